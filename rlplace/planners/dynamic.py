"""Dynamic program over stages, after Alpa's inter-operator pass (Zheng et al., arXiv 2201.12023).

Decision space: contiguous stages on runs of a line of devices, each with its own mesh shape; the
choices inside a stage come from `StageSolver`, whose stage tails know that gradient reduction
hides behind backward. Built from the last stage to the first, so the micro-batches in flight of
1F1B, and with them the memory, are known exactly.

For each micro-batch count and order of islands, and for each cap on the slowest stage, it
minimises the sum of stage times and transfers plus the first stage's tail; the step time is that
plus (micro-batches - 1) times the cap. The event simulator picks among the plans of all caps.
Complexity: caps x stages x runs x shapes x cuts^2. Left out: non-contiguous stages, several
stages on one mesh, unequal batch shares.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numba
import numpy as np
import numpy.typing as npt

from rlplace.plan.check import legal_micro_batches
from rlplace.plan.degrees import spread
from rlplace.plan.types import Instance, Mesh, Plan, Stage
from rlplace.plan.uniform import even_cuts, make_plan
from rlplace.planners.costing import Costing
from rlplace.planners.meshes import device_orders, mesh_shapes, runs
from rlplace.planners.search import Search
from rlplace.planners.stage_rows import by_depth
from rlplace.planners.stage_solver import StageSolver
from rlplace.planners.types import Budget, PlannerResult

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_CUTS = 48
_DEPTH = 24
_COUNTS = 7
#: Caps on the slowest stage, relative to the ideal of equal shares.
_CAPS = (1.0, 1.1, 1.2, 1.35, 1.6, 2.0, 3.0, 1e9)


def dynamic(
    instance: Instance,
    budget: Budget,
    rng: np.random.Generator,
    costing: Costing | None = None,
) -> PlannerResult:
    """The best plan of the dynamic program over all micro-batch counts and island orders."""
    search = Search("dynamic", costing or Costing(instance), budget)
    solver = search.costing.solver
    for order in device_orders(instance):
        for count in micro_batch_counts(instance):
            if search.stopped:
                return search.result()
            for plan in _plans(instance, solver, order, count):
                search.offer(plan)
    return search.result()


def micro_batch_counts(instance: Instance) -> tuple[int, ...]:
    """Up to `_COUNTS` micro-batch counts, spread in the logarithm, up to 8 a device."""
    legal = legal_micro_batches(instance.global_batch, 1)
    most = 8 * len(instance.cluster.devices)
    near = [count for count in legal if count <= most] or [legal[0]]
    return spread(near, _COUNTS)


@dataclass(frozen=True)
class _Tables:
    """Inputs of the program. M meshes of C classes, K depths, N cuts, P positions in the line.

    seconds, tail: (C, K, N, N) by class, depth, start cut, stop cut; kind, first, last: (M,) class
    and positions of each mesh; transfer: (P, N) seconds over the border before position p, at cut
    n.
    """

    meshes: tuple[Mesh, ...]
    cuts: Ints
    seconds: Floats
    tail: Floats
    kind: Ints
    first: Ints
    last: Ints
    transfer: Floats


def _plans(
    instance: Instance, solver: StageSolver, order: tuple[int, ...], count: int
) -> Iterator[Plan]:
    tables = _tables(instance, solver, order, count)
    if tables is None:
        return
    ideal = _ideal(tables)
    if not np.isfinite(ideal):
        return
    seen: set[tuple[tuple[int, int, int], ...]] = set()
    for cap in _CAPS:
        best, choice = _solve(
            tables.seconds,
            tables.tail,
            tables.kind,
            tables.first,
            tables.last,
            tables.transfer,
            cap * ideal,
        )
        stages = _backtrack(tables, best, choice)
        if stages and stages not in seen:
            seen.add(stages)
            yield _make(instance, solver, tables, stages, count)


def _tables(
    instance: Instance, solver: StageSolver, order: tuple[int, ...], count: int
) -> _Tables | None:
    micro_batch = instance.global_batch // count
    meshes: list[Mesh] = []
    places: list[tuple[int, int]] = []
    for start, stop in runs(instance, order):
        for mesh in mesh_shapes(instance, order[start:stop], micro_batch):
            if solver.usable(mesh):
                meshes.append(mesh)
                places.append((start, stop))
    if not meshes:
        return None
    cuts = even_cuts(instance, _CUTS)
    depth = min(_DEPTH, len(order), len(cuts) - 1)
    numbers = [solver.mesh_class(mesh) for mesh in meshes]
    of_class = {number: mesh for number, mesh in zip(numbers, meshes, strict=True)}
    blocks = np.stack(
        [by_depth(partial(solver.block, cuts, m, count), count, depth) for m in of_class.values()]
    )
    seconds, tail = (np.ascontiguousarray(blocks[:, :, place]) for place in (0, 2))
    index_of = {number: index for index, number in enumerate(of_class)}
    kind = np.array([index_of[number] for number in numbers], np.int64)
    first, last = np.array(places, np.int64).T
    transfer = _transfers(solver, order, cuts, micro_batch)
    return _Tables(tuple(meshes), cuts, seconds, tail, kind, first, last, transfer)


def _transfers(solver: StageSolver, order: tuple[int, ...], cuts: Ints, micro_batch: int) -> Floats:
    """Seconds (there and back) over the border before each position, by cut; one stream."""
    instance = solver.instance
    found = np.zeros((len(order) + 1, len(cuts)))
    for position in range(1, len(order)):
        pair = (Mesh(order[position - 1 : position]), Mesh(order[position : position + 1]))
        for index, cut in enumerate(cuts):
            floats, other = instance.graph.crossings[cut]
            size = (floats(micro_batch), other(micro_batch))
            found[position, index] = 2 * solver.cost.transfer(instance, *pair, *size)
    return found


def _ideal(tables: _Tables) -> float:
    """Seconds of a stage if all devices shared the work evenly: the unit of the caps.

    Infinite if a single group fits nowhere.
    """
    width = np.array([len(mesh.devices) for mesh in tables.meshes])
    groups = np.arange(len(tables.cuts) - 1)
    alone = tables.seconds[:, :, groups, groups + 1].min(axis=1)[tables.kind]
    shared = (alone * width[:, None]).min(axis=0).sum() / tables.last.max()
    return max(float(shared), float(alone.min(axis=0).max()))


@numba.njit(cache=True)
def _solve(
    seconds: Floats,
    tail: Floats,
    kind: Ints,
    first: Ints,
    last: Ints,
    transfer: Floats,
    cap: float,
) -> tuple[Floats, Ints]:
    """Best sums by (stages behind, position, cut), and the (mesh, next cut) that gave them."""
    _, depth, cuts, _ = seconds.shape
    positions = len(transfer)
    best = np.full((depth + 1, positions, cuts), np.inf)
    choice = np.full((depth + 1, positions, cuts, 2), -1, np.int64)
    best[0, positions - 1, cuts - 1] = 0.0
    for k in range(depth):
        for mesh in range(len(kind)):
            c, a, b = kind[mesh], first[mesh], last[mesh]
            for stop in range(1, cuts):
                behind = best[k, b, stop]
                if behind == np.inf:
                    continue
                behind += transfer[b, stop] if k else 0.0
                for start in range(stop):
                    own = seconds[c, k, start, stop]
                    if own > cap:
                        continue
                    total = behind + own + (tail[c, k, start, stop] if start == 0 else 0.0)
                    if total < best[k + 1, a, start]:
                        best[k + 1, a, start] = total
                        choice[k + 1, a, start, 0] = mesh
                        choice[k + 1, a, start, 1] = stop
    return best, choice


def _backtrack(tables: _Tables, best: Floats, choice: Ints) -> tuple[tuple[int, int, int], ...]:
    """(mesh, start cut, stop cut) of each stage, first to last; empty if nothing fits."""
    ends = best[:, :, 0]
    depth, position = np.unravel_index(int(np.argmin(ends)), ends.shape)
    if not np.isfinite(ends[depth, position]):
        return ()
    stages = []
    cut = 0
    for k in range(int(depth), 0, -1):
        mesh, stop = (int(value) for value in choice[k, position, cut])
        stages.append((mesh, cut, stop))
        position, cut = tables.last[mesh], stop
    return tuple(stages)


def _make(
    instance: Instance,
    solver: StageSolver,
    tables: _Tables,
    stages: tuple[tuple[int, int, int], ...],
    count: int,
) -> Plan:
    made = []
    for index, (mesh_index, start_cut, stop_cut) in enumerate(stages):
        mesh = tables.meshes[mesh_index]
        start, stop = int(tables.cuts[start_cut]), int(tables.cuts[stop_cut])
        held = min(count, len(stages) - index)
        choices = solver.choices(start, stop, mesh, count, held)
        made.append(Stage(start, stop, mesh, choices))
    return make_plan(instance, tuple(made), count)
