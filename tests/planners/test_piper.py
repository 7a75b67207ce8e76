"""Piper balances loads with both degrees, and redoes only where that makes stages fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlplace.cluster.types import Link
from rlplace.plan import testing
from rlplace.plan.types import Instance, Plan
from rlplace.planners.costing import Costing
from rlplace.planners.exhaustive import all_plans
from rlplace.planners.piper import _Loads, piper
from rlplace.planners.search import Search
from rlplace.planners.stage_program import pipelines
from rlplace.planners.types import Budget
from rlplace.simulate.estimate import estimate

_KIND = testing.round_kind()


def _plan(instance: Instance) -> Plan:
    plan = piper(instance, Budget(), np.random.default_rng(0)).plan
    assert plan is not None
    return plan


def test_what_is_heavy_and_has_few_states_is_replicated() -> None:
    """Twice the work on two devices, the large weights on one, where nothing is exchanged."""
    graph = testing.chain([4e12, 4e12, 2e12, 2e12], floats=1e3)
    structures = tuple(
        replace(s, work=replace(s.work, params=int(5e8) if index > 1 else 1000))
        for index, s in enumerate(graph.structures)
    )
    slow = testing.cluster([[_KIND] * 3], intra=Link(1e9, 1e-6))
    asked = Instance(replace(graph, structures=structures), slow, 8, "fp32", zero_levels=(0,))
    stages = _plan(asked).stages
    assert [(stage.stop, len(stage.mesh.devices)) for stage in stages] == [(2, 2), (4, 1)]


@pytest.mark.parametrize("seed", range(3))
def test_no_plan_of_its_space_has_a_smaller_load(seed: int) -> None:
    """Nothing is sent or exchanged, so that loads are compute alone."""
    rng = np.random.default_rng(seed)
    graph = testing.chain(list(rng.uniform(1e11, 3e12, 4)))
    cluster = testing.cluster([[_KIND] * 3])
    instance = Instance(graph, cluster, 2, "fp32", zero_levels=(0,), recompute_modes=("none",))
    loads = _Loads(Search("piper", Costing(instance), Budget()), 2)
    table = loads._table()
    stages = pipelines(table, [len(mesh.devices) for mesh in loads.meshes], 3, 1e9)[0]
    found = max(table[j, len(stages) - 1 - i, a, b] for i, (a, b, j) in enumerate(stages))
    every = [plan for plan in all_plans(instance) if plan.micro_batches == 2]
    least = min(_load(instance, plan) for plan in every)
    assert found == pytest.approx(least, rel=1e-6)


def _load(instance: Instance, plan: Plan) -> float:
    """The largest load of a plan of which nothing is sent: seconds of a micro-batch."""
    return max(stage.forward + stage.backward for stage in estimate(instance, plan).stages)


def test_what_is_in_front_is_redone_where_memory_is_short() -> None:
    """Three stages of equal work: the first holds most micro-batches."""
    graph = testing.chain([1e12] * 3, floats=1e8, params=10**8)
    memory = {"memory_margin": 0.0, "zero_levels": (0,), "tp_degrees": (1,)}
    few = testing.cluster([[testing.round_kind(memory=3.5e9)] * 3])
    instance = replace(Instance(graph, few, 6, "fp32"), **memory)  # type: ignore[arg-type]  # fields
    plan = _plan(instance)
    redone = [[choice.recompute for choice in stage.choices] for stage in plan.stages]
    assert redone == [["full"], ["none"], ["none"]]
