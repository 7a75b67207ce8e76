"""Every placement: the optimum of a tiny problem, and nothing else in reasonable time.

Devices that nothing tells apart (equal times and links) are used in their order, so that of
placements which differ only by exchanging them one is looked at. Complexity: D^V, over the
exchanges.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rlplace.cost.given.event_loop import EventArrays
from rlplace.graph.formats.types import GivenInstance
from rlplace.planners.given.alike import alike_before
from rlplace.planners.given.event_search import EventSearch
from rlplace.planners.given.types import Placed, Placement
from rlplace.planners.types import Limits


def exhaustive(
    instance: GivenInstance, budget: Limits, rng: np.random.Generator
) -> Placed[Placement]:
    """The best of all placements; of the first ones, where the budget ends before."""
    search = EventSearch("exhaustive", instance, budget)
    for placement in all_placements(search.arrays):
        search.offer(placement)
        if search.stopped:
            break
    return search.result()


def all_placements(arrays: EventArrays) -> Iterator[Placement]:
    """Every legal placement, once for all exchanges of devices that are alike."""
    before = alike_before(arrays)
    legal = [np.flatnonzero(np.isfinite(row)).tolist() for row in arrays.times]
    stack: list[Placement] = [()]
    while stack:
        placed = stack.pop()
        if len(placed) == arrays.ops:
            yield placed
            continue
        used = set(placed)
        stack += [
            (*placed, device)
            for device in reversed(legal[len(placed)])
            if before[device] is None or before[device] in used
        ]
