"""Vectors are legal plans; searches over them find what looking at all of them does."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest

from rlplace.plan import testing
from rlplace.plan.check import check
from rlplace.plan.types import Instance
from rlplace.planners.costing import Costing
from rlplace.planners.encoding import Encoding, VectorSearch
from rlplace.planners.registry import PLANNERS
from rlplace.planners.search import Search
from rlplace.planners.types import Budget

_FAST, _SLOW = testing.round_kind("fast"), testing.round_kind("slow", 0.5)


def _instance() -> Instance:
    return Instance(testing.transformer(3), testing.cluster([[_FAST] * 4, [_SLOW] * 2]), 12)


def test_vectors_are_legal_plans() -> None:
    instance, rng = _instance(), np.random.default_rng(0)
    encoding = Encoding(Costing(instance))
    sizes, stages = encoding.legal.sum(axis=1), set()
    for _ in range(60):
        plan = encoding.plan(rng.integers(sizes))
        assert plan is not None
        check(instance, plan)
        stages.add(len(plan.stages))
    assert stages == set(range(1, 7))


def test_the_default_is_replicas_on_all_devices() -> None:
    encoding = Encoding(Costing(_instance()))
    plan = encoding.plan(encoding.default)
    assert plan is not None
    assert [(stage.mesh.dp, stage.mesh.tp) for stage in plan.stages] == [(6, 1)]


def test_work_is_shared_by_speed_and_tilt() -> None:
    cluster = testing.cluster([[_FAST], [_SLOW]])
    encoding = Encoding(Costing(Instance(testing.chain([1e12] * 9, floats=1.0), cluster, 4)))
    vector = encoding.default
    vector[2] = 1
    borders = []
    for tilt in (3, 6):  # as fast as it is, and twice that
        vector[4] = tilt
        plan = encoding.plan(vector)
        assert plan is not None
        borders.append(plan.stages[0].stop)
    assert borders == [6, 7]


def test_nothing_is_estimated_twice() -> None:
    search = Search("test", Costing(_instance()), Budget(evaluations=10))
    looker = VectorSearch(search)
    vectors = np.stack([looker.encoding.default] * 3)
    vectors[1, 6:] = 1  # of stages that there are not
    again = looker.look(vectors)
    assert search.evaluations == 1
    assert len(set(again)) == 1


@cache
def _few_vectors() -> tuple[Instance, float]:
    """An instance of few decisions, and the least step time of all vectors."""
    graph = testing.chain([3e11, 1e11, 1e11], floats=1e5, params=10**6)
    cluster = testing.cluster([[_FAST, _SLOW]])
    instance = Instance(graph, cluster, 2, "fp32", zero_levels=(0,), recompute_modes=("none",))
    looker = VectorSearch(Search("all", Costing(instance), Budget()))
    sizes = looker.encoding.legal.sum(axis=1)
    # What counts is the ratio of two stages: the first one stays as it is.
    sizes[3], sizes[4] = 1, 1
    every = np.array(list(product(*(range(size) for size in sizes))))
    return instance, float(looker.look(every).min())


@pytest.mark.parametrize("planner", ["cross_entropy", "genetic", "tree_search"])
def test_a_search_finds_the_best_vector(planner: str) -> None:
    instance, best = _few_vectors()
    found = PLANNERS[planner](instance, Budget(evaluations=300), np.random.default_rng(0))
    assert found.estimate is not None
    assert found.estimate.step_time <= best * (1.0 + 1e-9)


def test_hill_climbing_is_never_worse_than_where_it_begins() -> None:
    instance = _instance()
    rng = np.random.default_rng(0)
    first = PLANNERS["grid"](instance, Budget(evaluations=40), rng)
    found = PLANNERS["hill_climb"](instance, Budget(evaluations=400), rng)
    assert first.estimate is not None
    assert found.estimate is not None
    assert found.estimate.step_time < first.estimate.step_time
