"""Galvatron and Galvatron-BMW (Miao et al., arXiv 2211.13878 and 2307.02031).

Decision space: stages of equally many devices; inside a stage a hybrid strategy for every layer
(`rlplace.planners.strategies`: orders and degrees of dp, sharded dp and tp over the levels of the
devices, with recompute or without); the micro-batch count.

Algorithm: for every number of stages and micro-batches, a partition whose stages hold equally many
bytes; a program with a memory axis (`memory_program`) chooses the strategies of each stage; then
border layers of the slowest stage move to its neighbours as long as those stay quicker than it was
and fit (BMW's bi-objective workflow, which ends at the partition of equal seconds, tried as well).
Complexity: counts x partitions x meshes x groups x memory cells x options.

How a strategy is said by a `Plan`: a stage has one mesh, so its layers share the degrees and their
order (an outer tp axis is another order of the devices), and differ in dp (ZeRO-0) or sharded dp
(ZeRO-3, or the highest level that is offered) and in recompute; between such layers nothing is laid
out anew. Every mesh is solved and the quickest is taken. Layers of one stage with unlike degrees
cannot be said: `unrestricted` gives the value of the program that has them, with the cost of laying
activations out anew, to tell what is lost. Left out for the same reason as in the paper: strategies
that mix dp and sharded dp.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from rlplace.cost.collectives import ring, seconds
from rlplace.plan.check import legal_micro_batches
from rlplace.plan.degrees import spread
from rlplace.plan.types import GroupChoice, Instance, Mesh, Stage
from rlplace.plan.uniform import make_plan
from rlplace.planners.costing import Costing
from rlplace.planners.mesh_options import MeshOptions, MeshTables, stage_meshes
from rlplace.planners.meshes import device_orders
from rlplace.planners.search import Search
from rlplace.planners.types import Budget, PlannerResult

Floats = npt.NDArray[np.float64]

_COUNTS = 8
#: Partitions of one number of stages and micro-batches that are looked at.
_MOVES = 24


def galvatron(
    instance: Instance,
    budget: Budget,
    rng: np.random.Generator,
    costing: Costing | None = None,
    counts: tuple[int, ...] = (),
) -> PlannerResult:
    """The best plan of equally wide stages; of fewer devices only where all cannot be used.

    Args:
        instance: The question.
        budget: What the search may spend.
        rng: Unused: nothing is random.
        costing: Of the instance, where it is shared.
        counts: Micro-batch counts that are looked at; by default some of all legal ones.
    """
    search = Search("galvatron", costing or Costing(instance), budget)
    tables = MeshTables(search.costing, _considered)
    counts = counts or spread(legal_micro_batches(instance.global_batch, 1), _COUNTS)
    for width in range(len(instance.cluster.devices), 0, -1):
        for order in device_orders(instance):
            for stages in _divisors(width, len(instance.graph.groups)):
                for count in counts:
                    if search.stopped:
                        return search.result()
                    _Pipeline(search, tables, order[:width], stages, count).run()
        if search.evaluations:
            break
    return search.result()


def _divisors(width: int, most: int) -> tuple[int, ...]:
    return tuple(stages for stages in range(1, min(width, most) + 1) if width % stages == 0)


def _considered(offered: Sequence[GroupChoice]) -> tuple[GroupChoice, ...]:
    """Dp and sharded dp, with recompute and without; whole only where nothing is cut over tp."""
    levels = [choice.zero for choice in offered]
    modes = [choice.recompute for choice in offered]  # from what keeps most to what keeps least
    cut = any(choice.layout != "replicate" for choice in offered)
    return tuple(
        choice
        for choice in offered
        if choice.zero in (min(levels), max(levels))
        and choice.recompute in (modes[0], modes[-1])
        and not choice.offload
        and (choice.layout != "replicate" or not cut)
    )


@dataclass(frozen=True)
class _Solved:
    """A stage: seconds of a step's work (infinite if it does not fit), mesh and choices."""

    seconds: float
    stage: Stage


@dataclass
class _Pipeline:
    """The search with so many stages and micro-batches on a line of devices."""

    search: Search
    tables: MeshTables
    order: tuple[int, ...]
    stages: int
    count: int
    _solved: dict[tuple[int, int, int], _Solved] = field(default_factory=dict)

    def run(self) -> None:
        """Offer the plans of the partitions that the moves lead through."""
        width = len(self.order) // self.stages
        parts = [self.order[i * width : (i + 1) * width] for i in range(self.stages)]
        self.meshes = [stage_meshes(self.search.costing, part, self.count) for part in parts]
        if not all(self.meshes):
            return
        first, last = self._balanced("bytes"), self._balanced("seconds")
        waiting, seen = deque([first, last]), {first, last}
        for _ in range(_MOVES):
            if not waiting or self.search.stopped:
                return
            bounds = waiting.popleft()
            found = self._stages(bounds)
            self._offer(found)
            for moved in self._moves(bounds, [one.seconds for one in found]):
                if moved not in seen:
                    seen.add(moved)
                    waiting.append(moved)

    def _options(self, mesh: Mesh) -> MeshOptions:
        return self.tables.options(mesh, self.count)

    def _held(self, index: int) -> int:
        """Micro-batches in flight of 1F1B."""
        return min(self.count, self.stages - index)

    def _balanced(self, what: str) -> tuple[int, ...]:
        """Borders of stages that weigh alike, each on its first mesh with what each group keeps."""
        loads = []
        for index, meshes in enumerate(self.meshes):
            options = self._options(meshes[0])
            if what == "bytes":
                weighed = options.static + self._held(index) * options.saved
            else:
                weighed = self.count * options.work + options.once
            loads.append(weighed[:, 0])
        return balanced(np.array(loads))

    def _stages(self, bounds: tuple[int, ...]) -> list[_Solved]:
        return [self._stage(index, *span) for index, span in enumerate(pairwise(bounds))]

    def _stage(self, index: int, start: int, stop: int) -> _Solved:
        key = (index, start, stop)
        if key not in self._solved:
            every = []
            for mesh in self.meshes[index]:
                options = self._options(mesh)
                value, choices = options.solve(start, stop, self.count, self._held(index))
                every.append(_Solved(value, Stage(start, stop, mesh, choices)))
            self._solved[key] = min(every, key=lambda one: one.seconds)
        return self._solved[key]

    def _offer(self, found: list[_Solved]) -> None:
        fits = all(np.isfinite(one.seconds) for one in found)
        if fits or self.search.best is None:
            stages = tuple(one.stage for one in found)
            self.search.offer(make_plan(self.search.costing.instance, stages, self.count))

    def _moves(self, bounds: tuple[int, ...], times: list[float]) -> Iterator[tuple[int, ...]]:
        """A border layer of the slowest stage goes to a neighbour that stays quicker and fits."""
        slowest = int(np.argmax(times))
        if bounds[slowest + 1] - bounds[slowest] < 2:
            return
        for border, step, to in (
            (slowest, 1, slowest - 1),
            (slowest + 1, -1, slowest + 1),
        ):
            if not 0 <= to < self.stages:
                continue
            moved = (*bounds[:border], bounds[border] + step, *bounds[border + 1 :])
            if self._stage(to, moved[to], moved[to + 1]).seconds < times[slowest]:
                yield moved


def balanced(loads: Floats) -> tuple[int, ...]:
    """Borders of contiguous parts, none empty, whose heaviest weighs least (dynamic program).

    Args:
        loads: Of each part and item, (P, N).
    """
    parts, items = loads.shape
    sums = np.concatenate([np.zeros((parts, 1)), np.cumsum(loads, axis=1)], axis=1)
    best = np.full((parts + 1, items + 1), np.inf)
    best[0, 0] = 0.0
    cut = np.zeros((parts + 1, items + 1), int)
    for part in range(1, parts + 1):
        for stop in range(part, items + 1):
            worst = np.maximum(best[part - 1, :stop], sums[part - 1, stop] - sums[part - 1, :stop])
            cut[part, stop] = int(np.argmin(worst))
            best[part, stop] = worst[cut[part, stop]]
    bounds = [items]
    for part in range(parts, 0, -1):
        bounds.append(int(cut[part, bounds[-1]]))
    return tuple(reversed(bounds))


def unrestricted(costing: Costing, micro_batches: int) -> float:
    """Seconds of a step's work of one stage whose layers may have unlike degrees.

    No plan says such a stage; only to compare with the same sum of one that can be said. Where
    replicas grow fewer from one layer to the next, samples are gathered in the forward pass; where
    they grow more, their gradients in the backward pass (slice and gather).
    Infinite if nothing fits.
    """
    instance, tables = costing.instance, MeshTables(costing, _considered)
    meshes = stage_meshes(costing, device_orders(instance)[0], micro_batches)
    every = [tables.options(mesh, micro_batches) for mesh in meshes]
    if not every:
        return float("inf")
    owners = [mesh for mesh, one in zip(meshes, every, strict=True) for _ in one.forward[0]]
    switch = np.array(
        [[micro_batches * _relayout(instance, a, b, micro_batches) for b in owners] for a in owners]
    )
    together = _together(every)
    return together.solve(0, len(together.choices), micro_batches, 1, switch)[0]


def _together(every: Sequence[MeshOptions]) -> MeshOptions:
    """The options of several meshes of the same devices, side by side; only their costs."""

    def beside(name: str) -> Floats:
        return np.concatenate([getattr(one, name) for one in every], axis=1)

    forward = beside("forward")
    return MeshOptions(
        choices=((GroupChoice(),) * forward.shape[1],) * len(forward),
        forward=forward,
        backward=beside("backward"),
        once=beside("once"),
        hides=beside("hides"),
        static=beside("static"),
        saved=beside("saved"),
        transient=beside("transient"),
        limit=min(one.limit for one in every),
    )


def _relayout(instance: Instance, before: Mesh, after: Mesh, micro_batches: int) -> float:
    """Seconds of a micro-batch between two layers on the same devices, at the widest border."""
    if before.dp == after.dp:
        return 0.0
    many, few = sorted((before, after), key=lambda mesh: -mesh.dp)
    samples = instance.global_batch / micro_batches
    floats = max(floats(samples) for floats, _ in instance.graph.crossings[1:-1])
    members = many.firsts[: many.dp // few.dp]
    size = floats * instance.bytes.activation / few.dp
    return seconds("all_gather", size, ring(instance.cluster, members, many.devices))
