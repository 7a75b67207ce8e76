from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest

from rlplace.errors import InputError
from rlplace.plan.types import Instance, Plan
from rlplace.planners.costing import Costing
from rlplace.planners.types import Budget, Planner, PlannerResult
from rlplace.policies.evaluate import Comparison, compare
from rlplace.simulate.types import Estimate


def fixed(times: list[float], seconds: float) -> Planner:
    """A planner whose instances are numbers: what it finds for each of them."""

    def plan(
        instance: Any,
        budget: Budget,
        rng: np.random.Generator,
        costing: Costing | None = None,
    ) -> PlannerResult:
        time = times[instance]
        estimate = Estimate(time, (), math.isfinite(time), (), (), (), 0.0, 0.0)
        found = Plan((), 1, 1) if math.isfinite(time) else None
        return PlannerResult(found, estimate, "fixed", 1, seconds)

    return plan


def suite(count: int) -> list[Instance]:
    return cast(list[Instance], list(range(count)))


@pytest.fixture
def comparison() -> Comparison:
    planners = {
        "good": fixed([1.0, 2.0, 3.0], 0.5),
        "poor": fixed([math.e, 2.0, math.inf], 0.1),
    }
    return compare(planners, suite(3), Budget(), seed=0)


def test_gaps_are_logs_over_the_best_known(comparison: Comparison) -> None:
    expected = np.array([[0.0, 0.0, 0.0], [1.0, 0.0, math.inf]])
    np.testing.assert_allclose(comparison.gaps, expected)
    poor = comparison.summary("poor")
    assert (poor.mean, poor.median, poor.worst, poor.failed) == (0.5, 0.5, 1.0, 1)
    assert poor.seconds_mean == pytest.approx(0.1)


def test_part_of_a_suite(comparison: Comparison) -> None:
    assert comparison.summary("poor", [1]).mean == 0.0
    assert comparison.summary("poor", [2]).mean == math.inf


def test_better_plans_from_elsewhere_count() -> None:
    result = compare({"a": fixed([2.0], 0.0)}, suite(1), Budget(), 0, best_known=[1.0])
    assert result.gaps[0, 0] == pytest.approx(math.log(2.0))


def test_nothing_fits_anywhere() -> None:
    result = compare({"a": fixed([math.inf], 0.0)}, suite(1), Budget(), 0)
    assert result.summary("a").failed == 1


def test_empty_comparison_is_refused() -> None:
    with pytest.raises(InputError, match="at least one of each"):
        compare({}, suite(1), Budget(), 0)
