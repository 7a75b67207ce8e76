"""Simulated annealing from any plan (Kirkpatrick et al. 1983), on the event-simulated estimate.

Decision space: stages on any meshes of disjoint devices, the micro-batch count, and the choices of
every group.

Moves: shift the border of two stages; give a stage another mesh shape; merge two stages or split
one; exchange the devices of two stages, or move a block of devices between
neighbours; change the micro-batch count; re-solve the choices of a stage; change one group's
choice. After a structural move the choices of the touched stages are solved anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import exp

import numpy as np

from rlplace.plan.check import legal_micro_batches
from rlplace.plan.schedules import in_flight, owners
from rlplace.plan.tied import settle
from rlplace.plan.types import Instance, Mesh, Plan, Stage
from rlplace.planners.costing import Costing
from rlplace.planners.grid import grid
from rlplace.planners.meshes import mesh_shapes
from rlplace.planners.search import Search, objective
from rlplace.planners.stage_solver import StageSolver
from rlplace.planners.types import Budget, PlannerResult, joined

Move = Callable[["Neighbours", Plan], Plan | None]

_START_TEMPERATURE = 0.03
_COOLING = 1 / 60
#: Draws an evaluation at most (where no move is possible none leads to one), and evaluations.
_DRAWS = 4
_MOST = 1_000_000
#: Of `annealing`: uniform plans, and evaluations where the budget does not say.
_FIRST, _STEPS = 40, 20_000


def annealing(
    instance: Instance, budget: Budget, rng: np.random.Generator, costing: Costing | None = None
) -> PlannerResult:
    """The best of a few uniform plans, annealed for what is left of the budget."""
    costing = costing or Costing(instance)
    few = min(_FIRST, max(1, budget.evaluations // 4))
    first = grid(instance, replace(budget, evaluations=few), rng, costing)
    start = first.plan or first.overfull
    left = budget.after(first)
    if start is None or not left.evaluations:
        return replace(first, planner="anneal")
    steps = min(left.evaluations, _STEPS)
    better = anneal(instance, replace(left, evaluations=steps), rng, start, costing)
    return replace(joined([first, better]), planner="anneal")


def anneal(
    instance: Instance,
    budget: Budget,
    rng: np.random.Generator,
    start: Plan,
    costing: Costing | None = None,
) -> PlannerResult:
    """Improve `start` for as many evaluations (or seconds) as the budget has.

    The result is never worse than `start`.
    """
    search = Search("anneal", costing or Costing(instance), budget)
    neighbours = Neighbours(instance, search.costing.solver, rng)
    current, value = start, objective(instance, search.offer(start))
    for _ in range(_DRAWS * min(budget.evaluations, _MOST)):
        if search.stopped:
            break
        plan = neighbours.draw(current)
        if plan is None or plan == current:
            continue
        temperature = _START_TEMPERATURE * _COOLING**search.progress
        other = objective(instance, search.offer(plan))
        if other <= value or rng.random() < exp((value - other) / temperature):
            current, value = plan, other
    return search.result()


class Neighbours:
    """Draws legal neighbours of a plan.

    Args:
        instance: The question.
        solver: Solves the choices of stages that a move has changed.
        rng: The source of all randomness.
    """

    def __init__(self, instance: Instance, solver: StageSolver, rng: np.random.Generator) -> None:
        self._instance, self._solver, self._rng = instance, solver, rng
        self._moves: tuple[Move, ...] = (
            Neighbours._shift,
            Neighbours._shift,
            Neighbours._reshape,
            Neighbours._merge,
            Neighbours._split,
            Neighbours._exchange,
            Neighbours._hand_over,
            Neighbours._micro_batches,
            Neighbours._choice,
            Neighbours._choice,
        )

    def draw(self, plan: Plan) -> Plan | None:
        """A random neighbour, or None where the move that was drawn is not possible."""
        return self._moves[int(self._rng.integers(len(self._moves)))](self, plan)

    def _pick(self, count: int) -> int:
        return int(self._rng.integers(count))

    def _rebuild(
        self, plan: Plan, parts: list[tuple[int, int, Mesh]], count: int | None = None
    ) -> Plan | None:
        """A plan of (start, stop, mesh) parts; stages that did not change keep their choices."""
        count = count or plan.micro_batches
        if any((self._instance.global_batch // count) % mesh.dp for _, _, mesh in parts):
            return None
        if not _disjoint(parts) or not all(self._solver.usable(mesh) for _, _, mesh in parts):
            return None
        same = count == plan.micro_batches and len(parts) == len(plan.stages)
        known = {(s.start, s.stop, s.mesh): s for s in plan.stages} if same else {}
        held = in_flight(plan.schedule, owners(mesh for _, _, mesh in parts), count)
        stages = []
        for index, (start, stop, mesh) in enumerate(parts):
            if (start, stop, mesh) in known:
                stages.append(known[start, stop, mesh])
                continue
            choices = self._solver.choices(start, stop, mesh, count, held[index])
            stages.append(settle(self._instance.graph, Stage(start, stop, mesh, choices)))
        return replace(plan, stages=tuple(stages), micro_batches=count)

    def _shapes(self, devices: tuple[int, ...], plan: Plan) -> list[Mesh]:
        return mesh_shapes(self._instance, devices, plan.micro_batch)

    def _any_shape(self, devices: tuple[int, ...], plan: Plan, like: Mesh) -> Mesh | None:
        """A shape for the devices: the tp degree of `like` if it is legal, else a random one."""
        shapes = self._shapes(devices, plan)
        alike = [mesh for mesh in shapes if mesh.tp == like.tp]
        chosen = alike or shapes
        return chosen[self._pick(len(chosen))] if chosen else None

    def _shift(self, plan: Plan) -> Plan | None:
        if len(plan.stages) < 2:
            return None
        parts = _parts(plan)
        border = self._pick(len(parts) - 1)
        (a, b, left), (_, d, right) = parts[border], parts[border + 1]
        step = (1 + self._pick(3)) * (1 if self._rng.random() < 0.5 else -1)
        middle = b + step
        if not a < middle < d:
            return None
        parts[border], parts[border + 1] = (a, middle, left), (middle, d, right)
        return self._rebuild(plan, parts)

    def _reshape(self, plan: Plan) -> Plan | None:
        parts = _parts(plan)
        index = self._pick(len(parts))
        start, stop, mesh = parts[index]
        shapes = self._shapes(mesh.devices, plan)
        if not shapes:
            return None
        parts[index] = (start, stop, shapes[self._pick(len(shapes))])
        return self._rebuild(plan, parts)

    def _merge(self, plan: Plan) -> Plan | None:
        if len(plan.stages) < 2:
            return None
        parts = _parts(plan)
        index = self._pick(len(parts) - 1)
        (start, _, left), (_, stop, right) = parts[index], parts[index + 1]
        mesh = self._any_shape(tuple(sorted((*left.devices, *right.devices))), plan, left)
        if mesh is None:
            return None
        return self._rebuild(plan, [*parts[:index], (start, stop, mesh), *parts[index + 2 :]])

    def _split(self, plan: Plan) -> Plan | None:
        parts = _parts(plan)
        index = self._pick(len(parts))
        start, stop, mesh = parts[index]
        if stop - start < 2 or len(mesh.devices) < 2:
            return None
        half = len(mesh.devices) // 2
        left = self._any_shape(mesh.devices[:half], plan, mesh)
        right = self._any_shape(mesh.devices[half:], plan, mesh)
        if left is None or right is None:
            return None
        middle = start + 1 + self._pick(stop - start - 1)
        new = [(start, middle, left), (middle, stop, right)]
        return self._rebuild(plan, [*parts[:index], *new, *parts[index + 1 :]])

    def _exchange(self, plan: Plan) -> Plan | None:
        if len(plan.stages) < 2:
            return None
        parts = _parts(plan)
        i, j = self._rng.choice(len(parts), size=2, replace=False)
        (a, b, first), (c, d, second) = parts[i], parts[j]
        parts[i], parts[j] = (a, b, second), (c, d, first)
        return self._rebuild(plan, parts)

    def _hand_over(self, plan: Plan) -> Plan | None:
        """Move some devices from one stage to a neighbour (or take in idle ones)."""
        parts = _parts(plan)
        idle = sorted(set(range(len(self._instance.cluster.devices))) - set(plan.devices))
        index = self._pick(len(parts))
        start, stop, mesh = parts[index]
        if idle and self._rng.random() < 0.5:
            grown = self._any_shape(tuple(sorted((*mesh.devices, *idle))), plan, mesh)
            if grown is None:
                return None
            parts[index] = (start, stop, grown)
            return self._rebuild(plan, parts)
        if len(parts) < 2 or len(mesh.devices) < 2:
            return None
        other = index + 1 if index + 1 < len(parts) else index - 1
        size = 1 << self._pick(int(np.log2(len(mesh.devices))) + 1)
        if size >= len(mesh.devices):
            return None
        given = mesh.devices[-size:] if other > index else mesh.devices[:size]
        kept = tuple(device for device in mesh.devices if device not in given)
        joined = tuple(sorted((*parts[other][2].devices, *given)))
        smaller = self._any_shape(kept, plan, mesh)
        larger = self._any_shape(joined, plan, parts[other][2])
        if smaller is None or larger is None:
            return None
        parts[index] = (start, stop, smaller)
        parts[other] = (parts[other][0], parts[other][1], larger)
        return self._rebuild(plan, parts)

    def _micro_batches(self, plan: Plan) -> Plan | None:
        legal = legal_micro_batches(plan.global_batch, 1)
        at = legal.index(plan.micro_batches) + (1 if self._rng.random() < 0.5 else -1)
        if not 0 <= at < len(legal):
            return None
        return self._rebuild(plan, _parts(plan), legal[at])

    def _choice(self, plan: Plan) -> Plan | None:
        """Another choice for a random run of groups of one stage that have equal structure."""
        index = self._pick(len(plan.stages))
        stage = plan.stages[index]
        groups = self._instance.graph.groups
        first = stage.start + self._pick(stage.stop - stage.start)
        last = first + 1 + self._pick(stage.stop - first)
        structure = groups[first].structure
        options = self._solver.options(structure, stage.mesh)
        if not options:
            return None
        chosen = options[self._pick(len(options))]
        choices = list(stage.choices)
        for group in range(first, last):
            if groups[group].structure == structure:
                choices[group - stage.start] = chosen
        stages = list(plan.stages)
        stages[index] = settle(self._instance.graph, replace(stage, choices=tuple(choices)))
        return replace(plan, stages=tuple(stages))


def _disjoint(parts: list[tuple[int, int, Mesh]]) -> bool:
    """Whether different meshes have no device in common, and neighbours different meshes."""
    meshes = {mesh for _, _, mesh in parts}
    devices = [device for mesh in meshes for device in mesh.devices]
    apart = all(before[2] != after[2] for before, after in pairwise(parts))
    return apart and len(set(devices)) == len(devices)


def _parts(plan: Plan) -> list[tuple[int, int, Mesh]]:
    return [(stage.start, stage.stop, stage.mesh) for stage in plan.stages]
