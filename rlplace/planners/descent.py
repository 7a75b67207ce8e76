"""Descent from a plan: borders, micro-batches and the choices of single stages, while that helps.

What a program over stages leaves out is small and near: stages may begin at any group, not only at
its cuts; a stage that is not the slowest may work longer to be over sooner, and one whose tail
hides behind others the other way round; and where memory is short, choices of single groups fill
what equal layers leave.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product

import numpy as np

from rlplace.plan.check import legal_micro_batches
from rlplace.plan.schedules import in_flight, lanes, owners
from rlplace.plan.types import Mesh, Plan
from rlplace.plan.uniform import dealt, group_loads, make_plan
from rlplace.planners.best_stages import Part, Stages
from rlplace.planners.search import Search, objective

#: By how many groups a border moves.
_STEPS = (1, -1, 2, -2)
#: How much more than its seconds in a step the work of a stage weighs against its tail.
_WEIGHTS = (1.0, 2.0, 4.0, 16.0, 0.25)
#: Stages a lane that are tried with each schedule.
_VIRTUAL = {"gpipe": (1,), "1f1b": (1,), "interleaved": (2, 3, 4), "zb-h1": (1,), "zb-v": (2,)}
#: What counts as better, in the logarithm of the step time.
_GAIN = 1e-6
#: Cells of the memory axis.
_CELLS = 64


def descend(search: Search, stages: Stages, plan: Plan, value: float, evaluations: int) -> Plan:
    """The plan that no neighbour betters, or that was reached after so many evaluations.

    Args:
        search: Is offered the plans on the way.
        stages: Solves stages.
        plan: Where it begins.
        value: Its `objective`.
        evaluations: At most.
    """
    instance = search.costing.instance
    seen, left, improved = {_decision(plan)}, evaluations, True
    while improved:
        improved = False
        for other in _neighbours(stages, plan):
            if left <= 0 or search.stopped:
                return plan
            if _decision(other) in seen:
                continue
            seen.add(_decision(other))
            left -= 1
            reached = objective(instance, search.offer(other))
            if reached < value - _GAIN:
                plan, value, improved = other, reached, True
                break
    return plan


def _decision(plan: Plan) -> Hashable:
    """What tells plans of one instance apart."""
    return plan.stages, plan.micro_batches, plan.schedule


def _neighbours(stages: Stages, plan: Plan) -> Iterator[Plan]:
    parts: list[Part] = [(stage.start, stage.stop, stage.mesh) for stage in plan.stages]
    for border, step in product(range(1, len(parts)), _STEPS):
        (a, b, left), (_, d, right) = parts[border - 1 : border + 1]
        if a < b + step < d:
            moved = [(a, b + step, left), (b + step, d, right)]
            line = [*parts[: border - 1], *moved, *parts[border + 1 :]]
            yield built(stages, line, plan.micro_batches, plan.schedule)
    yield from rescheduled(stages, plan)
    for index, weight in product(range(len(parts)), _WEIGHTS):
        other = _rechosen(stages, plan, index, weight)
        if other is not None:
            yield other
    counts = legal_micro_batches(plan.global_batch, 1)
    at = counts.index(plan.micro_batches)
    for count in counts[max(0, at - 1) : at + 2]:
        whole = all(stages.divides(mesh, plan.global_batch // count) for _, _, mesh in parts)
        if whole and _may_run(plan.schedule, len(lanes(plan)), count):
            yield built(stages, parts, count, plan.schedule)


def rescheduled(stages: Stages, plan: Plan) -> Iterator[Plan]:
    """The plan with each other schedule that the instance offers, the same meshes in its lanes.

    Where a schedule deals several stages to a lane, each lane has the same part of the work.
    """
    meshes = lanes(plan)
    if len(meshes) < 2:
        return
    for name in stages.costing.instance.schedules:
        for virtual in _VIRTUAL[name]:
            owner = dealt(name, len(meshes), virtual)
            parts = _dealt_parts(stages, plan, meshes, owner)
            other = (name, len(owner)) != (plan.schedule, len(plan.stages))
            if other and parts and _may_run(name, len(meshes), plan.micro_batches):
                yield built(stages, parts, plan.micro_batches, name)


def _may_run(schedule: str, meshes: int, micro_batches: int) -> bool:
    """Whether a schedule has lists for so many micro-batches on several stages a lane."""
    return schedule != "interleaved" or micro_batches % meshes == 0


def _dealt_parts(
    stages: Stages, plan: Plan, meshes: Sequence[Mesh], owner: Sequence[int]
) -> list[Part]:
    """Stages for the lanes in turn, with the share of the work that each has now; maybe none."""
    loads = np.concatenate([[0.0], np.cumsum(group_loads(stages.costing.instance))])
    work = {mesh: 0.0 for mesh in meshes}
    for stage in plan.stages:
        work[stage.mesh] += loads[stage.stop] - loads[stage.start]
    own = [work[meshes[lane]] / owner.count(lane) for lane in owner]
    cuts = np.searchsorted(loads, np.cumsum([0.0, *own]) - 1e-9 * loads[-1])
    cuts[-1] = len(loads) - 1
    if any(a >= b for a, b in pairwise(cuts)):
        return []
    spans = pairwise(int(cut) for cut in cuts)
    return [(a, b, meshes[lane]) for (a, b), lane in zip(spans, owner, strict=True)]


def _rechosen(stages: Stages, plan: Plan, index: int, weight: float) -> Plan | None:
    """The plan with another balance of work and tail in one stage."""
    stage = plan.stages[index]
    held = in_flight(plan.schedule, owners(s.mesh for s in plan.stages), plan.micro_batches)[index]
    program = stages.program(stage.mesh, plan.micro_batches)
    found = program.stage(stage.start, stage.stop, held, _CELLS, weight)
    if found is None:
        return None
    own = replace(stage, choices=found[1])
    made = (*plan.stages[:index], own, *plan.stages[index + 1 :])
    return make_plan(stages.costing.instance, made, plan.micro_batches, plan.schedule)


def built(
    stages: Stages, parts: Sequence[Part], micro_batches: int, schedule: str = "1f1b"
) -> Plan:
    """The plan of these parts, with the best choices of each stage by itself."""
    held = in_flight(schedule, owners(mesh for _, _, mesh in parts), micro_batches)
    made = tuple(
        stages.stage(part, micro_batches, own) for part, own in zip(parts, held, strict=True)
    )
    return make_plan(stages.costing.instance, made, micro_batches, schedule)
