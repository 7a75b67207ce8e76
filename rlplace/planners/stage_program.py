"""Pipelines of the least time from a table of what stages take: the program of Alpa and of Piper.

For each limit of the slowest stage, a program over (stages, first cut, devices) makes the sum of
the stages' seconds least (Alpa, arXiv 2201.12023); B micro-batches take that sum and (B - 1) times
the slowest stage. With B without end it is the largest load alone that counts (Piper, arXiv
2111.05972).
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: How much more than the last one a limit of the slowest stage is.
_STEP = 1.002
#: So many pipelines are kept.
_KEPT = 4


def pipelines(
    table: Floats, sizes: Sequence[int], devices: int, micro_batches: float
) -> list[list[tuple[int, int, int]]]:
    """The best pipelines, as (first cut, last cut, shape) of each stage; none if none is known.

    Args:
        table: Seconds of a micro-batch by shape, stages behind, first and last cut, (J, S, C, C).
        sizes: Devices of each shape.
        devices: That there are.
        micro_batches: Of a step.
    """
    limits = np.unique(table[np.isfinite(table)])
    cuts, last, total = table.shape[2], 0.0, np.inf
    # Some stage has each group.
    least = max(table[:, :, :cut, cut:].min(initial=np.inf) for cut in range(1, cuts))
    found: list[tuple[float, list[tuple[int, int, int]]]] = []
    for limit in limits[limits >= least]:
        if micro_batches * limit >= total:
            break
        if limit < last * _STEP:
            continue
        last = limit
        best, came = _fill(table, np.array(sizes, np.int64), devices, limit)
        stages = _stages(best, came, sizes)
        if stages:
            slowest = max(
                table[shape, len(stages) - 1 - index, start, stop]
                for index, (start, stop, shape) in enumerate(stages)
            )
            value = float(best[len(stages), 0, -1] + (micro_batches - 1) * slowest)
            total = min(total, value)
            found.append((value, stages))
    return [stages for _, stages in sorted(found, key=lambda one: one[0])[:_KEPT]]


@numba.njit(cache=True)
def _fill(table: Floats, sizes: Ints, devices: int, limit: float) -> tuple[Floats, Ints]:
    """Least sum of seconds of (stages, first cut, devices at most), and the stage that gave it."""
    shapes, depth, cuts, _ = table.shape
    best = np.full((depth + 1, cuts, devices + 1), np.inf)
    came = np.full((depth + 1, cuts, devices + 1, 2), -1, np.int64)
    best[0, cuts - 1] = 0.0
    for stages in range(1, depth + 1):
        for start in range(cuts - 1):
            for stop in range(start + 1, cuts):
                for shape in range(shapes):
                    own, size = table[shape, stages - 1, start, stop], sizes[shape]
                    if own > limit:
                        continue
                    for room in range(size, devices + 1):
                        total = own + best[stages - 1, stop, room - size]
                        if total < best[stages, start, room]:
                            best[stages, start, room] = total
                            came[stages, start, room, 0] = stop
                            came[stages, start, room, 1] = shape
    return best, came


def _stages(best: Floats, came: Ints, sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """The stages of the least sum over all groups and devices."""
    depth = int(np.argmin(best[:, 0, -1]))
    if not np.isfinite(best[depth, 0, -1]):
        return []
    found, start, room = [], 0, best.shape[2] - 1
    for stages in range(depth, 0, -1):
        stop, shape = (int(value) for value in came[stages, start, room])
        found.append((start, stop, shape))
        start, room = stop, room - sizes[shape]
    return found
