"""The parts of a model: where it may be cut with little to carry over, and where else."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rlplace.graph.groups.alive import Anchors, Gap, Position, find_gaps
from rlplace.graph.groups.balance import Costs, grown
from rlplace.graph.groups.branches import Branches
from rlplace.graph.groups.weigh import weights
from rlplace.graph.program import Program

#: A region with more matmul-like ops than this is cut even where several tensors cross.
MAX_ANCHORS = 16
#: The same for a region that holds more than `DEAR` of the model's cost.
MAX_DEAR_ANCHORS = 8
#: Share of the cost of the model: so many groups should be there, if the model has as many parts.
DEAR = 1.0 / 20.0
#: A group that is dear and costs so many times what half of the groups cost at most is cut.
UNEVEN = 4.0


class Parts:
    """The parts of a model.

    Args:
        program: The exported program.
        most: Parts are not cut for being dear where there are so many.
    """

    def __init__(self, program: Program, most: int) -> None:
        self._body = program.body()
        self._anchors = Anchors(program, self._body)
        self._weights = weights(program, self._body)
        self.costs = Costs(self._weights)
        self._gaps = find_gaps(program, self._body, self._anchors)
        #: First anchors of the gaps inside an embedding, or between the factors of one thing.
        self._tied = {gap.start for gap in self._gaps if gap.joins_lookup}
        self.cuts = self._find_cuts(most)

    def spare(self, tied: bool) -> list[Position]:
        """The best positions of all other gaps.

        Args:
            tied: Of those within what belongs together, or of the rest.
        """
        cuts = {cut.index for cut in self.cuts}
        return [
            gap.best
            for gap in self._gaps
            if (gap.start in self._tied) == tied
            and not any(place.index in cuts for place in gap.legal)
        ]

    def _find_cuts(self, most: int) -> list[Position]:
        cuts = [gap.best for gap in self._gaps if gap.best.alive <= 1 and not gap.joins_lookup]
        cuts = _merged(cuts, self._branch_cuts(cuts))
        while more := self._long_cuts(cuts):
            cuts = _merged(cuts, more)
        loose = [gap.best for gap in self._gaps if gap.start not in self._tied]
        return grown(cuts, loose, self.costs, lambda spans: len(spans) < most, self._dear)

    def _branch_cuts(self, cuts: Sequence[Position]) -> list[Position]:
        """Between branches; finds what belongs together on the way."""
        costs = dict(zip(self._body, self._weights, strict=True))
        more: list[Position] = []
        for start, stop, inner in self._regions(cuts):
            if inner:
                anchors = [self._body[i] for i in self._anchors.all if start <= i < stop]
                branches = Branches(self._body[start:stop], anchors, costs, MAX_ANCHORS)
                more += branches.cuts(inner)
                self._tied |= {gap.start for gap in inner if branches.parts_factors(gap)}
        return more

    def _long_cuts(self, cuts: Sequence[Position]) -> list[Position]:
        """The best positions that regions of too many anchors have left."""
        more: list[Position] = []
        for start, stop, inner in self._regions(cuts):
            places = [gap.best for gap in inner if gap.start not in self._tied]
            dear = self.costs.of(start, stop) > DEAR * self.costs.total
            most = MAX_DEAR_ANCHORS if dear else MAX_ANCHORS
            if places and len(self._anchors.matmuls(start, stop)) > most:
                fewest = min(place.alive for place in places)
                more += [place for place in places if place.alive == fewest]
        return more

    def _dear(self, spans: Sequence[tuple[int, int]]) -> float:
        """Cost above which a group is too dear."""
        usual = median(self.costs.of(start, stop) for start, stop in spans)
        return max(DEAR * self.costs.total, UNEVEN * usual)

    def _regions(self, cuts: Sequence[Position]) -> list[tuple[int, int, list[Gap]]]:
        """(First node, one past the last, gaps inside) of each region between two cuts."""
        gaps = iter(self._gaps)
        gap = next(gaps, None)
        found = []
        for start, stop in self.costs.spans(cuts):
            inner: list[Gap] = []
            while gap is not None and gap.stop < stop:
                if gap.start >= start:
                    inner.append(gap)
                gap = next(gaps, None)
            found.append((start, stop, inner))
        return found


def _merged(cuts: Sequence[Position], more: Sequence[Position]) -> list[Position]:
    return sorted({cut.index: cut for cut in (*cuts, *more)}.values(), key=lambda cut: cut.index)
