"""OSDP shards what memory asks for and no more, and slices what comes and goes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlplace.graph import library
from rlplace.plan import testing
from rlplace.plan.types import Instance, Plan
from rlplace.planners.costing import Costing
from rlplace.planners.exhaustive import all_plans
from rlplace.planners.osdp import osdp
from rlplace.planners.replicas import data_parallel, zero3
from rlplace.planners.search import Search
from rlplace.planners.types import Budget, PlannerResult

#: Params of each group: states of 16 bytes a parameter take 0.8 GB of all that are replicated.
_PARAMS = (int(2e7), int(1e7), int(5e6), int(15e6))


def _instance(memory: float) -> Instance:
    graph = testing.chain([1e11] * 4, floats=1e3)
    structures = tuple(
        replace(structure, work=replace(structure.work, params=params))
        for structure, params in zip(graph.structures, _PARAMS, strict=True)
    )
    cluster = testing.cluster([[testing.round_kind(memory=memory)] * 2])
    return Instance(
        replace(graph, structures=structures),
        cluster,
        2,
        "fp32",
        memory_margin=0.0,
        zero_levels=(0, 3),
        recompute_modes=("none",),
    )


def _found(instance: Instance) -> PlannerResult:
    return osdp(instance, Budget(), np.random.default_rng(0))


def _one_stage(plan: Plan) -> bool:
    stage = plan.stages[0]
    return len(plan.stages) == 1 and stage.mesh.tp == 1 and len(stage.mesh.devices) == 2


@pytest.mark.parametrize("memory", [2e9, 7.9e8, 7.5e8, 6.5e8, 6e8])
def test_it_is_the_optimum_of_its_decision_space(memory: float) -> None:
    instance = _instance(memory)
    best = Search("all", Costing(instance), Budget())
    for plan in all_plans(instance):
        if _one_stage(plan):
            best.offer(plan)
    found = _found(instance)
    assert best.best is not None
    assert found.estimate is not None
    assert found.estimate.step_time == pytest.approx(best.best[1].step_time)


def test_it_shards_as_much_as_memory_asks_for() -> None:
    sharded = []
    for memory in (2e9, 7.9e8, 7e8):
        found = _found(_instance(memory))
        assert found.plan is not None
        choices = found.plan.stages[0].choices
        sharded.append(sum(p for p, c in zip(_PARAMS, choices, strict=True) if c.zero))
    assert sharded == sorted(sharded)
    assert sharded[0] == 0
    assert 0 < sharded[1] < sum(_PARAMS)


def test_where_all_or_nothing_is_wasteful_it_is_between() -> None:
    instance, rng = _instance(7.9e8), np.random.default_rng(0)
    whole, sharded = (p(instance, Budget(), rng) for p in (data_parallel, zero3))
    found = _found(instance)
    assert whole.plan is None
    assert sharded.estimate is not None
    assert found.estimate is not None
    assert found.estimate.step_time < sharded.estimate.step_time


def test_slices_make_room_where_they_are_offered() -> None:
    """Between the least memory with slices and without, only a plan with slices fits."""
    graph = library.build("gpt", layers=1, hidden=64, heads=4, ffn=256, vocab=64, seq_len=4)

    def found(memory: float, slices: tuple[int, ...]) -> PlannerResult:
        cluster = testing.cluster([[testing.round_kind(memory=memory)] * 4])
        asked = Instance(
            graph, cluster, 4, "fp32", memory_margin=0.0, recompute_modes=("none",), slices=slices
        )
        return _found(asked)

    whole, cut = (found(1.0, slices).estimate for slices in ((1,), (1, 4)))
    assert whole is not None
    assert cut is not None
    assert max(cut.peak_memory) < max(whole.peak_memory)
    between = (max(cut.peak_memory) + max(whole.peak_memory)) / 2
    assert found(between, (1,)).plan is None
    plan = found(between, (1, 4)).plan
    assert plan is not None
    assert 4 in {choice.slices for choice in plan.stages[0].choices}
