"""Tests of Sailor's search."""

from __future__ import annotations

import numpy as np
import pytest

from rlplace.plan.testing import chain, cluster, round_kind, transformer
from rlplace.plan.types import Instance, Plan
from rlplace.planners.exhaustive import exhaustive
from rlplace.planners.sailor import sailor
from rlplace.planners.types import Budget, PlannerResult

_FAST, _SLOW = round_kind("fast"), round_kind("slow", 0.25)


def search(instance: Instance, evaluations: int = 10_000) -> PlannerResult:
    return sailor(instance, Budget(evaluations=evaluations), np.random.default_rng(0))


def plan_of(result: PlannerResult) -> Plan:
    assert result.plan is not None
    return result.plan


def kinds(instance: Instance, plan: Plan) -> list[list[str]]:
    return [[instance.cluster.devices[d].kind for d in s.mesh.devices] for s in plan.stages]


def test_an_even_stage_has_as_many_fast_devices_as_it_needs() -> None:
    # Half of the model each: the slow devices would take four times as long, and stay idle.
    instance = Instance(chain([1e10] * 8, floats=1e3), cluster([[_FAST] * 2, [_SLOW] * 2]), 64)
    result = search(instance)
    assert {kind for stage in kinds(instance, plan_of(result)) for kind in stage} == {"fast"}
    assert result.idle == (2, 3)


def test_replicas_of_two_kinds_make_one_stage() -> None:
    # Three devices, none of which is much slower: one stage of three replicas is best, and even.
    near = round_kind("near", 0.9)
    instance = Instance(chain([1e10] * 5, floats=1e3), cluster([[_FAST] * 2, [near]]), 24)
    plan = plan_of(search(instance))
    assert kinds(instance, plan) == [["fast", "fast", "near"]]
    assert plan.stages[0].mesh.dp_replicate == 3


def test_tp_is_the_least_that_fits() -> None:
    # States need 16 bytes a parameter: a device of the small kind holds half of them.
    graph = transformer(3, 256)
    big = round_kind("big", memory=1e9)
    small = round_kind("small", memory=0.7 * 16 * graph.params)
    for kind, tp in ((big, 1), (small, 2)):
        instance = Instance(graph, cluster([[kind] * 2]), 2, memory_margin=0.0)
        found = [stage.mesh.tp for stage in plan_of(search(instance, 1)).stages]
        assert found == [tp]


def test_all_stages_have_the_same_replicas() -> None:
    instance = Instance(transformer(6), cluster([[_FAST] * 4, [_SLOW] * 2]), 24)
    plan = plan_of(search(instance))
    assert len({stage.mesh.dp for stage in plan.stages}) == 1


@pytest.mark.parametrize("flops", [[1e10] * 4, [3e10, 1e10, 1e10, 1e10]])
def test_the_best_there_is_where_even_stages_are(flops: list[float]) -> None:
    instance = Instance(
        chain(flops, floats=1e3),
        cluster([[_FAST] * 2]),
        4,
        zero_levels=(0,),
        recompute_modes=("none",),
    )
    found = search(instance).estimate
    best = exhaustive(instance, Budget(), np.random.default_rng(0)).estimate
    assert found is not None
    assert best is not None
    assert found.step_time == pytest.approx(best.step_time)
