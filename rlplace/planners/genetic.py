"""Genetic search with biased random keys (BRKGA, the base of REGAL, arXiv 1905.02494).

Decision space: what `encoding` says: order of islands, micro-batch count, stages with widths, work
and tp degrees. Algorithm: a chromosome is a key in [0, 1] for each decision and option, the
largest is taken; a generation keeps the elite and fills up with children of an elite and an other
parent, and new ones (`vectors.evolve`). Complexity: generations x chromosomes x estimates. Left
out: REGAL's learned distribution of the first keys.
"""

from __future__ import annotations

import numpy as np

from rlplace.plan.types import Instance
from rlplace.planners.costing import Costing
from rlplace.planners.encoding import VectorSearch
from rlplace.planners.search import Search
from rlplace.planners.types import Budget, PlannerResult
from rlplace.planners.vectors import evolve


def genetic(
    instance: Instance, budget: Budget, rng: np.random.Generator, costing: Costing | None = None
) -> PlannerResult:
    """The best plan of all generations."""
    search = Search("genetic", costing or Costing(instance), budget)
    looker = VectorSearch(search)
    evolve(looker, looker.encoding.legal, rng)
    return search.result()
