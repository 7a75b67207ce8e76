"""The event loop of GiPH and DOPPLER on plain arrays, compiled by numba.

Bit for bit what a heap of all events gives, at half of its events: of the inputs of an op only the
one that arrives last matters, and it is known when the last producer ends. It waits in the heap at
the rank that it was made with, so that ties fall as if every arrival had been an event.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from rlplace.cost.given.common import costs_of
from rlplace.graph.formats.types import EventCosts, GivenInstance

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class EventArrays(NamedTuple):
    """An instance for the event loop; V ops, E edges, D devices, K tie orders.

    Args:
        times: Time of each op on each device, infinite where it may not run (V, D).
        inputs: Number of edges into each op (V,).
        first: First edge out of each op, and the end (V + 1,).
        delays: Latency from device to device (D, D); 0 on the diagonal.
        rates: Time of a unit of data from device to device (D, D); 0 on the diagonal.
        roots: The ops without inputs, in the order in which they ask for their devices (K, R).
        readers: The op that each edge goes to, edges by producer, and then in the order in which
            its outputs leave (K, E).
        sizes: Data of each edge, in the same order (K, E).
    """

    times: Floats
    inputs: Ints
    first: Ints
    delays: Floats
    rates: Floats
    roots: Ints
    readers: Ints
    sizes: Floats

    @property
    def ops(self) -> int:
        """Number of ops."""
        return len(self.times)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.delays)


def event_arrays(instance: GivenInstance, orders: int = 1) -> EventArrays:
    """The arrays of a GiPH or DOPPLER instance.

    Args:
        instance: The instance.
        orders: How many orders of what happens at the same time: of the outputs of an op, and of
            the ops without inputs. The first is that of the graph; the others are random, the same
            ones at each call.

    Raises:
        InputError: If the instance is of another form.
    """
    costs = costs_of(instance, EventCosts)
    ops, edges = len(costs.compute), instance.graph.edges
    sources = np.array([edge.src for edge in edges], np.int64)
    readers = np.array([edge.dst for edge in edges], np.int64)
    inputs = np.bincount(readers, minlength=ops).astype(np.int64)
    drawn = np.random.default_rng(0)
    roots = [np.flatnonzero(inputs == 0)]
    leaving = [np.argsort(sources, kind="stable")]
    for _ in range(orders - 1):
        shuffled = drawn.permutation(len(edges))
        leaving.append(shuffled[np.argsort(sources[shuffled], kind="stable")])
        roots.append(drawn.permutation(roots[0]))
    times = np.full((ops, costs.devices), np.inf)
    for op, legal in enumerate(costs.legal):
        times[op, list(legal)] = costs.compute[op] * np.array(costs.rates)[list(legal)]
    apart = 1.0 - np.eye(costs.devices)
    return EventArrays(
        times=times,
        inputs=inputs,
        first=np.searchsorted(np.sort(sources), np.arange(ops + 1)).astype(np.int64),
        delays=np.array(costs.delays, np.float64) * apart,
        rates=np.array(costs.transfer_rates, np.float64) * apart,
        roots=np.array(roots),
        readers=readers[np.array(leaving)],
        sizes=np.array(costs.sizes, np.float64)[np.array(leaving)],
    )


@numba.njit(cache=True)
def run_events(  # noqa: C901  # one loop over one heap: a part of it has nothing to say alone
    arrays: EventArrays, order: int, placement: Ints, start: Floats, end: Floats
) -> float:
    """Run a placement in one of the tie orders; fills in the start and end of each op.

    Returns:
        The makespan.
    """
    times, inputs, first, delays, rates = arrays[:5]
    roots, readers, sizes = arrays.roots[order], arrays.readers[order], arrays.sizes[order]
    ops, devices = times.shape
    # The heap: time, rank among equal times, and the op; an arrival is written as ~op.
    clock, rank, what = np.empty(ops), np.empty(ops, np.int64), np.empty(ops, np.int64)
    length, made = 0, 0
    missing = inputs.copy()
    last, last_rank = np.full(ops, -1.0), np.empty(ops, np.int64)
    queues = (np.full(devices, -1), np.empty(devices, np.int64), np.empty(ops, np.int64))
    busy = np.zeros(devices, np.bool_)
    longest = 0.0
    for turn in range(len(roots) + 2 * ops):
        op, now, asks = -1, 0.0, True
        if turn < len(roots):
            op = roots[turn]
        elif length == 0:
            break
        else:
            now, asks = clock[0], what[0] < 0
            op = ~what[0] if asks else what[0]
            length = _pop(clock, rank, what, length)
        device = placement[op]
        begins = op
        if asks and busy[device]:
            begins = -1
            _wait(queues, device, op)
        elif not asks:
            begins = _next(queues, device)
            busy[device] = False
        if begins >= 0:
            busy[device] = True
            start[begins], end[begins] = now, now + times[begins, device]
            longest = max(longest, end[begins])
            length = _push(clock, rank, what, length, end[begins], made, begins)
            made += 1
        if asks:
            continue
        for edge in range(first[op], first[op + 1]):
            reader, arrival = readers[edge], now
            there = placement[reader]
            if there != device:
                arrival = now + (delays[device, there] + sizes[edge] * rates[device, there])
            if arrival >= last[reader]:
                last[reader], last_rank[reader] = arrival, made
            made += 1
            missing[reader] -= 1
            if missing[reader] == 0:
                length = _push(clock, rank, what, length, last[reader], last_rank[reader], ~reader)
    return longest


@numba.njit(cache=True)
def run_many(arrays: EventArrays, orders: int, placements: Ints) -> Floats:
    """Makespans of placements (N, V) in the first tie orders (N, orders)."""
    count, ops = placements.shape
    start, end, found = np.empty(ops), np.empty(ops), np.empty((count, orders))
    for index in range(count):
        for order in range(orders):
            found[index, order] = run_events(arrays, order, placements[index], start, end)
    return found


@numba.njit(cache=True)
def _wait(queues: tuple[Ints, Ints, Ints], device: int, op: int) -> None:
    """Put an op at the end of the queue of a device: (first, last, the one after each op)."""
    head, tail, following = queues
    following[op] = -1
    if head[device] < 0:
        head[device] = op
    else:
        following[tail[device]] = op
    tail[device] = op


@numba.njit(cache=True)
def _next(queues: tuple[Ints, Ints, Ints], device: int) -> int:
    """Take the first op out of the queue of a device; -1 if there is none."""
    head, _, following = queues
    op = int(head[device])
    if op >= 0:
        head[device] = following[op]
    return op


@numba.njit(cache=True)
def _push(
    clock: Floats, rank: Ints, what: Ints, length: int, time: float, order: int, event: int
) -> int:
    """Put an event into the heap; the new length."""
    at = length
    while at > 0:
        above = (at - 1) >> 1
        if clock[above] < time or (clock[above] == time and rank[above] < order):
            break
        clock[at], rank[at], what[at] = clock[above], rank[above], what[above]
        at = above
    clock[at], rank[at], what[at] = time, order, event
    return length + 1


@numba.njit(cache=True)
def _pop(clock: Floats, rank: Ints, what: Ints, length: int) -> int:
    """Take the first event out of the heap; the new length."""
    length -= 1
    time, order, event = clock[length], rank[length], what[length]
    at = 0
    while True:
        below = 2 * at + 1
        if below >= length:
            break
        other = below + 1
        if other < length and (
            clock[other] < clock[below]
            or (clock[other] == clock[below] and rank[other] < rank[below])
        ):
            below = other
        if time < clock[below] or (time == clock[below] and order < rank[below]):
            break
        clock[at], rank[at], what[at] = clock[below], rank[below], what[below]
        at = below
    clock[at], rank[at], what[at] = time, order, event
    return length
