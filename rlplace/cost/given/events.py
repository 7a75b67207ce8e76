"""The objective of GiPH and DOPPLER: the makespan of an event simulation."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from rlplace.cost.given.common import check_placement, costs_of
from rlplace.errors import InputError
from rlplace.graph.formats.types import EventCosts, GivenInstance


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
    costs = costs_of(instance, EventCosts)
    check_placement(instance, placement, costs.devices)
    for op, device in enumerate(placement):
        if device not in costs.legal[op]:
            name = instance.graph.groups[op].name
            raise InputError(f"placement of {name}", device, "may not run there", costs.legal[op])
    return _Simulation(instance, costs, placement).run()


@dataclass
class _Simulation:
    """The state of `simulate_events`: a heap of (time, order, event, op)."""

    instance: GivenInstance
    costs: EventCosts
    placement: Sequence[int]
    heap: list[tuple[float, int, str, int]] = field(default_factory=list)
    order: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        ops = len(self.placement)
        self.outputs: list[list[tuple[int, float]]] = [[] for _ in range(ops)]
        self.missing = [0] * ops
        for edge, size in zip(self.instance.graph.edges, self.costs.sizes, strict=True):
            self.outputs[edge.src].append((edge.dst, self._transfer(edge.src, edge.dst, size)))
            self.missing[edge.dst] += 1
        self.waiting: list[deque[int]] = [deque() for _ in range(self.costs.devices)]
        self.busy = [False] * self.costs.devices
        self.start, self.end = [0.0] * ops, [0.0] * ops

    def run(self) -> GivenSchedule:
        for op, missing in enumerate(self.missing):
            if not missing:
                self._ask(op, 0.0)
        while self.heap:
            time, _, event, op = heapq.heappop(self.heap)
            if event == "end":
                self._finish(op, time)
            else:
                self.missing[op] -= 1
                if not self.missing[op]:
                    self._ask(op, time)
        return GivenSchedule(tuple(self.start), tuple(self.end))

    def _ask(self, op: int, time: float) -> None:
        device = self.placement[op]
        if self.busy[device]:
            self.waiting[device].append(op)
        else:
            self._begin(op, time)

    def _begin(self, op: int, time: float) -> None:
        device = self.placement[op]
        self.busy[device] = True
        self.start[op] = time
        self.end[op] = time + self.costs.compute[op] * self.costs.rates[device]
        self._push(self.end[op], "end", op)

    def _finish(self, op: int, time: float) -> None:
        device = self.placement[op]
        self.busy[device] = False
        if self.waiting[device]:
            self._begin(self.waiting[device].popleft(), time)
        for reader, seconds in self.outputs[op]:
            self._push(time + seconds, "arrival", reader)

    def _push(self, time: float, event: str, op: int) -> None:
        heapq.heappush(self.heap, (time, next(self.order), event, op))

    def _transfer(self, src: int, dst: int, size: float) -> float:
        i, j = self.placement[src], self.placement[dst]
        return 0.0 if i == j else self.costs.delays[i][j] + size * self.costs.transfer_rates[i][j]


def makespan(instance: GivenInstance, placement: Sequence[int]) -> float:
    """The objective of GiPH and DOPPLER: when the last op of `simulate_events` ends."""
    return simulate_events(instance, placement).makespan


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
