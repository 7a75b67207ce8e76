"""Hill climbing with moves and exchanges, from random placements.

The plain bar of every paper on placement (GiPH, MLSys 2023, and DOPPLER, ICLR 2026, compare with
it). Decision space: all placements, by the moves of `walk`; a move that is not worse is taken.
When nothing has been better for a while, it begins anew at random. Complexity: O((V + E) log V) a
move.
"""

from __future__ import annotations

import numpy as np

from rlplace.cost.given.event_loop import Ints
from rlplace.graph.formats.types import GivenInstance
from rlplace.planners.given.event_search import EventSearch
from rlplace.planners.given.types import Placed, Placement
from rlplace.planners.given.walk import Walker
from rlplace.planners.types import Limits

#: Climbs where the budget does not end them, and fruitless moves for each op that end a climb.
_CLIMBS, _PATIENCE = 10, 100


def hill_climbing(
    instance: GivenInstance, budget: Limits, rng: np.random.Generator
) -> Placed[Placement]:
    """The best of some climbs."""
    search = EventSearch("hill_climb", instance, budget)
    for _ in range(_CLIMBS):
        climb(search, search.any_placement(rng), rng)
        if search.stopped:
            break
    return search.result()


def climb(
    search: EventSearch, start: Ints, rng: np.random.Generator, moves: int | None = None
) -> None:
    """Climb from a placement.

    Args:
        search: Is shown what is found.
        start: Where to begin (V,).
        rng: The source of all randomness.
        moves: At most so many; by default until nothing has been better for a while.
    """
    walker = Walker(search, start, rng)
    patience = _PATIENCE * len(start)
    tried, since = 0, 0
    while not search.stopped and since < patience and (moves is None or tried < moves):
        before = walker.best
        step = walker.walk(patience - since if moves is None else moves - tried, 0.0)
        tried += step
        since = 0 if walker.best < before else since + step
