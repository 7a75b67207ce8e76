"""Poplar (Zhang et al., AAAI 2025, arXiv 2408.12596): unequal samples of ZeRO's replicas.

Decision space: one stage on all devices, or on those that get samples; the ZeRO level of all
groups; the micro-batch count; the samples of each device of a micro-batch; one recompute mode and
offload for all groups.

Algorithm: for each ZeRO level the time of each kind of device over numbers of samples, and the most
that it has room for (`rlplace.planners.shares`); for each micro-batch count the least time in which
all of them together can take a micro-batch, and what each can do in it. A device that can do none
is left out, and the rest shared anew. On equal devices all shares are equal, or differ by one where
they have to.

Complexity: levels x modes x micro-batch counts x kinds x log(samples) costs of the model, and
log(samples) looks at the curves. The paper takes the first level that fits; here all are estimated.
Left out: with ZeRO-0 and 1, which reduce once a step, the paper lets devices run unlike numbers of
micro-batches; here all run as many, for a plan says no other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from rlplace.plan.check import legal_micro_batches
from rlplace.plan.types import Instance, Mesh, Stage
from rlplace.plan.uniform import make_plan
from rlplace.planners.costing import Costing
from rlplace.planners.grid import of_shape
from rlplace.planners.search import Search
from rlplace.planners.shares import Curve, curves_of, even_time
from rlplace.planners.types import Budget, PlannerResult

#: ZeRO level, recompute mode, offload.
Mode = tuple[int, str, bool]


def poplar(
    instance: Instance, budget: Budget, rng: np.random.Generator, costing: Costing | None = None
) -> PlannerResult:
    """The best plan of one stage whose replicas end together."""
    search = Search("poplar", costing or Costing(instance), budget)
    if 1 not in instance.offered_tp:
        return search.result()
    offered = (instance.zero_levels, instance.offered_recompute, instance.offered_offload)
    for roomy in (False, True):
        for mode in product(*offered):
            replicas = _Replicas(search.costing, mode, roomy)
            for count in legal_micro_batches(instance.global_batch, 1):
                if search.over(roomy):
                    break
                if (stage := replicas.stage(instance.global_batch // count)) is not None:
                    search.offer(make_plan(instance, (stage,), count))
        if search.best is not None:
            break
    return search.result()


@dataclass
class _Replicas:
    """Replicas that all run in one mode.

    Args:
        costing: Of the instance.
        mode: The mode.
        roomy: Whether memory is no limit; all have equal shares then, the least overfull.
    """

    costing: Costing
    mode: Mode
    roomy: bool
    _known: dict[tuple[int, ...], tuple[Stage, list[Curve]] | None] = field(default_factory=dict)

    def stage(self, micro_batch: int) -> Stage | None:
        """The stage whose replicas end together; None if they have no room for the samples."""
        devices = tuple(range(len(self.costing.instance.cluster.devices)))
        while (known := self._curves(devices)) is not None:
            stage, curves = known
            shares = even_time(curves, micro_batch)
            if shares is None:
                return None
            if min(shares):
                return replace(stage, shares=shares if len(set(shares)) > 1 else ())
            devices = tuple(d for d, share in zip(devices, shares, strict=True) if share)
        return None

    def _curves(self, devices: tuple[int, ...]) -> tuple[Stage, list[Curve]] | None:
        """The stage on some devices and the curve of each, if its costs are known."""
        if devices not in self._known:
            instance = self.costing.instance
            zero, recompute, offload = self.mode
            mesh = Mesh(devices, 1, len(devices)) if zero else Mesh(devices, len(devices))
            one = of_shape(instance, (1, 1, 1), 1, zero=zero, recompute=recompute, offload=offload)
            stage = replace(one.stages[0], mesh=mesh)
            self._known[devices] = None
            if self.costing.solver.usable(mesh):
                curves = curves_of(self.costing, stage, instance.global_batch, self.roomy)
                if self.roomy:  # nothing fits, and equal shares miss by least
                    curves = curves[:1] * len(curves)
                self._known[devices] = stage, curves
        return self._known[devices]
