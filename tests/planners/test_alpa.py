"""Alpa's two programs against looking at everything, and its submeshes by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rlplace.bench.suites import suite
from rlplace.bench.types import Problem
from rlplace.cluster.types import Link
from rlplace.plan import testing
from rlplace.plan.types import Instance
from rlplace.planners.alpa import Submesh, alpa, place, submeshes
from rlplace.planners.costing import Costing
from rlplace.planners.exhaustive import all_plans
from rlplace.planners.search import Search
from rlplace.planners.types import Budget, PlannerResult

_KIND = testing.round_kind()
#: Every second tiny instance has equal devices.
_EQUAL = suite("tiny")[::14]


def _found(instance: Instance) -> PlannerResult:
    return alpa(instance, Budget(), np.random.default_rng(0))


def _best(instance: Instance, stages: int | None = None) -> float:
    """The least step time of all plans, of so many stages on all devices if that is said."""
    search, devices = Search("all", Costing(instance), Budget()), len(instance.cluster.devices)
    for plan in all_plans(instance):
        if stages is None or (len(plan.stages) == stages and len(plan.devices) == devices):
            search.offer(plan)
    return search.best[1].step_time if search.best is not None else float("inf")


def test_submeshes_are_those_of_the_paper() -> None:
    assert [(one.nodes, one.devices) for one in submeshes(2, 4)] == [(1, 1), (1, 2), (1, 4), (2, 4)]
    # And a whole node where that is no power of two.
    assert [one.size for one in submeshes(2, 6)] == [1, 2, 4, 6, 12]
    assert [one.size for one in submeshes(1, 1)] == [1]


def test_the_largest_submeshes_are_placed_first() -> None:
    nodes = [(0, 1, 2, 3), (4, 5, 6, 7)]
    half, whole = Submesh(1, 2), Submesh(1, 4)
    assert place([half, whole, half], nodes) == [(4, 5), (0, 1, 2, 3), (6, 7)]
    assert place([whole, whole, half], nodes) is None
    assert place([Submesh(2, 4)], nodes) == [(0, 1, 2, 3, 4, 5, 6, 7)]


@pytest.mark.parametrize("problem", _EQUAL, ids=lambda p: p.name)
def test_one_stage_is_what_looking_at_everything_finds(problem: Problem) -> None:
    """Equal devices: the program of a stage has all plans of one stage on all of them."""
    instance = problem.instance
    found, best = _found(instance), _best(instance, 1)
    if best < float("inf"):
        assert found.estimate is not None
        assert found.estimate.step_time <= best * 1.001


def test_a_pipeline_is_found_where_it_is_best() -> None:
    """Heavy weights, light activations, a slow link: two stages of equal work."""
    slow = Link(1e8, 1e-6)
    graph = testing.chain([1e11] * 4, floats=1.0, params=10**7)
    instance = Instance(graph, testing.cluster([[_KIND] * 2], intra=slow), 8, "fp32")
    found = _found(instance)
    assert found.plan is not None
    assert found.estimate is not None
    assert [(s.start, s.stop) for s in found.plan.stages] == [(0, 2), (2, 4)]
    assert found.estimate.step_time == pytest.approx(_best(instance), rel=1e-6)
