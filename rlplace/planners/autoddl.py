"""AutoDDL (Chen et al., arXiv 2301.06813): a signature for every operator, by coordinate descent.

Decision space: one stage on a grid of devices, and how each operator's tensors are split (S),
broadcast (B) or partial sums (P) along each of its axes. As far as our plans say them, the axes are
dp and tp, in either order and any degrees: on tp a group's signature is its layout (of those with
whole borders, and of those that cut sequences or other activations between groups); on dp the batch
is split, and weights are broadcast (ZeRO-0) or split (ZeRO-1 to 3). Partial sums are what a layout
reduces inside. Beside the paper: the micro-batch count and recompute, for memory.

Algorithm: from random signatures, group after group takes the one that is best while all others
stay, until nothing changes; several starts. Neighbours have to agree on what passes between them,
and no single group can change that, so there are starts for every way of cutting borders, and a
group moves among the signatures with its own borders. The value is the sum of the groups' seconds,
and how overfull the device is where it is. Complexity: meshes x counts x starts x sweeps x groups x
options. Left out: a layout change between neighbours that disagree, which no plan says; axes beyond
two; stages, as in the paper.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from rlplace.graph.neighbours import disagreement
from rlplace.graph.types import Layout
from rlplace.plan.check import legal_micro_batches
from rlplace.plan.degrees import spread
from rlplace.plan.types import Instance, Mesh, Plan, Stage
from rlplace.plan.uniform import make_plan
from rlplace.planners.costing import Costing
from rlplace.planners.mesh_options import MeshOptions, MeshTables, stage_meshes
from rlplace.planners.meshes import device_orders
from rlplace.planners.search import Search
from rlplace.planners.types import Budget, PlannerResult

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_COUNTS = 6
#: Starts for each way of cutting borders.
_STARTS = 3
_SWEEPS = 50


def autoddl(
    instance: Instance, budget: Budget, rng: np.random.Generator, costing: Costing | None = None
) -> PlannerResult:
    """The best of all descents; on fewer devices only where all cannot be used."""
    search = Search("autoddl", costing or Costing(instance), budget)
    tables = MeshTables(search.costing, bordered=True)
    for width in range(len(instance.cluster.devices), 0, -1):
        for order in device_orders(instance):
            for count in spread(legal_micro_batches(instance.global_batch, 1), _COUNTS):
                for mesh in stage_meshes(search.costing, order[:width], count):
                    for plan in _descents(search.costing, tables, mesh, count, rng):
                        search.offer(plan)
                        if search.stopped:
                            return search.result()
        if search.evaluations:
            break
    return search.result()


@dataclass(frozen=True)
class _Signatures:
    """What each option of each group reads and hands on. G groups, S options.

    Args:
        borders: A number for each way, (G, S); -1 where there is no such option.
        names: Layout of each option of each group.
    """

    borders: Ints
    names: tuple[tuple[str, ...], ...]


def _descents(
    costing: Costing, tables: MeshTables, mesh: Mesh, count: int, rng: np.random.Generator
) -> Iterator[Plan]:
    """The plans that descents on a mesh end at."""
    instance, options = costing.instance, tables.options(mesh, count)
    groups = len(instance.graph.groups)
    signatures = _signatures(instance, options, mesh.tp)
    seconds = count * options.work + options.once
    size = options.static + options.saved
    seen: set[bytes] = set()
    for first in _starts(instance, signatures, mesh.tp):
        alike = signatures.borders == signatures.borders[np.arange(groups), first][:, None]
        for _ in range(_STARTS):
            picks = np.array([rng.choice(np.flatnonzero(row)) for row in alike], np.int64)
            order = rng.permutation(groups)
            room = max(options.limit, 1.0)
            _descend(seconds, size, options.transient, alike, picks, order, room)
            if picks.tobytes() in seen:
                continue
            seen.add(picks.tobytes())
            rows = zip(options.choices, picks, strict=True)
            choices = tuple(own[int(pick)] for own, pick in rows)
            plan = make_plan(instance, (Stage(0, groups, mesh, choices),), count)
            # Groups that share a parameter were made to agree on it.
            if _agree(instance, tuple(c.layout for c in plan.stages[0].choices), mesh.tp):
                yield plan


def _signatures(instance: Instance, options: MeshOptions, tp: int) -> _Signatures:
    known: dict[object, int] = {}
    borders = np.full(options.forward.shape, -1, np.int64)
    for group, row in enumerate(options.choices):
        layouts = _layouts(instance, group, tp)
        for place, choice in enumerate(row):
            layout = layouts[choice.layout]
            key = (layout.reads, layout.writes)
            borders[group, place] = known.setdefault(key, len(known))
    names = tuple(tuple(choice.layout for choice in row) for row in options.choices)
    return _Signatures(borders, names)


def _starts(instance: Instance, signatures: _Signatures, tp: int) -> Iterator[Ints]:
    """An option for each group, for each way of cutting borders on which neighbours agree.

    Groups take the layout of one name where they have it, and whole borders where they do not.
    """
    whole = [row.index("replicate") if "replicate" in row else 0 for row in signatures.names]
    cut = dict.fromkeys(
        layout.name
        for group in range(len(whole))
        for layout in _layouts(instance, group, tp).values()
        if layout.reads or layout.writes
    )
    for name in (None, *cut):
        picks = [
            row.index(name) if name in row else default
            for row, default in zip(signatures.names, whole, strict=True)
        ]
        names = (row[pick] for row, pick in zip(signatures.names, picks, strict=True))
        if _agree(instance, tuple(names), tp):
            yield np.array(picks, np.int64)


def _layouts(instance: Instance, group: int, tp: int) -> dict[str, Layout]:
    return {own.name: own for own in instance.graph.structure(group).layouts_with("tp", tp)}


def _agree(instance: Instance, names: tuple[str, ...], tp: int) -> bool:
    layouts = {group: _layouts(instance, group, tp)[name] for group, name in enumerate(names)}
    return disagreement(instance.graph, layouts) is None


@numba.njit(cache=True)
def _descend(
    seconds: Floats,
    size: Floats,
    transient: Floats,
    allowed: npt.NDArray[np.bool_],
    picks: Ints,
    order: Ints,
    room: float,
) -> None:
    """Coordinate descent on `picks`, in place: first what is over `room`, then seconds.

    Args:
        seconds: Of each group and option, (G, S).
        size: Bytes, likewise.
        transient: Bytes that come and go, likewise; the most of all groups counts.
        allowed: Options that agree with the neighbours, (G, S).
        picks: Option of each group, (G,).
        order: In which groups are visited.
        room: Bytes that there are.
    """
    groups, options = seconds.shape
    for _ in range(_SWEEPS):
        changed = False
        for group in order:
            time, held, peak = 0.0, 0.0, 0.0
            for other in range(groups):
                if other != group:
                    time += seconds[other, picks[other]]
                    held += size[other, picks[other]]
                    peak = max(peak, transient[other, picks[other]])
            best, over, least = -1, np.inf, np.inf
            for option in range(options):
                if not allowed[group, option]:
                    continue
                full = held + size[group, option] + max(peak, transient[group, option])
                excess, total = max(full - room, 0.0), time + seconds[group, option]
                if excess < over or (excess == over and total < least):
                    best, over, least = option, excess, total
            if best != picks[group]:
                picks[group] = best
                changed = True
        if not changed:
            return
