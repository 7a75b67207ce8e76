"""Schedules as plain data: pure functions from (stages, micro-batches) to lists of actions.

A *lane* is the set of devices of one mesh, which run the same actions in lockstep; stages that
share a mesh share a lane. A schedule gives every lane its ordered actions.
"""

from __future__ import annotations

from collections.abc import Callable

from rlplace.errors import InputError, nearest_names
from rlplace.plan.types import Action, Mesh, Plan

Schedule = Callable[[int, int, int], tuple[Action, ...]]


def gpipe(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    """All forwards, then all backwards in the same order of micro-batches (arXiv 1811.06965)."""
    forward = tuple(Action(stage, "F", index) for index in range(micro_batches))
    return forward + tuple(Action(stage, "B", index) for index in range(micro_batches))


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    """1F1B (PipeDream-flush, arXiv 2006.09503): at most `in_flight` micro-batches are held."""
    warm_up = in_flight("1f1b", stage, stages, micro_batches) - 1
    order = [Action(stage, "F", index) for index in range(warm_up)]
    for index in range(micro_batches - warm_up):
        order.append(Action(stage, "F", warm_up + index))
        order.append(Action(stage, "B", index))
    order += [Action(stage, "B", index) for index in range(micro_batches - warm_up, micro_batches)]
    return tuple(order)


SCHEDULES: dict[str, Schedule] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def schedule(name: str) -> Schedule:
    """A schedule by name.

    Raises:
        InputError: If there is no such schedule.
    """
    if name not in SCHEDULES:
        rule = f"must be one of {', '.join(SCHEDULES)}"
        raise InputError("schedule", name, rule, nearest_names(name, SCHEDULES))
    return SCHEDULES[name]


def in_flight(name: str, stage: int, stages: int, micro_batches: int) -> int:
    """Micro-batches whose activations a stage holds at its peak.

    1F1B holds ``min(micro_batches, stages - stage)``, GPipe all of them.
    """
    return micro_batches if name == "gpipe" else min(micro_batches, stages - stage)


def lanes(plan: Plan) -> tuple[Mesh, ...]:
    """The distinct meshes of a plan, in the order of their first stage."""
    return tuple(dict.fromkeys(stage.mesh for stage in plan.stages))


def actions(plan: Plan) -> tuple[tuple[Action, ...], ...]:
    """The ordered actions of every lane of a plan, in the order of `lanes`.

    Where stages share a mesh their lists are merged in the order in which a chain of dependent
    actions could run them: by the earliest time of each action if every action took one unit.
    """
    order = schedule(plan.schedule)
    count = len(plan.stages)
    per_stage = [order(index, count, plan.micro_batches) for index in range(count)]
    meshes = lanes(plan)
    if len(meshes) == count:
        return tuple(per_stage)
    levels = _levels(per_stage)
    merged: list[tuple[Action, ...]] = []
    for mesh in meshes:
        own = [a for i, s in enumerate(plan.stages) if s.mesh == mesh for a in per_stage[i]]
        merged.append(tuple(sorted(own, key=lambda action: (levels[action], action.kind))))
    return tuple(merged)


def _levels(per_stage: list[tuple[Action, ...]]) -> dict[Action, int]:
    """Longest chain of actions before each action, stages running side by side."""
    level: dict[Action, int] = {}
    heads = [0] * len(per_stage)
    while any(head < len(own) for head, own in zip(heads, per_stage, strict=True)):
        for index, own in enumerate(per_stage):
            while heads[index] < len(own):
                action = own[heads[index]]
                needs = dependencies(action, len(per_stage))
                if any(need not in level for need in needs):
                    break
                before = [own[heads[index] - 1]] if heads[index] else []
                level[action] = 1 + max((level[n] for n in (*needs, *before)), default=0)
                heads[index] += 1
    return level


def dependencies(action: Action, stages: int) -> tuple[Action, ...]:
    """Actions of other stages, or of the same one, whose results an action reads."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == "F":
        return (Action(stage - 1, "F", micro_batch),) if stage else ()
    own = Action(stage, "F", micro_batch)
    return (own, Action(stage + 1, "B", micro_batch)) if stage + 1 < stages else (own,)
