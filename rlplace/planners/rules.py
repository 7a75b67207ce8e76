"""Rules that people follow by hand, each as short as it is told.

- `megatron` (Narayanan et al., arXiv 2104.04473, takeaways 1 and 2): tensor parallelism up to the
  devices of a node first, then pipeline stages, until the model fits; replicas take the rest. The
  optimizer states may be sharded over the replicas (ZeRO-1, Megatron's distributed optimizer).
- `layouts_advice` (Hagemann et al., arXiv 2311.05610): micro-batches of one sample, no
  recomputation, and the smallest product of tensor and pipeline degrees with which it fits.

Decision space: uniform plans (`uniform_plan`) on devices in the order of their ranks; neither knows
of unequal devices. Both take the first step of their ladder on which something fits, and of what is
left open there (the micro-batch size of the one, how the product is cut of the other) the best
estimate. Where nothing fits without, Megatron's rules redo activations; the advice never does.
Complexity: as many plans as there are (pp, tp) times sizes of micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import numpy as np

from rlplace.plan.check import legal_micro_batches
from rlplace.plan.types import Instance, Plan
from rlplace.planners.costing import Costing
from rlplace.planners.grid import Shape, micro_batch_counts, of_shape, shapes
from rlplace.planners.search import Search
from rlplace.planners.types import Budget, PlannerResult


def megatron(
    instance: Instance, budget: Budget, rng: np.random.Generator, costing: Costing | None = None
) -> PlannerResult:
    """Tensor parallelism up to a node, then stages, then replicas: the first that fits."""
    search = Search("megatron", costing or Costing(instance), budget)
    ladder = sorted(shapes(instance), key=_tensor_first)
    for _, step in groupby(
        ((mode, shape) for mode in instance.offered_recompute for shape in ladder),
        key=lambda one: (one[0], _tensor_first(one[1])[:2]),
    ):
        for mode, (pp, tp, dp) in step:
            for plan in _megatron_plans(instance, (pp, tp, dp), mode):
                if search.stopped:
                    return search.result()
                search.offer(plan)
        if search.best is not None:
            break
    return search.result()


def layouts_advice(
    instance: Instance, budget: Budget, rng: np.random.Generator, costing: Costing | None = None
) -> PlannerResult:
    """Micro-batches of a sample, no recompute, the smallest model-parallel product that fits."""
    search = Search("layouts_advice", costing or Costing(instance), budget)
    for _, step in groupby(sorted(shapes(instance), key=_product), key=_product):
        for pp, tp, dp in step:
            for zero in _levels(instance, dp):
                if search.stopped:
                    return search.result()
                count = legal_micro_batches(instance.global_batch, dp)[-1]
                mode = instance.offered_recompute[0]  # none, where that is offered
                plan = of_shape(instance, (pp, tp, dp), count, zero=zero, recompute=mode)
                search.offer(plan)
        if search.best is not None:
            break
    return search.result()


def _tensor_first(shape: Shape) -> Shape:
    pp, tp, dp = shape
    return pp, tp, -dp


def _product(shape: Shape) -> int:
    return shape[0] * shape[1]


def _megatron_plans(instance: Instance, shape: Shape, mode: str) -> Iterator[Plan]:
    pp, _, dp = shape
    for count in micro_batch_counts(instance, dp, pp):
        for zero in _levels(instance, dp):
            yield of_shape(instance, shape, count, zero=zero, recompute=mode)


def _levels(instance: Instance, dp: int) -> list[int]:
    """ZeRO levels of the optimizer states at most."""
    return [level for level in (0, 1) if level in instance.zero_levels] if dp > 1 else [0]
