"""Plain data parallelism: every device holds everything (DDP, Li et al., arXiv 2006.15704)."""

from __future__ import annotations

from itertools import product

import numpy as np

from rlplace.plan.check import legal_micro_batches
from rlplace.plan.types import Instance
from rlplace.plan.uniform import uniform_plan
from rlplace.planners.costing import Costing
from rlplace.planners.search import Search
from rlplace.planners.types import Budget, PlannerResult


def data_parallel(
    instance: Instance, budget: Budget, rng: np.random.Generator, costing: Costing | None = None
) -> PlannerResult:
    """The best micro-batch count for ZeRO-0 over as many devices as divide the global batch."""
    return replicas_only("data_parallel", instance, budget, zero=0, costing=costing)


def replicas_only(
    name: str, instance: Instance, budget: Budget, *, zero: int, costing: Costing | None
) -> PlannerResult:
    """Plans of one stage without tensor parallelism at one ZeRO level, all micro-batch counts."""
    search = Search(name, costing or Costing(instance), budget)
    if 1 not in instance.offered_tp or (zero and zero not in instance.zero_levels):
        return search.result()
    devices = len(instance.cluster.devices)
    dp = max(d for d in range(1, devices + 1) if instance.global_batch % d == 0)
    for offload, recompute in product(instance.offered_offload, instance.offered_recompute):
        for count in legal_micro_batches(instance.global_batch, dp):
            if search.stopped:
                return search.result()
            plan = uniform_plan(
                instance,
                dp_replicate=1 if zero else dp,
                dp_shard=dp if zero else 1,
                micro_batches=count,
                zero=zero,
                recompute=recompute,  # type: ignore[arg-type]  # a mode
                offload=offload,
            )
            search.offer(plan)
    return search.result()
