"""Schedules as action lists."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.errors import InputError
from rlplace.plan.schedules import (
    SCHEDULES,
    actions,
    dependencies,
    in_flight,
    lanes,
    schedule,
)
from rlplace.plan.types import Action, GroupChoice, Mesh, Plan, Stage

names = st.sampled_from(sorted(SCHEDULES))
sizes = st.integers(1, 8)


def _text(order: tuple[Action, ...]) -> str:
    return " ".join(map(str, order))


def test_the_papers_picture_of_1f1b() -> None:
    order = schedule("1f1b")
    assert _text(order(0, 3, 4)) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert _text(order(1, 3, 4)) == "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"
    assert _text(order(2, 3, 4)) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"


def test_gpipe_runs_all_forwards_first() -> None:
    assert _text(schedule("gpipe")(1, 2, 3)) == "1F0 1F1 1F2 1B0 1B1 1B2"


def test_fewer_micro_batches_than_stages() -> None:
    assert _text(schedule("1f1b")(0, 4, 2)) == "0F0 0F1 0B0 0B1"


@given(names, sizes, sizes, st.data())
def test_each_micro_batch_once_each_way_and_in_flight_as_said(
    name: str, stages: int, micro_batches: int, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, stages - 1))
    order = schedule(name)(stage, stages, micro_batches)
    wanted = [Action(stage, kind, i) for kind in ("B", "F") for i in range(micro_batches)]
    assert sorted(order) == sorted(wanted)
    held, most, done = 0, 0, set[Action]()
    for action in order:
        held += 1 if action.kind == "F" else -1
        most = max(most, held)
        done.add(action)
        assert action.kind == "F" or Action(stage, "F", action.micro_batch) in done
    assert most == in_flight(name, stage, stages, micro_batches)


@given(names, sizes, st.integers(1, 6), st.data())
def test_merged_lanes_keep_every_order_that_matters(
    name: str, micro_batches: int, stages: int, data: st.DataObject
) -> None:
    """Stages on shared meshes: no action before its dependencies in a lane, each stage's order."""
    owner = data.draw(st.lists(st.integers(0, 2), min_size=stages, max_size=stages))
    choice = GroupChoice()
    plan = Plan(
        tuple(Stage(i, i + 1, Mesh((rank,)), (choice,)) for i, rank in enumerate(owner)),
        micro_batches,
        micro_batches,
        name,
    )
    merged = actions(plan)
    assert len(merged) == len(lanes(plan)) == len(set(owner))
    position = {action: at for lane in merged for at, action in enumerate(lane)}
    assert len(position) == 2 * stages * micro_batches
    for index in range(stages):
        own = schedule(name)(index, stages, micro_batches)
        assert all(position[a] < position[b] for a, b in pairwise(own))
    for action in position:
        for need in dependencies(action, stages):
            if owner[need.stage] == owner[action.stage]:
                assert position[need] < position[action]


def test_unknown_schedule() -> None:
    with pytest.raises(InputError, match="must be one of gpipe, 1f1b") as caught:
        schedule("1f2b")
    assert caught.value.nearest == "1f1b"
