"""Islands planned alone and composed into a pipeline, after Tangram (Tao et al., arXiv 2606.16907).

A cluster of several kinds is a few islands of equal devices, because devices are bought in bulk. A
planner that knows one kind only says how fast each island can run each slice of the model; a
dynamic program then gives the islands, one after the other, slices of equal time.

Decision space: the order of the islands; of each, its slice of the model (none, and it stays idle),
and the stages of the slice on blocks of equally many devices, all of one mesh shape; the choices of
each group; the micro-batch count.

The planner of one kind here is Megatron's, but for cuts that make the slowest stage as quick as can
be, and choices inside a stage (layout, ZeRO, recompute) by `StageSolver`. "The slowest stage of a
slice" and "the slowest slice" are one minimum of maxima, so slices are not listed but grown stage
by stage from the end of the model, where the micro-batches in flight are known. For each
micro-batch count, order of islands and number of stages the most even pipeline is offered to the
estimate, which also sees transfers, fill and drain.

Complexity for an order: islands x widths x shapes x stages^2 x cuts^2. Left out: islands merged
from kinds that are nearly alike, or split; another planner inside the islands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice, permutations

import numpy as np
import numpy.typing as npt

from rlplace.plan.check import legal_micro_batches
from rlplace.plan.degrees import spread
from rlplace.plan.types import Instance, Mesh, Plan
from rlplace.plan.uniform import make_plan
from rlplace.planners.costing import Costing
from rlplace.planners.meshes import mesh_shapes
from rlplace.planners.search import Search
from rlplace.planners.stage_times import StageTimes
from rlplace.planners.types import Budget, PlannerResult

Floats = npt.NDArray[np.float64]
Island = tuple[int, ...]
#: A stage: its mesh, and the indices of the cuts between which it runs.
Piece = tuple[Mesh, int, int]

_COUNTS = 8
_DEPTH = 24
_ORDERS = 6
#: Up to so many devices every width of a block is tried, beyond it the divisors.
_SMALL = 12


def tangram(
    instance: Instance,
    budget: Budget,
    rng: np.random.Generator,
    costing: Costing | None = None,
) -> PlannerResult:
    """The best pipeline of islands over all micro-batch counts and orders of the islands."""
    search = Search("tangram", costing or Costing(instance), budget)
    orders = tuple(islice(permutations(instance.cluster.islands), _ORDERS))
    counts = spread(legal_micro_batches(instance.global_batch, 1), _COUNTS)
    for lean in (False, True):
        for count in counts:
            slices = _Slices(search, StageTimes(search.costing.solver, count, lean))
            for order in orders:
                for plan in _plans(slices, order):
                    if search.over(last=True):
                        return search.result()
                    search.offer(plan)
        if search.best is not None:
            break
    return search.result()


@dataclass
class _Slices:
    """What islands can do, for one micro-batch count.

    Args:
        search: For which it is asked.
        times: Of stages; at their leanest, also where they do not fit, if nothing fits.
    """

    search: Search
    times: StageTimes
    _blocks: dict[Island, tuple[tuple[Mesh, ...], ...]] = field(default_factory=dict)

    def blocks(self, island: Island) -> tuple[tuple[Mesh, ...], ...]:
        """The ways to cut an island into blocks of one mesh shape, each from first to last."""
        if island not in self._blocks:
            self._blocks[island] = tuple(self._cut(island))
        return self._blocks[island]

    def _cut(self, island: Island) -> Iterator[tuple[Mesh, ...]]:
        solver = self.times.solver
        instance = solver.instance
        micro_batch = instance.global_batch // self.times.count
        for width in range(1, len(island) + 1):
            if len(island) % width and len(island) > _SMALL:
                continue
            starts = range(0, len(island) - width + 1, width)
            runs = [island[start : start + width] for start in starts]
            for shape in mesh_shapes(instance, runs[0], micro_batch):
                found = tuple(replace(shape, devices=run) for run in runs)
                legal = all(
                    mesh in mesh_shapes(instance, mesh.devices, micro_batch) for mesh in found
                )
                if legal and solver.usable(shape):
                    yield found


def _plans(slices: _Slices, order: tuple[Island, ...]) -> Iterator[Plan]:
    """The most even pipeline of each number of stages."""
    times = slices.times
    for pieces in _compose(slices, order):
        stages = tuple(
            times.stage(*piece, behind=len(pieces) - at - 1) for at, piece in enumerate(pieces)
        )
        yield make_plan(times.solver.instance, stages, times.count)


def _compose(slices: _Slices, order: tuple[Island, ...]) -> Iterator[tuple[Piece, ...]]:
    """Grow pipelines from the last island to the first.

    `best` has, by number of stages and first cut, the slowest stage of the most even pipeline from
    that cut to the end, and `pieces` its stages.
    """
    cuts = len(slices.times.cuts)
    depth = min(_DEPTH, cuts - 1)
    best = np.full((depth + 1, cuts), np.inf)
    best[0, cuts - 1] = 0.0
    pieces: dict[tuple[int, int], tuple[Piece, ...]] = {(0, cuts - 1): ()}
    for island in reversed(order):
        before, known = best.copy(), dict(pieces)
        for behind in range(depth):
            if np.isfinite(before[behind]).any():
                for blocks in slices.blocks(island):
                    if slices.search.over(slices.times.lean):
                        return
                    _grow(slices, blocks, behind, before[behind], known, best, pieces)
    for stages in range(1, depth + 1):
        if np.isfinite(best[stages, 0]):
            yield pieces[stages, 0]


def _grow(
    slices: _Slices,
    blocks: tuple[Mesh, ...],
    behind: int,
    slowest: Floats,
    known: dict[tuple[int, int], tuple[Piece, ...]],
    best: Floats,
    pieces: dict[tuple[int, int], tuple[Piece, ...]],
) -> None:
    """Put stages on the blocks of an island, the last first, before `behind` stages of others."""
    nexts: list[npt.NDArray[np.int64]] = []
    for mesh in reversed(blocks[-(len(best) - 1 - behind) :]):
        stages = behind + len(nexts) + 1
        worst = np.maximum(slices.times.seconds(mesh, stages - 1), slowest[None, :])
        nexts.append(np.argmin(worst, axis=1))
        slowest = worst.min(axis=1)
        for first in np.flatnonzero(slowest < best[stages]).tolist():
            best[stages, first] = slowest[first]
            own, cut = [], first
            for block, to in zip(blocks[-len(nexts) :], reversed(nexts), strict=True):
                own.append((block, cut, int(to[cut])))
                cut = int(to[cut])
            pieces[stages, first] = (*own, *known[behind, cut])
