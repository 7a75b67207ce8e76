"""Hill climbing from uniform plans: a neighbour that is not worse is taken.

Decision space: stages on any meshes of disjoint devices, the micro-batch count, and the choices of
every group. Algorithm: climb from the best of a few uniform plans by the moves of annealing
(`anneal.Neighbours`); when nothing has been better for a while, climb anew from there. Complexity:
an estimate a move, and a solved stage where one has changed. The bar of papers on placement.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlplace.plan.types import Instance, Plan
from rlplace.planners.anneal import Neighbours
from rlplace.planners.costing import Costing
from rlplace.planners.grid import grid
from rlplace.planners.search import Search, objective
from rlplace.planners.types import Budget, PlannerResult, joined

#: Uniform plans to begin with, climbs where the budget does not end them, and fruitless moves that
#: end one.
_FIRST, _CLIMBS, _PATIENCE = 40, 5, 400


def hill_climb(
    instance: Instance, budget: Budget, rng: np.random.Generator, costing: Costing | None = None
) -> PlannerResult:
    """The best of some climbs."""
    costing = costing or Costing(instance)
    few = min(_FIRST, max(1, budget.evaluations // 4))
    first = grid(instance, replace(budget, evaluations=few), rng, costing)
    start, left = first.plan or first.overfull, budget.after(first)
    if start is None or not left.evaluations:
        return replace(first, planner="hill_climb")
    search = Search("hill_climb", costing, left)
    neighbours = Neighbours(instance, costing.solver, rng)
    for _ in range(_CLIMBS):
        if search.stopped:
            break
        _climb(search, neighbours, start)
    return replace(joined([first, search.result()]), planner="hill_climb")


def _climb(search: Search, neighbours: Neighbours, start: Plan) -> None:
    """Go from neighbour to neighbour until nothing has been better for a while."""
    instance = search.costing.instance
    current, value, since = start, objective(instance, search.offer(start)), 0
    while not search.stopped and since < _PATIENCE:
        since += 1
        plan = neighbours.draw(current)
        if plan is None or plan == current:
            continue
        other = objective(instance, search.offer(plan))
        if other < value:
            since = 0
        if other <= value:
            current, value = plan, other
