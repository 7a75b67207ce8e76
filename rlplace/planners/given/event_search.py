"""The search of the placers under the event simulation: what they share beside the budget.

A placement is worth its median makespan over the tie orders (`median_makespan`). Searches that look
at thousands are guided by that too where ops are few; else by the mean over the first few orders:
it is cheaper, and a better slope, since a placement that is good in most orders is nearer to one
that is good in all. What the guide likes is valued in full.
"""

from __future__ import annotations

import numba
import numpy as np

from rlplace.cost.given.event_loop import EventArrays, Floats, Ints, event_arrays, run_events
from rlplace.cost.given.events import TIE_ORDERS, makespan_bound
from rlplace.graph.formats.types import GivenInstance
from rlplace.planners.given.search import PlacementSearch
from rlplace.planners.given.types import Placement
from rlplace.planners.types import Limits

#: Tie orders whose mean guides a search, and up to how many ops all of them do.
_FEW, _SMALL = 3, 40
#: A guide that is over the best median by this much is not worth the full look.
_NEAR = 1.05


class EventSearch(PlacementSearch[Placement]):
    """The best placement of a GiPH or DOPPLER instance so far.

    Args:
        name: Name of the placer.
        instance: The question.
        budget: What it may spend.

    Raises:
        InputError: If the instance is of another form.
    """

    def __init__(self, name: str, instance: GivenInstance, budget: Limits) -> None:
        self.arrays = event_arrays(instance, TIE_ORDERS)
        self.few = 0 if self.arrays.ops <= _SMALL else _FEW
        self.bound = makespan_bound(instance)
        self.legal = np.isfinite(self.arrays.times)
        super().__init__(name, self._median, budget)

    def look(self, placements: Ints) -> Floats:
        """Guides of legal placements (N, V); the best of them is offered."""
        guides = np.array([guide_of(self.arrays, self.few, placed) for placed in placements])
        best = int(np.argmin(guides))
        self.saw(placements[best], float(guides[best]), len(placements))
        return guides

    def saw(self, placement: Ints, guide: float, evaluations: int) -> None:
        """Take in the best of some placements that were looked at elsewhere."""
        self.evaluations += evaluations
        if self.best is None or guide <= _NEAR * self.best[1]:
            chosen = tuple(placement.tolist())
            if self.best is None or chosen != self.best[0]:
                self.offer(chosen, evaluations=0)

    def any_devices(self, ops: Ints, rng: np.random.Generator) -> Ints:
        """A random legal device for each of some ops."""
        counts = self.legal.sum(axis=1)[ops]
        nth = (rng.random(len(ops)) * counts).astype(np.int64)
        # Legal devices first, in their order.
        listed = np.argsort(~self.legal, axis=1, kind="stable")
        return np.asarray(listed[ops, nth], np.int64)

    def any_placement(self, rng: np.random.Generator) -> Ints:
        """A random legal placement."""
        return self.any_devices(np.arange(self.arrays.ops), rng)

    def start(self) -> Ints:
        """The best placement so far, which has to exist."""
        assert self.best is not None
        return np.array(self.best[0], np.int64)

    def _median(self, placement: Placement) -> float:
        return float(guide_of(self.arrays, 0, np.array(placement, np.int64)))


@numba.njit(cache=True)
def guide_of(arrays: EventArrays, few: int, placement: Ints) -> float:
    """The mean makespan over the first few tie orders; for 0 the median over all."""
    start, end = np.empty(len(placement)), np.empty(len(placement))
    runs = np.empty(few if few else len(arrays.roots))
    for order in range(len(runs)):
        runs[order] = run_events(arrays, order, placement, start, end)
    return float(runs.mean() if few else np.median(runs))
