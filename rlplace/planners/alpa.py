"""Alpa (Zheng et al., arXiv 2201.12023): a linear program in each stage, a dynamic one over stages.

Decision space: contiguous stages on submeshes of (1, 2^m) devices or of (n, M), n whole nodes of M;
of each submesh all logical meshes, which are degrees and orders of dp and tp; in a stage, layouts
of all groups, those that cut activations between groups among them, ZeRO level and recompute; the
micro-batch count.

Algorithm: `layout_program` gives the seconds t of each interval of groups on each submesh, with as
many micro-batches in flight as stages are behind; equal intervals are solved once, and those that
alone would take longer than the best plan so far are not. For each limit of the slowest stage, from
the least one on, a program over (stages, first group, devices) makes the sum of the t least; B
micro-batches take that and (B - 1) times the limit. Limits that are close to the last one are left
out, and so are those with which the slowest stage alone takes longer than the best. Stages are then
put on nodes, the largest first. Complexity: counts x (intervals x submeshes integer programs +
limits x stages x cuts^2 x devices x submeshes).

Here t has its share of what is done once a step. As in the paper, transfers between stages are no
part of the program, and nodes are thought equal: where they are not, each counts as the slowest,
and as one of several nodes where sizes differ. Beside it, (1, M) where M is no power of two, and
idle devices, where replicas would not divide the micro-batch. Left out: more cuts than `_CUTS` (the
paper merges operators into layers too), and more than `_DEPTH` stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlplace.plan.check import legal_micro_batches
from rlplace.plan.degrees import spread
from rlplace.plan.types import Instance, Mesh, Stage
from rlplace.plan.uniform import even_cuts, make_plan
from rlplace.planners.costing import Costing
from rlplace.planners.layout_tables import LayoutTables
from rlplace.planners.mesh_options import MeshTables, stage_meshes
from rlplace.planners.meshes import Nodes, equal_nodes
from rlplace.planners.search import Search
from rlplace.planners.stage_program import pipelines
from rlplace.planners.types import Budget, PlannerResult

Floats = npt.NDArray[np.float64]

_CUTS, _DEPTH, _COUNTS = 16, 24, 7
#: Up to so many nodes every number of them is a submesh; then powers of two and all of them.
_FEW_NODES = 8
#: How far from the best stages may be while pipelines are looked for.
_ROUGH = 0.03
#: A linear program may take this share of the budget's seconds.
_SHARE = 0.25


def alpa(
    instance: Instance, budget: Budget, rng: np.random.Generator, costing: Costing | None = None
) -> PlannerResult:
    """The best pipeline, over micro-batch counts."""
    search = Search("alpa", costing or Costing(instance), budget)
    tables = LayoutTables(search.costing, _SHARE * budget.seconds)
    counts = spread(legal_micro_batches(instance.global_batch, 1), _COUNTS)
    every = [_Pipelines(search, tables, count) for count in counts]
    for own in every:
        own.whole()
    for own in every:
        own.run()
    if not search.evaluations:
        _least_overfull(search)
    return search.result()


@dataclass(frozen=True)
class Submesh:
    """So many nodes, and devices of each; less than all only of one node."""

    nodes: int
    devices: int

    @property
    def size(self) -> int:
        """Devices in all."""
        return self.nodes * self.devices


def submeshes(nodes: int, devices: int) -> tuple[Submesh, ...]:
    """The submeshes of so many nodes with so many devices each, the smallest first."""
    inside = (1 << m for m in range(devices.bit_length()))
    several = (n for n in range(1, nodes + 1) if nodes <= _FEW_NODES or n & (n - 1) == 0)
    found = (
        *(Submesh(1, width) for width in inside if width < devices),
        *(Submesh(n, devices) for n in dict.fromkeys((*several, nodes))),
    )
    return tuple(sorted(found, key=lambda one: one.size))


def place(shapes: Sequence[Submesh], nodes: Nodes) -> list[tuple[int, ...]] | None:
    """Devices of each submesh, the largest first; None if they cannot be placed side by side."""
    free = [list(own) for own in nodes]
    found: list[tuple[int, ...]] = [()] * len(shapes)
    for index in sorted(range(len(shapes)), key=lambda i: -shapes[i].size):
        shape = shapes[index]
        roomy = [own for own in free if len(own) >= shape.devices]
        if len(roomy) < shape.nodes:
            return None
        taken = roomy[: shape.nodes] if shape.nodes > 1 else [min(roomy, key=len)]
        found[index] = tuple(device for own in taken for device in own[: shape.devices])
        for own in taken:
            del own[: shape.devices]
    return found


@dataclass
class _Pipelines:
    """The search with one micro-batch count."""

    search: Search
    tables: LayoutTables
    count: int
    _seen: set[tuple[Stage, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        instance = self.search.costing.instance
        self.nodes = equal_nodes(instance)
        self.shapes = submeshes(len(self.nodes), len(self.nodes[0]))
        self.cuts = even_cuts(instance, _CUTS)

    def whole(self) -> None:
        """Offer one stage on all devices."""
        if not self.search.over(last=True):
            self._offer([(0, len(self.cuts) - 1, self.shapes[-1])])

    def run(self) -> None:
        """Offer the pipelines of the program."""
        if self.search.over(last=True):
            return
        sizes = [shape.size for shape in self.shapes]
        for stages in pipelines(self._table(), sizes, sizes[-1], self.count):
            if self.search.over(last=True):
                return
            self._offer([(start, stop, self.shapes[shape]) for start, stop, shape in stages])

    def _table(self) -> Floats:
        """Seconds of a micro-batch, by shape, stages behind, first and last cut."""
        size, groups = sum(map(len, self.nodes)), len(self.cuts) - 1
        depth = min(size, groups, _DEPTH)
        table = np.full((len(self.shapes), depth, groups + 1, groups + 1), np.inf)
        for index, shape in enumerate(self.shapes):
            reference = tuple(d for own in self.nodes[: shape.nodes] for d in own[: shape.devices])
            for mesh in stage_meshes(self.search.costing, reference, self.count):
                least = self.tables.least(mesh, self.count)[self.cuts]
                for start in range(groups):
                    for stop in range(start + 1, groups + 1):
                        if self.search.stopped:
                            return table
                        entries = table[index, :, start, stop]
                        self._solve(mesh, (start, stop), least[stop] - least[start], entries)
        return table

    def _solve(self, mesh: Mesh, span: tuple[int, int], least: float, entries: Floats) -> None:
        """Take in what a stage takes on a mesh, by stages behind.

        Args:
            mesh: Of the stage.
            span: Its first and last cut.
            least: Seconds of a step that it takes at least.
            entries: The least seconds of a micro-batch that are known, (depth,).
        """
        best = self.search.best
        most = min(self.count * entries[-1], best[1].step_time if best else np.inf)
        if least >= most:
            return
        first, last = (int(self.cuts[cut]) for cut in span)
        for behind in range(len(entries)):
            held = min(self.count, behind + 1)
            if behind and held == min(self.count, behind):
                entries[behind] = min(entries[behind], entries[behind - 1])
                continue
            most = min(most, self.count * entries[behind])
            value, _ = self.tables.solve(first, last, mesh, self.count, held, _ROUGH, most)
            if not value < most:
                return
            entries[behind] = min(entries[behind], value / self.count)

    def _offer(self, stages: list[tuple[int, int, Submesh]]) -> None:
        """Place and offer a pipeline of (first cut, last cut, submesh), if it fits."""
        placed = place([shape for _, _, shape in stages], self.nodes)
        if placed is None:
            return
        made = []
        for index, ((start, stop, _), devices) in enumerate(zip(stages, placed, strict=True)):
            held = min(self.count, len(stages) - index)
            span = int(self.cuts[start]), int(self.cuts[stop])
            stage = self._stage(span, devices, held)
            if stage is None:
                return
            made.append(stage)
        if tuple(made) not in self._seen:
            self._seen.add(tuple(made))
            self.search.offer(make_plan(self.search.costing.instance, tuple(made), self.count))

    def _stage(self, span: tuple[int, int], devices: tuple[int, ...], held: int) -> Stage | None:
        """The quickest stage on some devices."""
        best, found = np.inf, None
        for mesh in stage_meshes(self.search.costing, devices, self.count):
            value, choices = self.tables.solve(*span, mesh, self.count, held)
            if value < best:
                best, found = value, Stage(*span, mesh, choices)
        return found


def _least_overfull(search: Search) -> None:
    """Offer the leanest choices of one stage: nothing fits, or nothing was found that does."""
    instance, tables = search.costing.instance, MeshTables(search.costing)
    every, groups = tuple(range(len(instance.cluster.devices))), len(instance.graph.groups)
    for width in range(len(every), 0, -1):
        for count in reversed(legal_micro_batches(instance.global_batch, 1)):
            for mesh in stage_meshes(search.costing, every[:width], count):
                _, choices = tables.options(mesh, count).solve(0, groups, count, 1)
                search.offer(make_plan(instance, (Stage(0, groups, mesh, choices),), count))
                if search.stopped:
                    return
        if search.evaluations:
            return
