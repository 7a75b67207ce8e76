"""Metis (Um et al., USENIX ATC 2024): stages on device groups that may mix kinds, in balance.

Decision space: the order of kinds along the pipeline; how many devices each stage has, in that
order; the tp degree of each stage; the micro-batch count; in a stage of several kinds the samples
of each replica; the layers of each stage.

Algorithm: all arrangements of device groups for each number of stages, but for two prunings of the
paper: no group is much smaller than the mean (`_VARIANCE`), and of the sizes at most `_PERMUTED`
blocks of neighbours are put in every order. Of an arrangement each stage begins with data
parallelism alone; as long as no partition of the layers fits, the stage with most replicas takes
the next tp degree. The balance is of two kinds: samples go to the replicas of a stage so that they
end together, and layers to the stages so that the slowest is as quick as can be.

Complexity: stages x orders x arrangements x micro-batch counts x tp degrees x bisection x stages.
The paper balances layers by a heuristic that lowers the share of a stage that lacks memory, up to
three times; here bisection over the slowest stage, with memory as a limit, does both at once. Left
out: ZeRO, as in the paper; groups of other sizes than powers of two, whole nodes, all devices and
their even part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise, permutations

import numpy as np
import numpy.typing as npt

from rlplace.plan.check import legal_micro_batches
from rlplace.plan.degrees import spread
from rlplace.plan.types import Instance, Mesh, Plan, Stage
from rlplace.plan.uniform import make_plan
from rlplace.planners.costing import Costing
from rlplace.planners.meshes import device_orders, whole
from rlplace.planners.search import Search
from rlplace.planners.shares import curves_of, even_time, gain, replica_kinds
from rlplace.planners.stage_times import StageTimes
from rlplace.planners.types import Budget, PlannerResult

Floats = npt.NDArray[np.float64]

_COUNTS = 8
_STAGES = 16
#: The smallest group, as a share of the mean.
_VARIANCE = 0.5
#: Blocks of groups that are put in every order.
_PERMUTED = 4
_BISECTIONS = 24


def metis(
    instance: Instance, budget: Budget, rng: np.random.Generator, costing: Costing | None = None
) -> PlannerResult:
    """The best arrangement of device groups, with samples and layers in balance."""
    search = Search("metis", costing or Costing(instance), budget)
    counts = spread(legal_micro_batches(instance.global_batch, 1), _COUNTS)
    for lean in (False, True):
        balancers = [_Balancer(search.costing, count, lean) for count in counts]
        for groups, balancer in ((g, b) for g in _arrangements(instance) for b in balancers):
            if search.over(lean):
                break
            if (plan := balancer.plan(groups)) is not None:
                search.offer(plan)
        if search.best is not None:
            break
    return search.result()


def _arrangements(instance: Instance) -> Iterator[tuple[tuple[int, ...], ...]]:
    """The devices of each stage, in every arrangement."""
    count = len(instance.cluster.devices)
    nodes = {
        sum(d.node == n.index for d in instance.cluster.devices) for n in instance.cluster.nodes
    }
    for stages in range(1, min(count, len(instance.graph.groups), _STAGES) + 1):
        for sizes in device_groups(count, stages, nodes):
            bounds = tuple(pairwise((0, *accumulate(sizes))))
            for order in device_orders(instance):
                yield tuple(order[first:last] for first, last in bounds)


def device_groups(devices: int, stages: int, nodes: set[int]) -> Iterator[tuple[int, ...]]:
    """Numbers of devices of each stage, all together.

    Args:
        devices: Of the cluster.
        stages: Of the pipeline.
        nodes: Devices of a node.
    """
    powers = {2**power for power in range(devices.bit_length())}
    mean = devices // stages
    even = {mean} if devices % stages == 0 else set()
    sizes = sorted(size for size in powers | nodes | even if size >= _VARIANCE * mean)
    for found in _sums(devices, stages, sizes):
        width = -(-stages // _PERMUTED)
        blocks = [found[at : at + width] for at in range(0, stages, width)]
        for order in sorted(set(permutations(blocks))):
            yield tuple(size for block in order for size in block)


def _sums(total: int, parts: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Ascending sizes that add up to a total."""
    if parts == 0:
        if total == 0:
            yield ()
        return
    for at, size in enumerate(sizes):
        if size * parts <= total <= sizes[-1] * (parts - 1) + size:
            for rest in _sums(total - size, parts - 1, sizes[at:]):
                yield (size, *rest)


@dataclass
class _Balancer:
    """Plans of one micro-batch count.

    Args:
        costing: Of the instance.
        count: Micro-batches of a step.
        lean: Whether stages need not fit, and devices may be left over.
    """

    costing: Costing
    count: int
    lean: bool
    _gains: dict[Mesh, float] = field(default_factory=dict)

    @cached_property
    def times(self) -> StageTimes:
        """Seconds of stages whose replicas have equal samples."""
        return StageTimes(self.costing.solver, self.count, self.lean)

    @property
    def micro_batch(self) -> int:
        """Samples of a micro-batch."""
        return self.costing.instance.global_batch // self.count

    def plan(self, groups: tuple[tuple[int, ...], ...]) -> Plan | None:
        """The plan of an arrangement with as little tensor parallelism as fits; None if none does.

        Args:
            groups: The devices of each stage.
        """
        offered = [self._meshes(devices) for devices in groups]
        if not all(offered):
            return None
        at = [0] * len(groups)
        while True:
            meshes = [own[index] for own, index in zip(offered, at, strict=True)]
            if (stages := self._balanced(meshes)) is not None:
                return make_plan(self.costing.instance, stages, self.count)
            able = [s for s, index in enumerate(at) if index + 1 < len(offered[s])]
            if not able:
                return None
            at[max(able, key=lambda s: meshes[s].dp)] += 1

    def _meshes(self, devices: tuple[int, ...]) -> list[Mesh]:
        """Meshes of a stage by their tp degree; of the lean ones only the highest."""
        instance, found = self.costing.instance, []
        for tp in instance.offered_tp:
            dp = len(devices) // tp
            if self.lean:
                dp = max((d for d in range(1, dp + 1) if self.micro_batch % d == 0), default=0)
            own = devices[: dp * tp]
            if not dp or (len(own) < len(devices) and not self.lean):
                continue
            mesh = Mesh(own, dp, 1, 1, tp)
            enough = dp <= self.micro_batch if self._mixed(mesh) else self.micro_batch % dp == 0
            if (
                enough
                and (tp == 1 or whole(instance, own, tp))
                and self.costing.solver.usable(mesh)
            ):
                found.append(mesh)
        return found[-1:] if self.lean else found

    def _balanced(self, meshes: list[Mesh]) -> tuple[Stage, ...] | None:
        """Stages of which the slowest is as quick as can be."""
        tables = [
            self._gain(mesh) * self.times.seconds(mesh, len(meshes) - at - 1)
            for at, mesh in enumerate(meshes)
        ]
        best = balanced_layers(tables)
        if best is None:
            return None
        stages = [
            self._shared(self.times.stage(mesh, first, last, behind), behind)
            for mesh, (first, last), behind in zip(
                meshes, best, reversed(range(len(meshes))), strict=True
            )
        ]
        known = tuple(stage for stage in stages if stage is not None)
        return known if len(known) == len(stages) else None

    def _gain(self, mesh: Mesh) -> float:
        """Time of a stage whose replicas end together, over that with equal samples."""
        if not self._mixed(mesh):
            return 1.0
        if mesh not in self._gains:
            graph, solver = self.costing.instance.graph, self.costing.solver
            groups = len(graph.groups)
            model = Stage(0, groups, mesh, solver.choices(0, groups, mesh, self.count, 1))
            curves = curves_of(self.costing, model, self.micro_batch, roomy=True)
            shares = even_time(curves, self.micro_batch)
            assert shares is not None, "memory was no limit"
            self._gains[mesh] = gain(curves, shares)
        return self._gains[mesh]

    def _shared(self, stage: Stage, behind: int) -> Stage | None:
        """The stage with samples for each replica; None where some have none, or no room."""
        if not self._mixed(stage.mesh):
            return stage
        held = min(self.count, behind + 1)
        curves = curves_of(self.costing, stage, self.micro_batch, self.lean, held)
        shares = even_time(curves, self.micro_batch)
        if shares is None or not min(shares):
            return None
        return replace(stage, shares=shares if len(set(shares)) > 1 else ())

    def _mixed(self, mesh: Mesh) -> bool:
        return len(set(replica_kinds(self.costing.instance, mesh))) > 1


def balanced_layers(tables: Sequence[Floats]) -> tuple[tuple[int, int], ...] | None:
    """First and last cut of each stage, so that the slowest is as quick as can be; None if none is.

    Args:
        tables: Seconds of each stage by its first and last cut, (N, N); infinite where it does not
            fit.
    """
    low, high = 0.0, max(float(np.max(own[np.isfinite(own)], initial=0.0)) for own in tables)
    best = _partition(tables, high)
    for _ in range(_BISECTIONS if best else 0):
        middle = (low + high) / 2
        if (found := _partition(tables, middle)) is None:
            low = middle
        else:
            best, high = found, middle
    return best


def _partition(tables: Sequence[Floats], slowest: float) -> tuple[tuple[int, int], ...] | None:
    """First and last cut of stages of which none is slower, each as long as it may be.

    Args:
        tables: Seconds of each stage by its first and last cut.
        slowest: Seconds.
    """
    stop = len(tables[0]) - 1
    found: list[tuple[int, int]] = []
    for at in range(len(tables) - 1, -1, -1):
        able = np.flatnonzero(tables[at][at:stop, stop] <= slowest) + at
        if not len(able):
            return None
        first = int(able[0])
        found.append((first, stop))
        stop = first
    return tuple(reversed(found)) if stop == 0 else None
