"""Galvatron's program: exact inside a stage, and its moves balance a pipeline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlplace.cost.profiled import ProfiledCost, profile_graph, read_galvatron, read_galvatron_curves
from rlplace.plan import testing
from rlplace.plan.frameworks import Framework
from rlplace.plan.types import GroupChoice, Instance, Mesh, Stage
from rlplace.plan.uniform import make_plan
from rlplace.planners.costing import Costing
from rlplace.planners.exhaustive import exhaustive
from rlplace.planners.galvatron import balanced, galvatron, unrestricted
from rlplace.planners.registry import PLANNERS
from rlplace.planners.types import Budget, PlannerResult
from rlplace.units import GIB

SHARED = Path(__file__).parents[3] / "shared/data/profiles/galvatron"


def _found(instance: Instance, costing: Costing | None = None) -> PlannerResult:
    return galvatron(instance, Budget(), np.random.default_rng(0), costing)


def test_parts_balance_by_their_heaviest() -> None:
    assert balanced(np.array([[3.0, 1.0, 1.0, 1.0]] * 2)) == (0, 1, 4)
    # What the first part holds weighs twice.
    assert balanced(np.array([[2.0] * 6, [1.0] * 6])) == (0, 2, 6)


def test_a_device_redoes_as_little_as_fits() -> None:
    """One device, five equal groups: the optimum at every limit, by looking at everything."""
    graph = testing.chain([1e12] * 5, floats=1e9 / 4)
    redone = []
    for memory in (11e9, 9e9, 7.5e9):
        cluster = testing.cluster([[testing.round_kind(memory=memory)]])
        instance = Instance(graph, cluster, 1, "fp32", memory_margin=0.0)
        found = _found(instance)
        best = exhaustive(instance, Budget(), np.random.default_rng(0))
        assert found.plan is not None
        assert found.estimate is not None
        assert best.estimate is not None
        assert found.estimate.step_time == pytest.approx(best.estimate.step_time)
        redone.append(sum(c.recompute == "full" for c in found.plan.stages[0].choices))
    assert redone == sorted(redone)
    assert redone[0] < redone[-1]


@pytest.mark.parametrize("seed", range(4))
def test_on_two_devices_little_is_lost(seed: int) -> None:
    """Two devices have no stages of unlike width: all that it leaves out is an idle device."""
    rng = np.random.default_rng(seed)
    graph = testing.chain(list(rng.uniform(1e11, 4e12, 4)), floats=1e6, params=int(1e8))
    cluster = testing.cluster([[testing.round_kind(memory=14e9)] * 2])
    instance = Instance(graph, cluster, 4, "fp32", memory_margin=0.0, zero_levels=(0, 3))
    found, best = _found(instance), exhaustive(instance, Budget(), np.random.default_rng(0))
    assert found.estimate is not None
    assert best.estimate is not None
    assert found.estimate.step_time <= 1.01 * best.estimate.step_time


def test_moves_lead_from_equal_bytes_to_equal_seconds() -> None:
    """States so large that replicas cannot be reduced: a pipeline, whose first group is heavy."""
    graph = testing.chain([3e12, 1e12, 1e12, 1e12], floats=1e3, params=int(2e8))
    slow = replace(testing.INTRA, bandwidth=1e8)
    cluster = testing.cluster([[testing.round_kind(memory=20e9)] * 2], intra=slow)
    found = _found(Instance(graph, cluster, 8, "fp32", memory_margin=0.0, zero_levels=(0,)))
    assert found.plan is not None
    assert [(stage.start, stage.stop) for stage in found.plan.stages] == [(0, 1), (1, 4)]
    assert found.plan.micro_batches == 8


def test_layers_of_unlike_degrees_are_never_worse_and_may_be_better() -> None:
    """One group cannot be cut, and its states are few: replicas are best for it alone."""
    graph = testing.transformer(3, 512, vocab=64, degrees=(2, 4))
    cluster = testing.cluster([[testing.round_kind(memory=60e6)] * 4])
    instance = Instance(graph, cluster, 8, memory_margin=0.0, zero_levels=(0,))
    costing = Costing(instance)
    of_one = [
        costing.estimator.estimate(plan.plan).step_time
        for plan in [_found(instance, costing)]
        if plan.plan is not None and len(plan.plan.stages) == 1
    ]
    free = min(unrestricted(costing, count) for count in (1, 2, 4, 8))
    assert np.isfinite(free)
    assert all(free <= 1.02 * said for said in of_one)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the published profiles")
@pytest.mark.parametrize(("memory", "theirs"), [(36, 1.086), (24, 1.541)])
def test_llama_is_planned_better_than_published(memory: int, theirs: float) -> None:
    instance, cost = _llama(memory)
    budget = Budget(evaluations=60)
    for name in ("galvatron", "dynamic"):
        planner = PLANNERS[name]
        found = planner(instance, budget, np.random.default_rng(0), Costing(instance, cost))
        assert found.estimate is not None
        assert found.estimate.step_time <= theirs
        assert max(found.estimate.peak_memory) <= memory * GIB


@pytest.mark.skipif(not SHARED.exists(), reason="needs the published profiles")
def test_the_published_plan_is_passed_under_the_same_costs() -> None:
    """Its plan at 36 GB: ZeRO-3 over 8, one micro-batch, 20 of 32 layers recomputed."""
    instance, cost = _llama(36)
    kept = GroupChoice("replicate", 3)
    choices = (replace(kept, recompute="full"),) * 20 + (kept,) * 13
    plan = make_plan(instance, (Stage(0, 33, Mesh(tuple(range(8)), 1, 8), choices),), 1)
    costing = Costing(instance, cost)
    theirs = costing.estimator.estimate(plan)
    found = galvatron(instance, Budget(evaluations=60), np.random.default_rng(0), costing)
    assert theirs.feasible
    assert found.estimate is not None
    assert found.estimate.step_time < 0.9 * theirs.step_time


def _llama(memory: int) -> tuple[Instance, ProfiledCost]:
    """llama2-7b on 8 GPUs, 2048 tokens, global batch 16."""
    hardware = SHARED / "hardware__sp_time_1nodes_8gpus_per_node__e8efe41.json"
    profile = read_galvatron(
        SHARED / "gpt__computation_profiling_bf16_llama2-7b_all__5c104c6.json",
        SHARED / "gpt__memory_profiling_bf16_llama2-7b_all__5c104c6.json",
        hardware,
        layers=32,
        hidden=4096,
        kind="gpu",
    )
    kind = testing.round_kind("gpu", memory=memory * GIB, overlap=0.9)
    cluster = testing.cluster([[kind] * 8], curves=read_galvatron_curves(hardware))
    instance = Instance(
        profile_graph(profile),
        cluster,
        16,
        "bf16-mixed",
        framework=Framework("galvatron"),
        memory_margin=0.0,
    )
    return instance, ProfiledCost(profile)
