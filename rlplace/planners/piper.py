"""Piper (Tarnawski et al., arXiv 2111.05972) on a chain of groups: the least largest load.

Decision space: contiguous stages, each with a data-parallel and a tensor-parallel degree, and for
each group its layout of that degree and whether it is redone; the micro-batch count.

Algorithm: the load of a stage is the seconds that one micro-batch takes on it: compute, what it
gets and sends, and its share of the exchange of gradients. Recompute is chosen so that the states
and the micro-batches in flight fit, as many as stages are behind (`StageSolver`, in place of the
paper's knapsack, which is by prices of memory too). A program over (stages behind, groups, devices)
finds the pipeline of the least largest load, and among those the one of the least sum.
Complexity: counts x limits x stages x cuts^2 x degrees x devices.

`rlplace.planners.given.piper` plans the authors' own form, any graph by its ideals; groups here are
a chain already. As in the paper, devices and links are thought equal: where they are not, each
counts as the slowest. Their copies take turns, replicas here share each micro-batch. Left out:
ZeRO, as in the paper; more cuts than `_CUTS`, and more than `_DEPTH` stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlplace.plan.check import legal_micro_batches
from rlplace.plan.degrees import spread
from rlplace.plan.types import Instance, Mesh, Stage
from rlplace.plan.uniform import even_cuts, make_plan
from rlplace.planners.costing import Costing
from rlplace.planners.meshes import alike, equal_nodes, whole
from rlplace.planners.search import Search
from rlplace.planners.stage_program import pipelines
from rlplace.planners.types import Budget, PlannerResult

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_CUTS, _DEPTH, _COUNTS = 24, 16, 7
#: Degrees (dp, tp) that are looked at, the products evenly spread.
_SHAPES = 32
#: Micro-batches of a throughput.
_ENDLESS = 1e9


def piper(
    instance: Instance, budget: Budget, rng: np.random.Generator, costing: Costing | None = None
) -> PlannerResult:
    """The pipeline of the least largest load, over micro-batch counts."""
    search = Search("piper", costing or Costing(instance), budget)
    counts = reversed(spread(legal_micro_batches(instance.global_batch, 1), _COUNTS))
    every = [_Loads(search, count) for count in counts]
    for own in every:
        if search.over(last=True):
            break
        own.run()
    for own in every if not search.evaluations else ():
        own.overfull()
    return search.result()


@dataclass
class _Loads:
    """The search with one micro-batch count."""

    search: Search
    count: int

    def __post_init__(self) -> None:
        instance = self.search.costing.instance
        self.line = tuple(device for own in equal_nodes(instance) for device in own)
        self.cuts = even_cuts(instance, _CUTS)
        micro_batch = instance.global_batch // self.count
        meshes = [
            mesh
            for tp in instance.offered_tp
            for dp in range(1, len(self.line) // tp + 1)
            if micro_batch % dp == 0 and whole(instance, self.line[: dp * tp], tp)
            if self.search.costing.solver.usable(mesh := _mesh(self.line[: dp * tp], tp))
        ]
        self.meshes = spread(sorted(meshes, key=lambda mesh: len(mesh.devices)), _SHAPES)

    def run(self) -> None:
        """Offer the best pipelines."""
        if not self.meshes:
            return
        sizes = [len(mesh.devices) for mesh in self.meshes]
        for stages in pipelines(self._table(), sizes, len(self.line), _ENDLESS):
            self._offer(stages)

    def overfull(self) -> None:
        """Offer the leanest choices of one stage on most devices."""
        if self.meshes and not self.search.stopped:
            self._offer([(0, len(self.cuts) - 1, len(self.meshes) - 1)])

    def _table(self) -> Floats:
        """Loads by shape, stages behind, first and last cut."""
        solver, cuts = self.search.costing.solver, self.cuts
        depth = min(len(self.line), len(cuts) - 1, _DEPTH)
        moved = self._moved()
        table = np.full((len(self.meshes), depth, len(cuts), len(cuts)), np.inf)
        for index, mesh in enumerate(self.meshes):
            for behind in range(depth):
                if self.search.over(last=True):
                    return table
                held = min(self.count, behind + 1)
                seconds, _, tail, _ = solver.block(cuts, mesh, self.count, held)
                table[index, behind] = seconds + tail / self.count + moved[:, None] + moved
        return table

    def _moved(self) -> Floats:
        """Seconds there and back of a micro-batch at each cut, between the first two devices."""
        found = np.zeros(len(self.cuts))
        if len(self.line) > 1:
            ends = _mesh(self.line[:1], 1), _mesh(self.line[1:2], 1)
            for index in range(1, len(self.cuts) - 1):
                cut = int(self.cuts[index])
                found[index] = 2 * self.search.costing.solver.transfer(cut, *ends, self.count)
        return found

    def _offer(self, stages: Sequence[tuple[int, int, int]]) -> None:
        """Place and offer a pipeline of (first cut, last cut, shape), if that is legal.

        Stages of large tp degrees come first in the line of devices, so that they stay in nodes.
        """
        instance, solver = self.search.costing.instance, self.search.costing.solver
        made: list[Stage | None] = [None] * len(stages)
        taken = 0
        for index in sorted(range(len(stages)), key=lambda i: -self.meshes[stages[i][2]].tp):
            start, stop, shape = stages[index]
            size, tp = len(self.meshes[shape].devices), self.meshes[shape].tp
            mesh = _mesh(self.line[taken : taken + size], tp)
            taken += size
            if not alike(instance, mesh) or not solver.usable(mesh):
                return
            span = int(self.cuts[start]), int(self.cuts[stop])
            held = min(self.count, len(stages) - index)
            choices = solver.choices(*span, mesh, self.count, held)
            made[index] = Stage(*span, mesh, choices)
        placed = tuple(stage for stage in made if stage is not None)
        self.search.offer(make_plan(instance, placed, self.count))


def _mesh(devices: tuple[int, ...], tp: int) -> Mesh:
    return Mesh(devices, len(devices) // tp, 1, 1, tp)
