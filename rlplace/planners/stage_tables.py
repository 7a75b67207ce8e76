"""Stages and the ways between them as arrays, for a program over takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rlplace.plan.types import Mesh
from rlplace.planners.best_stages import Stages
from rlplace.planners.search import Search
from rlplace.planners.stage_rows import by_depth
from rlplace.planners.stage_solver import StageSolver
from rlplace.planners.takes import State, Takes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class TableArrays(NamedTuple):
    """C classes of meshes, K depths, N cuts, E takes, L lines, R ways.

    Args:
        kind: Class of each take (E,).
        before, after, entry: State before and after, and line of the first device, of each (E,).
        seconds: Forward and backward of a micro-batch, by class, stages behind, first and last cut
            (C, K, N, N); infinite where nothing fits.
        forward, tail: Likewise: of the forward, and of what follows the last backward, once a step.
        way: From each take to a stage that begins in a line (E, L); -1 where there is none.
        transfer: Seconds of a micro-batch on each way, one direction, at each cut (R, N).
    """

    kind: Ints
    before: Ints
    after: Ints
    entry: Ints
    seconds: Floats
    forward: Floats
    tail: Floats
    way: Ints
    transfer: Floats


@dataclass(frozen=True)
class StageTables:
    """What a program over stages reads.

    Args:
        arrays: The numbers.
        meshes: Of each take, E.
        states: Devices that each state leaves.
        width: Devices of each class of meshes (C,).
    """

    arrays: TableArrays
    meshes: tuple[Mesh, ...]
    states: tuple[State, ...]
    width: Ints


def stage_tables(
    stages: Stages,
    takes: Takes,
    cuts: Ints,
    count: int,
    deepest: int,
    most: float,
    search: Search,
) -> StageTables | None:
    """The tables of one micro-batch count; None where no mesh divides the micro-batch.

    They take a while, so None too where the search is out of its budget before they are done.

    Args:
        stages: Solves stages of the instance.
        takes: All of them.
        cuts: First groups of stages, and the end.
        count: Micro-batches of a step.
        deepest: Stages at most.
        most: Seconds; a stage whose step takes as long may be left out.
        search: For which they are.
    """
    solver = stages.costing.solver
    micro_batch = solver.instance.global_batch // count
    own = takes.of(np.array([stages.divides(mesh, micro_batch) for mesh in takes.meshes], bool))
    if not own.meshes:
        return None
    numbers = [solver.mesh_class(mesh) for mesh in own.meshes]
    of_class = dict(zip(numbers, own.meshes, strict=True))
    parts = []
    for mesh in of_class.values():
        if search.stopped:
            return None
        block = partial(stages.block, cuts, mesh, count, most)
        parts.append(by_depth(block, count, deepest))
    blocks = np.stack(parts)
    classes = {number: index for index, number in enumerate(of_class)}
    way, transfer = _ways(solver, own, numbers, cuts, micro_batch)
    seconds, forward, tail = (np.ascontiguousarray(blocks[:, :, place]) for place in range(3))
    arrays = TableArrays(
        np.array([classes[number] for number in numbers], np.int64),
        own.before,
        own.after,
        own.entry,
        seconds,
        forward,
        tail,
        way,
        transfer,
    )
    width = np.array([len(mesh.devices) for mesh in of_class.values()])
    return StageTables(arrays, own.meshes, own.states, width)


def _ways(
    solver: StageSolver, takes: Takes, numbers: list[int], cuts: Ints, micro_batch: int
) -> tuple[Ints, Floats]:
    """`StageTables.way` and `transfer`, as if the other end were shaped like the mesh of the take.

    So there are as many streams as replicas of the mesh, or as devices that are left behind.
    """
    instance = solver.instance
    crossings = [instance.graph.crossings[cut] for cut in cuts]
    sizes = [(floats(micro_batch), other(micro_batch)) for floats, other in crossings]
    way = np.full((len(takes.meshes), len(takes.lines)), -1, np.int64)
    found: dict[tuple[object, ...], int] = {}
    seconds: list[list[float]] = []
    node = [device.node for device in instance.cluster.devices]
    for take, mesh in enumerate(takes.meshes):
        state = takes.states[takes.before[take]]
        for line, devices in enumerate(takes.lines):
            behind = devices[state[line] :][: len(mesh.devices)]
            if not behind:
                continue
            inside = node[mesh.devices[-1]] == node[behind[0]]
            key = (numbers[take], line, inside, len(behind))
            if key not in found:
                found[key] = len(seconds)
                tp = mesh.tp if len(behind) % mesh.tp == 0 else 1
                other_end = Mesh(behind, 1, len(behind) // tp, 1, tp)
                known = {
                    size: solver.cost.transfer(instance, mesh, other_end, *size)
                    for size in set(sizes)
                }
                seconds.append([known[size] for size in sizes])
            way[take, line] = found[key]
    return way, np.array(seconds).reshape(-1, len(cuts))
