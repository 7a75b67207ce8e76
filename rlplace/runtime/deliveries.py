"""What every lane sends and awaits, and when: worked out from the action lists alone.

*Order.* Both ends of a pair of lanes handle their deliveries in the order of the sender's list, for
NCCL has no tags and keeps the messages of a pair in order. A receive is posted together with all
that the same sender has sent before it.

*No deadlock.* A lane only ever waits for what comes before its own action in every run of the
lists: for a delivery that it needs, or for one of its own to leave which the other lane must have
awaited before it sent what has just arrived. So any lists that can be run are run, however large
the messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlplace.plan.types import Action


@dataclass(frozen=True, slots=True)
class Delivery:
    """The tensors of a micro-batch over a border, in one direction.

    Args:
        border: Index of the later stage.
        backward: Whether these are gradients.
        micro_batch: Of which micro-batch.
        source: Lane that sends.
        sent: Position in its list of the action that makes them.
        target: Lane that receives, perhaps the same.
        awaited: Position in its list of the action that needs them.
    """

    border: int
    backward: bool
    micro_batch: int
    source: int
    sent: int
    target: int
    awaited: int


@dataclass(frozen=True)
class Mail:
    """The deliveries of one lane.

    Args:
        arrivals: By the position of the action that needs it.
        incoming: Of each lane, in the order in which that sends them.
        gone: By the position of an action that had an arrival: deliveries of this lane that have
            then left for certain.
    """

    arrivals: dict[int, Delivery]
    incoming: dict[int, tuple[Delivery, ...]]
    gone: dict[int, tuple[Delivery, ...]]


def deliveries(orders: Sequence[Sequence[Action]]) -> list[Delivery]:
    """All deliveries of a step, by source and position.

    Args:
        orders: The actions of each lane.
    """
    places = {
        action: (lane, position)
        for lane, own in enumerate(orders)
        for position, action in enumerate(own)
    }
    found = []
    for action, (lane, position) in places.items():
        backward = action.kind == "B"
        neighbour = Action(
            action.stage - 1 if backward else action.stage + 1, action.kind, action.micro_batch
        )
        if action.kind != "W" and neighbour in places:
            border = max(action.stage, neighbour.stage)
            ends = (lane, position, *places[neighbour])
            found.append(Delivery(border, backward, action.micro_batch, *ends))
    return found


def mail(orders: Sequence[Sequence[Action]], lane: int) -> Mail:
    """What one lane sends and awaits.

    Args:
        orders: The actions of each lane.
        lane: Which one.
    """
    every = deliveries(orders)
    coming = [one for one in every if one.target == lane]
    going = sorted((one for one in every if one.source == lane), key=lambda one: one.awaited)
    incoming: dict[int, tuple[Delivery, ...]] = {}
    for one in coming:
        incoming[one.source] = (*incoming.get(one.source, ()), one)
    arrivals = {one.awaited: one for one in coming}
    gone: dict[int, tuple[Delivery, ...]] = {}
    left: set[Delivery] = set()
    for position, arrival in sorted(arrivals.items()):
        known = [
            one
            for one in going
            if one.target == arrival.source and one.awaited <= arrival.sent and one not in left
        ]
        left.update(known)
        gone[position] = tuple(known)
    return Mail(arrivals, incoming, gone)
