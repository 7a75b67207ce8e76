"""Whole episodes of a builder: by its own heuristic, and after a plan that a search found."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np

from rlplace.envs.builders.stagewise import StagewiseBuilder, StagewiseState
from rlplace.envs.types import Builder, Candidates
from rlplace.plan.types import Instance, Plan, Stage
from rlplace.planners.search import objective
from rlplace.simulate.estimate import Estimator


def best_index(candidates: Candidates) -> int:
    """The legal candidate with the best heuristic score; the first of equal ones."""
    return int(np.argmax(np.where(candidates.mask, candidates.features[:, 0], -np.inf)))


def greedy_state(builder: Builder, instance: Instance) -> Any:
    """The complete state that the heuristic alone leads to."""
    state = builder.start(instance)
    while not builder.done(state):
        state = builder.apply(state, best_index(builder.candidates(state)))
    return state


@dataclass(frozen=True)
class Imitation:
    """A plan as a sequence of a builder's candidates.

    Args:
        path: Index of the candidate at each step.
        plan: The plan that the path leads to.
        lost: Natural logarithm of its step time over that of the plan that was imitated, a price
            on overflow included; negative where the projection is better.
    """

    path: tuple[int, ...]
    plan: Plan
    lost: float


def imitate_plan(builder: StagewiseBuilder, instance: Instance, plan: Plan) -> Imitation | None:
    """Express a plan by the nearest legal candidates of the stage-wise builder.

    The micro-batch count has to be listed; of the orders of islands the one is taken that puts
    most of the plan's devices in their place. Stages are matched from the last to the first by
    their mesh and their first group.

    Returns:
        None where the micro-batch count is not listed, or stages share a mesh.
    """
    meshes = {stage.mesh for stage in plan.stages}
    state = builder.start(instance)
    counts = state.desk.counts
    if len(meshes) < len(plan.stages) or plan.micro_batches not in counts:
        return None
    path = [_first(builder, state, plan)]
    state = builder.apply(state, path[0])
    rest = list(plan.stages)
    while not builder.done(state):
        path.append(_nearest(builder, state, rest))
        state = builder.apply(state, path[-1])
        if rest:
            rest.pop()
    projected = builder.plan(state)
    estimator = Estimator(instance)
    both = [objective(instance, estimator.estimate(p)) for p in (projected, plan)]
    return Imitation(tuple(path), projected, both[0] - both[1])


def _first(builder: StagewiseBuilder, state: StagewiseState, plan: Plan) -> int:
    wanted = [device for stage in plan.stages for device in stage.mesh.devices]
    rows = builder.first_decisions(state)
    legal = builder.candidates(state).mask

    def distance(index: int) -> tuple[bool, float, float]:
        count, line = rows[index]
        order = state.desk.lines[line].devices[-len(wanted) :]
        kinds = instance_kinds(state.instance)
        misplaced = sum(kinds[a] != kinds[b] for a, b in zip(order, wanted, strict=True))
        return not legal[index], abs(log(count / plan.micro_batches)), misplaced

    return min(range(len(rows)), key=distance)


def instance_kinds(instance: Instance) -> tuple[int, ...]:
    """The island of each device."""
    owner = {d: index for index, island in enumerate(instance.cluster.islands) for d in island}
    return tuple(owner[device.index] for device in instance.cluster.devices)


def _nearest(builder: StagewiseBuilder, state: StagewiseState, rest: list[Stage]) -> int:
    """The legal candidate closest to the last of the stages that remain, or the best one."""
    candidates = builder.candidates(state)
    if not rest:
        return best_index(candidates)
    stage, finishes = rest[-1], len(rest) == 1
    groups = len(state.instance.graph.groups)
    rows = builder.stage_decisions(state)

    def distance(index: int) -> tuple[bool, float, float]:
        start, mesh = rows[index]
        far = 4.0 * abs(log(len(mesh.devices) / len(stage.mesh.devices)))
        far += abs(log(mesh.tp / stage.mesh.tp)) + abs(log(mesh.dp / stage.mesh.dp))
        far += 0.1 * abs(log(mesh.dp_shard / stage.mesh.dp_shard))
        far += 8.0 * abs(start - stage.start) / groups + (2.0 if (start == 0) != finishes else 0.0)
        return not candidates.mask[index], far, -float(candidates.features[index, 0])

    return min(range(len(rows)), key=distance)
