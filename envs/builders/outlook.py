"""How well the rest of a pipeline can still turn out: a dynamic program over what is left.

`stage_table` costs every stage between two cuts on every class of mesh, for every number of
micro-batches in flight. `look_ahead` then finds, for every number of stages behind, every number
of devices left and every cut, the best way to place what is left. Both are numba loops over plain
arrays. The step time of a pipeline is taken as

    sum of stages and transfers + (micro-batches - 1) * period + exposed tail,

with the period the slowest stage, or the round trip over the micro-batches in flight where that is
longer (1F1B waits for a gradient before it sends the next activation).
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
        fill: Bytes over the limit of the way that was taken.
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
        backward: Sum of backward seconds and half of the transfers.
        tail: Longest tail that outlasts the backward of the stages before it.
        depth: Stages.
        overflow: Sum of the stages' overflow.
    """

    total: Floats
    slowest: Floats
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

    Where the fastest way does not fit, a blend of it with a leaner one that just does is taken:
    group for group the solver can mix them, so the blend is close to what it will find.
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
                    first, second, weight, fits = _mix(way, count, limit[v], held, fastest)
                    at = (v, k, start, stop)
                    seconds[at] = way[1, first] + weight * (way[1, second] - way[1, first])
                    back[at] = way[2, first] + weight * (way[2, second] - way[2, first])
                    tail[at] = way[3, first] + weight * (way[3, second] - way[3, first])
                    low = way[4, first] + held * way[5, first]
                    high = way[4, second] + held * way[5, second]
                    fill[at] = (low + weight * (high - low)) / limit[v]
                    if not fits:
                        overflow[at] = fill[at] - 1.0
                    if fits and first == fastest:
                        # Fewer micro-batches in flight fit all the more.
                        for less in range(k):
                            other = (v, less, start, stop)
                            seconds[other], back[other] = seconds[at], back[at]
                            tail[other] = tail[at]
                            held = min(micro_batches, less + 1)
                            fill[other] = (way[4, first] + held * way[5, first]) / limit[v]
                        break
    return StageTable(seconds, back, tail, overflow, fill)


@numba.njit(cache=True)
def _mix(
    way: Floats, count: int, limit: float, held: int, fastest: int
) -> tuple[int, int, float, bool]:
    """Two ways, the share of the second, and whether they fit; the leanest where nothing does."""
    best, lean = -1, 0
    for o in range(count):
        size = way[4, o] + held * way[5, o]
        if size < way[4, lean] + held * way[5, lean]:
            lean = o
        if size <= limit and (best < 0 or way[0, o] < way[0, best]):
            best = o
    if best < 0:
        return lean, lean, 0.0, False
    if way[0, best] <= way[0, fastest]:
        return fastest, fastest, 0.0, True
    goal, first, second, weight = way[0, best], best, best, 0.0
    for fit in range(count):
        low = way[4, fit] + held * way[5, fit]
        for over in range(count):
            high = way[4, over] + held * way[5, over]
            if low <= limit < high:
                mix = (limit - low) / (high - low)
                value = way[0, fit] + mix * (way[0, over] - way[0, fit])
                if value < goal:
                    goal, first, second, weight = value, fit, over, mix
    return first, second, weight, True


@numba.njit(cache=True)
def step_seconds(
    total: float,
    slowest: float,
    tail: float,
    depth: int,
    micro_batches: int,
) -> float:
    """The step time of a pipeline, as the module docstring says."""
    round_trip = total / max(1, min(micro_batches, depth))
    return total + (micro_batches - 1) * max(slowest, round_trip) + tail


@numba.njit(cache=True)
def look_ahead(
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
) -> Rest:
    """The best rest for every state.

    Args:
        table: Costs of stages.
        classes, firsts, lasts: Of each mesh: its class, and the positions in the line of devices
            that it takes.
        turns: Factor by which devices that share a core slow a mesh down in the steady state.
        transfers: (meshes, cuts): seconds there and back from a mesh over its later border.
        places: Length of the line of devices.
        micro_batches: Micro-batches of a step.
        floor: A period that cannot be beaten; below it, a shorter slowest stage is worth nothing.
        penalty: Seconds that an overflow of the whole limit costs.
    """
    _, depth, cuts, _ = table.seconds.shape
    shape = (depth + 1, places + 1, cuts)
    value = np.full(shape, np.inf)
    total, slowest, backward = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    tail, overflow = np.zeros(shape), np.zeros(shape)
    stages = np.zeros(shape, np.int64)
    value[:, :, 0] = 0.0
    for k in range(depth - 1, -1, -1):
        for mesh in range(len(classes)):
            a, b, v = firsts[mesh], lasts[mesh], classes[mesh]
            if k == 0 and b != places:
                continue
            for stop in range(cuts - 1 if k == 0 else 1, cuts):
                hop = transfers[mesh, stop] if k else 0.0
                for start in range(stop):
                    if value[k + 1, a, start] == np.inf:
                        continue
                    own = table.seconds[v, k, start, stop]
                    rest = (k + 1, a, start)
                    new_total = total[rest] + own + hop
                    new_slowest = max(slowest[rest], own * turns[mesh])
                    new_tail = max(tail[rest], table.tail[v, k, start, stop] - backward[rest])
                    new_overflow = overflow[rest] + table.overflow[v, k, start, stop]
                    count = stages[rest] + 1
                    reached = step_seconds(
                        new_total, max(floor, new_slowest), new_tail, count, micro_batches
                    )
                    if new_overflow > 0.0:
                        reached += penalty * (1.0 + new_overflow)
                    if reached < value[k, b, stop]:
                        here = (k, b, stop)
                        value[here] = reached
                        total[here], slowest[here] = new_total, new_slowest
                        backward[here] = (
                            backward[rest] + table.backward[v, k, start, stop] + hop / 2.0
                        )
                        tail[here], overflow[here], stages[here] = new_tail, new_overflow, count
    unreachable = np.isinf(value)
    for index in np.argwhere(unreachable):
        total[index[0], index[1], index[2]] = np.inf
    return Rest(total, slowest, backward, tail, stages, overflow)
