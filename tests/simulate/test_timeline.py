"""The event simulator against cases worked out by hand, laws, and a reference in plain Python."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.plan.orders import Lanes, dependencies, levels, parse_orders, split_actions
from rlplace.plan.schedules import lane_orders, owners
from rlplace.plan.types import Action, Mesh
from rlplace.simulate.orders import orders
from rlplace.simulate.timeline import (
    AT_ONCE,
    BESIDE,
    END,
    IN_TURN,
    JOINED,
    LAST,
    REDUCED,
    Durations,
    simulate,
    step_times,
)
from tests.plan.test_orders import random_orders

Spans = dict[Action, tuple[float, float]]


@dataclass(frozen=True)
class _Problem:
    """What a step does: seconds by stage, by cut, and by lane; buckets are (seconds, ready)."""

    lanes: Lanes
    forward: Sequence[float]
    backward: Sequence[float]
    weight: Sequence[float] = ()
    transfer: Sequence[float] = ()
    sends: Sequence[int] = ()
    cores: Sequence[int] = ()
    buckets: Sequence[Sequence[tuple[float, float]]] = ()
    late: Sequence[float] = ()
    joint: Sequence[tuple[int, int, float]] = ()
    optimizer: Sequence[float] = ()

    def durations(self, factor: float = 1.0) -> Durations:
        """As arrays, if everything took `factor` times as long."""
        stages, lanes = len(self.forward), len(self.lanes)
        forward, backward = np.array(self.forward, float), np.array(self.backward, float)
        weight = np.array(self.weight or [0.0] * stages, float)
        buckets = self.buckets or [[]] * stages
        flat = np.array([b for own in buckets for b in own], float).reshape(-1, 2)
        joint = np.array(self.joint, float).reshape(-1, 3)
        return Durations(
            seconds=factor * np.concatenate([forward, backward, backward - weight, weight]),
            transfer=factor * np.array(self.transfer or [0.0] * (stages - 1), float),
            sends=np.array(self.sends or [BESIDE] * (stages - 1), np.int64),
            optimizer=factor * np.array(self.optimizer or [0.0] * lanes, float),
            bucket_first=np.cumsum([0, *map(len, buckets)]),
            bucket_seconds=factor * flat[:, 0],
            bucket_ready=flat[:, 1].copy(),
            late=factor * np.array(self.late or [0.0] * stages, float),
            joint_one=joint[:, 0].astype(np.int64),
            joint_other=joint[:, 1].astype(np.int64),
            joint_seconds=factor * joint[:, 2],
            cores=np.array(self.cores or range(lanes), np.int64),
        )

    def spans(self, factor: float = 1.0) -> Spans:
        """Start and end of each action."""
        times = simulate(orders(self.lanes), self.durations(factor))
        flat = [action for lane in self.lanes for action in lane]
        return dict(zip(flat, zip(times.start.tolist(), times.end.tolist(), strict=True)))  # noqa: B905

    def tails(self) -> list[list[float]]:
        """Rows of `Times.tails`."""
        return simulate(orders(self.lanes), self.durations()).tails.tolist()  # type: ignore[no-any-return]  # of numpy


def _lanes(name: str, micro_batches: int, ranks: Sequence[int]) -> Lanes:
    """Action lists of the lanes, stage i on device `ranks[i]`."""
    return lane_orders(name, owners(Mesh((rank,)) for rank in ranks), micro_batches)


def _run(
    lanes: Lanes,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Sequence[float] = (),
    cores: Sequence[int] = (),
) -> Spans:
    return _Problem(lanes, forward, backward, transfer=transfer, cores=cores).spans()


@dataclass
class _Clock:
    """The same rules without arrays: of all actions that could run, the earliest one does.

    Sends run beside compute.
    """

    problem: _Problem
    spans: Spans = field(default_factory=dict)
    arrival: dict[tuple[Action, Action], float] = field(default_factory=dict)
    link_free: dict[tuple[int, int], float] = field(default_factory=dict)

    def run(self) -> _Clock:
        own = self.problem
        heads = [0] * len(own.lanes)
        lane_free, core_free = [0.0] * len(own.lanes), dict.fromkeys(self.cores, 0.0)
        while any(head < len(lane) for head, lane in zip(heads, own.lanes, strict=True)):
            able = []
            for index, lane in enumerate(own.lanes):
                if heads[index] < len(lane):
                    needs = dependencies(lane[heads[index]], len(own.forward))
                    if all(need in self.spans for need in needs):
                        came = [self.came(need, lane[heads[index]]) for need in needs]
                        free = max(lane_free[index], core_free[self.cores[index]])
                        able.append((max(free, *came, 0.0), index))
            start, index = min(able)
            action = own.lanes[index][heads[index]]
            end = start + self.seconds(action)
            self.spans[action] = (start, end)
            lane_free[index] = core_free[self.cores[index]] = end
            heads[index] += 1
            self.send(action, index)
        return self

    @property
    def cores(self) -> Sequence[int]:
        return self.problem.cores or range(len(self.problem.lanes))

    def lane(self, stage: int) -> int:
        return next(
            i for i, lane in enumerate(self.problem.lanes) if any(a.stage == stage for a in lane)
        )

    def seconds(self, action: Action) -> float:
        own, stage = self.problem, action.stage
        if action.kind == "F":
            return own.forward[stage]
        weight = own.weight[stage] if own.weight else 0.0
        if action.kind == "W":
            return weight
        apart = (stage, action.micro_batch) in split_actions(own.lanes)
        return own.backward[stage] - weight if apart else own.backward[stage]

    def send(self, action: Action, lane: int) -> None:
        """Put what the action made on the link to the lane that reads it."""
        step = {"F": 1, "B": -1, "W": 0}[action.kind]
        other = action.stage + step
        if not step or not 0 <= other < len(self.problem.forward) or self.lane(other) == lane:
            return
        link = (lane, self.lane(other))
        begin = max(self.spans[action][1], self.link_free.get(link, 0.0))
        transfer = self.problem.transfer
        way = transfer[min(action.stage, other)] if transfer else 0.0
        self.link_free[link] = begin + way
        self.arrival[action, Action(other, action.kind, action.micro_batch)] = begin + way

    def came(self, need: Action, action: Action) -> float:
        return self.arrival.get((need, action), self.spans[need][1])

    def end(self) -> float:
        """The end of the step."""
        own = self.problem
        last = [max(self.spans[a][1] for a in lane) for lane in own.lanes]
        joined = [self.reduced(index, end) for index, end in enumerate(last)]
        for one, other, seconds in own.joint:
            joined[one] = joined[other] = max(joined[one], joined[other]) + seconds
        free = {
            c: max(e for e, o in zip(last, self.cores, strict=True) if o == c) for c in self.cores
        }
        for index, core in enumerate(self.cores):
            optimizer = own.optimizer[index] if own.optimizer else 0.0
            joined[index] = free[core] = max(joined[index], free[core]) + optimizer
        return max(joined)

    def reduced(self, lane: int, last: float) -> float:
        """When a lane's reductions are done."""
        own = self.problem
        ready: list[tuple[float, int, int, float]] = []
        makers = [a for a in own.lanes[lane] if self.makes(a)]
        for at, stage in enumerate(
            sorted(
                {a.stage for a in makers},
                key=lambda s: max(i for i, a in enumerate(makers) if a.stage == s),
            )
        ):
            begin, end = max(self.spans[a] for a in makers if a.stage == stage)
            own_buckets = own.buckets[stage] if own.buckets else []
            ready += [(begin + r * (end - begin), at, k, s) for k, (s, r) in enumerate(own_buckets)]
        channel = 0.0
        for begin, _, _, seconds in sorted(ready, key=lambda item: item[1:3]):
            channel = max(channel, begin) + seconds
        late = sum(own.late[s] for s in {a.stage for a in makers}) if own.late else 0.0
        return max(channel, last) + late

    def makes(self, action: Action) -> bool:
        """Whether the action makes gradients of parameters."""
        apart = (action.stage, action.micro_batch) in split_actions(self.problem.lanes)
        return action.kind == ("W" if apart else "B")


class _Paths:
    """The same rules as longest paths, for lanes with cores of their own; any sends."""

    def __init__(self, problem: _Problem) -> None:
        self.problem, self.clock = problem, _Clock(problem)
        self.place = {a: (i, at) for i, own in enumerate(problem.lanes) for at, a in enumerate(own)}
        self.level = {
            a: level
            for own, found in zip(problem.lanes, levels(problem.lanes), strict=True)
            for a, level in zip(own, found, strict=True)
        }
        self.readers = {
            need: a
            for a, (lane, _) in self.place.items()
            for need in dependencies(a, len(problem.forward))
            if need.kind == a.kind and self.place[need][0] != lane
        }
        self.senders = {reader: sender for sender, reader in self.readers.items()}
        self.meetings = sorted(filter(self.meets, self.readers), key=self.order)
        self.done: dict[tuple[str, Action], float] = {}

    def neighbour(self, action: Action, step: int) -> Action | None:
        lane, at = self.place[action]
        own = self.problem.lanes[lane]
        return own[at + step] if 0 <= at + step < len(own) else None

    def kind(self, sender: Action) -> int:
        cut = min(sender.stage, self.readers[sender].stage)
        return self.problem.sends[cut] if self.problem.sends else BESIDE

    def meets(self, sender: Action) -> bool:
        before, following = self.neighbour(self.readers[sender], -1), self.neighbour(sender, 1)
        if self.kind(sender) == BESIDE:
            return False
        return None in (before, following) or self.level[before] < self.level[following]  # type: ignore[index]  # neither is None

    def order(self, sender: Action) -> tuple[int, bool, int]:
        reader = self.readers[sender]
        forward = reader.kind == "F"
        return self.level[reader], forward, -reader.stage if forward else reader.stage

    def end(self, action: Action) -> float:
        return self.start(action) + self.clock.seconds(action)

    def start(self, action: Action) -> float:
        if ("start", action) not in self.done:
            waits = [0.0]
            before = self.neighbour(action, -1)
            if before is not None:
                waits.append(self.free(before))
            if action in self.senders:
                waits.append(self.passed(self.senders[action]))
            self.done["start", action] = max(waits)
        return self.done["start", action]

    def free(self, action: Action) -> float:
        """When the lane may go on after an action."""
        sent = [self.passed(action)] if action in self.meetings else []
        return max(self.end(action), *sent, 0.0)

    def passed(self, sender: Action) -> float:
        """When what an action sends has arrived."""
        if ("passed", sender) not in self.done:
            reader, waits = self.readers[sender], [self.end(sender)]
            lanes = self.place[sender][0], self.place[reader][0]
            if sender in self.meetings:
                before = self.neighbour(reader, -1)
                waits += [] if before is None else [self.end(before)]
                if self.kind(sender) == IN_TURN:
                    former = self.meetings[: self.meetings.index(sender)]
                    for other in former:
                        if {*lanes} & {self.place[other][0], self.place[self.readers[other]][0]}:
                            waits.append(self.passed(other))
            for other in self.problem.lanes[lanes[0]][: self.place[sender][1]]:
                if other in self.readers and self.place[self.readers[other]][0] == lanes[1]:
                    waits.append(self.passed(other))
            transfer = self.problem.transfer
            way = transfer[min(sender.stage, reader.stage)] if transfer else 0.0
            self.done["passed", sender] = max(waits) + way
        return self.done["passed", sender]


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


def test_sends_on_a_link_queue_by_hand() -> None:
    """Forwards of one second behind a link of three; the way back is another."""
    spans = _run(_lanes("gpipe", 3, (0, 1)), (1, 1), (1, 1), (3,))
    assert _text(spans, 1) == "1F0@4 1F1@7 1F2@10 1B0@11 1B1@12 1B2@13"
    assert _text(spans, 0) == "0F0@0 0F1@1 0F2@2 0B0@15 0B1@18 0B2@21"


def test_a_send_that_blocks_by_hand() -> None:
    """Half a second each way, during which both stages wait."""
    lanes = _lanes("1f1b", 2, (0, 1))
    problem = _Problem(lanes, (1, 1), (2, 2), transfer=(0.5,), sends=(AT_ONCE,))
    # 0F1 and 1B0 end at 2.5 and 4.5: the activation and the gradient pass both ways until 5.
    assert _text(problem.spans(), 0) == "0F0@0 0F1@1.5 0B0@5 0B1@8.5"
    assert _text(problem.spans(), 1) == "1F0@1.5 1B0@2.5 1F1@5 1B1@6"
    in_turn = replace(problem, sends=(IN_TURN,))
    # The gradient until 5, then the activation until 5.5.
    assert _text(in_turn.spans(), 0) == "0F0@0 0F1@1.5 0B0@5.5 0B1@9"
    assert _text(in_turn.spans(), 1) == "1F0@1.5 1B0@2.5 1F1@5.5 1B1@6.5"
    assert in_turn.tails()[LAST] == [11, 9], "stage 1 waits until its last gradient is gone"


def test_a_send_waits_for_a_receiver_that_is_busy_by_hand() -> None:
    """Stage 1 takes three seconds a forward; stage 0 may be one micro-batch ahead."""
    lanes = _lanes("gpipe", 3, (0, 1))
    beside = _Problem(lanes, (1, 3), (1, 1), transfer=(1,))
    assert _text(beside.spans(), 0).startswith("0F0@0 0F1@1 0F2@2")
    blocked = replace(beside, sends=(AT_ONCE,))
    assert _text(blocked.spans(), 0).startswith("0F0@0 0F1@2 0F2@6")
    assert _text(blocked.spans(), 1).startswith("1F0@2 1F1@6 1F2@10")


def test_sends_that_would_wait_in_a_circle_pass_through_a_buffer() -> None:
    """Stage 1 takes the second micro-batch first; stage 0 must not wait for it with the first."""
    lanes = parse_orders("0F0 0F1 0B1 0B0\n1F1 1B1 1F0 1B0")
    problem = _Problem(lanes, (1, 1), (2, 2), transfer=(1,), sends=(IN_TURN,))
    assert _text(problem.spans(), 0).startswith("0F0@0 0F1@1")
    assert _text(problem.spans(), 1).startswith("1F1@3 1B1@4")


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_every_send_of_these_schedules_may_block(name: str) -> None:
    for stages, micro_batches in ((2, 1), (4, 2), (4, 9), (8, 8)):
        turns = orders(_lanes(name, micro_batches, range(stages))).turns
        assert turns.meets.sum() == (turns.target >= 0).sum() == 2 * (stages - 1) * micro_batches


def test_stages_of_a_lane_share_its_link_by_hand() -> None:
    """Stages 0 and 2 both send to lane 1, and its link is busy for four seconds each time."""
    both = parse_orders("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\n1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1")
    spans = _run(both, (1, 1, 1, 1), (1, 1, 1, 1), (4, 0, 4))
    # 0F0 takes the link from 1 to 5, 0F1 from 5 to 9; 2F0 ends at 7 and has to wait until 9.
    assert _text(spans, 2).startswith("2F0@6 2F1@10")
    assert _text(spans, 3).startswith("3F0@13 3F1@17")


def test_a_backward_in_two_parts_by_hand() -> None:
    """Stage 0 gets its gradient after the first part; the second fills what was a wait."""
    whole = _run(_lanes("1f1b", 2, (0, 1)), (1, 1), (2, 2))
    lanes = parse_orders("0F0 0F1 0B0 0W0 0B1 0W1\n1F0 1B0 1F1 1B1 1W0 1W1")
    spans = _Problem(lanes, (1, 1), (2, 2), (1, 1)).spans()
    assert _text(spans, 1) == "1F0@1 1B0@2 1F1@3 1B1@4 1W0@5 1W1@6"
    assert _text(spans, 0) == "0F0@0 0F1@1 0B0@3 0W0@4 0B1@5 0W1@6"
    assert (_end(whole), _end(spans)) == (9, 7)


def test_buckets_hide_behind_the_last_backward_by_hand() -> None:
    """A backward from 1 to 5: buckets ready at 2 and 5, a second that cannot hide, and 0.5."""
    problem = _Problem(
        parse_orders("0F0 0B0"),
        (1,),
        (4,),
        buckets=[[(2, 0.25), (1, 1)]],
        late=[1],
        optimizer=[0.5],
    )
    assert problem.tails() == [[5], [7], [7], [7], [7.5]]
    hidden = replace(problem, buckets=[[(2, 0.25)]], late=[0])
    assert hidden.tails() == [[5], [5], [5], [5], [5.5]]
    slow = replace(problem, buckets=[[(7, 0.25), (1, 1)]])
    assert slow.tails() == [[5], [11], [11], [11], [11.5]]


def test_buckets_of_a_stage_in_the_middle_hide_behind_other_stages_by_hand() -> None:
    lanes = parse_orders("0F0 2F0 2B0 0B0\n1F0 1B0")
    problem = _Problem(lanes, (1, 1, 1), (2, 2, 2), buckets=[[(1, 1)], [(9, 1)], [(3, 1)]])
    # Stage 2's last backward is from 3 to 5, stage 1's to 7, stage 0's to 9.
    assert problem.tails()[LAST] == [9, 7]
    assert problem.tails()[REDUCED] == [10, 16]


def test_weight_gradients_apart_are_reduced_after_them_by_hand() -> None:
    problem = _Problem(parse_orders("0F0 0B0 0W0"), (1,), (4,), (2,), buckets=[[(1, 0.5)]])
    assert problem.spans()[Action(0, "W", 0)] == (3, 5)
    assert problem.tails()[REDUCED] == [5], "ready at 4"


def test_lanes_reduce_together_when_both_are_done_by_hand() -> None:
    lanes = _lanes("1f1b", 1, (0, 1))
    problem = _Problem(lanes, (1, 1), (2, 2), joint=[(0, 1, 3)], optimizer=[1, 2])
    assert problem.tails() == [[6, 4], [6, 4], [9, 9], [9, 9], [10, 11]]


def test_optimizers_on_one_core_take_turns_by_hand() -> None:
    lanes = _lanes("1f1b", 1, (0, 1))
    problem = _Problem(lanes, (1, 1), (2, 2), cores=(0, 0), optimizer=[1, 2])
    assert problem.tails()[END] == [7, 9]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 8), (4, 4), (7, 3), (8, 32)])
def test_closed_form_of_equal_stages(name: str, stages: int, micro_batches: int) -> None:
    """(m + p - 1)(f + b), arXiv 2104.04473 section 2.2."""
    spans = _run(_lanes(name, micro_batches, range(stages)), (2.0,) * stages, (3.0,) * stages)
    assert _end(spans) == pytest.approx((micro_batches + stages - 1) * 5.0)


@pytest.mark.parametrize("pp", [1, 2, 4, 5])
@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("runs", [1, 2, 5])
def test_bubble_of_interleaved_1f1b(pp: int, rounds: int, runs: int) -> None:
    """(p - 1)/(v m) of the work, arXiv 2104.04473 section 2.2."""
    stages, micro_batches = pp * rounds, pp * runs
    lanes = _lanes("interleaved", micro_batches, [*range(pp)] * rounds)
    spans = _run(lanes, (1.0,) * stages, (2.0,) * stages)
    work = micro_batches * rounds * 3.0
    assert _end(spans) - work == pytest.approx((pp - 1) / (rounds * micro_batches) * work)


@pytest.mark.parametrize("pp", [2, 4, 6])
@pytest.mark.parametrize(("forward", "inner", "weight"), [(1, 1, 1), (2, 3, 2), (3, 3, 1)])
def test_bubble_of_zb_h1(pp: int, forward: float, inner: float, weight: float) -> None:
    """(p - 1)(F + B - W) against 1F1B's (p - 1)(F + B + W), arXiv 2401.10241 table 2."""
    count, each = 3 * pp, [forward] * pp
    whole, apart = [inner + weight] * pp, [weight] * pp
    work = count * (forward + inner + weight)
    plain = _run(_lanes("1f1b", count, range(pp)), each, whole)
    split = _Problem(_lanes("zb-h1", count, range(pp)), each, whole, apart).spans()
    assert _end(plain) - work == pytest.approx((pp - 1) * (forward + inner + weight))
    assert _end(split) - work == pytest.approx((pp - 1) * (forward + inner - weight))


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_zb_v_has_no_bubble_where_all_parts_take_as_long(pp: int) -> None:
    """Arxiv 2401.10241 section 6: no lane waits once it has begun."""
    count, ranks = 3 * pp, [*range(pp), *range(pp)[::-1]]
    problem = _Problem(_lanes("zb-v", count, ranks), [1.0] * 2 * pp, [2.0] * 2 * pp, [1.0] * 2 * pp)
    spans = problem.spans()
    for lane in problem.lanes:
        start, end = (f(spans[a][at] for a in lane) for at, f in enumerate((min, max)))
        assert end - start == pytest.approx(count * 2 * 3.0)
    half = _Problem(_lanes("zb-h1", count, range(pp)), [2.0] * pp, [4.0] * pp, [2.0] * pp)
    assert (
        _end(spans)
        < _end(half.spans())
        < _end(_run(_lanes("1f1b", count, range(pp)), [2.0] * pp, [4.0] * pp))
    )


seconds = st.floats(0.01, 10.0)


@st.composite
def _problems(draw: st.DrawFn) -> _Problem:
    """Random lists that can be run, or schedules, on lanes and cores of which some are shared."""
    stages, micro_batches = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    ranks = draw(st.lists(st.integers(0, 4), min_size=stages, max_size=stages))
    name = draw(st.sampled_from(("gpipe", "1f1b", "random")))
    if name == "random":
        owner = owners(Mesh((rank,)) for rank in ranks)
        lanes = random_orders(draw(st.integers(0, 10**6)), list(owner), micro_batches)
    else:
        lanes = _lanes(name, micro_batches, ranks)
    rng = random.Random(draw(st.integers(0, 10**6)))

    def some(count: int, low: float = 0.01, high: float = 10.0) -> list[float]:
        return [rng.uniform(low, high) for _ in range(count)]

    shared = draw(st.booleans())
    buckets = [
        list(zip(some(n), sorted(some(n, 0.0, 1.0)), strict=True))
        for n in draw(st.lists(st.integers(0, 3), min_size=stages, max_size=stages))
    ]
    pairs = [(rng.randrange(len(lanes)), rng.randrange(len(lanes))) for _ in range(2)]
    backward = some(stages)
    return _Problem(
        lanes,
        some(stages),
        backward,
        weight=[value * rng.random() for value in backward],
        transfer=some(stages - 1, 0.0, 3.0),
        sends=[rng.choice((BESIDE, AT_ONCE, IN_TURN)) for _ in range(stages - 1)],
        cores=[rng.randrange(3) if shared else lane for lane in range(len(lanes))],
        buckets=buckets,
        late=some(stages, 0.0, 1.0),
        joint=[(a, b, rng.random()) for a, b in pairs if a != b],
        optimizer=some(len(lanes)),
    )


@given(_problems())
def test_equal_to_the_reference(problem: _Problem) -> None:
    problem = replace(problem, sends=())
    clock, spans = _Clock(problem).run(), problem.spans()
    assert spans.keys() == clock.spans.keys()
    for action, span in spans.items():
        assert span == pytest.approx(clock.spans[action], rel=1e-12)
    assert max(problem.tails()[END]) == pytest.approx(clock.end(), rel=1e-12)


@given(_problems())
def test_equal_to_longest_paths(problem: _Problem) -> None:
    problem = replace(problem, cores=())
    paths = _Paths(problem)
    for action, span in problem.spans().items():
        assert span == pytest.approx((paths.start(action), paths.end(action)), rel=1e-12)
    last = [paths.free(lane[-1]) for lane in problem.lanes]
    assert problem.tails()[LAST] == pytest.approx(last, rel=1e-12)


@given(_problems())
def test_blocking_takes_longer_and_in_turn_longest(problem: _Problem) -> None:
    cuts = len(problem.forward) - 1
    alone = replace(problem, cores=())
    beside, at_once, in_turn = (
        replace(alone, sends=[sends] * cuts).spans() for sends in (BESIDE, AT_ONCE, IN_TURN)
    )
    assert all(beside[action][1] <= at_once[action][1] + 1e-9 for action in beside)
    assert all(at_once[action][1] <= in_turn[action][1] + 1e-9 for action in beside)


@given(st.lists(_problems(), min_size=1, max_size=6))
def test_many_plans_in_one_call(problems: list[_Problem]) -> None:
    """Each as if it were alone, in any order, lists shared or not."""
    lists = [orders(problem.lanes) for problem in problems]
    costs = [problem.durations() for problem in problems]
    alone = [simulate(order, cost).seconds for order, cost in zip(lists, costs, strict=True)]
    assert step_times(lists, costs).tolist() == alone
    twice = step_times([*lists, *lists[::-1]], [*costs, *costs[::-1]])
    assert twice.tolist() == [*alone, *alone[::-1]]


@given(_problems())
def test_laws_of_a_timeline(problem: _Problem) -> None:
    spans, clock = problem.spans(), _Clock(problem)
    for action, (start, end) in spans.items():
        assert end - start == pytest.approx(clock.seconds(action))
        for need in dependencies(action, len(problem.forward)):
            apart = clock.lane(need.stage) != clock.lane(action.stage)
            way = problem.transfer[min(need.stage, action.stage)] if apart else 0.0
            assert start >= spans[need][1] + way - 1e-9
    for lane in problem.lanes:
        assert all(spans[a][1] <= spans[b][0] + 1e-9 for a, b in pairwise(lane))
    for core in set(problem.cores):
        lanes = [lane for lane, o in zip(problem.lanes, problem.cores, strict=True) if o == core]
        work = sorted(spans[action] for lane in lanes for action in lane)
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(work))
        assert _end(spans) >= sum(end - start for start, end in work) - 1e-9
    last, reduced, joined, begin, end = np.array(problem.tails())
    assert (last <= reduced).all()
    assert (reduced <= joined).all()
    assert (joined <= begin).all()
    assert end - begin == pytest.approx(np.array(problem.optimizer))


@given(_problems(), st.floats(0.1, 50.0))
def test_a_machine_slower_by_a_factor_takes_longer_by_it(problem: _Problem, factor: float) -> None:
    # Where lanes share a core, rounding may break a tie the other way; a power of two is exact.
    alone = replace(problem, cores=range(len(problem.lanes)))
    assert _end(alone.spans(factor)) == pytest.approx(factor * _end(alone.spans()))
    assert _end(problem.spans(2.0)) == 2.0 * _end(problem.spans())


@given(_problems(), st.data())
def test_no_action_ends_earlier_where_one_takes_longer(
    problem: _Problem, data: st.DataObject
) -> None:
    """Without shared cores the times are longest paths, which are monotone."""
    stage = data.draw(st.integers(0, len(problem.forward) - 1))
    forward = [value + (index == stage) for index, value in enumerate(problem.forward)]
    alone = replace(problem, cores=range(len(problem.lanes)))
    before, after = alone.spans(), replace(alone, forward=forward).spans()
    assert all(after[action][1] >= before[action][1] - 1e-9 for action in before)
    assert (
        np.array(replace(alone, forward=forward).tails()) >= np.array(alone.tails()) - 1e-9
    ).all()
    assert JOINED > REDUCED > LAST
