"""Choices of a stage whose gradient reductions hide behind its own backward, and that fit.

Backward runs from the last group to the first, and the reductions of its groups queue on a channel
of their own. By how much that channel is late, L, changes with group g of backward b, of which h
seconds of reduction may hide, as

    L_g = max(L_(g+1) - b_g, 0) + h_g,

the recursion of `exposed_reduce`; what is still late at the first group is waited for. So ways to
the same group differ in seconds T, lateness L and bytes, and one is worse than another if
T + max(0, L - L') is not less, for lateness is never passed on by more than it is. Of ways with
about the same bytes (cells of a memory axis) a few are kept; a way's own bytes are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from rlplace.plan.types import GroupChoice
from rlplace.planners.mesh_options import MeshOptions

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Ways that are kept of those with about the same bytes.
_WAYS = 6
#: Fields of a way: seconds but for what is late, what is late, forward, work, and the bytes that
#: are held and that come and go.
_SECONDS, _LATE, _FORWARD, _WORK, _SIZE, _PEAK = range(6)


class _Costs(NamedTuple):
    """Of G groups and S options, (G, S).

    Args:
        seconds: Of a step, but for reductions that may hide; infinite where there is no option.
        forward, backward: Of a micro-batch.
        hides: Of the reduction that may hide.
        size: Bytes that are held.
        transient: Bytes that come and go.
        lean: The least bytes of each group (G,).
        limit: Bytes that there are.
    """

    seconds: Floats
    forward: Floats
    backward: Floats
    hides: Floats
    size: Floats
    transient: Floats
    lean: Floats
    limit: float


@dataclass(frozen=True)
class OverlapProgram:
    """The options of all groups on one mesh, for steps of a number of micro-batches.

    Args:
        options: Of the groups, G.
        count: Micro-batches: how often work counts in a step.
    """

    options: MeshOptions
    count: int

    @cached_property
    def _after(self) -> Floats:
        """Seconds once a step but for reductions that may hide, (G, S)."""
        options = self.options
        with np.errstate(invalid="ignore"):
            after = options.once - np.maximum(0.0, options.hides - options.backward)
        return np.where(np.isfinite(options.work), after, np.inf)

    def _costs(self, held: int, weight: float = 1.0) -> _Costs:
        options = self.options
        size = options.static + held * options.saved
        return _Costs(
            weight * self.count * options.work + self._after,
            options.forward,
            options.backward,
            options.hides,
            size,
            options.transient,
            size.min(axis=1),
            options.limit,
        )

    def block(self, cuts: Ints, held: int, most: float) -> Floats:
        """Seconds, forward and tail (see `StageRow`) of the stages between any two cuts.

        Args:
            cuts: Ascending groups, the last one past the end (N,).
            held: Micro-batches in flight at the peak.
            most: Seconds; a stage whose step takes as long is not looked for.

        Returns:
            (3, N, N) by first and last cut; seconds are infinite where nothing was found.
        """
        found = np.full((3, len(cuts), len(cuts)), np.inf)
        _fill_block(self._costs(held), cuts, self.count, most, found)
        return found

    def stage(
        self, start: int, stop: int, held: int, cells: int = 1, weight: float = 1.0
    ) -> tuple[float, tuple[GroupChoice, ...]] | None:
        """Seconds and choices of the stage [start, stop), or None where none were found that fit.

        Args:
            start: First group.
            stop: One past the last.
            held: Micro-batches in flight at the peak.
            cells: Of the memory axis; with one, only a few ways are kept that fit.
            weight: Of work against all that follows the last backward.

        Returns:
            Weighted seconds of a step, alone on the mesh, and the choices.
        """
        ways = np.empty((stop + 1, cells * _WAYS, 6))
        came = np.empty((stop, cells * _WAYS, 2), np.int64)
        _sweep(self._costs(held, weight), cells, start, stop, np.inf, ways, came)
        way = _best(ways[start])
        seconds = float(ways[start, way, _SECONDS] + ways[start, way, _LATE])
        if not np.isfinite(seconds):
            return None
        found = []
        for group in range(start, stop):
            option, way = (int(value) for value in came[group, way])
            found.append(self.options.choices[group][option])
        return seconds, tuple(found)


@numba.njit(cache=True)
def _fill_block(costs: _Costs, cuts: Ints, count: int, most: float, found: Floats) -> None:
    """Fill `OverlapProgram.block`."""
    ways = np.empty((cuts[-1] + 1, _WAYS, 6))
    came = np.empty((cuts[-1], _WAYS, 2), np.int64)
    for last in range(1, len(cuts)):
        _sweep(costs, 1, 0, cuts[last], most, ways, came)
        for first in range(last):
            own = ways[cuts[first]]
            way = own[_best(own)]
            if way[_SECONDS] == np.inf:
                continue
            found[0, first, last], found[1, first, last] = way[_WORK], way[_FORWARD]
            found[2, first, last] = way[_SECONDS] + way[_LATE] - count * way[_WORK]


@numba.njit(cache=True)
def _best(ways: Floats) -> int:
    return int(np.argmin(ways[:, _SECONDS] + ways[:, _LATE]))


@numba.njit(cache=True)
def _sweep(
    costs: _Costs, cells: int, start: int, stop: int, most: float, ways: Floats, came: Ints
) -> None:
    """Fill the ways to each group, and of each the option and the way that it came from.

    Ways of `most` seconds are left out, for a longer way takes no less.
    """
    ways[start : stop + 1] = np.inf
    ways[stop, 0] = 0.0
    least, new = 0.0, np.empty(6)
    # Bytes beyond the leanest, by cell; with one cell, stages may begin at any group.
    rest = costs.lean[start:stop].sum() if cells > 1 else 0.0
    width = max((costs.limit - rest) / cells, 1.0)
    for group in range(stop - 1, start - 1, -1):
        least += costs.lean[group]
        rest -= costs.lean[group] if cells > 1 else 0.0
        for before in range(ways.shape[1]):
            old = ways[group + 1, before]
            if old[_SECONDS] == np.inf:
                continue
            for option in range(costs.seconds.shape[1]):
                if costs.seconds[group, option] == np.inf:
                    continue
                new[_SIZE] = old[_SIZE] + costs.size[group, option]
                new[_PEAK] = max(old[_PEAK], costs.transient[group, option])
                if new[_SIZE] + new[_PEAK] + rest > costs.limit:
                    continue
                new[_SECONDS] = old[_SECONDS] + costs.seconds[group, option]
                if new[_SECONDS] >= most:
                    continue
                late = (
                    max(old[_LATE] - costs.backward[group, option], 0.0)
                    + costs.hides[group, option]
                )
                new[_LATE] = late
                new[_FORWARD] = old[_FORWARD] + costs.forward[group, option]
                new[_WORK] = (
                    old[_WORK] + costs.forward[group, option] + costs.backward[group, option]
                )
                cell = min(int((new[_SIZE] - least) / width), cells - 1)
                _keep(ways[group], came[group], cell * _WAYS, new, option, before)
        if (ways[group, :, _SECONDS] == np.inf).all():
            break


@numba.njit(cache=True)
def _keep(ways: Floats, came: Ints, at: int, new: Floats, option: int, before: int) -> None:
    """Put a way among those of its cell, unless one is as good; drop those that it is as good as.

    Where the cell is full the one goes that is latest to be over.
    """
    worst, most = -1, new[_SECONDS] + new[_LATE]
    for place in range(at, at + _WAYS):
        old = ways[place]
        if old[_SECONDS] == np.inf:
            continue
        if old[_SECONDS] + max(0.0, old[_LATE] - new[_LATE]) <= new[_SECONDS]:
            return
        if new[_SECONDS] + max(0.0, new[_LATE] - old[_LATE]) <= old[_SECONDS]:
            old[:] = np.inf
    for place in range(at, at + _WAYS):
        over = ways[place, _SECONDS] + ways[place, _LATE]
        if over == np.inf:
            worst = place
            break
        if over > most:
            worst, most = place, over
    if worst >= 0:
        ways[worst] = new
        came[worst, 0], came[worst, 1] = option, before
