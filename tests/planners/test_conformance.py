"""What every planner keeps: legal plans, the budget, the seed, the memory limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from rlplace.cluster.types import Cluster
from rlplace.plan.check import check
from rlplace.plan.testing import chain, cluster, round_kind, transformer
from rlplace.plan.types import Instance
from rlplace.plan.uniform import uniform_plan
from rlplace.planners.registry import PLANNERS
from rlplace.planners.types import Budget, PlannerResult
from rlplace.simulate.bound import bound
from rlplace.simulate.estimate import estimate

_FAST, _SLOW = round_kind("fast", overlap=0.9), round_kind("slow", 0.3, memory=20e9)


_CLUSTERS: dict[str, Cluster] = {
    "1": cluster([[_FAST]]),
    "2": cluster([[_FAST] * 2]),
    "3": cluster([[_FAST] * 3]),
    "6": cluster([[_FAST] * 3] * 2),
    "12": cluster([[_FAST] * 4] * 3),
    "mixed": cluster([[_FAST] * 4, [_SLOW] * 2]),
    "mixed nodes": cluster([[_FAST, _SLOW]] * 3),
    "cores": cluster([[_FAST] * 4], cores=(0, 1, 0, 1)),
}


def _instance(name: str) -> Instance:
    return Instance(transformer(3), _CLUSTERS[name], 12)


def _plan(
    planner: str, instance: Instance, evaluations: int = 300, seconds: float = float("inf")
) -> PlannerResult:
    return PLANNERS[planner](instance, Budget(seconds, evaluations), np.random.default_rng(3))


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("name", _CLUSTERS)
def test_the_plan_is_legal_and_worth_what_is_said(planner: str, name: str) -> None:
    instance = _instance(name)
    result = _plan(planner, instance)
    assert result.plan is not None
    assert result.estimate is not None
    check(instance, result.plan)
    meshes = {stage.mesh for stage in result.plan.stages}
    devices = [device for mesh in meshes for device in mesh.devices]
    assert len(devices) == len(set(devices))
    again = estimate(instance, result.plan)
    assert again == result.estimate
    assert again.feasible
    assert again.step_time >= bound(instance) * (1 - 1e-9)
    assert result.overfull is None
    assert result.overflow == 0.0
    assert 1 <= result.evaluations <= 300
    times = [time for _, time in result.curve]
    assert all(a > b for a, b in pairwise(times)), "each point is an improvement"
    assert times[-1] == again.step_time
    assert result.idle == tuple(d for d in range(len(instance.cluster.devices)) if d not in devices)


@pytest.mark.parametrize("planner", PLANNERS)
def test_every_improvement_is_told_as_it_is_found(planner: str) -> None:
    """So that a search that is killed at any moment leaves its best so far."""
    instance, told = _instance("mixed"), []
    budget = Budget(evaluations=120, told=lambda plan, found, at: told.append((plan, found, at)))
    result = PLANNERS[planner](instance, budget, np.random.default_rng(3))
    best = min(told, key=lambda one: one[1].step_time)
    assert best[0] == result.plan
    assert best[1] == result.estimate
    assert {time for _, time in result.curve} <= {found.step_time for _, found, _ in told}


@pytest.mark.parametrize("planner", PLANNERS)
def test_the_same_seed_gives_the_same_plan(planner: str) -> None:
    instance = _instance("mixed")
    first, second = _plan(planner, instance), _plan(planner, instance)
    assert first.plan == second.plan
    assert first.evaluations == second.evaluations


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("name", ["1", "12", "mixed"])
def test_one_evaluation_is_an_answer(planner: str, name: str) -> None:
    result = _plan(planner, _instance(name), evaluations=1)
    assert result.plan is not None
    assert result.evaluations == 1
    assert result.stopped == "evaluations"


@pytest.mark.parametrize("planner", PLANNERS)
def test_little_time_is_an_answer(planner: str) -> None:
    instance = _instance("mixed")
    _plan(planner, instance, evaluations=20)  # compile first
    result = _plan(planner, instance, evaluations=1_000_000, seconds=0.05)
    assert result.plan is not None
    assert result.stopped in ("seconds", "done")


@pytest.mark.parametrize("planner", PLANNERS)
def test_more_evaluations_are_never_worse(planner: str) -> None:
    instance = _instance("mixed nodes")
    times = []
    for evaluations in (1, 10, 100):
        result = _plan(planner, instance, evaluations=evaluations)
        assert result.estimate is not None
        times.append(result.estimate.step_time)
    if planner in ("anneal", "portfolio"):  # cooling differs; the start is the least they give
        assert times[0] >= max(times) * (1 - 1e-9)
    else:
        assert times == sorted(times, reverse=True)


def _tight(share: float) -> Instance:
    """Four devices on which `share` of the states of the whole model fit."""
    graph = transformer(6, 128)
    memory = share * graph.params * 16
    devices = cluster([[round_kind(memory=memory, overlap=0.5)] * 4])
    return Instance(graph, devices, 8, memory_margin=0.0)


@pytest.mark.parametrize(
    "planner", ["zero3", "megatron", "grid", "dynamic", "overlap", "portfolio"]
)
def test_the_memory_limit_is_kept(planner: str) -> None:
    instance = _tight(0.8)
    assert not estimate(instance, uniform_plan(instance)).feasible
    result = _plan(planner, instance)
    assert result.plan is not None
    assert result.estimate is not None
    limit = instance.memory_limit(0)
    assert max(result.estimate.peak_memory) <= limit
    check(instance, result.plan)


@pytest.mark.parametrize("planner", PLANNERS)
def test_where_nothing_fits_the_least_overfull_plan_is_told(planner: str) -> None:
    instance = _tight(0.01)
    result = _plan(planner, instance, evaluations=50)
    assert result.plan is None
    assert result.curve == ()
    if result.overfull is None:
        assert result.estimate is None
        assert planner == "dynamic", "it builds only plans that fit"
        return
    check(instance, result.overfull)
    found = estimate(instance, result.overfull)
    assert found == result.estimate
    assert not found.feasible
    assert result.overflow == pytest.approx(max(found.peak_memory) / instance.memory_limit(0) - 1)


@pytest.mark.parametrize("planner", ["grid", "dynamic", "overlap", "portfolio"])
@pytest.mark.parametrize(
    "changes",
    [
        {"zero_levels": (0,)},
        {"zero_levels": (3,)},
        {"recompute_modes": ("full",)},
        {"attention": "math"},
        {"optimizer": "sgd", "precision": "fp32"},
        {"global_batch": 1},
        {"global_batch": 7},
        {"tp_degrees": (1,)},
        {"loss_chunks": 4},
        {"fused": True},
    ],
)
def test_what_the_instance_allows_is_what_the_plan_uses(
    planner: str, changes: dict[str, object]
) -> None:
    instance = replace(_instance("6"), **changes)  # type: ignore[arg-type]
    result = _plan(planner, instance, evaluations=100)
    assert result.plan is not None
    check(instance, result.plan)
    for stage in result.plan.stages:
        assert stage.mesh.tp in instance.offered_tp
        for choice in stage.choices:
            assert choice.zero in (*instance.zero_levels, 0)
            assert choice.recompute in instance.recompute_modes


def _searched(instance: Instance, names: Sequence[str]) -> list[float]:
    results = (_plan(name, instance) for name in names)
    return [r.estimate.step_time for r in results if r.estimate is not None]


def test_a_search_pays_on_a_mixed_cluster() -> None:
    """The slow devices hold a uniform plan back; the program gives them less to do."""
    fast, slow = round_kind("fast"), round_kind("slow", 0.2)
    instance = Instance(chain([1e10] * 12, floats=1e3), cluster([[fast] * 2, [slow] * 2]), 16)
    replicas, grid, dynamic = _searched(instance, ("data_parallel", "grid", "dynamic"))
    assert grid <= replicas
    assert dynamic < 0.6 * grid
    assert dynamic < 1.25 * bound(instance)
