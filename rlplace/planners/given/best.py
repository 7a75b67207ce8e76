"""The best list schedule, local search from it, and annealing: the bar that a policy must pass.

List schedules first (HEFT, CPOP, m-ETF, m-SCT: milliseconds), then hill climbing from the best of
them for a few moves an op, which is what a small budget is for; then annealing from the best of all
that was found, and from random placements in turn.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlplace.cost.given.event_loop import EventArrays, Ints
from rlplace.graph.formats.types import GivenInstance
from rlplace.planners.given.anneal import RUNS, anneal
from rlplace.planners.given.critical_path import critical_path_placement
from rlplace.planners.given.etf import earliest_first
from rlplace.planners.given.event_search import EventSearch
from rlplace.planners.given.heft import heft_placement
from rlplace.planners.given.hill_climb import climb
from rlplace.planners.given.sct import favourite_children
from rlplace.planners.given.types import Placed, Placement
from rlplace.planners.types import Limits

#: Moves of the first climb for each op.
_FIRST = 20

_Lists = tuple[Callable[[EventArrays], Ints], ...]


def best(instance: GivenInstance, budget: Limits, rng: np.random.Generator) -> Placed[Placement]:
    """The best that the placers together find."""
    search = EventSearch("best", instance, budget)
    lists: _Lists = (heft_placement, earliest_first, critical_path_placement, _sct)
    for place in lists:
        search.look(place(search.arrays)[None])
        if search.stopped:
            return search.result()
    climb(search, search.start(), rng, _FIRST * search.arrays.ops)
    for run in range(RUNS):
        if search.stopped:
            break
        anneal(search, search.any_placement(rng) if run % 2 else search.start(), rng)
    return search.result()


def _sct(arrays: EventArrays) -> Ints:
    return earliest_first(arrays, favourite_children(arrays))
