"""Choices of a stage against all of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from rlplace.cluster.types import Link
from rlplace.plan.testing import chain, cluster, round_kind
from rlplace.plan.types import GroupChoice, Instance, Mesh, Stage
from rlplace.planners.best_stages import Stages
from rlplace.planners.costing import Costing
from rlplace.simulate.stages import StageCost, boundaries, stage_cost

_MESH = Mesh((0, 1), 1, 2, 1, 1)
_COUNT, _HELD = 3, 2


def _instance(memory: float) -> Instance:
    flops = [1e9, 3e9, 2e9, 1e9]
    kind = round_kind(memory=memory, overlap=0.8)
    devices = cluster([[kind] * 2], intra=Link(10e9, 1e-6))
    graph = chain(flops, floats=1e6, params=10**6)
    return Instance(graph, devices, 6, memory_margin=0.0, zero_levels=(0, 2, 3))


def _costs(instance: Instance, start: int, stop: int) -> Iterator[StageCost]:
    """Of every stage [start, stop) that fits."""
    costing, reads = Costing(instance), boundaries(instance.graph)
    groups = instance.graph.groups[start:stop]
    every = [costing.solver.options(group.structure, _MESH) for group in groups]
    for choices in product(*every):
        stage = Stage(start, stop, _MESH, tuple(choices))
        cost = stage_cost(instance, stage, _COUNT, costing.cost, reads)
        held = cost.params + cost.gradients + cost.optimizer_states + _HELD * cost.saved
        if held + cost.transient <= costing.solver.limit(_MESH):
            yield cost


def _total(cost: StageCost) -> float:
    return _COUNT * (cost.forward + cost.backward) + cost.exposed_reduce + cost.optimizer


def _cost(instance: Instance, start: int, choices: tuple[GroupChoice, ...]) -> StageCost:
    stage = Stage(start, start + len(choices), _MESH, choices)
    return stage_cost(instance, stage, _COUNT, Costing(instance).cost, boundaries(instance.graph))


@pytest.mark.parametrize("memory", [80e9, 70e6, 62e6])
@pytest.mark.parametrize(("start", "stop"), [(0, 4), (1, 3)])
def test_no_choices_are_quicker(memory: float, start: int, stop: int) -> None:
    instance = _instance(memory)
    program = Stages(Costing(instance)).program(_MESH, _COUNT)
    found = program.stage(start, stop, _HELD, cells=64)
    every = [_total(cost) for cost in _costs(instance, start, stop)]
    if found is None:
        assert not every
        return
    assert found[0] == pytest.approx(min(every), rel=1e-9)
    assert _total(_cost(instance, start, found[1])) == pytest.approx(found[0], rel=1e-9)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.1])
@pytest.mark.parametrize("memory", [80e9, 62e6])
def test_a_block_lacks_only_stages_that_take_too_long(memory: float, share: float) -> None:
    # Devices of two speeds, so that shares are unequal and seconds are what they make of them.
    kinds = [round_kind(memory=memory, overlap=0.8), round_kind("slow", 0.5, memory, 0.8)]
    graph = chain([1e9, 3e9, 2e9, 1e9], floats=1e6, params=10**6)
    instance = Instance(graph, cluster([kinds]), 24, memory_margin=0.0, zero_levels=(0, 2, 3))
    stages, cuts = Stages(Costing(instance)), np.arange(5)
    every = stages.block(cuts, _MESH, _COUNT, float("inf"), _HELD)
    taken = _COUNT * every[0] + every[2]
    most = share * float(taken[np.isfinite(taken)].max())
    some = stages.block(cuts, _MESH, _COUNT, most, _HELD)
    assert np.array_equal(some[:, taken < most], every[:, taken < most])
    lacking = np.isfinite(every[0]) & ~np.isfinite(some[0])
    assert lacking.any() == (share < 1.0)
    assert share > 0.0 or lacking.sum() == np.isfinite(every[0]).sum()


def test_weight_trades_the_tail_for_work() -> None:
    instance = _instance(80e9)
    program = Stages(Costing(instance)).program(_MESH, _COUNT)

    def work(weight: float) -> float:
        found = program.stage(0, 4, _HELD, weight=weight)
        assert found is not None
        cost = _cost(instance, 0, found[1])
        return cost.forward + cost.backward

    assert work(1e6) <= work(1.0) <= work(1e-6)
    assert work(1e6) < work(1e-6)
