"""What searches share: the best so far, the budget, the choice among results."""

from __future__ import annotations

import numpy as np
import pytest

from rlplace.plan.testing import chain, cluster, round_kind
from rlplace.plan.types import Instance
from rlplace.plan.uniform import uniform_plan
from rlplace.planners.costing import Costing
from rlplace.planners.portfolio import polished
from rlplace.planners.search import Search, objective, overflow
from rlplace.planners.types import Budget, PlannerResult, best_of

#: The whole model's states take 64 MB: too much for the small device, not for the large one.
_GRAPH = chain([1e9] * 4, floats=1e3, params=10**6)
_DEVICES = cluster([[round_kind("large", memory=200e6), round_kind("small", memory=20e6)]])
_INSTANCE = Instance(_GRAPH, _DEVICES, 8)
_FITS = uniform_plan(_INSTANCE, devices=(0,))
_SMALL = uniform_plan(_INSTANCE, devices=(1,))
_BOTH = uniform_plan(_INSTANCE, pp=2, cuts=(1,))


def _search(budget: Budget | None = None) -> Search:
    return Search("test", Costing(_INSTANCE), budget or Budget())


def test_the_best_plan_that_fits_is_kept() -> None:
    search = _search()
    search.offer(_SMALL)
    found = search.offer(_FITS)
    search.offer(_BOTH)
    result = search.result()
    assert (result.plan, result.estimate) == (_FITS, found)
    assert (result.overfull, result.overflow) == (None, 0.0)
    assert result.stopped == "done"
    assert len(result.curve) == 1


def test_the_least_overfull_plan_is_kept_where_none_fits() -> None:
    search = _search()
    worse, better = search.offer(_SMALL), search.offer(_BOTH)
    assert overflow(_INSTANCE, worse) > overflow(_INSTANCE, better) > 0.0
    result = search.result()
    assert result.plan is None
    assert result.overfull == _BOTH
    assert result.overflow == overflow(_INSTANCE, better)
    assert objective(_INSTANCE, better) > np.log(better.step_time)


def test_nothing_was_offered() -> None:
    result = _search().result()
    assert (result.plan, result.estimate, result.overfull) == (None, None, None)


def test_the_budget_runs_out() -> None:
    search = _search(Budget(evaluations=2))
    assert search.stopped is None
    assert search.progress == 0.0
    search.offer(_FITS)
    assert search.progress == 0.5
    search.offer(_FITS)
    assert search.stopped == "evaluations"
    assert search.progress == 1.0
    assert _search(Budget(seconds=0.0)).stopped == "seconds"


def test_what_is_left_of_a_budget() -> None:
    spent = PlannerResult(None, None, "x", evaluations=7, seconds=2.0)
    assert Budget(3.0, 10).after(spent) == Budget(1.0, 3)
    assert Budget(1.0, 5).after(spent) == Budget(0.0, 0)
    assert Budget().after(spent).seconds == float("inf")


def test_an_estimator_that_is_shared_counts_for_each_search() -> None:
    costing = Costing(_INSTANCE)
    costing.estimator.estimate(_FITS)
    search = Search("test", costing, Budget(evaluations=1))
    assert search.evaluations == 0
    search.offer(_FITS)
    assert search.evaluations == 1


def test_the_best_result() -> None:
    """One that fits, the quickest; else the least overfull, however many bytes it has."""
    results = []
    for plans in ([_SMALL], [_BOTH], [], [_FITS]):
        search = _search()
        for plan in plans:
            search.offer(plan)
        results.append(search.result())
    small, both, none, fits = results
    assert best_of([none, small, both, fits]) is fits
    assert both.estimate is not None
    assert small.estimate is not None
    assert best_of([none, small, both]) is both
    assert best_of([none, small]) is small


@pytest.mark.parametrize("steps", [0, 1, 50])
def test_polish_is_never_worse(steps: int) -> None:
    search = _search()
    before = search.offer(_FITS)
    after = polished(
        _INSTANCE, search.result(), Budget(evaluations=steps), np.random.default_rng(0)
    )
    assert after.estimate is not None
    assert after.estimate.step_time <= before.step_time
    assert after.evaluations <= 1 + steps
    assert after.planner == ("test+anneal" if steps else "test")


def test_there_is_nothing_to_polish() -> None:
    empty = _search().result()
    assert polished(_INSTANCE, empty, Budget(evaluations=9), np.random.default_rng(0)) is empty
