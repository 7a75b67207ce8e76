"""Sailor (Strati et al., SOSP 2025, arXiv 2504.17096): replicas of even stages on kinds and zones.

Decision space: even stages (by work), all with the same number of replicas; for each stage how many
of its replicas run on each pool of equal devices, of one pool or of two; a tp degree; the samples
of a replica and, with them, the micro-batch count. A stage's devices follow those of the one
before in a pool.

Algorithm: the number of stages, then the samples of a replica, then the number of replicas, from
most to fewest and only as long as fewer are better. For each of them a dynamic program goes over
the stages, its state the devices of each pool that earlier stages took: of every choice for a
stage it keeps the one whose pipeline from here to the end is quickest,

    (micro-batches - 1) * slowest stage + sum of stages and transfers + longest gradient reduction,

which is a rule of thumb, as in the paper: a slower end may do no harm behind a slow beginning. The
tp degree is no choice: it is the least that fits on the devices of the stage, and never leaves a
node. A pool here is an island: kind and zone in one.

Complexity: stages^2 x sizes x replica counts x states x choices of a stage; the states are at most
the product of the devices of the pools. Recompute is the user's setting in the paper; here plans
that redo nothing are looked for first, then those that redo as little as fits. Left out: ZeRO, as
in the paper; another tp degree for each kind of one stage, which a mesh cannot say; money. The form
of `rlplace.planners.given.sailor` on published tables is another search, exact under the paper's
own rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, pairwise

import numpy as np

from rlplace.plan.check import legal_micro_batches
from rlplace.plan.degrees import spread
from rlplace.plan.types import Instance, Mesh, Plan, Stage
from rlplace.plan.uniform import balanced_cuts, make_plan
from rlplace.planners.costing import Costing
from rlplace.planners.search import Search
from rlplace.planners.types import Budget, PlannerResult

#: Most stages, sizes of a micro-batch on a replica, and shares of a stage between two pools.
_STAGES, _SIZES, _SPLITS = 24, 6, 4

#: What a stage may do to fit: nothing, redo, or not fit at its leanest.
_EFFORTS = ("keep", "redo", "lean")

#: Devices taken of each pool.
Used = tuple[int, ...]


def sailor(
    instance: Instance, budget: Budget, rng: np.random.Generator, costing: Costing | None = None
) -> PlannerResult:
    """The best of the plans that the program finds for each number of stages and replicas."""
    search = Search("sailor", costing or Costing(instance), budget)
    pools = _Pools(instance)
    most = min(len(instance.cluster.devices), len(instance.graph.groups), _STAGES)
    for effort in _EFFORTS:
        if effort == "lean" and search.best is not None:
            break
        for stages in range(1, most + 1):
            for size in spread(legal_micro_batches(instance.global_batch, 1), _SIZES):
                _scale(search, pools, stages, size, effort)
    return search.result()


def _scale(search: Search, pools: _Pools, stages: int, size: int, effort: str) -> None:
    """From most replicas of so many samples to fewest, as long as fewer are better."""
    instance = search.costing.instance
    before = float("inf")
    room = len(instance.cluster.devices) // stages
    counts = legal_micro_batches(instance.global_batch // size, 1)
    for replicas in reversed([count for count in counts if count <= room]):
        program = _Program(search, pools, stages, size, replicas, effort)
        if program.over:
            return
        found = program.best(0, (0,) * len(pools.devices))
        if found is None:
            continue
        search.offer(program.plan(found))
        if found.seconds >= before:
            return
        before = found.seconds


@dataclass
class _Pools:
    """Equal devices, in the order in which stages take them."""

    instance: Instance

    @cached_property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """The islands, nodes whole inside each."""
        node = {device.index: device.node for device in self.instance.cluster.devices}
        islands = self.instance.cluster.islands
        return tuple(tuple(sorted(own, key=lambda d: (node[d], d))) for own in islands)

    @cached_property
    def groups(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        """By tp degree and pool, where groups of so many neighbours in a node begin."""
        node = {device.index: device.node for device in self.instance.cluster.devices}
        return {
            tp: tuple(tuple(_starts([node[d] for d in own], tp)) for own in self.devices)
            for tp in self.instance.offered_tp
        }

    def take(self, used: Used, split: Used, tp: int) -> tuple[Mesh, Used] | None:
        """The next devices for so many replicas of each pool, and what is then used."""
        devices: list[int] = []
        after = list(used)
        for pool, count in enumerate(split):
            if not count:
                continue
            starts = [at for at in self.groups[tp][pool] if at >= used[pool]][:count]
            if len(starts) < count:
                return None
            devices += (d for at in starts for d in self.devices[pool][at : at + tp])
            after[pool] = starts[-1] + tp
        return Mesh(tuple(devices), sum(split), 1, 1, tp), tuple(after)

    def splits(self, replicas: int) -> Iterator[Used]:
        """Replicas of each pool: all of one, or some of each of two."""
        pools = range(len(self.devices))
        for pool in pools:
            yield tuple(replicas * (other == pool) for other in pools)
        for one, two in combinations(pools, 2):
            for part in spread(range(1, replicas), _SPLITS) if replicas > 1 else ():
                of = {one: part, two: replicas - part}
                yield tuple(of.get(pool, 0) for pool in pools)


def _starts(nodes: list[int], tp: int) -> Iterator[int]:
    at = 0
    while at + tp <= len(nodes):
        whole = nodes[at] == nodes[at + tp - 1]
        if whole:
            yield at
        at += tp if whole else 1


@dataclass(frozen=True, slots=True)
class _Pipeline:
    """Stages up to the last: seconds of a step, of its parts, and the meshes."""

    seconds: float
    slowest: float
    total: float
    once: float
    meshes: tuple[Mesh, ...]


@dataclass
class _Program:
    """The program for a number of stages, samples of a replica and replicas."""

    search: Search
    pools: _Pools
    stages: int
    size: int
    replicas: int
    effort: str
    _known: dict[tuple[int, Used], _Pipeline | None] = field(default_factory=dict)
    _own: dict[tuple[int, int], tuple[float, float] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        instance = self.search.costing.instance
        self.instance, self.solver = instance, self.search.costing.solver
        self.count = instance.global_batch // (self.size * self.replicas)
        cuts = balanced_cuts(instance, self.stages)
        self.bounds = tuple(pairwise((0, *cuts, len(instance.graph.groups))))
        self.splits = tuple(self.pools.splits(self.replicas))

    @property
    def over(self) -> bool:
        """Whether the search ends here."""
        return self.search.over(self.effort == _EFFORTS[-1])

    def best(self, stage: int, used: Used) -> _Pipeline | None:
        """The quickest pipeline of the stages from `stage` on, when so much is used."""
        if stage == self.stages:
            return _Pipeline(0.0, 0.0, 0.0, 0.0, ())
        if (stage, used) not in self._known:
            found = () if self.over else self._pipelines(stage, used)
            self._known[stage, used] = min(found, key=lambda one: one.seconds, default=None)
        return self._known[stage, used]

    def _pipelines(self, stage: int, used: Used) -> Iterator[_Pipeline]:
        for mesh, after, own, once in self._choices(stage, used):
            behind = self.best(stage + 1, after)
            if behind is None:
                continue
            sent = 0.0
            if behind.meshes:
                cut = self.bounds[stage][1]
                sent = 2 * self.solver.transfer(cut, mesh, behind.meshes[0], self.count)
            slowest = max(own + sent, behind.slowest)
            total, once = own + sent + behind.total, max(once, behind.once)
            seconds = (self.count - 1) * slowest + total + once
            yield _Pipeline(seconds, slowest, total, once, (mesh, *behind.meshes))

    def _choices(self, stage: int, used: Used) -> Iterator[tuple[Mesh, Used, float, float]]:
        """Mesh, devices used after it, and seconds, at the least tp degree that fits."""
        lean = self.effort == "lean"
        degrees = self.instance.offered_tp
        for split in self.splits:
            for tp in reversed(degrees) if lean else degrees:
                taken = self.pools.take(used, split, tp)
                seconds = self._seconds(stage, taken[0]) if taken else None
                if taken and seconds:
                    yield *taken, *seconds
                    break

    def _seconds(self, stage: int, mesh: Mesh) -> tuple[float, float] | None:
        """Seconds of a micro-batch of a stage, and once a step, if it fits."""
        key = (stage, self.solver.mesh_class(mesh))
        if key not in self._own:
            self._own[key] = self._solve(stage, mesh)
        return self._own[key]

    def _solve(self, stage: int, mesh: Mesh) -> tuple[float, float] | None:
        if not self.solver.usable(mesh):
            return None
        start, stop = self.bounds[stage]
        held = min(self.count, self.stages - stage)
        row = self.solver.row(stop, mesh, self.count, held)
        if self.effort == "lean":
            return float(row.lean_seconds[start]), float(row.tail[start])
        if not np.isfinite(row.seconds[start]):
            return None
        if self.effort == "keep":
            kept = ("none", self.instance.offered_recompute[0])
            choices = self.solver.choices(start, stop, mesh, self.count, held)
            if any(choice.recompute not in kept for choice in choices):
                return None
        return float(row.seconds[start]), float(row.tail[start])

    def plan(self, found: _Pipeline) -> Plan:
        """The plan of a pipeline."""
        stages = []
        for at, (mesh, (start, stop)) in enumerate(zip(found.meshes, self.bounds, strict=True)):
            held = min(self.count, self.stages - at)
            choices = self.solver.choices(start, stop, mesh, self.count, held)
            stages.append(Stage(start, stop, mesh, choices))
        return make_plan(self.instance, tuple(stages), self.count)
