"""How many groups: fewer or more than the model has parts, near-equal in cost."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, pairwise

from rlplace.graph.groups.alive import Position


class Costs:
    """Cost of any run of body nodes.

    Args:
        weights: Cost of each node.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._sums = list(accumulate(weights, initial=0.0))

    @property
    def total(self) -> float:
        """Of the whole body."""
        return self._sums[-1]

    @property
    def end(self) -> int:
        """Number of body nodes."""
        return len(self._sums) - 1

    def of(self, start: int, stop: int) -> float:
        """Of the nodes from `start` on and before `stop`."""
        return self._sums[stop] - self._sums[start]

    def spans(self, cuts: Sequence[Position]) -> list[tuple[int, int]]:
        """(First node, one past the last) of each group."""
        return list(pairwise([0, *(cut.index for cut in cuts), self.end]))


def limit(cuts: list[Position], costs: Costs, most: int, fewest: int) -> list[Position]:
    """At most `most` groups: cuts inside repeated elements go first, then others.

    All cuts of one kind go or none, so that equal layers get equal groups; if that would leave
    fewer than `fewest` groups, neighbours are joined instead, the cheapest together.
    """
    if len(cuts) < most:
        return cuts
    outer = [cut for cut in cuts if not cut.inside]
    return thin(outer if len(outer) + 1 >= fewest else cuts, costs, most)


def thin(cuts: list[Position], costs: Costs, most: int) -> list[Position]:
    """At most `most` groups, the dearest of those that are joined as cheap as can be."""
    if len(cuts) < most:
        return cuts
    low, high = 0.0, costs.total
    for _ in range(64):
        middle = (low + high) / 2
        if len(_joined(cuts, costs, middle)) < most:
            high = middle
        else:
            low = middle
    return _joined(cuts, costs, high)


def _joined(cuts: Sequence[Position], costs: Costs, most: float) -> list[Position]:
    """Neighbours joined from the first on while they cost at most `most` together."""
    kept: list[Position] = []
    start = 0
    for cut, (_, after) in zip(cuts, costs.spans(cuts)[1:], strict=True):
        if costs.of(start, after) > most * (1 + 1e-9):
            kept.append(cut)
            start = cut.index
    return kept


def grown(
    cuts: Sequence[Position],
    spare: Collection[Position],
    costs: Costs,
    wants: Callable[[Sequence[tuple[int, int]]], bool],
    least: Callable[[Sequence[tuple[int, int]]], float] = lambda _: 0.0,
) -> list[Position]:
    """Cut the dearest group where the fewest tensors are alive, then most evenly, and again.

    Args:
        cuts: That there are, in order.
        spare: Where it may be cut besides.
        costs: Of the nodes.
        wants: Whether there are too few groups.
        least: Cost above which a group is cut.
    """
    chosen = list(cuts)
    known = {cut.index for cut in cuts}
    places = sorted((p for p in spare if p.index not in known), key=lambda place: place.index)
    while wants(spans := costs.spans(chosen)):
        bound = least(spans)
        options = []
        for start, stop in spans:
            inner = places[_at(places, start) : _at(places, stop)]
            if inner and (cost := costs.of(start, stop)) > bound:
                options.append((-cost, start, stop, inner))
        if not options:
            break
        _, start, stop, inner = min(options, key=lambda option: option[:2])
        best = min(inner, key=lambda place: (place.alive, _larger(costs, start, place, stop)))
        places.remove(best)
        chosen.insert(_at(chosen, best.index), best)
    return chosen


def _at(places: Sequence[Position], index: int) -> int:
    return bisect_left(places, index, key=lambda place: place.index)


def _larger(costs: Costs, start: int, place: Position, stop: int) -> float:
    return max(costs.of(start, place.index), costs.of(place.index, stop))
