"""OSDP, optimal sharded data parallelism (Jiang et al., arXiv 2209.13258).

Decision space: one stage of replicas on as many devices as divide the global batch; for every group
plain data parallelism (ZeRO-0) or sharded (ZeRO-3, or the highest level that is offered), and for
sharded ones the number of slices in which its weights are gathered, where the instance offers some
(the paper's operator splitting, which lowers what comes and goes); the micro-batch count; recompute
of all groups or of none.

Algorithm: the paper raises the batch until nothing fits and searches over memory for each; here the
global batch is given and the size of a micro-batch takes its place. The search is a knapsack,
`MeshOptions.solve`: a dynamic program over bytes for each of a few limits of what comes and goes,
exact up to a thousandth of the memory, but for how reductions overlap across groups. Complexity:
counts x modes x groups x cells x options.
Left out: tensor parallelism and stages, as in the paper; its hybrids with them are `galvatron`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from rlplace.plan.check import legal_micro_batches
from rlplace.plan.types import GroupChoice, Instance, Mesh, Stage
from rlplace.plan.uniform import make_plan
from rlplace.planners.costing import Costing
from rlplace.planners.mesh_options import MeshTables
from rlplace.planners.search import Search
from rlplace.planners.types import Budget, PlannerResult


def osdp(
    instance: Instance, budget: Budget, rng: np.random.Generator, costing: Costing | None = None
) -> PlannerResult:
    """The best plan of replicas, each group sharded or not."""
    search = Search("osdp", costing or Costing(instance), budget)
    devices, groups = len(instance.cluster.devices), len(instance.graph.groups)
    dp = max(d for d in range(1, devices + 1) if instance.global_batch % d == 0)
    mesh = Mesh(tuple(range(dp)), 1, dp)
    if 1 not in instance.offered_tp or not search.costing.solver.usable(mesh):
        return search.result()
    for mode in instance.offered_recompute:
        tables = MeshTables(search.costing, partial(_of_mode, mode))
        for count in legal_micro_batches(instance.global_batch, dp):
            if search.stopped:
                return search.result()
            _, choices = tables.options(mesh, count).solve(0, groups, count, 1)
            search.offer(make_plan(instance, (Stage(0, groups, mesh, choices),), count))
    return search.result()


def _of_mode(mode: str, offered: Sequence[GroupChoice]) -> tuple[GroupChoice, ...]:
    """Sharded and not, in one recompute mode (the first, where a group has none such)."""
    levels = [choice.zero for choice in offered]
    modes = [choice.recompute for choice in offered]
    return tuple(
        choice
        for choice in offered
        if choice.zero in (min(levels), max(levels))
        and choice.recompute == (mode if mode in modes else modes[0])
        and not choice.offload
    )
