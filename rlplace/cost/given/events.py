"""The objective of GiPH and DOPPLER: the makespan of an event simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlplace.cost.given.common import check_placement, costs_of
from rlplace.cost.given.event_loop import event_arrays, run_events, run_many
from rlplace.errors import InputError
from rlplace.graph.formats.types import EventCosts, GivenInstance

#: Orders that `median_makespan` looks at; the first is that of the file.
TIE_ORDERS = 31


@dataclass(frozen=True)
class GivenSchedule:
    """When each group ran.

    Args:
        start: Start of each group.
        end: End of each group.
    """

    start: tuple[float, ...]
    end: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """End of the last group."""
        return max(self.end)


def simulate_events(instance: GivenInstance, placement: Sequence[int]) -> GivenSchedule:
    """Run a placement through the event simulator that GiPH and DOPPLER publish.

    An op asks for its device when its last input has arrived. A device serves one op at a time,
    first come, first served. A transfer starts when the producer ends, takes no time on the same
    device, and never waits for another. Equal times go by the order in which events were made; at
    an end the device takes its next op before the outputs leave (env/latency.py of
    uidmice/placement-rl, env/cost.py of xinyuyao/Doppler, both on simpy).

    Args:
        instance: A GiPH or DOPPLER instance.
        placement: Device of each group.

    Raises:
        InputError: If the instance is of another form, the placement names no such device, or an
            op is on a device that may not run it.
    """
    _check_legal(instance, placement)
    arrays = event_arrays(instance)
    start, end = np.empty(arrays.ops), np.empty(arrays.ops)
    run_events(arrays, 0, np.array(placement, np.int64), start, end)
    return GivenSchedule(tuple(start.tolist()), tuple(end.tolist()))


def makespan(instance: GivenInstance, placement: Sequence[int]) -> float:
    """The objective of GiPH and DOPPLER: when the last op of `simulate_events` ends."""
    return simulate_events(instance, placement).makespan


def median_makespan(instance: GivenInstance, placement: Sequence[int]) -> float:
    """The median of the makespan over the orders in which equal times may be served.

    What a makespan is worth to compare: where costs are equal, as in DOPPLER's graphs, the order in
    which a simulator happens to make its events moves the end by a tenth and more.

    Args:
        instance: A GiPH or DOPPLER instance.
        placement: Device of each group.

    Raises:
        InputError: As in `simulate_events`.
    """
    _check_legal(instance, placement)
    arrays = event_arrays(instance, TIE_ORDERS)
    return float(np.median(run_many(arrays, TIE_ORDERS, np.array([placement], np.int64))))


def _check_legal(instance: GivenInstance, placement: Sequence[int]) -> None:
    costs = costs_of(instance, EventCosts)
    check_placement(instance, placement, costs.devices)
    for op, device in enumerate(placement):
        if device not in costs.legal[op]:
            name = instance.graph.groups[op].name
            raise InputError(f"placement of {name}", device, "may not run there", costs.legal[op])


def makespan_bound(instance: GivenInstance) -> float:
    """No placement of a GiPH or DOPPLER instance has a shorter makespan.

    The larger of the longest path, each op at its fastest device and every transfer free, and of
    all work at every op's fastest device, shared evenly.

    Args:
        instance: A GiPH or DOPPLER instance.
    """
    costs = costs_of(instance, EventCosts)
    fastest = [
        work * min(costs.rates[device] for device in legal)
        for work, legal in zip(costs.compute, costs.legal, strict=True)
    ]
    ends = list(fastest)
    # Groups are in topological order, so an op's end is final before its edges are looked at.
    for edge in sorted(instance.graph.edges, key=lambda edge: edge.src):
        ends[edge.dst] = max(ends[edge.dst], ends[edge.src] + fastest[edge.dst])
    return max(*ends, sum(fastest) / costs.devices)
