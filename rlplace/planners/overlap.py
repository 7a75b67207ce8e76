"""Overlap-aware dynamic program over stages: the strongest search here.

Decision space: contiguous stages, each on a mesh of its own shape, that takes any of the devices
that are left (`takes`): device kinds in any order, degrees that are no powers of two, stages that
span kinds, whose replicas have shares with which they end together (`shares`); and the schedules
that the instance offers. The choices inside a stage know what hides behind its backward
(`overlap_stage`), the pipeline what hides behind that of the stages before (`overlap_pipeline`).

For each micro-batch count the program gives a few plans of each number of stages, which the
estimate compares; from the best so far it descends after each count, and at the end from the best
few with different meshes (`descent`). Complexity: for each count, classes of meshes x cuts x groups
x options for the stages, and stages x takes x cuts^2 for the pipeline; most of that is cut off by
the best plan so far. Left out: several stages on a mesh in the program itself, cp, layouts that cut
what is between groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rlplace.plan.check import legal_micro_batches
from rlplace.plan.degrees import spread
from rlplace.plan.types import Instance, Mesh, Plan
from rlplace.plan.uniform import even_cuts
from rlplace.planners.best_stages import Stages
from rlplace.planners.costing import Costing
from rlplace.planners.descent import built, descend
from rlplace.planners.grid import grid
from rlplace.planners.overlap_pipeline import pipelines
from rlplace.planners.search import Search, objective
from rlplace.planners.stage_tables import stage_tables
from rlplace.planners.takes import Takes, all_takes
from rlplace.planners.types import Budget, PlannerResult, joined

#: Where stages may begin: so many cuts at most, and where there are few takes.
_CUTS, _FINE_CUTS, _FEW_TAKES = 48, 128, 400
_DEPTH = 24
_COUNTS = 9
#: Uniform plans that are looked at first, and the share of the seconds for them.
_FIRST, _FIRST_SHARE = 24, 0.1
#: Predicted step times up to this many times that of the best plan are worth an estimate.
_MARGIN = 1.05
#: From so many of the best plans that differ in their meshes it goes down, with so many estimates.
_STARTS, _DESCENT = 4, 100


def overlap(
    instance: Instance,
    budget: Budget,
    rng: np.random.Generator,
    costing: Costing | None = None,
) -> PlannerResult:
    """The best of a few uniform plans and of the program's, descended from."""
    costing = costing or Costing(instance)
    first = grid(instance, budget.part(_FIRST, _FIRST_SHARE), rng, costing)
    left = budget.after(first)
    if not left.evaluations:
        return replace(first, planner="overlap")
    search = Search("overlap", costing, left)
    known = first.estimate.step_time if first.plan and first.estimate else float("inf")
    _search(search, Stages(costing), known)
    return replace(joined([first, search.result()]), planner="overlap")


def _search(search: Search, stages: Stages, known: float) -> None:
    """Offer plans of the program that may be better than a known step time, then descend."""
    instance = search.costing.instance
    # Of each line of meshes the best plan, and its objective.
    best: dict[tuple[Mesh, ...], tuple[float, Plan]] = {}
    descended: set[tuple[tuple[Mesh, ...], float]] = set()

    def descend_from(starts: int) -> None:
        for line, (value, plan) in sorted(best.items(), key=lambda item: item[1][0])[:starts]:
            if (line, value) not in descended:
                descended.add((line, value))
                descend(search, stages, plan, value, _DESCENT)

    for takes in all_takes(search.costing.solver):
        for count in micro_batch_counts(instance):
            most = min(known, search.best[1].step_time) if search.best else known
            for plan in _plans(search, stages, takes, count, most * _MARGIN):
                if search.stopped:
                    return
                value = objective(instance, search.offer(plan))
                line = tuple(stage.mesh for stage in plan.stages)
                if line not in best or value < best[line][0]:
                    best[line] = (value, plan)
            descend_from(1)
    descend_from(_STARTS)


def micro_batch_counts(instance: Instance) -> tuple[int, ...]:
    """Up to `_COUNTS` micro-batch counts, spread in the logarithm."""
    return spread(legal_micro_batches(instance.global_batch, 1), _COUNTS)


def _plans(search: Search, stages: Stages, takes: Takes, count: int, most: float) -> Iterator[Plan]:
    """Plans that may be below `most` seconds, the best of each number of stages."""
    instance = stages.costing.instance
    cuts = even_cuts(instance, _FINE_CUTS if len(takes.meshes) <= _FEW_TAKES else _CUTS)
    deepest = min(_DEPTH, len(instance.cluster.devices), len(cuts) - 1)
    tables = stage_tables(stages, takes, cuts, count, deepest, most, search)
    if tables is None:
        return
    for pipeline in pipelines(tables, count, most):
        parts = [
            (int(cuts[first]), int(cuts[last]), tables.meshes[take])
            for take, first, last in pipeline
        ]
        yield built(stages, parts, count)
