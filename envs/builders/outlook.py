"""How well the rest of a pipeline can still turn out: a dynamic program over what is left.

`stage_table` costs every stage between two cuts on every class of mesh, for every number of
micro-batches in flight. `look_behind` finds the best way to every state from the end of the
pipeline, `look_ahead` the best way from every state to its head. All are numba loops over plain
arrays. The step time of a 1F1B pipeline with M micro-batches is taken as

    sum of stages and transfers + max((M - 1) * slowest stage, stall) + exposed tail.

The stall is what the round trips cost: a stage with k stages behind it may have k + 1 micro-batches
in flight and then waits for a gradient, so M micro-batches take M / (k + 1) round trips through it
and all that is behind, of which one is in the sum already.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class StageTable(NamedTuple):
    """Stages by (class of mesh, stages behind, start cut, stop cut).

    Args:
        seconds: Forward + backward of one micro-batch, of the leanest way where nothing fits.
        backward: Backward of one micro-batch.
        tail: Exposed gradient reduction and optimizer.
        overflow: Share of the limit by which the leanest way exceeds it, 0 where something fits.
        fill: Bytes of the way that was taken over the limit.
    """

    seconds: Floats
    backward: Floats
    tail: Floats
    overflow: Floats
    fill: Floats


class Rest(NamedTuple):
    """The best pipeline found for what is left, by (stages behind, devices left, stop cut).

    Args:
        total: Sum of stage seconds and transfers.
        slowest: Slowest stage.
        stall: Seconds of round trips, given the best known stages behind.
        backward: Sum of backward seconds and half of the transfers.
        tail: Longest tail that outlasts the backward of the stages before it.
        depth: Stages.
        overflow: Sum of the stages' overflow.
    """

    total: Floats
    slowest: Floats
    stall: Floats
    backward: Floats
    tail: Floats
    depth: Ints
    overflow: Floats


@numba.njit(cache=True)
def stage_table(
    ways: Ints,
    forward: Floats,
    backward: Floats,
    reduce: Floats,
    optimizer: Floats,
    static: Floats,
    saved: Floats,
    first_reduce: Floats,
    transient: Floats,
    hidden: Floats,
    limit: Floats,
    micro_batches: int,
    depth: int,
) -> StageTable:
    """Cost all stages; see `Columns` for the shapes, each with a leading axis of classes.

    The fastest way that fits is taken, or the leanest one where none does.
    """
    classes, most, cuts = forward.shape
    shape = (classes, depth, cuts, cuts)
    seconds, back, tail = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    overflow, fill = np.zeros(shape), np.zeros(shape)
    # Of each way: step seconds (without fill and drain), seconds, backward, tail, bytes, and bytes
    # a micro-batch in flight.
    way, peak = np.zeros((6, most)), np.zeros(most)
    for v in range(classes):
        share, count = hidden[v], ways[v]
        for stop in range(1, cuts):
            peak[:] = 0.0
            for start in range(stop - 1, -1, -1):
                for o in range(count):
                    peak[o] = max(peak[o], transient[v, o, start])
                    b = backward[v, o, stop] - backward[v, o, start]
                    red = reduce[v, o, stop] - reduce[v, o, start]
                    late = max(share * first_reduce[v, o, start], share * red - b)
                    t = forward[v, o, stop] - forward[v, o, start] + b
                    e = optimizer[v, o, stop] - optimizer[v, o, start] + (1.0 - share) * red + late
                    way[0, o], way[1, o], way[2, o], way[3, o] = micro_batches * t + e, t, b, e
                    way[4, o] = static[v, o, stop] - static[v, o, start] + peak[o]
                    way[5, o] = saved[v, o, stop] - saved[v, o, start]
                fastest = np.argmin(way[0, :count])
                for k in range(depth - 1, -1, -1):
                    held = min(micro_batches, k + 1)
                    best = _pick(way, count, limit[v], held)
                    at = (v, k, start, stop)
                    seconds[at], back[at], tail[at] = way[1, best], way[2, best], way[3, best]
                    fill[at] = (way[4, best] + held * way[5, best]) / limit[v]
                    overflow[at] = max(0.0, fill[at] - 1.0)
                    if best == fastest and fill[at] <= 1.0:
                        # Fewer micro-batches in flight fit all the more.
                        for less in range(k):
                            other = (v, less, start, stop)
                            seconds[other], back[other] = seconds[at], back[at]
                            tail[other] = tail[at]
                            held = min(micro_batches, less + 1)
                            fill[other] = (way[4, best] + held * way[5, best]) / limit[v]
                        break
    return StageTable(seconds, back, tail, overflow, fill)


@numba.njit(cache=True)
def _pick(way: Floats, count: int, limit: float, held: int) -> int:
    """The fastest way that fits, or the leanest one."""
    best, lean = -1, 0
    for o in range(count):
        size = way[4, o] + held * way[5, o]
        if size < way[4, lean] + held * way[5, lean]:
            lean = o
        if size <= limit and (best < 0 or way[0, o] < way[0, best]):
            best = o
    return best if best >= 0 else lean


@numba.njit(cache=True)
def _stall(total: float, behind: int, micro_batches: int) -> float:
    """Seconds of round trips beyond the first through a stage and all that is behind it."""
    return max(0, micro_batches - behind - 1) * total / (behind + 1)


@numba.njit(cache=True)
def look_behind(
    table: StageTable,
    classes: Ints,
    firsts: Ints,
    lasts: Ints,
    turns: Floats,
    transfers: Floats,
    places: int,
    micro_batches: int,
    floor: float,
    penalty: float,
) -> tuple[Floats, float]:
    """Seconds of the stages behind every state, and a period that a whole pipeline can hold.

    Args: as `look_ahead`, with `floor` the period below which nothing is gained.

    Returns:
        Sums of seconds and transfers by (stages behind, devices left, stop cut), inf where no
        pipeline leads; and seconds a micro-batch of the best whole pipeline in the steady state.
    """
    _, depth, cuts, _ = table.seconds.shape
    shape = (depth + 1, places + 1, cuts)
    value, total = np.full(shape, np.inf), np.full(shape, np.inf)
    slowest, stall, overflow = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    value[0, places, cuts - 1] = total[0, places, cuts - 1] = 0.0
    best, period = np.inf, 0.0
    for k in range(depth):
        for mesh in range(len(classes)):
            a, b, v = firsts[mesh], lasts[mesh], classes[mesh]
            for stop in range(1, cuts):
                here = (k, b, stop)
                if value[here] == np.inf:
                    continue
                base = total[here] + (transfers[mesh, stop] if k else 0.0)
                for start in range(stop):
                    own = table.seconds[v, k, start, stop]
                    new_total = base + own
                    new_slowest = max(slowest[here], own * turns[mesh])
                    new_stall = max(stall[here], _stall(new_total, k, micro_batches))
                    new_overflow = overflow[here] + table.overflow[v, k, start, stop]
                    reached = new_total + max(
                        (micro_batches - 1) * max(floor, new_slowest), new_stall
                    )
                    if new_overflow > 0.0:
                        reached += penalty * (1.0 + new_overflow)
                    if start == 0 and reached < best:
                        best = reached
                        period = max(new_slowest, new_stall / max(1, micro_batches - 1))
                    there = (k + 1, a, start)
                    if reached < value[there]:
                        value[there], total[there] = reached, new_total
                        slowest[there], stall[there] = new_slowest, new_stall
                        overflow[there] = new_overflow
    return total, period


@numba.njit(cache=True)
def look_ahead(
    table: StageTable,
    behind: Floats,
    classes: Ints,
    firsts: Ints,
    lasts: Ints,
    turns: Floats,
    transfers: Floats,
    places: int,
    micro_batches: int,
    floor: float,
    penalty: float,
) -> Rest:
    """The best rest for every state.

    Args:
        table: Costs of stages.
        behind: Sums of seconds that the stages behind each state are taken to have.
        classes: Class of each mesh.
        firsts: First position in the line of devices that it takes.
        lasts: One past the last position.
        turns: Factor by which ranks that share a core slow it down in the steady state.
        transfers: (meshes, cuts): seconds there and back from a mesh over its later border.
        places: Length of the line of devices.
        micro_batches: Micro-batches of a step.
        floor: A period; below it, a shorter slowest stage is worth nothing.
        penalty: Seconds that an overflow of the whole limit costs.
    """
    _, depth, cuts, _ = table.seconds.shape
    shape = (depth + 1, places + 1, cuts)
    value = np.full(shape, np.inf)
    total, slowest, stall = np.full(shape, np.inf), np.zeros(shape), np.zeros(shape)
    backward, tail, overflow = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    stages = np.zeros(shape, np.int64)
    value[:, :, 0] = total[:, :, 0] = 0.0
    for k in range(depth - 1, -1, -1):
        for mesh in range(len(classes)):
            a, b, v = firsts[mesh], lasts[mesh], classes[mesh]
            for stop in range(1, cuts):
                here = (k, b, stop)
                if behind[here] == np.inf:
                    continue
                hop = transfers[mesh, stop] if k else 0.0
                for start in range(stop):
                    rest = (k + 1, a, start)
                    if value[rest] == np.inf:
                        continue
                    own = table.seconds[v, k, start, stop]
                    new_total = total[rest] + own + hop
                    new_slowest = max(slowest[rest], own * turns[mesh])
                    trips = _stall(behind[here] + own + hop, k, micro_batches)
                    new_stall = max(stall[rest], trips)
                    new_tail = max(tail[rest], table.tail[v, k, start, stop] - backward[rest])
                    new_overflow = overflow[rest] + table.overflow[v, k, start, stop]
                    steady = max((micro_batches - 1) * max(floor, new_slowest), new_stall)
                    reached = new_total + steady + new_tail
                    if new_overflow > 0.0:
                        reached += penalty * (1.0 + new_overflow)
                    if reached < value[here]:
                        value[here] = reached
                        total[here], slowest[here], stall[here] = new_total, new_slowest, new_stall
                        back = table.backward[v, k, start, stop] + hop / 2.0
                        backward[here], tail[here] = backward[rest] + back, new_tail
                        overflow[here], stages[here] = new_overflow, stages[rest] + 1
    return Rest(total, slowest, stall, backward, tail, stages, overflow)
