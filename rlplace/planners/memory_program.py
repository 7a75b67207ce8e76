"""One option for each of a chain of items, under a limit of bytes: a program with a memory axis.

C(item, bytes, option) = least over the option before of C(item - 1, bytes - own, before) + switch
+ own seconds: the recurrence of Galvatron (arXiv 2211.13878), and without switching the
knapsack of OSDP (arXiv 2209.13258). Complexity: items x cells x options^2, or x options where
nothing is charged for a switch.

Only what an option has beyond the leanest of its item is on the axis, in cells to whose nearest it
is rounded; each state keeps its true bytes, and the quickest state that truly fits is taken. So the
leanest options are always found where they fit.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_CELLS = 1024


def memory_program(
    seconds: Floats, size: Floats, room: float, switch: Floats | None = None, cells: int = _CELLS
) -> tuple[float, Ints]:
    """The quickest options that fit, and their seconds.

    Args:
        seconds: Of each item and option, (N, S); infinite where there is no such option.
        size: Bytes likewise.
        room: Bytes that there are.
        switch: Seconds from each option to each of the next item, (S, S); None for no such cost.
        cells: Cells of the memory axis.

    Returns:
        Seconds and option of each item, (N,); infinite and the leanest options if nothing fits.
    """
    size = np.where(np.isfinite(seconds), size, np.inf)
    lean = size.min(axis=1)
    free = room - lean.sum()
    leanest = np.argmin(np.where(size <= lean[:, None], seconds, np.inf), axis=1)
    if free < 0.0 or not np.isfinite(lean).all():
        return float("inf"), leanest.astype(np.int64)
    if switch is None:
        quick = np.argmin(seconds, axis=1)
        rows = np.arange(len(seconds))
        if size[rows, quick].sum() <= room:
            return float(seconds[rows, quick].sum()), quick.astype(np.int64)
    excess = size - lean[:, None]
    width = max(free / cells, 1.0)
    whole = np.where(np.isfinite(excess), np.rint(np.minimum(excess / width, cells + 1)), cells + 1)
    args = (seconds, np.where(np.isfinite(excess), excess, 0.0), whole.astype(np.int64), free)
    if switch is None:
        return _apart(*args, cells)
    return _chained(*args, switch, cells)


@numba.njit(cache=True)
def _apart(
    seconds: Floats, excess: Floats, whole: Ints, free: float, cells: int
) -> tuple[float, Ints]:
    """The program without a cost of switching: the option before does not matter."""
    items, options = seconds.shape
    best, held = np.full(cells + 1, np.inf), np.zeros(cells + 1)
    best[0] = 0.0
    choice = np.full((items, cells + 1), -1, np.int64)
    for item in range(items):
        now, true = np.full(cells + 1, np.inf), np.zeros(cells + 1)
        for option in range(options):
            own, step = seconds[item, option], whole[item, option]
            if own == np.inf:
                continue
            for cell in range(cells + 1 - step):
                total = best[cell] + own
                bytes_ = held[cell] + excess[item, option]
                if total < now[cell + step] and bytes_ <= free:
                    now[cell + step], true[cell + step] = total, bytes_
                    choice[item, cell + step] = option
        best, held = now, true
    cell = int(np.argmin(best))
    value, picks = best[cell], np.zeros(items, np.int64)
    for item in range(items - 1, -1, -1):
        picks[item] = choice[item, cell]
        cell -= whole[item, picks[item]]
    return value, picks


@numba.njit(cache=True)
def _chained(
    seconds: Floats, excess: Floats, whole: Ints, free: float, switch: Floats, cells: int
) -> tuple[float, Ints]:
    """The program whose state is the option of the last item too."""
    items, options = seconds.shape
    best, held = np.full((cells + 1, options), np.inf), np.zeros((cells + 1, options))
    before = np.full((items, cells + 1, options), -1, np.int64)
    for option in range(options):
        if whole[0, option] <= cells and excess[0, option] <= free:
            best[whole[0, option], option] = seconds[0, option]
            held[whole[0, option], option] = excess[0, option]
    for item in range(1, items):
        now, true = np.full((cells + 1, options), np.inf), np.zeros((cells + 1, options))
        for option in range(options):
            own, step = seconds[item, option], whole[item, option]
            if own == np.inf:
                continue
            for cell in range(cells + 1 - step):
                for last in range(options):
                    total = best[cell, last] + switch[last, option] + own
                    bytes_ = held[cell, last] + excess[item, option]
                    if total < now[cell + step, option] and bytes_ <= free:
                        now[cell + step, option], true[cell + step, option] = total, bytes_
                        before[item, cell + step, option] = last
        best, held = now, true
    place = int(np.argmin(best))
    cell, option = place // options, place % options
    value, picks = best[cell, option], np.zeros(items, np.int64)
    for item in range(items - 1, -1, -1):
        picks[item] = option
        last = before[item, cell, option]
        cell -= whole[item, option]
        option = last
    return value, picks
