"""Tests of Metis' arrangements and balances."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from rlplace.cluster.types import Link
from rlplace.plan.testing import chain, cluster, round_kind, transformer
from rlplace.plan.types import Instance, Plan
from rlplace.planners.metis import balanced_layers, device_groups, metis
from rlplace.planners.types import Budget, PlannerResult

_FAST, _SLOW = round_kind("fast"), round_kind("slow", 0.25)


def search(instance: Instance, evaluations: int = 300) -> PlannerResult:
    return metis(instance, Budget(evaluations=evaluations), np.random.default_rng(0))


def plan_of(result: PlannerResult) -> Plan:
    assert result.plan is not None
    return result.plan


def test_groups_are_all_devices_and_none_is_much_smaller_than_the_mean() -> None:
    assert list(device_groups(8, 2, {8})) == [(4, 4)]
    assert set(device_groups(8, 3, {8})) == {(2, 2, 4), (2, 4, 2), (4, 2, 2)}
    assert set(device_groups(6, 2, {3})) == {(2, 4), (4, 2), (3, 3)}
    assert list(device_groups(6, 1, {3})) == [(6,)]


def test_many_groups_move_in_blocks() -> None:
    # Twelve groups of sixteen devices: four blocks of three, of which one holds the larger sizes.
    found = set(device_groups(16, 12, {16}))
    assert (1,) * 8 + (2,) * 4 in found
    assert all(sum(sizes) == 16 and len(sizes) == 12 for sizes in found)
    assert len(found) <= 2 * 24


@pytest.mark.parametrize("seed", range(20))
def test_no_partition_of_layers_is_more_even(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cuts, stages = 7, 3
    tables = []
    for _ in range(stages):
        sums = np.concatenate([[0.0], np.cumsum(rng.random(cuts - 1))])
        table = sums[None, :] - sums[:, None]
        table[(table > rng.uniform(1.0, 3.0)) | (table <= 0.0)] = np.inf
        tables.append(table)
    every = [
        max(own[a, b] for own, a, b in zip(tables, (0, *inner), (*inner, cuts - 1), strict=True))
        for inner in combinations(range(1, cuts - 1), stages - 1)
    ]
    found = balanced_layers(tables)
    if found is None:
        assert min(every) == np.inf
        return
    slowest = max(own[a, b] for own, (a, b) in zip(tables, found, strict=True))
    assert slowest == pytest.approx(min(every), rel=1e-6)


def test_layers_are_in_balance() -> None:
    # 4 GB of gradients would take 40 s between the nodes; so two stages, and a device four times
    # as fast has four of five layers.
    graph = chain([1e10] * 10, floats=1e3, params=2 * 10**8)
    slow_link = Link(1e8, 1e-6, "slow")
    instance = Instance(graph, cluster([[_FAST], [_SLOW]], nic=slow_link), 64)
    kinds = {0: "fast", 1: "slow"}
    sizes = {kinds[s.mesh.devices[0]]: s.stop - s.start for s in plan_of(search(instance)).stages}
    assert sizes == {"fast": 8, "slow": 2}


def test_samples_are_in_balance() -> None:
    # One group makes one stage, in which the fast device has four of five samples.
    instance = Instance(chain([1e10]), cluster([[_FAST, _SLOW]]), 10)
    plan = plan_of(search(instance))
    assert plan.stages[0].shares in ((8, 2), (4, 1))
    assert {plan.stages[0].shares[0] // plan.stages[0].shares[1]} == {4}


def test_both_balances_in_one_pipeline() -> None:
    # Groups of two on three fast and one slow device: one stage is of both kinds.
    instance = Instance(chain([1e10] * 13, floats=1e3), cluster([[_FAST] * 3 + [_SLOW]]), 40)
    result = search(instance, 2000)
    assert result.estimate is not None
    # All work at the speed of all devices, 3.25 TFLOP/s, is the least there can be.
    least = 40 * 13 * 3e10 / 3.25e12
    assert result.estimate.step_time < 1.1 * least


def test_tp_is_no_more_than_memory_asks_for() -> None:
    # States need 16 bytes a parameter: a device of the small kind holds two thirds of them.
    graph = transformer(1, 256)
    big = round_kind("big", memory=1e9)
    small = round_kind("small", memory=0.7 * 16 * graph.params)
    for kind, tp in ((big, 1), (small, 2)):
        instance = Instance(graph, cluster([[kind] * 2]), 2, memory_margin=0.0)
        found = [stage.mesh.tp for stage in plan_of(search(instance, 1)).stages]
        assert found == [tp]
