"""Schedules as plain data: pure functions from (lanes of stages, micro-batches) to action lists.

A *lane* is the set of devices of one mesh, which run the same actions in lockstep; stages that
share a mesh share a lane. A schedule gives every lane its ordered actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from rlplace.errors import InputError, nearest_names
from rlplace.plan.orders import Peak, levels, peaks, refuse_orders
from rlplace.plan.types import SCHEDULE_NAMES, Action, ActionKind, Mesh, Plan

Orders = tuple[tuple[Action, ...], ...]

#: The name with which a plan carries action lists of its own.
EXPLICIT = "explicit"


def gpipe(owner: Sequence[int], micro_batches: int) -> Orders:
    """All forwards, then all backwards in the same order of micro-batches (arXiv 1811.06965)."""
    every = range(micro_batches)
    per_stage = [
        [Action(stage, kind, index) for kind in _WHOLE for index in every]
        for stage in range(len(owner))
    ]
    return _merged(per_stage, owner)


def one_f_one_b(owner: Sequence[int], micro_batches: int) -> Orders:
    """1F1B (PipeDream-flush, arXiv 2006.09503): stage s holds ``min(m, stages - s)`` at most."""
    stages = len(owner)
    per_stage = [
        _steady(stage, min(stages - stage, micro_batches) - 1, micro_batches)
        for stage in range(stages)
    ]
    return _merged(per_stage, owner)


def zb_h1(owner: Sequence[int], micro_batches: int) -> Orders:
    """ZB-H1 (arXiv 2401.10241): stage s puts the parameter gradients of a micro-batch off by s.

    So they fill what would be a bubble, and no stage holds more than ``min(m, stages)``.
    """
    stages = len(owner)
    per_stage = []
    for stage in range(stages):
        order = []
        for action in _steady(stage, min(stages - 1 - stage, micro_batches), micro_batches):
            order.append(action)
            if action.kind == "B" and action.micro_batch >= stage:
                order.append(Action(stage, "W", action.micro_batch - stage))
        late = range(max(0, micro_batches - stage), micro_batches)
        per_stage.append([*order, *(Action(stage, "W", index) for index in late)])
    return _merged(per_stage, owner)


def interleaved(owner: Sequence[int], micro_batches: int) -> Orders:
    """Interleaved 1F1B (arXiv 2104.04473): each lane has several stages, dealt out in turn.

    Micro-batches go in runs of as many as there are lanes through a lane's stages one after the
    other. With one stage a lane this is 1F1B.
    """
    pp = 1 + max(owner)
    rounds = len(owner) // pp
    if rounds == 1:
        return one_f_one_b(owner, micro_batches)
    total = micro_batches * rounds
    orders = []
    for lane in range(pp):
        run = [
            (turn, first + index)
            for first in range(0, micro_batches, pp)
            for turn in range(rounds)
            for index in range(pp)
        ]
        forward = [Action(lane + pp * turn, "F", index) for turn, index in run]
        backward = [Action(lane + pp * (rounds - 1 - turn), "B", index) for turn, index in run]
        warm_up = min((rounds - 1) * pp + 2 * (pp - 1 - lane), total)
        orders.append(_alternate(forward, backward, warm_up))
    return tuple(orders)


def zb_v(owner: Sequence[int], micro_batches: int) -> Orders:
    """ZB-V (arXiv 2401.10241, section 6): two stages a lane in a V, without a bubble in between.

    Made for forward, input gradients and parameter gradients that take equally long; no lane
    holds more than ``2 * lanes``, as 1F1B's first one does of stages twice as large.
    """
    pp = len(owner) // 2
    return tuple(_v_lane(lane, pp, micro_batches) for lane in range(pp))


_WHOLE: tuple[ActionKind, ...] = ("F", "B")

SCHEDULES: dict[str, Callable[[Sequence[int], int], Orders]] = dict(
    zip(SCHEDULE_NAMES, (gpipe, one_f_one_b, interleaved, zb_h1, zb_v), strict=True)
)


def _alternate(
    forward: Sequence[Action], backward: Sequence[Action], warm_up: int
) -> tuple[Action, ...]:
    """Some forwards, then a forward and a backward in turn, then what is left of the backwards."""
    order = list(forward[:warm_up])
    for index, action in enumerate(backward):
        order += forward[warm_up + index : warm_up + index + 1]
        order.append(action)
    return tuple(order)


def _steady(stage: int, warm_up: int, micro_batches: int) -> tuple[Action, ...]:
    forward, backward = (
        [Action(stage, kind, index) for index in range(micro_batches)] for kind in _WHOLE
    )
    return _alternate(forward, backward, warm_up)


def _v_lane(lane: int, pp: int, micro_batches: int) -> tuple[Action, ...]:
    """One lane of ZB-V; made for at least ``2 * pp - 1`` micro-batches, then cut to size."""
    count = max(2 * pp - 1, micro_batches)
    stages = (lane, 2 * pp - 1 - lane)
    following = {(part, kind): 0 for part in (0, 1) for kind in "FBW"}
    order: list[Action] = []

    def run(words: str) -> None:
        for word in words.split():
            part, kind = int(word[0]), word[1]
            index = following[part, kind]
            following[part, kind] += 1
            if index < micro_batches:
                order.append(Action(stages[part], _KIND[kind], index))

    run("0F " * (2 * (pp - lane) - 1))
    run("1F 0F " * lane)
    run("1F 1B 1W " * (pp - lane))
    while following[1, "F"] < count:
        run("0F 0B 0W 1F 1B 1W" if following[0, "F"] < count else "0B 0W 1F 1B 1W")
    run("0B 1B " * lane)
    run("0B 0W " * (pp - lane))
    for part in (1, 0):
        run(f"{part}W " * (count - following[part, "W"]))
    return tuple(order)


_KIND: dict[str, ActionKind] = {"F": "F", "B": "B", "W": "W"}


def _merged(per_stage: Sequence[Sequence[Action]], owner: Sequence[int]) -> Orders:
    """Lists of stages as lists of lanes.

    Those of one lane are merged in the order in which a chain of dependent actions could run
    them: by the earliest time of each action if every action took one unit.
    """
    pp = 1 + max(owner)
    if pp == len(owner):
        return tuple(tuple(own) for own in per_stage)
    rank = {
        action: level
        for own, found in zip(per_stage, levels(per_stage), strict=True)
        for action, level in zip(own, found, strict=True)
    }
    merged = []
    for lane in range(pp):
        own = [a for stage, at in enumerate(owner) if at == lane for a in per_stage[stage]]
        merged.append(tuple(sorted(own, key=lambda action: (rank[action], action.kind))))
    return tuple(merged)


def refuse_name(name: str, field: str = "schedule") -> None:
    """Refuse a name of no schedule.

    Raises:
        InputError: With the nearest name.
    """
    known = (*SCHEDULES, EXPLICIT)
    if name not in known:
        rule = f"must be one of {', '.join(known)}"
        raise InputError(field, name, rule, nearest_names(name, known) or "1f1b")


def refuse_lanes(name: str, owner: Sequence[int]) -> None:
    """Refuse stages that are not on the lanes that a schedule deals out.

    Raises:
        InputError: With the lane of each stage as the schedule has it.
    """
    pp, stages = 1 + max(owner), len(owner)
    rounds = -(-stages // pp)
    rules: dict[str, tuple[str, tuple[int, ...]]] = {
        "interleaved": (
            "deals its stages out to the lanes in turn, as many to each",
            tuple(range(pp)) * rounds,
        ),
        "zb-h1": ("has one stage a lane", tuple(range(stages))),
        "zb-v": (
            "has two stages a lane, in a V",
            (*range((stages + 1) // 2), *range((stages + 1) // 2)[::-1]),
        ),
    }
    if name in rules and tuple(owner) != rules[name][1]:
        rule, wanted = rules[name]
        raise InputError("plan.stages.mesh", tuple(owner), f"{name} {rule}", wanted)


def refuse_micro_batches(
    name: str, owner: Sequence[int], micro_batches: int, legal: Sequence[int]
) -> None:
    """Refuse micro-batches that cannot be cut into runs of one for each lane.

    Interleaved 1F1B alone asks for it (arXiv 2104.04473, section 2.2).

    Args:
        name: A name of `SCHEDULES`.
        owner: The lane of each stage.
        micro_batches: Micro-batches of a step.
        legal: Counts that may be offered in its place.

    Raises:
        InputError: With the nearest multiple among `legal`.
    """
    pp = 1 + max(owner)
    if name != "interleaved" or len(owner) == pp or micro_batches % pp == 0:
        return
    fitting = [count for count in legal if count % pp == 0]
    near = min(fitting, key=lambda count: (abs(count - micro_batches), count), default=None)
    rule = f"{name} on {pp} lanes takes a multiple of {pp} micro-batches"
    raise InputError("plan.micro_batches", micro_batches, rule, near)


@lru_cache(maxsize=128)
def lane_orders(name: str, owner: tuple[int, ...], micro_batches: int) -> Orders:
    """The ordered actions of every lane.

    Args:
        name: A name of `SCHEDULES`.
        owner: The lane of each stage, numbered by their first stages.
        micro_batches: Micro-batches of a step.

    Raises:
        InputError: If there is no such schedule, if the stages are not on lanes as it has them, or
            if it has no lists for so many micro-batches.
    """
    refuse_name(name)
    if name == EXPLICIT:
        raise InputError("schedule", name, "has its lists in a plan; see `actions`")
    refuse_lanes(name, owner)
    step = 1 + max(owner)
    below = micro_batches // step * step
    refuse_micro_batches(name, owner, micro_batches, (below or step, below + step))
    return SCHEDULES[name](owner, micro_batches)


@lru_cache(maxsize=65536)
def in_flight(name: str, owner: tuple[int, ...], micro_batches: int) -> tuple[int, ...]:
    """Micro-batches whose activations each stage holds at its own peak (see `held`).

    Args:
        name: A name of `SCHEDULES`.
        owner: The lane of each stage.
        micro_batches: Micro-batches of a step.
    """
    lists = lane_orders(name, owner, micro_batches)
    return held([peaks(lane) for lane in lists], len(owner))


def held(moments: Iterable[Sequence[Peak]], stages: int) -> tuple[int, ...]:
    """Micro-batches whose activations each stage holds at its own peak.

    1F1B holds ``min(m, stages - stage)`` (arXiv 2006.09503), GPipe all of them, ZB-H1 at most
    ``min(m, stages)`` (arXiv 2401.10241).

    Args:
        moments: The `peaks` of each lane.
        stages: Number of stages.
    """
    most = [0] * stages
    for lane in moments:
        for peak in lane:
            for stage, count in peak.held:
                most[stage] = max(most[stage], count)
    return tuple(most)


def lanes(plan: Plan) -> tuple[Mesh, ...]:
    """The distinct meshes of a plan, in the order of their first stage."""
    return tuple(dict.fromkeys(stage.mesh for stage in plan.stages))


def owners(meshes: Iterable[Mesh]) -> tuple[int, ...]:
    """The lane of each stage, from the mesh of each stage."""
    number: dict[Mesh, int] = {}
    return tuple(number.setdefault(mesh, len(number)) for mesh in meshes)


def actions(plan: Plan) -> Orders:
    """The ordered actions of every lane of a plan, in the order of `lanes`.

    Raises:
        InputError: If the schedule is unknown, or its stages are not on the lanes that it has.
    """
    if plan.schedule == EXPLICIT:
        return plan.orders
    return lane_orders(
        plan.schedule, owners(stage.mesh for stage in plan.stages), plan.micro_batches
    )


def refuse_schedule(plan: Plan, legal: Sequence[int]) -> None:
    """Refuse a plan whose stages or micro-batches do not go with its schedule.

    Args:
        plan: The plan, with at least one stage.
        legal: The micro-batch counts that its batch and its meshes allow.

    Raises:
        InputError: With the field, the value, the rule and the nearest legal value.
    """
    refuse_name(plan.schedule, "plan.schedule")
    owner = owners(stage.mesh for stage in plan.stages)
    if bool(plan.orders) != (plan.schedule == EXPLICIT):
        rule = f"action lists go with the schedule {EXPLICIT}, and with no other"
        raise InputError("plan.schedule", plan.schedule, rule, EXPLICIT if plan.orders else "1f1b")
    if plan.schedule == EXPLICIT:
        refuse_orders(plan.orders, owner, plan.micro_batches)
        return
    refuse_lanes(plan.schedule, owner)
    refuse_micro_batches(plan.schedule, owner, plan.micro_batches, legal)
