"""Uniform grid: what a careful Megatron-LM or DeepSpeed user tries by hand.

Decision space: every pp x tp x dp x micro-batches x ZeRO x recompute, the same everywhere.
Complexity: the size of the grid.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

import numpy as np

from rlplace.plan.check import legal_micro_batches
from rlplace.plan.degrees import spread
from rlplace.plan.types import Instance, Plan
from rlplace.plan.uniform import balanced_cuts, uniform_plan
from rlplace.planners.costing import Costing
from rlplace.planners.search import Search
from rlplace.planners.types import Budget, PlannerResult

#: Degrees (pp, tp, dp).
Shape = tuple[int, int, int]

#: At most so many micro-batch counts are tried for each shape.
_COUNTS = 6


def grid(
    instance: Instance, budget: Budget, rng: np.random.Generator, costing: Costing | None = None
) -> PlannerResult:
    """The best uniform plan."""
    search = Search("grid", costing or Costing(instance), budget)
    cuts = lru_cache(maxsize=None)(lambda pp: balanced_cuts(instance, pp))
    for pp, tp, dp in shapes(instance):
        zeros = instance.zero_levels if dp > 1 else (0,)
        for count in micro_batch_counts(instance, dp, pp):
            for zero in zeros:
                for offload, recompute in product(
                    instance.offered_offload, instance.offered_recompute
                ):
                    if search.stopped:
                        return search.result()
                    plan = of_shape(
                        instance,
                        (pp, tp, dp),
                        count,
                        zero=zero,
                        recompute=recompute,
                        offload=offload,
                        cuts=cuts(pp),
                    )
                    if search.offer(plan).feasible and recompute == "none":
                        break  # recompute and offload only cost time where everything fits
    return search.result()


def of_shape(
    instance: Instance,
    shape: Shape,
    micro_batches: int,
    *,
    zero: int = 0,
    recompute: str = "none",
    offload: bool = False,
    cuts: tuple[int, ...] | None = None,
) -> Plan:
    """The uniform plan of a shape, with everything sharded over all replicas or nothing."""
    pp, tp, dp = shape
    return uniform_plan(
        instance,
        pp=pp,
        tp=tp,
        dp_replicate=1 if zero else dp,
        dp_shard=dp if zero else 1,
        micro_batches=micro_batches,
        zero=zero,
        recompute=recompute,  # type: ignore[arg-type]  # a mode
        offload=offload,
        cuts=cuts,
    )


def shapes(instance: Instance) -> Iterator[Shape]:
    """All (pp, tp, dp) that use as many devices as the batch lets them; tp stays in a node."""
    devices = instance.cluster.devices
    groups = len(instance.graph.groups)
    per_node = min(sum(d.node == node.index for d in devices) for node in instance.cluster.nodes)
    for pp in range(1, min(len(devices), groups) + 1):
        if len(devices) % pp and pp not in (2, 3):
            continue
        for tp in instance.offered_tp:
            if tp > 1 and per_node % tp:
                continue
            room = len(devices) // (pp * tp)
            dp = max((d for d in range(1, room + 1) if instance.global_batch % d == 0), default=0)
            if dp and _same_kind(instance, pp, tp, dp):
                yield pp, tp, dp


def micro_batch_counts(instance: Instance, dp: int, pp: int) -> tuple[int, ...]:
    """Up to `_COUNTS` legal counts, spread in the logarithm; from 1, or from pp for a pipeline."""
    legal = [count for count in legal_micro_batches(instance.global_batch, dp) if count >= pp]
    if not legal:
        legal = list(legal_micro_batches(instance.global_batch, dp)[-1:])
    return spread(legal, _COUNTS)


def _same_kind(instance: Instance, pp: int, tp: int, dp: int) -> bool:
    """Whether no tp group mixes device kinds or leaves a node, devices taken in rank order."""
    devices = instance.cluster.devices[: pp * tp * dp]
    for start in range(0, len(devices), tp):
        if len({(d.kind, d.node) for d in devices[start : start + tp]}) > 1:
            return False
    return True
