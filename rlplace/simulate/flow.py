"""What follows from a plan's schedule, lanes and micro-batches alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rlplace.plan import schedules
from rlplace.plan.orders import Peak, peaks
from rlplace.simulate.orders import Orders, orders


@dataclass(frozen=True, slots=True)
class Flow:
    """Action lists, ready to be simulated.

    Args:
        order: The lists as arrays.
        peaks: The moments of each lane among which is the one at which it holds most.
        held: Micro-batches whose activations each stage holds at its own peak.
    """

    order: Orders
    peaks: tuple[tuple[Peak, ...], ...]
    held: tuple[int, ...]


@lru_cache(maxsize=256)
def flow(
    schedule: str, owner: tuple[int, ...], micro_batches: int, lists: schedules.Orders = ()
) -> Flow:
    """The flow of a schedule, or of action lists; made once.

    Args:
        schedule: A name of `rlplace.plan.schedules.SCHEDULES`, where there are no lists.
        owner: The lane of each stage.
        micro_batches: Micro-batches of a step.
        lists: Action lists by lane.
    """
    lists = lists or schedules.lane_orders(schedule, owner, micro_batches)
    moments = tuple(peaks(lane) for lane in lists)
    return Flow(orders(lists), moments, schedules.held(moments, len(owner)))
