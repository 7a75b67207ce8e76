"""Data parallelism alone: every device has the whole model to run, at one ZeRO level.

- `data_parallel` (DDP, Li et al., arXiv 2006.15704): every device holds everything;
- `zero1` (Rajbhandari et al., arXiv 1910.02054): optimizer states are sharded over all of them;
- `zero2` (the same): gradients too;
- `zero3` (the same; FSDP, Zhao et al., arXiv 2304.11277): weights too.

Decision space: as many devices as divide the global batch, in the order of their ranks; the
micro-batch count; one recompute mode and offload for all groups. All of it is tried. Left out:
shards inside a node with replicas across (HSDP), which `dynamic` finds, and unequal shares.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np

from rlplace.plan.check import legal_micro_batches
from rlplace.plan.types import Instance
from rlplace.planners.costing import Costing
from rlplace.planners.grid import of_shape
from rlplace.planners.search import Search
from rlplace.planners.types import Budget, Planner, PlannerResult


def replicas_only(
    name: str,
    zero: int,
    instance: Instance,
    budget: Budget,
    rng: np.random.Generator,
    costing: Costing | None = None,
) -> PlannerResult:
    """The best plan of one stage without tensor parallelism at one ZeRO level."""
    search = Search(name, costing or Costing(instance), budget)
    if 1 not in instance.offered_tp or (zero and zero not in instance.zero_levels):
        return search.result()
    devices = len(instance.cluster.devices)
    dp = max(d for d in range(1, devices + 1) if instance.global_batch % d == 0)
    for offload, recompute in product(instance.offered_offload, instance.offered_recompute):
        for count in legal_micro_batches(instance.global_batch, dp):
            if search.stopped:
                return search.result()
            shape = (1, 1, dp)
            search.offer(
                of_shape(instance, shape, count, zero=zero, recompute=recompute, offload=offload)
            )
    return search.result()


data_parallel: Planner = partial(replicas_only, "data_parallel", 0)
zero1: Planner = partial(replicas_only, "zero1", 1)
zero2: Planner = partial(replicas_only, "zero2", 2)
zero3: Planner = partial(replicas_only, "zero3", 3)
