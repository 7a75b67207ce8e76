"""Fully sharded data parallelism, ZeRO-3 (Rajbhandari et al., arXiv 1910.02054)."""

from __future__ import annotations

import numpy as np

from rlplace.plan.types import Instance
from rlplace.planners.costing import Costing
from rlplace.planners.data_parallel import replicas_only
from rlplace.planners.types import Budget, PlannerResult


def zero3(
    instance: Instance, budget: Budget, rng: np.random.Generator, costing: Costing | None = None
) -> PlannerResult:
    """The best micro-batch count for ZeRO-3 over as many devices as divide the global batch."""
    return replicas_only("zero3", instance, budget, zero=3, costing=costing)
