"""Several planners on one instance, the best answer polished: the bar that a policy must pass.

Decision space: what `grid`, `overlap` and `anneal` decide.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlplace.plan.types import Instance
from rlplace.planners.anneal import anneal
from rlplace.planners.costing import Costing
from rlplace.planners.grid import grid
from rlplace.planners.overlap import overlap
from rlplace.planners.types import Budget, PlannerResult, joined

#: Share of the seconds that the grid may take.
_GRID_SHARE = 0.2


def polished(
    instance: Instance,
    result: PlannerResult,
    budget: Budget,
    rng: np.random.Generator,
    costing: Costing | None = None,
) -> PlannerResult:
    """A result after annealing; its seconds and evaluations include the first search's.

    Args:
        instance: The question.
        result: Where annealing starts.
        budget: What annealing may spend.
        rng: The source of all randomness.
        costing: Of the instance, where it is shared.
    """
    start = result.plan or result.overfull
    if start is None or budget.evaluations < 1:
        return result
    better = anneal(instance, budget, rng, start, costing)
    return replace(joined([result, better]), planner=f"{result.planner}+anneal")


def portfolio(
    instance: Instance,
    budget: Budget,
    rng: np.random.Generator,
    costing: Costing | None = None,
    steps: int = 1000,
) -> PlannerResult:
    """The overlap-aware program or grid, whichever is better, and `steps` annealing evaluations.

    The grid goes first: it is quick, so a short budget has an answer; it may take some of the
    seconds only, for on many devices it is long.
    """
    costing = costing or Costing(instance)
    results = [grid(instance, budget.part(budget.evaluations, _GRID_SHARE), rng, costing)]
    left = budget.after(results[0])
    if left.evaluations:
        results.append(overlap(instance, left, rng, costing))
        left = left.after(results[-1])
    steps = min(steps, left.evaluations)
    return polished(instance, joined(results), replace(left, evaluations=steps), rng, costing)
