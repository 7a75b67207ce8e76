"""Steps from placement to placement, compiled by numba: what hill climbing and annealing share.

Moves: an op to any device; two ops exchange their devices; an op to the device of one that it
reads or that reads it; an op and such a neighbour to any device. The last two keep talk short,
which single random moves hardly ever do.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from rlplace.cost.given.event_loop import EventArrays, Floats, Ints
from rlplace.cost.given.events import TIE_ORDERS
from rlplace.planners.given.event_search import EventSearch, guide_of

_MOVE, _EXCHANGE, _JOIN, _PAIR = range(4)
#: Shares of the moves.
_MIX = (0.2, 0.2, 0.3, 0.3)
#: Simulated ops of a chunk, after each of which the budget is looked at: some milliseconds.
_CHUNK = 50_000


class Moves(NamedTuple):
    """Moves to try, one after the other (N,).

    Args:
        kind: Of the move.
        one: The op that moves.
        other: The other op.
        device: Where to, for the kinds that say it.
        worse: How much worse the guide may become.
    """

    kind: Ints
    one: Ints
    other: Ints
    device: Ints
    worse: Floats


class Walker:
    """Walks from a placement by the guide of the search.

    Args:
        search: Is shown what is found on the way.
        start: Where to begin, which counts as an evaluation (V,).
        rng: The source of all randomness.
    """

    def __init__(self, search: EventSearch, start: Ints, rng: np.random.Generator) -> None:
        self._search, self._rng, self.at = search, rng, start.copy()
        arrays = search.arrays
        sources = np.repeat(np.arange(arrays.ops), np.diff(arrays.first))
        self._pairs = np.stack([sources, arrays.readers[0]])
        self._chunk = max(8, _CHUNK // ((search.few or TIE_ORDERS) * arrays.ops))
        self.guide = self.best = float(search.look(start[None])[0])

    def walk(self, moves: int, temperature: float) -> int:
        """Try some moves, fewer where the budget or a chunk ends before.

        A move is taken with the probability exp(-(how much worse) / temperature).

        Returns:
            How many were tried.
        """
        search = self._search
        count = min(moves, self._chunk, search.left)
        best = self.at.copy()
        drawn = self._draw(count, temperature)
        guide, found, tried = _walk(search.arrays, search.few, self.at, self.guide, drawn, best)
        search.saw(best, found, tried)
        self.guide, self.best = guide, min(self.best, found)
        return count

    def _draw(self, count: int, temperature: float) -> Moves:
        rng, ops = self._rng, len(self.at)
        kind = rng.choice(4, count, p=_MIX)
        one, other = rng.integers(ops, size=(2, count))
        near = kind >= _JOIN
        if self._pairs.size:
            pairs = self._pairs[:, rng.integers(self._pairs.shape[1], size=count)]
            turned = np.where(rng.random(count) < 0.5, pairs, pairs[::-1])
            one, other = np.where(near, turned, (one, other))
        else:
            kind[near] = _MOVE
        worse = -temperature * np.log1p(-rng.random(count))
        return Moves(kind, one, other, self._search.any_devices(one, rng), worse)


@numba.njit(cache=True)
def _walk(
    arrays: EventArrays, few: int, at: Ints, guide: float, moves: Moves, best: Ints
) -> tuple[float, float, int]:
    """Try moves from `at`, which becomes where the walk ends; `best` becomes the best on the way.

    Returns:
        The guides of the two, and how many placements were looked at. Where nothing was better, the
        best is the beginning.
    """
    least, looked = guide, 0
    for step in range(len(moves.kind)):
        one, other, kind = moves.one[step], moves.other[step], moves.kind[step]
        first, second = at[one], at[other]
        to_one, to_other = moves.device[step], second
        if kind == _EXCHANGE:
            to_one, to_other = second, first
        elif kind == _JOIN:
            to_one = second
        elif kind == _PAIR:
            to_other = to_one
        if one == other or (to_one == first and to_other == second):
            continue
        if not (np.isfinite(arrays.times[one, to_one] + arrays.times[other, to_other])):
            continue
        at[one], at[other] = to_one, to_other
        value = guide_of(arrays, few, at)
        looked += 1
        if value <= guide + moves.worse[step]:
            guide = value
            if value < least:
                least = value
                best[:] = at
        else:
            at[one], at[other] = first, second
    return guide, least, looked
