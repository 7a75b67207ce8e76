"""DAPPLE (Fan et al., arXiv 2007.01045): stages and replicas by a dynamic program over layers.

Decision space: contiguous stages, each replicated over any number of devices that divides the
micro-batch; which devices, by one of three rules: on fresh nodes first, on nodes that already have
stages first (append), or spread evenly (scatter); the micro-batch count.

Algorithm: a state is (layers planned, devices taken of each node); from it, the next stage takes
some more layers and devices by each rule, and whatever is left is thought of as one last stage. The
latency of that pipeline has a closed form, warm-up + steady state + ending, in which the pivot
stage (the one with the fewest bubbles) sets the pace and communication counts as stages of its own;
of each state the best way there is kept. The best pipelines are then estimated like any plan.
Complexity: states x cuts x replica counts x 3 rules x stages.

The ending is derived anew: stages up to the pivot still wait for the backwards from it to them,
stages behind it are done earlier by those between. Memory is no part of the paper's program (its
answer is recompute); here the stages that it finds redo as little as fits. Left out: tensor
parallelism and ZeRO, as in the paper; more cuts than an even choice of `_CUTS`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from rlplace.plan.check import legal_micro_batches
from rlplace.plan.degrees import spread
from rlplace.plan.types import Instance, Mesh, Stage
from rlplace.plan.uniform import even_cuts, make_plan
from rlplace.planners.costing import Costing
from rlplace.planners.mesh_options import MeshTables
from rlplace.planners.search import Search
from rlplace.planners.types import Budget, PlannerResult

_CUTS = 16
_COUNTS = 6
#: Pipelines of a micro-batch count that are estimated.
_OFFERED = 8

#: Devices taken of each node.
Taken = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A stage of computation or of communication: seconds of a micro-batch, and once a step."""

    forward: float
    backward: float
    once: float = 0.0


def latency(parts: Sequence[Part], micro_batches: int) -> float:
    """Seconds of a step of a pipeline (arXiv 2007.01045)."""
    steady = [(micro_batches - 1) * (part.forward + part.backward) for part in parts]
    pivot = len(parts) - 1
    between = 0.0
    for index in range(len(parts) - 2, -1, -1):
        if steady[index] > steady[pivot] + between:
            pivot, between = index, 0.0
        else:
            between += parts[index].forward + parts[index].backward
    warm_up = sum(part.forward for part in parts[: pivot + 1])
    # The pivot's last backward begins at 0; behind the pivot, those of later stages are over.
    before = list(accumulate((part.backward for part in parts), initial=0.0))
    ending = max(part.once + before[pivot + 1] - before[i] for i, part in enumerate(parts))
    return warm_up + steady[pivot] + ending


def dapple(
    instance: Instance, budget: Budget, rng: np.random.Generator, costing: Costing | None = None
) -> PlannerResult:
    """The best pipeline of replicated stages, over micro-batch counts."""
    search = Search("dapple", costing or Costing(instance), budget)
    single = (Mesh((device.index,)) for device in instance.cluster.devices)
    if 1 not in instance.offered_tp or not all(map(search.costing.solver.usable, single)):
        return search.result()
    tables = MeshTables(search.costing)
    for count in spread(legal_micro_batches(instance.global_batch, 1), _COUNTS):
        if search.stopped:
            break
        _Program(search, tables, count).run()
    return search.result()


#: How a rule ranks a node that has so many devices taken: those of the least value go first.
_RULES: tuple[Callable[[int], tuple[int, ...]], ...] = (
    lambda taken: (taken > 0,),
    lambda taken: (taken == 0,),
)


def place(taken: Taken, room: Taken, devices: int) -> list[Taken]:
    """What is taken of each node after `devices` more, by each of the three rules.

    Args:
        taken: Devices taken of each node before.
        room: Devices of each node.
        devices: How many more; there are as many.
    """
    found = []
    for rank in _RULES:
        now, left = list(taken), devices
        for node in sorted(range(len(room)), key=lambda n: (rank(taken[n]), n)):
            own = min(left, room[node] - now[node])
            now[node], left = now[node] + own, left - own
        found.append(tuple(now))
    now = list(taken)
    for _ in range(devices):
        free = [node for node in range(len(room)) if now[node] < room[node]]
        used = [node for node in free if taken[node]] or free
        now[min(used, key=lambda n: now[n] - taken[n])] += 1
    found.append(tuple(now))
    return list(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class _Prefix:
    """Stages planned so far: (first group, stop, devices) of each, and their parts."""

    stages: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    parts: tuple[Part, ...] = ()


@dataclass
class _Program:
    """The program for one micro-batch count."""

    search: Search
    tables: MeshTables
    count: int
    _sums: dict[int, np.ndarray] = field(default_factory=dict)
    _ends: list[tuple[float, int, _Prefix]] = field(default_factory=list)

    def run(self) -> None:
        """Plan all layers, and offer the best pipelines."""
        instance = self.search.costing.instance
        nodes = [
            [d.index for d in instance.cluster.devices if d.node == node.index]
            for node in instance.cluster.nodes
        ]
        self.nodes, self.room = nodes, tuple(len(own) for own in nodes)
        self.cuts = [int(cut) for cut in even_cuts(instance, _CUTS)]
        states: list[dict[Taken, tuple[float, _Prefix]]] = [{} for _ in self.cuts]
        states[0][(0,) * len(nodes)] = (0.0, _Prefix())
        for at in range(len(self.cuts) - 1):
            for taken, (_, prefix) in states[at].items():
                if self.search.stopped:
                    break
                self._end(at, taken, prefix)
                for to in range(at + 1, len(self.cuts) - 1):
                    self._extend(states[to], at, to, taken, prefix)
        for _, _, prefix in heapq.nsmallest(_OFFERED, self._ends):
            if self.search.over(last=True):
                return
            self._offer(prefix)

    def _extend(
        self,
        states: dict[Taken, tuple[float, _Prefix]],
        at: int,
        to: int,
        taken: Taken,
        prefix: _Prefix,
    ) -> None:
        """All stages of the layers between two cuts, behind a prefix."""
        left = sum(self.room) - sum(taken)
        for size in (size for size in self._sizes() if size < left):
            for now in place(taken, self.room, size):
                stage = (self.cuts[at], self.cuts[to], self._devices(taken, now))
                longer = self._longer(prefix, stage)
                last = self._last(to, now)
                value = latency(self._longer(longer, last).parts, self.count)
                if now not in states or value < states[now][0]:
                    states[now] = (value, longer)

    def _end(self, at: int, taken: Taken, prefix: _Prefix) -> None:
        """The pipeline whose last stage has all layers and devices that are left."""
        whole = self._longer(prefix, self._last(at, taken))
        self._ends.append((latency(whole.parts, self.count), len(self._ends), whole))

    def _last(self, at: int, taken: Taken) -> tuple[int, int, tuple[int, ...]]:
        left = sum(self.room) - sum(taken)
        size = max(size for size in self._sizes() if size <= left)
        now = place(taken, self.room, size)[0]
        return self.cuts[at], self.cuts[-1], self._devices(taken, now)

    def _sizes(self) -> list[int]:
        """Numbers of replicas that divide the micro-batch."""
        micro_batch = self.search.costing.instance.global_batch // self.count
        return [size for size in range(1, sum(self.room) + 1) if micro_batch % size == 0]

    def _devices(self, before: Taken, after: Taken) -> tuple[int, ...]:
        return tuple(
            device
            for own, first, last in zip(self.nodes, before, after, strict=True)
            for device in own[first:last]
        )

    def _longer(self, prefix: _Prefix, stage: tuple[int, int, tuple[int, ...]]) -> _Prefix:
        """The prefix with one more stage, and what is sent to it."""
        start, stop, devices = stage
        mesh, parts = Mesh(devices, len(devices)), prefix.parts
        if prefix.stages:
            source = prefix.stages[-1][2]
            before = Mesh(source, len(source))
            sent = self.search.costing.solver.transfer(start, before, mesh, self.count)
            parts = (*parts, Part(sent, sent))
        forward, backward, once = self._prefix_sums(mesh)[:, [start, stop]] @ (-1.0, 1.0)
        return _Prefix((*prefix.stages, stage), (*parts, Part(forward, backward, once)))

    def _prefix_sums(self, mesh: Mesh) -> np.ndarray:
        """Seconds of the groups before each one, nothing redone, (3, G + 1)."""
        number = self.search.costing.solver.mesh_class(mesh)
        if number not in self._sums:
            options = self.tables.options(mesh, self.count)
            rows = [own[:, 0] for own in (options.forward, options.backward, options.once)]
            self._sums[number] = np.array([[0.0, *np.cumsum(row)] for row in rows])
        return self._sums[number]

    def _offer(self, prefix: _Prefix) -> None:
        stages = []
        for index, (start, stop, devices) in enumerate(prefix.stages):
            mesh, held = Mesh(devices, len(devices)), min(self.count, len(prefix.stages) - index)
            options = self.tables.options(mesh, self.count)
            _, choices = options.solve(start, stop, self.count, held)
            stages.append(Stage(start, stop, mesh, choices))
        self.search.offer(make_plan(self.search.costing.instance, tuple(stages), self.count))
