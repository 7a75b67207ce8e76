"""DAPPLE's latency agrees with the simulator, its rules with the paper, its plans with the best."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlplace.plan import testing
from rlplace.plan.types import Instance, Mesh, Stage
from rlplace.plan.uniform import make_plan
from rlplace.planners.costing import Costing
from rlplace.planners.dapple import Part, dapple, latency, place
from rlplace.planners.exhaustive import all_plans
from rlplace.planners.mesh_options import MeshTables
from rlplace.planners.search import Search
from rlplace.planners.types import Budget
from rlplace.simulate.estimate import estimate


def test_one_stage_is_its_work_and_its_reduction() -> None:
    assert latency([Part(1.0, 2.0, 5.0)], 4) == 4 * 3 + 5


def test_the_pivot_sets_the_pace() -> None:
    # Warm-up 1 + 4; three more micro-batches of 12; the last backwards 8 + 2.
    assert latency([Part(1.0, 2.0), Part(4.0, 8.0)], 4) == 5 + 36 + 10
    # The first stage sets it: warm-up 4, three of 12, its last backward 8.
    assert latency([Part(4.0, 8.0), Part(1.0, 2.0)], 4) == 4 + 36 + 8 + 0
    # A stage behind the pivot is over before it, so its reduction has started earlier.
    assert latency([Part(4.0, 8.0), Part(1.0, 2.0, 30.0)], 4) == 4 + 36 + 30


@pytest.mark.parametrize("flops", [[1e12, 2e12], [2e12, 1e12, 1e12], [1e12, 3e12, 1e12]])
def test_it_is_what_the_simulator_says_within_a_bubble(flops: list[float]) -> None:
    """One group a stage, transfers that cost next to nothing; the form has no exact bubbles."""
    graph = testing.chain(flops, floats=1.0)
    count = len(flops)
    instance = Instance(graph, testing.cluster([[testing.round_kind()] * count]), 8, "fp32")
    meshes = [Mesh((i,)) for i in range(count)]
    tables, costing = MeshTables(Costing(instance)), Costing(instance)
    parts = []
    for index, mesh in enumerate(meshes):
        options = tables.options(mesh, 8)
        forward, backward = options.forward[index, 0], options.backward[index, 0]
        parts.append(Part(float(forward), float(backward), float(options.once[index, 0])))
    choices = [costing.solver.options(index, mesh)[:1] for index, mesh in enumerate(meshes)]
    stages = tuple(
        Stage(index, index + 1, mesh, own)
        for index, (mesh, own) in enumerate(zip(meshes, choices, strict=True))
    )
    found = estimate(instance, make_plan(instance, stages, 8)).step_time
    assert latency(parts, 8) == pytest.approx(found, rel=0.06)


def test_the_three_rules_differ_as_in_the_paper() -> None:
    room, taken = (4, 4, 4), (2, 0, 0)
    fresh, append, scatter = place(taken, room, 2), place(taken, room, 3), place(taken, room, 4)
    assert fresh[0] == (2, 2, 0)
    assert append[1] == (4, 1, 0)
    # Evenly over nodes that are in use, and then over the others.
    assert scatter[2] == (4, 1, 1)
    assert place((0, 0, 0), room, 6) == [(4, 2, 0), (2, 2, 2)]


def test_what_is_heavy_and_has_few_states_is_replicated() -> None:
    """Convolutions before dense layers: replicas for the former, one device for the latter."""
    graph = testing.chain([4e12, 4e12, 1e12, 1e12], floats=1e3)
    structures = tuple(
        replace(s, work=replace(s.work, params=int(5e8) if index > 1 else 1000))
        for index, s in enumerate(graph.structures)
    )
    slow = replace(testing.INTRA, bandwidth=1e9)
    cluster = testing.cluster([[testing.round_kind()] * 3], intra=slow)
    asked = Instance(replace(graph, structures=structures), cluster, 8, "fp32", zero_levels=(0,))
    found = dapple(asked, Budget(), np.random.default_rng(0))
    assert found.plan is not None
    assert [len(stage.mesh.devices) for stage in found.plan.stages] == [2, 1]


@pytest.mark.parametrize("seed", range(3))
def test_little_is_lost_to_looking_at_everything(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = testing.chain(list(rng.uniform(1e11, 3e12, 4)), floats=1e6, params=int(3e7))
    slow = replace(testing.INTRA, bandwidth=2e9)
    cluster = testing.cluster([[testing.round_kind()] * 3], intra=slow)
    instance = Instance(graph, cluster, 4, "fp32", zero_levels=(0,), recompute_modes=("none",))
    best = Search("all", Costing(instance), Budget())
    for plan in all_plans(instance):
        best.offer(plan)
    found = dapple(instance, Budget(), np.random.default_rng(0))
    assert best.best is not None
    assert found.estimate is not None
    assert found.estimate.step_time <= 1.02 * best.best[1].step_time
