"""Step time and peak memory of many measured plans at once, for a fit of constants."""

from __future__ import annotations

from collections.abc import Sequence

from rlplace.cost.analytic import AnalyticCost
from rlplace.cost.measured import Measured
from rlplace.simulate.estimate import Estimator


def predict(rows: Sequence[Measured]) -> list[tuple[float, float]]:
    """(step time, bytes of the device that holds most) of each row.

    Rows of one instance share an estimator, and all rows a cost model, so that groups and meshes
    that occur in several are costed once.
    """
    cost = AnalyticCost()
    estimators: dict[int, Estimator] = {}
    found = []
    for row in rows:
        key = id(row.instance)
        if key not in estimators:
            estimators[key] = Estimator(row.instance, cost)
        estimate = estimators[key].estimate(row.plan)
        found.append((estimate.step_time, max(estimate.peak_memory)))
    return found
