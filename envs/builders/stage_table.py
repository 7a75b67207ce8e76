"""What every stage of every class of mesh costs: a numba loop over plain arrays."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from rlplace.envs.builders.rates import BACKWARD, FORWARD, OPTIMIZER, REDUCE, SAVED, STATIC
from rlplace.envs.types import FloatArray

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Ways(NamedTuple):
    """All ways to run the groups, by class of mesh; the fields of `rates.Columns` stacked.

    Shapes: number, hidden, limit (V,): ways of each class, share of the gradient reduction that
    may hide, bytes for states and activations; sums (V, 6, C, O); first_reduce and transient
    (V, C - 1, O).
    """

    number: Ints
    hidden: Floats
    limit: Floats
    sums: Floats
    first_reduce: Floats
    transient: Floats


class StageTable(NamedTuple):
    """Stages by (class of mesh, stages behind, start cut, stop cut).

    Args:
        seconds: Forward + backward of one micro-batch, of the leanest way where nothing fits.
        backward: Backward of one micro-batch.
        tail: Exposed gradient reduction and optimizer.
        overflow: Share of the limit by which the leanest way exceeds it, 0 where something fits.
        fill: Bytes of the way that was taken over the limit.
        way: Which way was taken.
    """

    seconds: FloatArray
    backward: FloatArray
    tail: FloatArray
    overflow: FloatArray
    fill: FloatArray
    way: npt.NDArray[np.int16]


@numba.njit(cache=True)
def stage_table(
    ways: Ways,
    micro_batches: int,
    depth: int,
) -> StageTable:
    """Cost all stages: the fastest way that fits, or the leanest one where none does.

    Args:
        ways: All ways to run the groups.
        micro_batches: Micro-batches of a step.
        depth: Stages behind, at most.
    """
    classes, _, cuts, most = ways.sums.shape
    shape = (classes, depth, cuts, cuts)
    small = np.float32
    seconds, back, tail = np.zeros(shape, small), np.zeros(shape, small), np.zeros(shape, small)
    overflow, fill = np.zeros(shape, small), np.zeros(shape, small)
    taken = np.zeros(shape, np.int16)
    # Of each way: step seconds (without fill and drain), seconds, backward, tail, bytes, and bytes
    # a micro-batch in flight.
    way, peak = np.zeros((6, most)), np.zeros(most)
    for v in range(classes):
        share, count, limit = ways.hidden[v], ways.number[v], ways.limit[v]
        for stop in range(1, cuts):
            peak[:] = 0.0
            for start in range(stop - 1, -1, -1):
                low, high = ways.sums[v, :, start], ways.sums[v, :, stop]
                for o in range(count):
                    peak[o] = max(peak[o], ways.transient[v, start, o])
                    b = high[BACKWARD, o] - low[BACKWARD, o]
                    red = high[REDUCE, o] - low[REDUCE, o]
                    late = max(share * ways.first_reduce[v, start, o], share * red - b)
                    t = high[FORWARD, o] - low[FORWARD, o] + b
                    e = high[OPTIMIZER, o] - low[OPTIMIZER, o] + (1.0 - share) * red + late
                    way[0, o], way[1, o], way[2, o], way[3, o] = micro_batches * t + e, t, b, e
                    way[4, o] = high[STATIC, o] - low[STATIC, o] + peak[o]
                    way[5, o] = high[SAVED, o] - low[SAVED, o]
                fastest = np.argmin(way[0, :count])
                for k in range(depth - 1, -1, -1):
                    held = min(micro_batches, k + 1)
                    best = _pick(way, count, limit, held)
                    at = (v, k, start, stop)
                    seconds[at], back[at], tail[at] = way[1, best], way[2, best], way[3, best]
                    taken[at] = best
                    fill[at] = (way[4, best] + held * way[5, best]) / limit
                    overflow[at] = max(0.0, fill[at] - 1.0)
                    if best == fastest and fill[at] <= 1.0:
                        # Fewer micro-batches in flight fit all the more.
                        for less in range(k):
                            other = (v, less, start, stop)
                            seconds[other], back[other] = seconds[at], back[at]
                            tail[other], taken[other] = tail[at], best
                            held = min(micro_batches, less + 1)
                            fill[other] = (way[4, best] + held * way[5, best]) / limit
                        break
    return StageTable(seconds, back, tail, overflow, fill, taken)


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
