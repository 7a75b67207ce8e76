"""Cross-entropy minimisation of one table of probabilities.

The placement half of Gao, Chen, Li, "Post: Device Placement with Cross-Entropy Minimization and
Proximal Policy Optimization", NeurIPS 2018. Decision space: all placements. Each op has a
distribution of its own over its devices; placements are drawn, and the table moves towards the
frequencies of the best tenth, which minimises the cross entropy to the distribution of good
placements. Complexity: O(N (V D + (V + E) log V)) a round of N placements.

Left out: Post's steps of PPO between the rounds. They use the placements that are not among the
best, to spare measurements on a real machine, which here cost microseconds.
"""

from __future__ import annotations

import numpy as np

from rlplace.cost.given.event_loop import Floats, Ints
from rlplace.graph.formats.types import GivenInstance
from rlplace.planners.given.event_search import EventSearch
from rlplace.planners.given.types import Placed, Placement
from rlplace.planners.types import Limits

#: Placements of a round, the share of them that the table follows, and how far.
_ROUND, _ELITE, _STEP = 200, 0.1, 0.3
#: Rounds where the budget does not end them, and the probability at which all is said.
_ROUNDS, _SURE = 400, 0.999


def cross_entropy(
    instance: GivenInstance, budget: Limits, rng: np.random.Generator
) -> Placed[Placement]:
    """The best placement that was drawn, until every op is sure of its device."""
    search = EventSearch("cross_entropy", instance, budget)
    table = search.legal / search.legal.sum(axis=1, keepdims=True)
    for _ in range(_ROUNDS):
        drawn = _draw(table, min(_ROUND, search.left), rng)
        guides = search.look(drawn)
        if search.stopped or table.max(axis=1).min() > _SURE:
            break
        elite = drawn[np.argsort(guides, kind="stable")[: max(1, int(_ELITE * len(drawn)))]]
        followed = (elite[:, :, None] == np.arange(table.shape[1])).mean(axis=0)
        table += _STEP * (followed - table)
    return search.result()


def _draw(table: Floats, count: int, rng: np.random.Generator) -> Ints:
    """Placements by the table (count, V)."""
    below = np.cumsum(table, axis=1)
    below /= below[:, -1:]
    drawn = rng.random((count, len(table), 1)) >= below
    return np.asarray(drawn.sum(axis=2), np.int64)
