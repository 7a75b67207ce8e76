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

from rlplace.graph.formats.types import GivenInstance
from rlplace.planners.given.event_search import EventSearch
from rlplace.planners.given.types import Placed, Placement
from rlplace.planners.types import Limits
from rlplace.planners.vectors import settle


def cross_entropy(
    instance: GivenInstance, budget: Limits, rng: np.random.Generator
) -> Placed[Placement]:
    """The best placement that was drawn, until every op is sure of its device."""
    search = EventSearch("cross_entropy", instance, budget)
    settle(search, search.legal, rng)
    return search.result()
