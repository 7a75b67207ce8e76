"""Monte Carlo tree search over decisions (automap, Schaarschmidt et al., arXiv 2112.02958).

Decision space: what `encoding` says: order of islands, micro-batch count, stages with widths, work
and tp degrees. Algorithm: UCT; an episode decides some of them anew, in that order, and the rest is
as in the default, replicas on all devices (`vectors.grow`). Complexity: episodes x estimates. Left
out: automap decides the shardings of arguments and lets them spread, here layouts of groups are
solved; its learned ranking of what is worth a decision. Decisions of stages that there are not are
branches too, so that deep down many episodes are of one plan, which is estimated once.
"""

from __future__ import annotations

import numpy as np

from rlplace.plan.types import Instance
from rlplace.planners.costing import Costing
from rlplace.planners.encoding import VectorSearch
from rlplace.planners.search import Search
from rlplace.planners.types import Budget, PlannerResult
from rlplace.planners.vectors import grow


def tree_search(
    instance: Instance, budget: Budget, rng: np.random.Generator, costing: Costing | None = None
) -> PlannerResult:
    """The best plan of all episodes."""
    search = Search("tree_search", costing or Costing(instance), budget)
    looker = VectorSearch(search)
    legal = looker.encoding.legal
    grow(looker, legal, looker.encoding.default, range(len(legal)), rng)
    return search.result()
