"""Simulated annealing (Kirkpatrick et al. 1983) of placements, several times from random ones.

Decision space: all placements, by the moves of `walk`. The temperature falls geometrically, from a
hundredth of the bound of the makespan to a two-thousandth: a move of one op costs about that much.
Several short runs beat one long run, since most of the luck is in the beginning. Complexity:
O((V + E) log V) a move.
"""

from __future__ import annotations

import numpy as np

from rlplace.cost.given.event_loop import Ints
from rlplace.graph.formats.types import GivenInstance
from rlplace.planners.given.event_search import EventSearch
from rlplace.planners.given.types import Placed, Placement
from rlplace.planners.given.walk import Walker
from rlplace.planners.types import Limits

#: Runs where the budget does not end them, and moves of a run for each op.
RUNS, MOVES = 8, 800
_HOT, _COOLING = 0.01, 1 / 20


def annealing(
    instance: GivenInstance, budget: Limits, rng: np.random.Generator
) -> Placed[Placement]:
    """The best of some runs."""
    search = EventSearch("anneal", instance, budget)
    for _ in range(RUNS):
        anneal(search, search.any_placement(rng), rng)
        if search.stopped:
            break
    return search.result()


def anneal(search: EventSearch, start: Ints, rng: np.random.Generator) -> None:
    """One run from a placement; a shorter one where the budget ends before.

    Args:
        search: Is shown what is found.
        start: Where to begin (V,).
        rng: The source of all randomness.
    """
    walker = Walker(search, start, rng)
    tried, moves, began = 0, MOVES * len(start), search.progress
    while not search.stopped and tried < moves:
        spent = (search.progress - began) / max(1.0 - began, 1e-9)
        cooled = _COOLING ** max(tried / moves, spent)
        tried += walker.walk(moves - tried, _HOT * search.bound * cooled)
