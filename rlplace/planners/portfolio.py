"""Several planners on one instance, the best answer polished: the bar that a policy must pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlplace.cost.analytic import AnalyticCost
from rlplace.plan.types import Instance
from rlplace.planners.anneal import anneal
from rlplace.planners.data_parallel import data_parallel
from rlplace.planners.dynamic import dynamic
from rlplace.planners.grid import grid
from rlplace.planners.stage_solver import StageSolver
from rlplace.planners.types import Budget, Planner, PlannerResult
from rlplace.planners.zero3 import zero3
from rlplace.simulate.estimate import Estimator

PLANNERS: dict[str, Planner] = {
    "data_parallel": data_parallel,
    "zero3": zero3,
    "grid": grid,
    "dynamic": dynamic,
}


def best_of(results: list[PlannerResult]) -> PlannerResult:
    """The feasible result with the least step time; the least overfull one if none fits."""
    return min(
        results,
        key=lambda r: (
            r.plan is None,
            r.overflow if r.estimate is not None else float("inf"),
            r.estimate.step_time if r.estimate is not None else float("inf"),
        ),
    )


def polished(
    instance: Instance,
    result: PlannerResult,
    steps: int,
    rng: np.random.Generator,
    seconds: float = float("inf"),
) -> PlannerResult:
    """A result after `steps` annealing evaluations; its seconds include the first search's.

    Args:
        instance: The question.
        result: Where annealing starts.
        steps: Evaluations at most.
        rng: The source of all randomness.
        seconds: Wall seconds of the annealing at most.
    """
    start = result.plan or result.overfull
    if start is None or steps < 1:
        return result
    cost = AnalyticCost()
    better = anneal(
        instance,
        Budget(seconds, steps),
        rng,
        start,
        Estimator(instance, cost),
        StageSolver(instance, cost),
    )
    return replace(
        better,
        planner=f"{result.planner}+anneal",
        seconds=result.seconds + better.seconds,
        evaluations=result.evaluations + better.evaluations,
    )


def portfolio(
    instance: Instance, budget: Budget, rng: np.random.Generator, steps: int = 1000
) -> PlannerResult:
    """Dynamic program or grid, whichever is better, and `steps` annealing evaluations.

    The grid goes first: it is quick, so a short budget has an answer.
    """
    quick = grid(instance, budget, rng)
    left = budget.after(quick)
    results = [quick]
    if left.evaluations:
        results.append(dynamic(instance, left, rng))
        left = left.after(results[-1])
    best = best_of(results)
    spent = replace(
        best,
        seconds=sum(result.seconds for result in results),
        evaluations=sum(result.evaluations for result in results),
    )
    return polished(instance, spent, min(steps, left.evaluations), rng, left.seconds)
