"""AutoDDL's descent ends where looking at everything does; borders are cut where that pays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlplace.graph import library
from rlplace.plan import testing
from rlplace.plan.check import check
from rlplace.plan.types import Instance
from rlplace.planners.autoddl import autoddl
from rlplace.planners.costing import Costing
from rlplace.planners.exhaustive import all_plans
from rlplace.planners.search import Search
from rlplace.planners.types import Budget, PlannerResult


def _found(instance: Instance, seed: int = 0) -> PlannerResult:
    return autoddl(instance, Budget(), np.random.default_rng(seed))


@pytest.mark.parametrize("memory", [80e9, 5e6, 3.5e6])
def test_it_is_the_best_of_one_stage(memory: float) -> None:
    """Whole borders only, two devices: every layout, ZeRO level and recompute of every group."""
    graph = testing.transformer(1, 64, vocab=256, degrees=(2,))
    cluster = testing.cluster([[testing.round_kind(memory=memory)] * 2])
    instance = Instance(graph, cluster, 2, memory_margin=0.0, zero_levels=(0, 3))
    best = Search("all", Costing(instance), Budget())
    for plan in all_plans(instance):
        if len(plan.stages) == 1 and len(plan.stages[0].mesh.devices) == 2:
            best.offer(plan)
    found = _found(instance)
    assert best.best is not None
    assert found.estimate is not None
    assert found.estimate.step_time == pytest.approx(best.best[1].step_time, rel=0.01)


def test_sequences_are_cut_where_whole_activations_do_not_fit() -> None:
    """At tp 2 for all, without ZeRO and recompute: a cut sequence is all that frees memory."""
    graph = library.build("gpt", layers=1, hidden=64, heads=4, ffn=256, vocab=64, seq_len=64)

    def found(memory: float) -> PlannerResult:
        instance = Instance(
            graph,
            testing.cluster([[testing.round_kind(memory=memory)] * 2]),
            4,
            "fp32",
            memory_margin=0.0,
            zero_levels=(0,),
            recompute_modes=("none",),
            tp_degrees=(2,),
        )
        result = _found(instance)
        for plan in (result.plan, result.overfull):
            if plan is not None:
                check(instance, plan)
        return result

    least = found(1.0)
    assert least.overfull is not None
    assert least.estimate is not None
    assert "sequence" in {choice.layout for choice in least.overfull.stages[0].choices}
    assert found(1.001 * max(least.estimate.peak_memory)).plan is not None
    assert found(0.999 * max(least.estimate.peak_memory)).plan is None


def test_the_split_of_weights_is_chosen_group_by_group() -> None:
    """Between what replicas need and what shards need, some groups are split and some are not."""
    graph = testing.transformer(3, 256, degrees=())
    split = []
    for share in (40.0, 10.0, 8.0):
        memory = share * graph.params
        cluster = testing.cluster([[testing.round_kind(memory=memory)] * 4])
        instance = Instance(graph, cluster, 4, memory_margin=0.0, zero_levels=(0, 3))
        instance = replace(instance, recompute_modes=("none",))
        plan = _found(instance).plan
        assert plan is not None
        split.append(sum(choice.zero == 3 for choice in plan.stages[0].choices))
    assert split[0] < split[1] < split[2]
    assert split[2] < len(graph.groups)
