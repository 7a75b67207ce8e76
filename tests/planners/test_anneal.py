"""Annealing: legal neighbours, never worse than its start."""

from __future__ import annotations

import numpy as np
import pytest

from rlplace.plan.check import check
from rlplace.plan.testing import chain, cluster, random_plan, round_kind, transformer
from rlplace.plan.types import GroupChoice, Instance, Mesh, Plan, Stage
from rlplace.plan.uniform import make_plan, uniform_plan
from rlplace.planners.anneal import Neighbours, anneal
from rlplace.planners.stage_solver import StageSolver
from rlplace.planners.types import Budget
from rlplace.simulate.estimate import estimate

_MIXED = Instance(
    transformer(3), cluster([[round_kind("fast")] * 4, [round_kind("slow", 0.4)] * 4]), 24
)


def _shared_meshes(instance: Instance) -> Plan:
    """Four stages in turn on two devices."""
    meshes = (Mesh((0,)), Mesh((1,)))
    bounds = ((0, 2), (2, 4), (4, 6), (6, 8))
    stages = tuple(
        Stage(a, b, meshes[index % 2], (GroupChoice(),) * (b - a))
        for index, (a, b) in enumerate(bounds)
    )
    return make_plan(instance, stages, 4)


@pytest.mark.parametrize("seed", range(6))
def test_never_worse_than_its_start(seed: int) -> None:
    rng = np.random.default_rng(seed)
    start = random_plan(_MIXED, rng)
    before = estimate(_MIXED, start)
    result = anneal(_MIXED, Budget(evaluations=150), rng, start)
    assert result.estimate is not None
    assert result.estimate.step_time <= before.step_time
    assert result.evaluations <= 150


def test_it_improves_a_bad_start() -> None:
    start = uniform_plan(_MIXED, devices=(7,))
    result = anneal(_MIXED, Budget(evaluations=600), np.random.default_rng(0), start)
    assert result.estimate is not None
    assert result.estimate.step_time < 0.5 * estimate(_MIXED, start).step_time


def test_it_finds_room_from_an_overfull_start() -> None:
    graph = chain([1e9] * 8, floats=1e3, params=10**6)
    devices = cluster([[round_kind(memory=60e6)] * 4])
    instance = Instance(graph, devices, 8)
    start = uniform_plan(instance)
    assert not estimate(instance, start).feasible
    result = anneal(instance, Budget(evaluations=300), np.random.default_rng(0), start)
    assert result.plan is not None
    assert result.estimate is not None
    assert result.estimate.feasible


@pytest.mark.parametrize("shared", [False, True])
def test_neighbours_are_legal(shared: bool) -> None:
    rng = np.random.default_rng(5)
    neighbours = Neighbours(_MIXED, StageSolver(_MIXED), rng)
    start = _shared_meshes(_MIXED) if shared else random_plan(_MIXED, rng)
    check(_MIXED, start)
    plan, drawn = start, 0
    for _ in range(400):
        other = neighbours.draw(plan)
        if other is None:
            continue
        check(_MIXED, other)
        plan, drawn = other, drawn + 1
    assert drawn > 100
    assert plan != start


def test_a_short_time_cools_too() -> None:
    """Under seconds alone the search ends near the best it saw, as under evaluations."""
    start = uniform_plan(_MIXED, devices=(0,))
    result = anneal(_MIXED, Budget(seconds=0.5), np.random.default_rng(0), start)
    assert result.stopped == "seconds"
    assert result.estimate is not None
    assert result.estimate.step_time < estimate(_MIXED, start).step_time
