"""Estimates of plans: by hand, and against what must hold for all of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rlplace.cluster.catalogue import DEVICE_KINDS
from rlplace.cluster.types import Cluster, Link
from rlplace.cost.analytic import AnalyticCost
from rlplace.cost.types import GroupCost
from rlplace.errors import InputError
from rlplace.plan.schedules import actions, in_flight
from rlplace.plan.testing import (
    INTRA,
    NIC,
    chain,
    cluster,
    random_plan,
    round_kind,
    transformer,
)
from rlplace.plan.types import GroupChoice, Instance, Mesh, Plan, Stage
from rlplace.plan.uniform import make_plan, uniform_plan
from rlplace.simulate.bound import bound
from rlplace.simulate.estimate import Estimator, estimate, timeline
from rlplace.simulate.types import Estimate

_KIND = round_kind()
_FREE = Link(1e30, 0.0)
#: Four groups of 1, 1, 2, 2 ms forward a sample, twice that backward.
_CHAIN = chain([1e9, 1e9, 2e9, 2e9], floats=1e6, params=1000)
_PAIR = Instance(_CHAIN, cluster([[_KIND] * 2], intra=_FREE), 8, optimizer="sgd")


def _optimizer(params: int) -> float:
    """Seconds of SGD under bf16-mixed: weight and master read and written, gradient read."""
    return params * (2 * 2 + 2 + 2 * 4) / 1e12


def test_one_device_by_hand() -> None:
    found = estimate(_PAIR, uniform_plan(_PAIR, devices=(0,)))
    assert found.step_time == pytest.approx(8 * 18e-3 + _optimizer(4000))
    assert found.tokens_per_s == pytest.approx(8 / found.step_time)
    # All FLOPs of the step over what two devices could have done.
    assert found.mfu == pytest.approx(8 * 18e9 / found.step_time / 2e12)
    states = 4000 * (2 + 2 + 4)
    activations = 8 * 4 * 2e6 * 2
    assert found.peak_memory == (states + activations, 0.0)
    assert found.feasible
    assert found.reasons == ()


def test_an_uneven_pipeline_by_hand() -> None:
    """Stages of 2 and 4 ms forward: the second one never waits once it has begun."""
    plan = uniform_plan(_PAIR, pp=2, cuts=(2,), micro_batches=8)
    found = estimate(_PAIR, plan)
    # Seven of eight backwards add to gradients that are there: two reads and a write of 2 bytes.
    add = 7 / 8 * 2000 * 6 / 1e12
    busy = 8 * (12e-3 + add) + _optimizer(2000)
    assert found.step_time == pytest.approx(2e-3 + busy + 4e-3 + add)
    first, second = found.stages
    assert (first.forward, first.backward) == pytest.approx((2e-3, 4e-3 + add))
    assert (second.forward, second.backward) == pytest.approx((4e-3, 8e-3 + add))
    assert second.idle == pytest.approx(1 - busy / found.step_time)
    assert (first.in_flight, second.in_flight) == (2, 1)
    assert found.memory[0].activations == 2 * found.memory[1].activations
    assert found.breakdown == found.stages


def test_a_transfer_costs_its_way_there_and_back() -> None:
    slow = replace(_PAIR, cluster=cluster([[_KIND] * 2]))
    plans = (uniform_plan(i, pp=2, cuts=(2,), micro_batches=1) for i in (_PAIR, slow))
    free, paid = (estimate(i, plan).step_time for i, plan in zip((_PAIR, slow), plans, strict=True))
    way = INTRA.latency + 8 * 1e6 * 2 / INTRA.bandwidth
    assert paid - free == pytest.approx(2 * way)


def test_gradients_are_reduced_once_a_step() -> None:
    link = Link(1e9, 0.0)
    instance = replace(_PAIR, cluster=cluster([[_KIND] * 2], intra=link))
    one, four = (
        estimate(instance, uniform_plan(instance, micro_batches=count)) for count in (1, 4)
    )
    assert one.step_time == pytest.approx(four.step_time)
    assert one.stages[0].reduce == pytest.approx(2 * 0.5 * 4000 * 2 / 1e9)


def test_ranks_that_share_a_core_gain_nothing() -> None:
    shared = replace(_PAIR, cluster=cluster([[_KIND] * 2], intra=_FREE, cores=(0, 0)))
    alone = estimate(shared, uniform_plan(shared, devices=(0,), micro_batches=2)).step_time
    for plan in (
        uniform_plan(shared, dp_replicate=2, micro_batches=2),
        uniform_plan(shared, pp=2, cuts=(2,), micro_batches=2),
        uniform_plan(shared, pp=2, cuts=(2,), micro_batches=8),
    ):
        assert estimate(shared, plan).step_time >= alone * (1 - 1e-9)


def test_cores_are_of_one_node() -> None:
    hosts = [
        cluster([[_KIND]] * 2, intra=_FREE, nic=_FREE, cores=cores) for cores in ((0, 0), None)
    ]
    times = []
    for host in hosts:
        instance = replace(_PAIR, cluster=host)
        times.append(estimate(instance, uniform_plan(instance, pp=2, cuts=(2,))).step_time)
    assert times[0] == times[1]


def test_peak_memory_is_of_the_heaviest_device() -> None:
    """The second stage has three of four groups; the limit is broken there and nowhere else."""
    instance = replace(_PAIR, cluster=cluster([[round_kind(memory=13e6, reserve=1e6)] * 2]))
    plan = uniform_plan(instance, pp=2, cuts=(1,), micro_batches=8)
    found = estimate(instance, plan)
    own = 1000 * 8 + 4e6
    assert found.peak_memory == (own + 4e6 + 1e6, 3 * own + 1e6)
    assert not found.feasible
    assert len(found.reasons) == 1
    assert found.reasons[0].startswith("device 1 (round) needs 12.4 MiB, ")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("count", [1, 2, 16])
def test_micro_batches_in_flight(schedule: str, count: int) -> None:
    instance = Instance(chain([1e9] * 4, floats=1e6), cluster([[_KIND] * 4]), 16)
    found = estimate(instance, uniform_plan(instance, pp=4, micro_batches=count, schedule=schedule))
    each = 16 // count * 2e6 * 2
    for index, use in enumerate(found.memory):
        held = count if schedule == "gpipe" else min(count, 4 - index)
        assert found.stages[index].in_flight == held
        assert in_flight(schedule, (0, 1, 2, 3), count)[index] == held
        assert use.activations == held * each


_OWNERS = {
    "1f1b": (0, 1, 2, 3),
    "zb-h1": (0, 1, 2, 3),
    "interleaved": (0, 1, 2, 3, 0, 1, 2, 3),
    "zb-v": (0, 1, 2, 3, 3, 2, 1, 0),
}


def _scheduled(name: str, count: int) -> tuple[Instance, Plan]:
    """Eight equal groups on four devices as a schedule has them; 16 samples."""
    instance = Instance(
        chain([1e9] * 8, floats=1e6), cluster([[_KIND] * 4], intra=_FREE), 16, optimizer="sgd"
    )
    owner, each = _OWNERS[name], 8 // len(_OWNERS[name])
    stages = tuple(
        Stage(i * each, (i + 1) * each, Mesh((device,)), (GroupChoice(),) * each)
        for i, device in enumerate(owner)
    )
    return instance, make_plan(instance, stages, count, name)


@pytest.mark.parametrize("name", _OWNERS)
@pytest.mark.parametrize("count", [4, 16])
def test_memory_of_schedules_on_several_stages_a_device(name: str, count: int) -> None:
    """The most that a device holds at one time, followed action by action."""
    instance, plan = _scheduled(name, count)
    found, saved = estimate(instance, plan), 16 // count * 2e6 * 2 * (8 // len(plan.stages))
    for lane, use in zip(actions(plan), found.memory, strict=True):
        held = most = 0
        for action in lane:
            held += action.kind == "F"
            most = max(most, held)
            held -= action.kind == ("W" if name.startswith("zb") else "B")
        assert use.activations == most * saved
    parts = [0.0] * 4
    for index, device in enumerate(_OWNERS[name]):
        parts[device] += found.stages[index].memory.activations
    assert all(a >= b.activations for a, b in zip(parts, found.memory, strict=True))


@pytest.mark.parametrize("count", [4, 8, 16])
def test_interleaving_halves_the_bubble(count: int) -> None:
    """The bubble of p - 1 micro-batches over the stages of a lane (arXiv 2104.04473)."""
    plain, halved = (estimate(*_scheduled(name, count)) for name in ("1f1b", "interleaved"))
    work = plain.critical.compute
    assert plain.critical.bubble == pytest.approx(3 / count * work)
    assert halved.critical.bubble == pytest.approx(3 / (2 * count) * work)
    assert halved.critical.compute == pytest.approx(work)


def test_zero_bubble_schedules_put_off_what_makes_gradients_of_parameters() -> None:
    """With a third of the work in each of forward, input and parameter gradients."""
    found = {}
    for name in ("1f1b", "zb-h1", "zb-v"):
        instance, plan = _scheduled(name, 16)
        found[name] = Estimator(instance, _Weights(0.5)).estimate(plan).critical
    third = found["1f1b"].compute / 16 / 3
    assert found["1f1b"].bubble == pytest.approx(3 * 3 * third)
    assert found["zb-h1"].bubble == pytest.approx(3 * third)
    assert found["zb-v"].bubble == pytest.approx(3 * third / 2)


@dataclass
class _Weights(AnalyticCost):
    """Groups of which a part of the backward makes gradients of parameters, in the words of a test.

    Args:
        share: That part.
        step: Bytes that come and go while the optimizer steps.
    """

    share: float = 0.0
    step: float = 0.0

    def __init__(self, share: float, step: float = 0.0) -> None:
        super().__init__()
        self.share, self.step = share, step

    def group(self, *args: Any) -> GroupCost:
        cost = super().group(*args)
        part = self.share * cost.backward
        return replace(cost, weight_backward=part, optimizer_transient=self.step)


def test_lists_of_ones_own_are_estimated_as_the_schedule_they_spell() -> None:
    instance, plan = _scheduled("zb-v", 16)
    own = replace(plan, schedule="explicit", orders=actions(plan))
    assert estimate(instance, own) == estimate(instance, plan)


def test_the_phase_of_the_peak() -> None:
    instance, plan = _scheduled("1f1b", 16)
    found = estimate(instance, plan)
    assert found.peak_phase == tuple(f"backward of micro-batch 0 (stage {s})" for s in range(4))
    one = estimate(_PAIR, uniform_plan(_PAIR, devices=(0,)))
    assert one.peak_phase == ("backward of micro-batch 0 (stage 0)", "")
    stepping = Estimator(instance, _Weights(0.0, step=1e9)).estimate(plan)
    assert stepping.peak_phase == ("optimizer",) * 4
    for use, before in zip(stepping.memory, found.memory, strict=True):
        held = before.activations + before.logits + before.transient
        expected = replace(before, activations=0.0, logits=0.0, transient=2e9, cached=held)
        assert use == expected


def test_activations_are_linear_in_the_samples() -> None:
    held = []
    for batch in (4, 8, 12):
        instance = Instance(transformer(4), cluster([[_KIND]]), batch)
        found = estimate(instance, uniform_plan(instance, micro_batches=1))
        held.append(found.memory[0].activations + found.memory[0].transient)
    assert held[2] - held[1] == pytest.approx(held[1] - held[0])
    assert held[1] == pytest.approx(2 * held[0])


def test_recompute_trades_memory_for_time() -> None:
    instance = Instance(transformer(8), cluster([[_KIND]]), 8)
    none = uniform_plan(instance, micro_batches=2)
    plans = [none]
    for count in range(1, len(none.stages[0].choices) + 1):
        full = tuple(
            replace(choice, recompute="full") if index < count else choice
            for index, choice in enumerate(none.stages[0].choices)
        )
        plans.append(replace(none, stages=(replace(none.stages[0], choices=full),)))
    found = [estimate(instance, plan) for plan in plans]
    activations = [use.memory[0].activations for use in found]
    times = [use.step_time for use in found]
    # The embedding reads ids only and saves nothing but them.
    assert activations == sorted(activations, reverse=True)
    assert times == sorted(times)
    assert activations[-1] < 0.5 * activations[0]


def test_a_larger_micro_batch_means_a_larger_bubble() -> None:
    instance = Instance(chain([1e9] * 4), cluster([[_KIND] * 4], intra=_FREE), 32)
    plans = [uniform_plan(instance, pp=4, micro_batch=size) for size in (1, 2, 4, 8, 16)]
    assert [plan.micro_batches for plan in plans] == [32, 16, 8, 4, 2]
    for plan in plans:
        bubble = 3 / (plan.micro_batches + 3)
        found = estimate(instance, plan)
        assert [stage.idle for stage in found.stages] == pytest.approx([bubble] * 4)


def test_a_tied_table_is_held_once_by_a_stage() -> None:
    devices = cluster([[_KIND] * 2])
    free, tied = (Instance(transformer(2, tied=t), devices, 4) for t in (False, True))
    table = 1024 * 256
    alone = [estimate(i, uniform_plan(i, devices=(0,))) for i in (free, tied)]
    assert alone[0].peak_memory[0] - alone[1].peak_memory[0] == table * 16
    assert alone[1].memory[0].params == tied.graph.params * 2
    apart = [estimate(i, uniform_plan(i, pp=2)) for i in (free, tied)]
    assert apart[0].peak_memory == apart[1].peak_memory, "each stage holds its own"
    assert apart[1].step_time > apart[0].step_time, "and their gradients are summed"
    sharded = [estimate(i, uniform_plan(i, zero=3)) for i in (free, tied)]
    assert sharded[0].memory[0].params - sharded[1].memory[0].params == table * 2 / 2


def test_an_illegal_plan_is_refused() -> None:
    plan = uniform_plan(_PAIR)
    with pytest.raises(InputError, match="another graph"):
        estimate(replace(_PAIR, graph=transformer(1)), plan)


def _clusters() -> dict[str, Cluster]:
    a100, t4 = DEVICE_KINDS["A100-80"], DEVICE_KINDS["T4"]
    cpu = replace(_KIND, name="cpu", half_flops=1e6, launch_overhead=1e-6, max_efficiency=0.8)
    return {
        "round": cluster([[_KIND] * 4], intra=Link(1e15, 0.0)),
        "uniform": cluster([[a100] * 4] * 2),
        "mixed": cluster([[a100] * 3, [t4] * 3], nic=NIC),
        "cpu": cluster([[cpu] * 6], cores=(0, 1, 2, 0, 1, 0)),
    }


_CLUSTERS = _clusters()


def _instances(name: str) -> list[Instance]:
    precision = "fp16-mixed" if name == "mixed" else "fp32"
    graphs = (transformer(3), chain([1e9, 5e9, 1e8, 3e9, 3e9], floats=1e5, params=10**6))
    return [
        Instance(graph, _CLUSTERS[name], 12, precision=precision, attention=attention)
        for graph in graphs
        for attention in ("flash", "math")
    ]


@pytest.mark.parametrize("name", sorted(_CLUSTERS))
def test_no_plan_beats_the_bound_or_the_peak(name: str) -> None:
    rng = np.random.default_rng(7)
    for instance in _instances(name):
        estimator, least = Estimator(instance), bound(instance)
        for _ in range(100):
            found = estimator.estimate(random_plan(instance, rng))
            assert found.step_time >= least * (1 - 1e-9)
            assert 0.0 < found.mfu <= 1.0 + 1e-9
            assert all(0.0 <= stage.idle <= 1.0 for stage in found.stages)
            assert found.critical.total == pytest.approx(found.step_time)
            assert min(astuple(found.critical)) >= -1e-9 * found.step_time
            assert all(bool(phase) == (size > 0) for phase, size in _phases(found))


def _phases(found: Estimate) -> list[tuple[str, float]]:
    return list(zip(found.peak_phase, found.peak_memory, strict=True))


@pytest.mark.parametrize("name", sorted(_CLUSTERS))
def test_a_timeline_tells_what_the_estimate_tells(name: str) -> None:
    rng = np.random.default_rng(11)
    instance = _instances(name)[0]
    for _ in range(20):
        plan = random_plan(instance, rng)
        drawn = timeline(instance, plan)
        assert drawn.seconds == pytest.approx(estimate(instance, plan).step_time)
        by_device = defaultdict(list)
        for event in drawn.events:
            assert event.end >= event.start >= 0.0
            by_device[event.device].append(event)
        assert sorted(by_device) == list(plan.devices)
        for events in by_device.values():
            for lanes in (  # sends run beside all else
                [event for event in events if event.kind != "send"],
                [event for event in events if (event.kind, event.stage) == ("send", 0)],
            ):
                ordered = sorted(lanes, key=lambda event: (event.start, event.end))
                assert all(a.end <= b.start + 1e-12 for a, b in pairwise(ordered))
            kinds = [event.kind for event in events]
            assert kinds.count("F") == kinds.count("B") >= plan.micro_batches


def test_memory_counts_every_stage_of_a_device() -> None:
    """Stages 0 and 2 on device 0: states and activations add up, the transient is the larger."""
    instance = Instance(chain([1e9] * 3, floats=1e6, params=1000), cluster([[_KIND] * 2]), 4)
    stages = tuple(
        Stage(i, i + 1, Mesh((device,)), (GroupChoice(),)) for i, device in enumerate((0, 1, 0))
    )
    found = estimate(instance, make_plan(instance, stages, 4))
    assert found.memory[0].params == 2 * found.memory[1].params
    held = [min(4, 3 - index) for index in range(3)]
    assert found.memory[0].activations == (held[0] + held[2]) * 2e6 * 2
    assert found.memory[1].activations == held[1] * 2e6 * 2


def test_a_search_pays_for_each_stage_once() -> None:
    estimator = Estimator(_PAIR)
    plan = uniform_plan(_PAIR, pp=2)
    first, second = estimator.estimate(plan), estimator.estimate(plan)
    assert first == second
    assert estimator.evaluations == 2
    assert isinstance(plan, Plan)


def test_a_border_takes_as_long_as_its_busiest_replica() -> None:
    """Two pairs of nodes with a link each: the one that carries 6 of 8 samples is the last."""
    graph = chain([1e9, 1e9], floats=1e6, params=1000)
    instance = Instance(graph, cluster([[_KIND]] * 4, nic=Link(1e9, 0.0)), 8)

    def sends(*shares: tuple[int, ...]) -> set[float]:
        stages = tuple(
            Stage(i, i + 1, Mesh((2 * i, 2 * i + 1), 2), (GroupChoice(),), own)
            for i, own in enumerate(shares)
        )
        drawn = timeline(instance, make_plan(instance, stages, 1))
        return {round(e.end - e.start, 12) for e in drawn.events if e.kind == "send"}

    assert sends((), ()) == {4 * 2e6 / 1e9}
    assert sends((4, 4), ()) == {4 * 2e6 / 1e9}
    assert sends((6, 2), ()) == sends((), (2, 6)) == sends((6, 2), (6, 2)) == {6 * 2e6 / 1e9}
