"""Cross-entropy minimisation of tables (Post, Gao, Chen, Li, NeurIPS 2018).

Decision space: what `encoding` says: order of islands, micro-batch count, stages with widths, work
and tp degrees. Algorithm: every decision has a distribution over its options; vectors are drawn,
and the table moves towards the frequencies of the best tenth (`vectors.settle`). Complexity: rounds
x vectors of a round x estimates. Left out: Post's steps of PPO between the rounds, and its table of
a device for every group, of which hardly any drawing is a pipeline.
"""

from __future__ import annotations

import numpy as np

from rlplace.plan.types import Instance
from rlplace.planners.costing import Costing
from rlplace.planners.encoding import VectorSearch
from rlplace.planners.search import Search
from rlplace.planners.types import Budget, PlannerResult
from rlplace.planners.vectors import settle


def cross_entropy(
    instance: Instance, budget: Budget, rng: np.random.Generator, costing: Costing | None = None
) -> PlannerResult:
    """The best plan that was drawn, until every decision is sure."""
    search = Search("cross_entropy", costing or Costing(instance), budget)
    looker = VectorSearch(search)
    settle(looker, looker.encoding.legal, rng)
    return search.result()
