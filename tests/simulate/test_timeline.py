"""The event simulator against cases worked out by hand, laws, and a reference in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.plan.schedules import SCHEDULES, actions, dependencies, schedule
from rlplace.plan.types import Action, GroupChoice, Mesh, Plan, Stage
from rlplace.simulate.timeline import Times, orders, simulate

Lanes = Sequence[Sequence[Action]]
Spans = dict[Action, tuple[float, float]]


def _lanes(name: str, micro_batches: int, owner: Sequence[int]) -> Lanes:
    """Action lists of the lanes, stage i on device `owner[i]`."""
    stages = tuple(Stage(i, i + 1, Mesh((rank,)), (GroupChoice(),)) for i, rank in enumerate(owner))
    return actions(Plan(stages, micro_batches, micro_batches, name))


def _run(
    lanes: Lanes,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Sequence[float] | None = None,
    cores: Sequence[int] | None = None,
) -> Spans:
    times = _times(lanes, forward, backward, transfer, cores)
    flat = [action for lane in lanes for action in lane]
    return {
        action: (float(a), float(b))
        for action, a, b in zip(flat, times.start, times.end, strict=True)
    }


def _times(
    lanes: Lanes,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Sequence[float] | None,
    cores: Sequence[int] | None,
) -> Times:
    return simulate(
        orders(lanes),
        np.array(forward, float),
        np.array(backward, float),
        np.zeros(len(forward) - 1) if transfer is None else np.array(transfer, float),
        np.array(range(len(lanes)) if cores is None else cores, np.int64),
    )


def _reference(
    lanes: Lanes,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Sequence[float],
    cores: Sequence[int],
) -> Spans:
    """The same rules without arrays: of all actions that could run, the earliest one does."""
    spans: Spans = {}
    heads = [0] * len(lanes)
    lane_free, core_free = [0.0] * len(lanes), [0.0] * (max(cores) + 1)
    while any(head < len(lane) for head, lane in zip(heads, lanes, strict=True)):
        ready = []
        for index, lane in enumerate(lanes):
            if heads[index] == len(lane):
                continue
            action = lane[heads[index]]
            needs = dependencies(action, len(forward))
            if all(need in spans for need in needs):
                arrivals = [
                    spans[need][1]
                    + (transfer[min(need.stage, action.stage)] if need.stage != action.stage else 0)
                    for need in needs
                ]
                ready.append((max(lane_free[index], core_free[cores[index]], *arrivals, 0), index))
        start, index = min(ready)
        action = lanes[index][heads[index]]
        duration = (forward if action.kind == "F" else backward)[action.stage]
        spans[action] = (start, start + duration)
        lane_free[index] = core_free[cores[index]] = start + duration
        heads[index] += 1
    return spans


def _end(spans: Spans) -> float:
    return max(end for _, end in spans.values())


def _text(spans: Spans, stage: int) -> str:
    own = sorted((span[0], action) for action, span in spans.items() if action.stage == stage)
    return " ".join(f"{action}@{start:g}" for start, action in own)


def test_1f1b_by_hand() -> None:
    """Two stages, three micro-batches, forward 1 and backward 2."""
    spans = _run(_lanes("1f1b", 3, (0, 1)), (1, 1), (2, 2))
    assert _text(spans, 0) == "0F0@0 0F1@1 0B0@4 0F2@6 0B1@7 0B2@10"
    assert _text(spans, 1) == "1F0@1 1B0@2 1F1@4 1B1@5 1F2@7 1B2@8"
    assert _end(spans) == 12


def test_gpipe_by_hand() -> None:
    spans = _run(_lanes("gpipe", 2, (0, 1)), (1, 1), (2, 2))
    assert _text(spans, 0) == "0F0@0 0F1@1 0B0@5 0B1@7"
    assert _text(spans, 1) == "1F0@1 1F1@2 1B0@3 1B1@5"
    assert _end(spans) == 9


def test_uneven_stages_by_hand() -> None:
    """The second stage is the bottleneck: it never waits once it has begun."""
    spans = _run(_lanes("1f1b", 3, (0, 1)), (1, 3), (2, 4))
    assert _text(spans, 1) == "1F0@1 1B0@4 1F1@8 1B1@11 1F2@15 1B2@18"
    assert _text(spans, 0) == "0F0@0 0F1@1 0B0@8 0F2@10 0B1@15 0B2@22"
    assert _end(spans) == 1 + 3 * 7 + 2


def test_transfers_by_hand() -> None:
    """Half a second on the way there, and again on the way back."""
    spans = _run(_lanes("1f1b", 2, (0, 1)), (1, 1), (2, 2), (0.5,))
    assert _text(spans, 0) == "0F0@0 0F1@1 0B0@5 0B1@8"
    assert _text(spans, 1) == "1F0@1.5 1B0@2.5 1F1@4.5 1B1@5.5"
    assert _end(spans) == 10


def test_fewer_micro_batches_than_stages_by_hand() -> None:
    spans = _run(_lanes("1f1b", 2, (0, 1, 2)), (1, 1, 1), (2, 2, 2))
    assert _text(spans, 2) == "2F0@2 2B0@3 2F1@5 2B1@6"
    assert _end(spans) == 12


def test_one_stage_has_no_bubble() -> None:
    assert _end(_run(_lanes("1f1b", 5, (0,)), (1,), (2,))) == 15


def test_two_lanes_on_one_core_take_turns_by_hand() -> None:
    spans = _run(_lanes("1f1b", 2, (0, 1)), (1, 1), (2, 2), cores=(0, 0))
    merged = sorted((span, str(action)) for action, span in spans.items())
    assert [name for _, name in merged] == ["0F0", "0F1", "1F0", "1B0", "0B0", "1F1", "1B1", "0B1"]
    assert all(before[0][1] == after[0][0] for before, after in pairwise(merged)), "no idle core"
    assert _end(spans) == 2 * 2 * 3


def test_lanes_on_cores_of_their_own_do_not_wait_for_a_shared_one() -> None:
    spans = _run(_lanes("gpipe", 2, (0, 1, 2)), (1, 1, 5), (0, 0, 0), cores=(0, 0, 1))
    assert _text(spans, 0).startswith("0F0@0 0F1@1")
    assert _text(spans, 1).startswith("1F0@2 1F1@3")
    assert _text(spans, 2).startswith("2F0@3 2F1@8")


def test_two_stages_on_one_mesh_share_a_lane() -> None:
    """Stages 0 and 2 on device 0: interleaved, with one micro-batch all in a row."""
    spans = _run(_lanes("1f1b", 1, (0, 1, 0)), (1, 2, 3), (4, 5, 6))
    assert _text(spans, 0) == "0F0@0 0B0@17"
    assert _text(spans, 2) == "2F0@3 2B0@6"
    assert _end(spans) == 21
    two = _run(_lanes("1f1b", 2, (0, 1, 0)), (1, 1, 1), (1, 1, 1))
    lane = sorted(span for action, span in two.items() if action.stage != 1)
    assert all(before[1] <= after[0] for before, after in pairwise(lane))


def test_a_deadlock_is_refused() -> None:
    """Stage 0 wants a backward before the forward that it depends on."""
    first = (Action(0, "B", 0), Action(0, "F", 0))
    second = (Action(1, "F", 0), Action(1, "B", 0))
    with pytest.raises(ValueError, match="deadlocks: 4 actions"):
        _run((first, second), (1, 1), (1, 1))
    with pytest.raises(ValueError, match="deadlocks"):
        _run((first, second), (1, 1), (1, 1), cores=(0, 0))
    crossed = ((Action(0, "F", 0), Action(0, "B", 1)), (Action(1, "F", 1), Action(1, "F", 0)))
    with pytest.raises(ValueError, match="deadlocks: 3 actions"):
        _run(crossed, (1, 1), (1, 1))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 8), (4, 4), (7, 3), (8, 32)])
def test_closed_form_of_equal_stages(name: str, stages: int, micro_batches: int) -> None:
    """(m + p - 1)(f + b), arXiv 2104.04473 section 2.2."""
    spans = _run(_lanes(name, micro_batches, range(stages)), (2.0,) * stages, (3.0,) * stages)
    assert _end(spans) == pytest.approx((micro_batches + stages - 1) * 5.0)


seconds = st.floats(0.01, 10.0)


@dataclass(frozen=True)
class _Problem:
    lanes: Lanes
    forward: list[float]
    backward: list[float]
    transfer: list[float]
    cores: list[int]

    def spans(self, factor: float = 1.0, cores: list[int] | None = None) -> Spans:
        """The simulated times if everything took `factor` times as long."""
        forward, backward, transfer = (
            [factor * value for value in column]
            for column in (self.forward, self.backward, self.transfer)
        )
        return _run(self.lanes, forward, backward, transfer, cores or self.cores)


@st.composite
def _problems(draw: st.DrawFn) -> _Problem:
    """Schedules with stages on lanes and lanes on cores of which some are shared."""
    stages, micro_batches = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    owner = draw(st.lists(st.integers(0, 4), min_size=stages, max_size=stages))
    lanes = _lanes(draw(st.sampled_from(sorted(SCHEDULES))), micro_batches, owner)
    one_each = st.lists(seconds, min_size=stages, max_size=stages)
    forward, backward = draw(one_each), draw(one_each)
    transfer = [draw(st.floats(0.0, 3.0)) for _ in range(stages - 1)]
    cores = draw(st.lists(st.integers(0, 4), min_size=len(lanes), max_size=len(lanes)))
    return _Problem(lanes, forward, backward, transfer, cores)


@given(_problems())
def test_equal_to_the_reference(problem: _Problem) -> None:
    spans = problem.spans()
    wanted = _reference(
        problem.lanes, problem.forward, problem.backward, problem.transfer, problem.cores
    )
    assert spans.keys() == wanted.keys()
    for action, (start, end) in spans.items():
        assert (start, end) == pytest.approx(wanted[action], rel=1e-12)


@given(_problems())
def test_laws_of_a_timeline(problem: _Problem) -> None:
    spans, transfer = problem.spans(), problem.transfer
    duration = {"F": problem.forward, "B": problem.backward}
    for action, (start, end) in spans.items():
        assert end - start == pytest.approx(duration[action.kind][action.stage])
        for need in dependencies(action, len(problem.forward)):
            way = transfer[min(need.stage, action.stage)] if need.stage != action.stage else 0.0
            assert start >= spans[need][1] + way - 1e-9
    for lane in problem.lanes:
        assert all(spans[a][1] <= spans[b][0] + 1e-9 for a, b in pairwise(lane))
    for core in set(problem.cores):
        lanes = [
            lane for lane, own in zip(problem.lanes, problem.cores, strict=True) if own == core
        ]
        work = sorted(spans[action] for lane in lanes for action in lane)
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(work))
        assert _end(spans) >= sum(end - start for start, end in work) - 1e-9
    path = sum(problem.forward) + sum(problem.backward) + 2 * sum(transfer)
    assert _end(spans) >= path - 1e-9


@given(_problems(), st.floats(0.1, 50.0))
def test_a_machine_slower_by_a_factor_takes_longer_by_it(problem: _Problem, factor: float) -> None:
    # Where lanes share a core, rounding may break a tie the other way; a power of two is exact.
    alone = list(range(len(problem.lanes)))
    assert _end(problem.spans(factor, alone)) == pytest.approx(
        factor * _end(problem.spans(1.0, alone))
    )
    assert _end(problem.spans(2.0)) == 2.0 * _end(problem.spans())


@given(_problems(), st.data())
def test_no_action_ends_earlier_where_one_takes_longer(
    problem: _Problem, data: st.DataObject
) -> None:
    """Without shared cores the times are longest paths, which are monotone."""
    stage = data.draw(st.integers(0, len(problem.forward) - 1))
    forward = [value + (index == stage) for index, value in enumerate(problem.forward)]
    alone = list(range(len(problem.lanes)))
    before = problem.spans(cores=alone)
    after = replace(problem, forward=forward).spans(cores=alone)
    assert all(after[action][1] >= before[action][1] - 1e-9 for action in before)


def test_lists_in_arrays() -> None:
    lanes = [schedule("1f1b")(0, 2, 2), schedule("1f1b")(1, 2, 2)]
    order = orders(lanes)
    assert order.first.tolist() == [0, 4, 8]
    assert order.stage.tolist() == [0] * 4 + [1] * 4
    assert order.backward.tolist() == [0, 0, 1, 1, 0, 1, 0, 1]
    assert order.micro_batch.tolist() == [0, 1, 0, 1, 0, 0, 1, 1]
