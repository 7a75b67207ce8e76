"""Monte Carlo tree search over decisions op by op.

automap (Schaarschmidt et al. 2021, arXiv 2112.02958), with UCT (Kocsis and Szepesvári 2006). An
episode begins with a default placement; each decision gives the next op a device or stops, which
leaves the rest as it is; only the end of an episode is valued. The tree grows by one node an
episode, below it decisions are random. Decision space: all placements, in principle; in practice
those that differ from the default in what is decided first. Complexity: O(V D) an episode beside
the simulation.

automap decides the shardings of arguments and lets them spread; here an op gets a device. Its
learned ranking of what is worth a decision is left out: the ops go by their work, largest first.
The default is that each op runs where it is fastest.
"""

from __future__ import annotations

import numpy as np

from rlplace.graph.formats.types import GivenInstance
from rlplace.planners.given.event_search import EventSearch
from rlplace.planners.given.ranks import mean_times
from rlplace.planners.given.types import Placed, Placement
from rlplace.planners.types import Limits
from rlplace.planners.vectors import grow


def tree_search(
    instance: GivenInstance, budget: Limits, rng: np.random.Generator
) -> Placed[Placement]:
    """The best placement of all episodes; a reward is the default's makespan over the episode's."""
    search = EventSearch("tree_search", instance, budget)
    default = np.argmin(search.arrays.times, axis=1).astype(np.int64)
    order = np.argsort(-mean_times(search.arrays), kind="stable").tolist()
    grow(search, search.legal, default, order, rng)
    return search.result()
