"""Descent from a plan."""

from __future__ import annotations

import numpy as np

from rlplace.bench.suites import suite
from rlplace.plan.check import check
from rlplace.plan.uniform import uniform_plan
from rlplace.planners.costing import Costing
from rlplace.planners.descent import descend
from rlplace.planners.search import Search, objective
from rlplace.planners.stage_tables import Stages
from rlplace.planners.types import Budget


def test_it_goes_down_and_stays_where_nothing_is_lower() -> None:
    improved = 0
    for problem in suite("tiny", 20):
        instance = problem.instance
        if len(instance.cluster.devices) < 2:
            continue
        costing = Costing(instance)
        search, stages = Search("descent", costing, Budget()), Stages(costing)
        start = uniform_plan(instance, pp=2, devices=(0, 1), cuts=(1,))
        reached = descend(search, stages, start, 500)
        check(instance, reached)
        before, after = (
            objective(instance, costing.estimator.estimate(plan)) for plan in (start, reached)
        )
        assert after <= before
        improved += after < before
        assert descend(search, stages, reached, 500) == reached
    assert improved >= 10


def test_it_keeps_to_its_evaluations() -> None:
    instance = suite("tiny")[15].instance
    costing = Costing(instance)
    search = Search("descent", costing, Budget())
    start = uniform_plan(instance, pp=2, devices=(0, 1), cuts=(1,))
    descend(search, Stages(costing), start, 2)
    assert search.evaluations <= 3
    assert np.isfinite(search.result().seconds)
