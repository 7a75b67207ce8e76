"""Action lists: their text form, what an action waits for, and whether lists can be run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlplace.errors import InputError
from rlplace.plan.types import Action, ActionKind

Lanes = Sequence[Sequence[Action]]

#: ``0F0``, ``1B3``, ``2W0``; torch writes ``I`` for a backward without parameter gradients.
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_KINDS: dict[str, ActionKind] = {"F": "F", "B": "B", "I": "B", "W": "W"}


@dataclass(frozen=True, slots=True)
class Peak:
    """A moment at which a lane may hold most.

    Args:
        action: What runs then.
        held: Micro-batches whose activations are held, as pairs of stage and number.
    """

    action: Action
    held: tuple[tuple[int, int], ...]


def parse_orders(text: str) -> tuple[tuple[Action, ...], ...]:
    """Action lists from text: a line for each lane, actions apart by spaces or commas.

    Empty cells between commas, with which torch writes idle steps, are skipped.

    Raises:
        InputError: If a word is not an action.
    """
    return tuple(parse_lane(line) for line in text.splitlines() if line.strip())


def parse_lane(text: str) -> tuple[Action, ...]:
    """The actions of one lane, from one line of `parse_orders`."""
    return tuple(_action(word) for word in text.replace(",", " ").split())


def format_orders(orders: Lanes) -> str:
    """The text that `parse_orders` reads."""
    return "\n".join(" ".join(map(str, lane)) for lane in orders)


def _action(word: str) -> Action:
    found = _ACTION.fullmatch(word)
    if found is None:
        rule = "an action is a stage, one of F, B, W, and a micro-batch"
        raise InputError("orders", word, rule, "0F0")
    stage, kind, micro_batch = found.groups()
    return Action(int(stage), _KINDS[kind], int(micro_batch))


def dependencies(action: Action, stages: int) -> tuple[Action, ...]:
    """Actions of other stages, or of the same one, whose results an action reads."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == "F":
        return (Action(stage - 1, "F", micro_batch),) if stage else ()
    if action.kind == "W":
        return (Action(stage, "B", micro_batch),)
    own = Action(stage, "F", micro_batch)
    return (own, Action(stage + 1, "B", micro_batch)) if stage + 1 < stages else (own,)


def levels(lanes: Lanes) -> list[list[int]]:
    """Longest chain of actions before each action of each lane, lanes running side by side.

    The list of a lane is shorter than its actions where one waits for what never comes.
    """
    stages = 1 + max((a.stage for lane in lanes for a in lane), default=0)
    count = 1 + max((a.micro_batch for lane in lanes for a in lane), default=0)
    place = {
        (stage, kind): index * count
        for index, (stage, kind) in enumerate((s, k) for s in range(stages) for k in "FBW")
    }
    needs = {
        (s, k): [place[n.stage, n.kind] for n in dependencies(Action(s, _KINDS[k], 0), stages)]
        for s, k in place
    }
    level = [-1] * (3 * stages * count)
    found: list[list[int]] = [[] for _ in lanes]
    moved = True
    while moved:
        moved = False
        for lane, own in zip(lanes, found, strict=True):
            while len(own) < len(lane):
                action = lane[len(own)]
                key, micro_batch = (action.stage, action.kind), action.micro_batch
                before = [level[need + micro_batch] for need in needs[key]]
                if -1 in before:
                    break
                own.append(1 + max(before + own[-1:], default=-1))
                level[place[key] + micro_batch] = own[-1]
                moved = True
    return found


def refuse_orders(orders: Lanes, owner: Sequence[int], micro_batches: int) -> None:
    """Refuse action lists that do not run every micro-batch through every stage once.

    Args:
        orders: The lists, by lane.
        owner: The lane of each stage.
        micro_batches: Micro-batches of a step.

    Raises:
        InputError: If there are more or fewer lists than lanes, if an action is missing, of no
            stage or micro-batch, in another lane's list or there twice, or if the order cannot be
            run, with the first action of each lane that is blocked.
    """
    lanes = 1 + max(owner)
    if len(orders) != lanes:
        raise InputError("plan.orders", len(orders), "one list for each lane", lanes)
    for lane, own in enumerate(orders):
        for action in own:
            _refuse_action(action, lane, owner, micro_batches)
    counts = Counter(action for own in orders for action in own)
    for action, times in counts.items():
        if times > 1:
            raise InputError("plan.orders", str(action), f"occurs {times} times", "once")
    for action in _wanted(len(owner), micro_batches):
        if action not in counts:
            rule = f"every micro-batch goes through every stage both ways; {action} is missing"
            raise InputError("plan.orders", format_orders(orders)[:40], rule, str(action))
    _refuse_deadlock(orders)


def _wanted(stages: int, micro_batches: int) -> Iterator[Action]:
    for stage in range(stages):
        for index in range(micro_batches):
            yield Action(stage, "F", index)
            yield Action(stage, "B", index)


def _refuse_action(action: Action, lane: int, owner: Sequence[int], micro_batches: int) -> None:
    for name, value, end in (
        ("stages", action.stage, len(owner)),
        ("micro-batches", action.micro_batch, micro_batches),
    ):
        if not 0 <= value < end:
            rule = f"{action}: there are the {name} 0 to {end - 1}"
            raise InputError(f"plan.orders[{lane}]", value, rule, min(max(value, 0), end - 1))
    if owner[action.stage] != lane:
        rule = f"stage {action.stage} is on lane {owner[action.stage]}"
        raise InputError(f"plan.orders[{lane}]", str(action), rule, owner[action.stage])


def _refuse_deadlock(orders: Lanes) -> None:
    done = levels(orders)
    blocked = [
        str(lane[len(own)]) for lane, own in zip(orders, done, strict=True) if len(own) < len(lane)
    ]
    if blocked:
        rule = "the order cannot be run: these actions wait for actions behind one another"
        raise InputError("plan.orders", ", ".join(blocked), rule)


def split_actions(orders: Lanes) -> frozenset[tuple[int, int]]:
    """Stage and micro-batch of every backward with a ``W`` of its own."""
    return frozenset((a.stage, a.micro_batch) for lane in orders for a in lane if a.kind == "W")


def peaks(lane: Sequence[Action]) -> tuple[Peak, ...]:
    """The moments of a lane among which is the one at which it holds most.

    A micro-batch's activations are held from its forward until its backward has ended, or until
    its ``W`` has where that is apart: inputs of matmuls are needed until then, and gradients of
    their outputs take the place of what the first part could free (32 of 34 bytes an element of
    a transformer layer, Qi et al., arXiv 2401.10241, table 1). Of moments at which the same stage
    runs, those at which no stage holds more than at another are left out; of equal ones a
    backward stays.
    """
    apart = split_actions([lane])
    held = dict.fromkeys(sorted({action.stage for action in lane}), 0)
    found: dict[tuple[int, tuple[tuple[int, int], ...]], Action] = {}
    for action in lane:
        if action.kind == "F":
            held[action.stage] += 1
        key = (action.stage, tuple(held.items()))
        if key not in found or (found[key].kind == "F" and action.kind != "F"):
            found[key] = action
        last = "W" if (action.stage, action.micro_batch) in apart else "B"
        if action.kind == last:
            held[action.stage] -= 1
    moments = [Peak(action, counts) for (_, counts), action in found.items()]
    return tuple(moment for moment in moments if not any(_less(moment, o) for o in moments))


def _less(one: Peak, other: Peak) -> bool:
    """Whether `other` holds at least as much of every stage, and more of some, than `one`."""
    if one.action.stage != other.action.stage or one.held == other.held:
        return False
    return all(a <= b for (_, a), (_, b) in zip(one.held, other.held, strict=True))
