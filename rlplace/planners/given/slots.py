"""A schedule under construction, for list schedulers that fill gaps."""

from __future__ import annotations

from bisect import insort

import numpy as np

from rlplace.cost.given.event_loop import EventArrays, Floats, Ints
from rlplace.planners.given.ranks import producers


class Slots:
    """Ops put on devices one after the other, each after its producers.

    A transfer starts when its producer ends, as in the event simulation; the ops of a device are
    served in any order that the scheduler likes, which the simulation does not promise.
    """

    def __init__(self, arrays: EventArrays) -> None:
        self._arrays, self._reads = arrays, producers(arrays)
        self._taken: list[list[tuple[float, float]]] = [[] for _ in range(arrays.devices)]
        self.placement: Ints = np.full(arrays.ops, -1, np.int64)
        self.end: Floats = np.zeros(arrays.ops)

    def arrivals(self, op: int) -> Floats:
        """When all inputs of an op are there, on each device (D,)."""
        there = np.zeros(self._arrays.devices)
        for source, size in self._reads[op]:
            home = self.placement[source]
            sent = self._arrays.delays[home] + size * self._arrays.rates[home]
            there = np.maximum(there, self.end[source] + sent)
        return there

    def put_earliest(self, op: int, devices: Ints) -> None:
        """Put an op on that of some devices where it ends first, into a gap where one is wide."""
        there = self.arrivals(op)
        times = self._arrays.times[op]
        starts = {int(d): self._gap(int(d), float(there[d]), float(times[d])) for d in devices}
        device = min(starts, key=lambda d: starts[d] + float(times[d]))
        self.put(op, device, starts[device])

    def put(self, op: int, device: int, start: float) -> None:
        """Put an op on a device at a time that is free."""
        self.placement[op] = device
        self.end[op] = start + self._arrays.times[op, device]
        insort(self._taken[device], (start, float(self.end[op])))

    def _gap(self, device: int, ready: float, time: float) -> float:
        """The earliest start of so much time from `ready` on."""
        for begin, end in self._taken[device]:
            if ready + time <= begin:
                break
            ready = max(ready, end)
        return ready
