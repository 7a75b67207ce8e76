"""PipeDream (Narayanan et al., SOSP 2019; arXiv 1806.03377): replicated stages, level by level.

Decision space: contiguous stages, each replicated over devices; the micro-batch count. The network
is a hierarchy: a program plans a node for every interval of layers, a second one plans the nodes,
and of a stage of the second all nodes run the same pipeline of the first, as its replicas.

Algorithm: A(i..j, m), the least time of the slowest stage of layers i..j on m devices of a level,
is T(i..j, m), or the largest of A(i..s, m - k), the transfer at s, and T(s..j, k). T is compute or
weight exchange, whichever is longer; they overlap. Memory is no part of it. Complexity: counts x
nodes x cuts^3 x devices of a node^2.

The paper's pipeline exchanges weights after every minibatch. A step here does once, so that a
micro-batch is charged its share. All nodes are taken for the slowest ones; where they differ in
size, each counts as several. Devices may stay idle, since replicas must divide the micro-batch.
Stages redo as little as fits. Left out: tensor parallelism, as in the paper; more cuts than
`_CUTS`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from rlplace.plan.check import legal_micro_batches
from rlplace.plan.degrees import spread
from rlplace.plan.types import Instance, Mesh, Stage
from rlplace.plan.uniform import even_cuts, make_plan
from rlplace.planners.costing import Costing
from rlplace.planners.mesh_options import MeshTables
from rlplace.planners.meshes import Nodes, equal_nodes
from rlplace.planners.search import Search
from rlplace.planners.types import Budget, PlannerResult

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_CUTS = 24
_COUNTS = 7


def pipedream(
    instance: Instance, budget: Budget, rng: np.random.Generator, costing: Costing | None = None
) -> PlannerResult:
    """The pipeline whose slowest stage is quickest, over micro-batch counts."""
    search = Search("pipedream", costing or Costing(instance), budget)
    single = (Mesh((device.index,)) for device in instance.cluster.devices)
    if 1 not in instance.offered_tp or not all(map(search.costing.solver.usable, single)):
        return search.result()
    tables = MeshTables(search.costing)
    for count in reversed(spread(legal_micro_batches(instance.global_batch, 1), _COUNTS)):
        if search.stopped:
            break
        _offer(search, tables, count)
    return search.result()


@dataclass(frozen=True)
class _Level:
    """A solved level, by first cut, last cut and components, (C, C, M + 1).

    Args:
        best: Time of the slowest stage, on at most so many components.
        split: Where the last stage begins; the first cut itself where there is one stage.
        last: Components of the last stage.
    """

    best: Floats
    split: Ints
    last: Ints

    def stages(self, start: int, stop: int, components: int) -> list[tuple[int, int, int]]:
        """(first cut, last cut, components) of each stage."""
        found = []
        while True:
            split = int(self.split[start, stop, components])
            last = int(self.last[start, stop, components])
            found.append((split, stop, last))
            if split == start:
                return found[::-1]
            stop, components = split, components - last


def _offer(search: Search, tables: MeshTables, count: int) -> None:
    """Plan one micro-batch count, and offer the pipeline."""
    made, stages = [], _pipeline(tables, count)
    for index, (start, stop, mesh) in enumerate(stages):
        held = min(count, len(stages) - index)
        _, choices = tables.options(mesh, count).solve(start, stop, count, held)
        made.append(Stage(start, stop, mesh, choices))
    search.offer(make_plan(search.costing.instance, tuple(made), count))


def _pipeline(tables: MeshTables, count: int) -> list[tuple[int, int, Mesh]]:
    """First group, stop and mesh of each stage."""
    instance = tables.costing.instance
    cuts, nodes = even_cuts(instance, _CUTS), equal_nodes(instance)
    inside, across = _transfers(tables.costing, nodes, cuts, count)
    levels = []
    times = np.full((len(cuts), len(cuts), len(nodes) + 1), np.inf)
    for replicas in range(1, len(nodes) + 1):
        levels.append(_node_level(tables, nodes[:replicas], cuts, inside, count))
        times[:, :, replicas] = levels[-1].best[:, :, -1]
    stages, first = [], 0
    for start, stop, replicas in _solve(times, across).stages(0, len(cuts) - 1, len(nodes)):
        own, taken = nodes[first : first + replicas], 0
        for begin, end, width in levels[replicas - 1].stages(start, stop, len(nodes[0])):
            devices = tuple(d for node in own for d in node[taken : taken + width])
            stages.append((int(cuts[begin]), int(cuts[end]), Mesh(devices, len(devices))))
            taken += width
        first += replicas
    return stages


def _transfers(costing: Costing, nodes: Nodes, cuts: Ints, count: int) -> tuple[Floats, Floats]:
    """Seconds there and back at each cut, inside a node and between two."""

    def at_cuts(pair: tuple[int, ...]) -> Floats:
        found = np.zeros(len(cuts))
        if len(pair) == 2:
            for index in range(1, len(cuts) - 1):
                ends = Mesh((pair[0],)), Mesh((pair[1],))
                found[index] = 2.0 * costing.solver.transfer(int(cuts[index]), *ends, count)
        return found

    return at_cuts(nodes[0][:2]), at_cuts(tuple(own[0] for own in nodes[:2]))


def _node_level(
    tables: MeshTables, nodes: Nodes, cuts: Ints, transfer: Floats, count: int
) -> _Level:
    """The program of a node, where each of some nodes runs a replica of its pipeline."""
    micro_batch = tables.costing.instance.global_batch // count
    times = np.full((len(cuts), len(cuts), len(nodes[0]) + 1), np.inf)
    for width in range(1, len(nodes[0]) + 1):
        devices = tuple(d for node in nodes for d in node[:width])
        if micro_batch % len(devices):
            continue
        options = tables.options(Mesh(devices, len(devices)), count)
        both = []
        for row in (options.work[:, 0], options.once[:, 0] / count):
            before = np.concatenate([[0.0], np.cumsum(row)])[cuts]
            both.append(before[None, :] - before[:, None])
        times[:, :, width] = np.maximum(*both)
    return _solve(times, transfer)


def _solve(times: Floats, transfer: Floats) -> _Level:
    """Solve a level.

    Args:
        times: T of (first cut, last cut, components), (C, C, M + 1).
        transfer: Seconds at each cut, (C,).
    """
    best = np.full(times.shape, np.inf)
    split, last = np.zeros(times.shape, np.int64), np.zeros(times.shape, np.int64)
    _fill(times, transfer, best, split, last)
    return _Level(best, split, last)


@numba.njit(cache=True)
def _fill(times: Floats, transfer: Floats, best: Floats, split: Ints, last: Ints) -> None:
    cuts, _, most = times.shape
    for stop in range(1, cuts):
        for start in range(stop - 1, -1, -1):
            for m in range(1, most):
                # At most m components: what fewer can do, or some of them for the last stage.
                value = best[start, stop, m - 1]
                at, width = split[start, stop, m - 1], last[start, stop, m - 1]
                if times[start, stop, m] < value:
                    value, at, width = times[start, stop, m], start, m
                for s in range(start + 1, stop):
                    if transfer[s] >= value:
                        continue
                    for k in range(1, m):
                        slowest = max(best[start, s, m - k], transfer[s], times[s, stop, k])
                        if slowest < value:
                            value, at, width = slowest, s, k
                best[start, stop, m] = value
                split[start, stop, m], last[start, stop, m] = at, width
