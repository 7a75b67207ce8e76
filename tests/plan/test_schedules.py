"""Schedules as action lists."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from rlplace.errors import InputError
from rlplace.plan.orders import dependencies, format_orders, parse_orders, peaks, refuse_orders
from rlplace.plan.schedules import (
    EXPLICIT,
    SCHEDULES,
    actions,
    in_flight,
    lane_orders,
    lanes,
    owners,
    refuse_schedule,
)
from rlplace.plan.types import Action, GroupChoice, Mesh, Plan, Stage

sizes = st.integers(1, 8)


def _owner(name: str, pp: int, rounds: int = 2) -> tuple[int, ...]:
    """The lanes of the stages of a schedule on `pp` lanes."""
    if name == "zb-v":
        return (*range(pp), *range(pp)[::-1])
    return tuple(range(pp)) * (rounds if name == "interleaved" else 1)


def _plan(name: str, owner: tuple[int, ...], micro_batches: int) -> Plan:
    stages = tuple(
        Stage(index, index + 1, Mesh((rank,)), (GroupChoice(),)) for index, rank in enumerate(owner)
    )
    return Plan(stages, micro_batches, micro_batches, name)


def test_the_papers_picture_of_1f1b() -> None:
    assert format_orders(lane_orders("1f1b", (0, 1, 2), 4)).splitlines() == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_gpipe_runs_all_forwards_first() -> None:
    assert format_orders(lane_orders("gpipe", (0, 1), 3)[1:]) == "1F0 1F1 1F2 1B0 1B1 1B2"


def test_fewer_micro_batches_than_stages() -> None:
    assert format_orders(lane_orders("1f1b", (0, 1, 2, 3), 2)[:1]) == "0F0 0F1 0B0 0B1"


def test_zb_h1_by_hand() -> None:
    """The last of three stages puts weight gradients off by two (Qi et al., figure 2)."""
    assert format_orders(lane_orders("zb-h1", (0, 1, 2), 4)).splitlines() == [
        "0F0 0F1 0F2 0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3",
        "1F0 1F1 1B0 1F2 1B1 1W0 1F3 1B2 1W1 1B3 1W2 1W3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2W0 2F3 2B3 2W1 2W2 2W3",
    ]


def test_interleaved_by_hand() -> None:
    """Two lanes with two stages each: stages 0 and 2 on the first."""
    assert format_orders(lane_orders("interleaved", (0, 1, 0, 1), 2)).splitlines() == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ]
    assert lane_orders("interleaved", (0, 1), 4) == lane_orders("1f1b", (0, 1), 4)


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 5), sizes, st.integers(1, 4))
def test_every_schedule_can_be_run_and_holds_what_it_says(
    name: str, pp: int, micro_batches: int, rounds: int
) -> None:
    owner = _owner(name, pp, rounds)
    micro_batches *= pp if name == "interleaved" else 1
    orders = lane_orders(name, owner, micro_batches)
    refuse_orders(orders, owner, micro_batches)
    most = [0] * len(owner)
    for lane in orders:
        apart = {(a.stage, a.micro_batch) for a in lane if a.kind == "W"}
        held = [0] * len(owner)
        for action in lane:
            held[action.stage] += action.kind == "F"
            most[action.stage] = max(most[action.stage], held[action.stage])
            last = "W" if (action.stage, action.micro_batch) in apart else "B"
            held[action.stage] -= action.kind == last
    assert in_flight(name, owner, micro_batches) == tuple(most)


@given(sizes, st.integers(1, 20))
def test_peaks_of_the_papers(pp: int, micro_batches: int) -> None:
    owner, m = tuple(range(pp)), micro_batches
    assert in_flight("gpipe", owner, m) == (m,) * pp
    assert in_flight("1f1b", owner, m) == tuple(min(m, pp - stage) for stage in owner)
    assert in_flight("zb-h1", owner, m) == (min(m, pp),) * pp, "1F1B's largest, everywhere"
    for lane in lane_orders("zb-v", _owner("zb-v", pp), m):
        assert max(sum(n for _, n in peak.held) for peak in peaks(lane)) <= 2 * pp


@given(st.integers(1, 6), st.integers(2, 4), st.integers(1, 4))
def test_peak_of_interleaved_1f1b(pp: int, rounds: int, runs: int) -> None:
    """Warm-up and one more (arXiv 2104.04473); (1 + (p - 1)/(p v)) of 1F1B's on the first lane."""
    orders = lane_orders("interleaved", _owner("interleaved", pp, rounds), runs * pp)
    for lane, own in enumerate(orders):
        most = max(sum(n for _, n in peak.held) for peak in peaks(own))
        warm_up = (rounds - 1) * pp + 2 * (pp - 1 - lane)
        assert most == min(warm_up + 1, runs * pp * rounds)


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 8, 12])
def test_torch_makes_the_same_lists(pp: int, micro_batches: int) -> None:
    """Of ZB-V and ZB-H1 ("ZB1P" with a stage a rank), and of interleaved 1F1B where it is legal."""
    cases: list[tuple[str, Any, int]] = [
        ("zb-v", torch_schedules.ScheduleZBVZeroBubble, 2),
        ("zb-h1", torch_schedules.ScheduleInterleavedZeroBubble, 1),
    ]
    if micro_batches % pp == 0:
        cases += [("interleaved", torch_schedules.ScheduleInterleaved1F1B, v) for v in (2, 3)]
    for name, kind, rounds in cases:
        owner = _owner(name, pp, rounds)
        settings = SimpleNamespace(
            pp_group_size=pp,
            _n_microbatches=micro_batches,
            num_stages=len(owner),
            n_local_stages=rounds,
            microbatches_per_round=micro_batches // max(1, micro_batches // pp),
        )
        for rank, own in enumerate(lane_orders(name, owner, micro_batches)):
            theirs = kind._calculate_single_rank_operations(settings, rank)
            text = " ".join(str(action) for action in theirs if action is not None)
            assert (own,) == parse_orders(text)


@given(st.sampled_from(("gpipe", "1f1b")), sizes, st.integers(1, 6), st.data())
def test_merged_lanes_keep_every_order_that_matters(
    name: str, micro_batches: int, stages: int, data: st.DataObject
) -> None:
    """Stages on shared meshes: no action before its dependencies in a lane, each stage's order."""
    ranks = data.draw(st.lists(st.integers(0, 2), min_size=stages, max_size=stages))
    plan = _plan(name, tuple(ranks), micro_batches)
    owner = owners(stage.mesh for stage in plan.stages)
    merged = actions(plan)
    assert len(merged) == len(lanes(plan)) == len(set(ranks))
    refuse_orders(merged, owner, micro_batches)
    position = {action: at for lane in merged for at, action in enumerate(lane)}
    assert len(position) == 2 * stages * micro_batches
    alone = lane_orders(name, tuple(range(stages)), micro_batches)
    for index in range(stages):
        assert all(position[a] < position[b] for a, b in pairwise(alone[index]))
    for action in position:
        for need in dependencies(action, stages):
            if owner[need.stage] == owner[action.stage]:
                assert position[need] < position[action]


def test_unknown_schedule() -> None:
    with pytest.raises(InputError, match="must be one of gpipe, 1f1b, interleaved") as caught:
        lane_orders("1f2b", (0,), 1)
    assert caught.value.nearest == "1f1b"


@pytest.mark.parametrize(
    ("name", "owner", "wanted"),
    [
        ("interleaved", (0, 1, 1, 0), (0, 1, 0, 1)),
        ("interleaved", (0, 1, 0), (0, 1, 0, 1)),
        ("zb-h1", (0, 1, 0), (0, 1, 2)),
        ("zb-v", (0, 1, 0, 1), (0, 1, 1, 0)),
        ("zb-v", (0, 1), (0, 0)),
    ],
)
def test_stages_on_other_lanes_than_the_schedule_has(
    name: str, owner: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    for call in (
        lambda: lane_orders(name, owner, 4),
        lambda: refuse_schedule(_plan(name, owner, 4), (4,)),
    ):
        with pytest.raises(InputError, match=name) as caught:
            call()
        assert caught.value.nearest == wanted


def test_interleaved_takes_runs_of_as_many_micro_batches_as_lanes() -> None:
    owner = (0, 1, 2, 0, 1, 2)
    with pytest.raises(InputError, match="a multiple of 3") as caught:
        lane_orders("interleaved", owner, 8)
    assert caught.value.nearest == 9
    with pytest.raises(InputError, match="a multiple of 3") as caught:
        refuse_schedule(_plan("interleaved", owner, 8), (1, 2, 3, 4, 6, 8, 12, 24))
    assert caught.value.nearest == 6


def test_a_plan_carries_lists_of_its_own() -> None:
    plan = _plan(EXPLICIT, (0, 1), 2)
    orders = parse_orders("0F0 0F1 0B1 0B0\n1F0 1F1 1B1 1B0")
    own = replace(plan, orders=orders)
    refuse_schedule(own, (1, 2))
    assert actions(own) == orders
    with pytest.raises(InputError, match="action lists go with") as caught:
        refuse_schedule(plan, (1, 2))
    assert caught.value.nearest == "1f1b"
    with pytest.raises(InputError, match="action lists go with") as caught:
        refuse_schedule(replace(own, schedule="gpipe"), (1, 2))
    assert caught.value.nearest == EXPLICIT
    with pytest.raises(InputError, match="missing"):
        refuse_schedule(replace(own, micro_batches=3), (1, 3))
    assert Action(0, "B", 1) in orders[0]
