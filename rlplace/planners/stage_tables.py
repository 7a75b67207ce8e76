"""Stages and the ways between them as arrays, for a program over takes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rlplace.plan.check import nearest_shares
from rlplace.plan.types import GroupChoice, Mesh, Stage
from rlplace.planners.costing import Costing
from rlplace.planners.mesh_options import MeshTables
from rlplace.planners.meshes import may_share
from rlplace.planners.overlap_stage import OverlapProgram
from rlplace.planners.search import Search
from rlplace.planners.shares import curves_of, even_time
from rlplace.planners.stage_solver import StageSolver
from rlplace.planners.takes import State, Takes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
#: A stage without its choices.
Part = tuple[int, int, Mesh]


@dataclass
class Stages:
    """Solves stages of one instance, by `OverlapProgram` and by `StageSolver`: the better of both.

    The one knows what hides behind backward, the other mixes choices of equal layers where memory
    is short.

    Args:
        costing: Of the instance.
    """

    costing: Costing
    _programs: dict[tuple[int, int], OverlapProgram] = field(default_factory=dict)
    _gains: dict[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tables = MeshTables(self.costing)

    def program(self, mesh: Mesh, count: int) -> OverlapProgram:
        """The program of a mesh, for steps of `count` micro-batches."""
        key = (self.costing.solver.mesh_class(mesh), count)
        if key not in self._programs:
            self._programs[key] = OverlapProgram(self._tables.options(mesh, count), count)
        return self._programs[key]

    def block(self, cuts: Ints, mesh: Mesh, count: int, held: int) -> Floats:
        """Seconds, forward and tail of the stages between any two cuts (see `StageSolver.block`).

        Args:
            cuts: Ascending groups, the last one past the end (N,).
            mesh: Where the stages run.
            count: Micro-batches of a step.
            held: Of those, in flight at the peak.
        """
        swept = self.program(mesh, count).block(cuts, held)
        priced = self.costing.solver.block(cuts, mesh, count, held)
        better = count * swept[0] + swept[2] <= count * priced[0] + priced[2]
        found = np.where(better, swept, priced)
        found[:2] *= self._gain(mesh, count)
        return found

    def stage(self, part: Part, count: int, held: int) -> Stage:
        """The stage behind `block`; the leanest one where nothing fits.

        Replicas of unequal devices have as many samples as make them end together.
        """
        start, stop, mesh = part
        stage = Stage(*part, self._choices(start, stop, mesh, count, held))
        if not self._unequal(mesh, count):
            return stage
        return replace(stage, shares=self._shares(stage, count, held)[0])

    def divides(self, mesh: Mesh, micro_batch: int) -> bool:
        """Whether replicas of a mesh can share the samples of a micro-batch."""
        instance = self.costing.instance
        return micro_batch % mesh.dp == 0 or may_share(instance, mesh.devices, mesh.dp, micro_batch)

    def _unequal(self, mesh: Mesh, count: int) -> bool:
        uneven = self.costing.instance.global_batch // count % mesh.dp > 0
        return mesh.dp > 1 and (uneven or len(set(self._kinds(mesh))) > 1)

    def _kinds(self, mesh: Mesh) -> list[str]:
        devices = self.costing.instance.cluster.devices
        return [devices[device].kind for device in mesh.firsts]

    def _gain(self, mesh: Mesh, count: int) -> float:
        """What unequal shares make of the seconds that equal ones take, of the whole model."""
        if not self._unequal(mesh, count):
            return 1.0
        key = (self.costing.solver.mesh_class(mesh), count)
        if key not in self._gains:
            graph = self.costing.instance.graph
            first = [
                self.costing.solver.options(group.structure, mesh)[0] for group in graph.groups
            ]
            whole = Stage(0, len(graph.groups), mesh, tuple(first))
            self._gains[key] = self._shares(whole, count, 1, roomy=True)[1]
        return self._gains[key]

    def _shares(
        self, stage: Stage, count: int, held: int, roomy: bool = False
    ) -> tuple[tuple[int, ...], float]:
        """Shares with which replicas end together, and seconds over those of equal shares.

        There are none where equal ones are as good; where there is no room for any, they are as
        equal as can be.
        """
        micro_batch = self.costing.instance.global_batch // count
        kinds = self._kinds(stage.mesh)
        curves = curves_of(self.costing, stage, kinds, micro_batch, roomy, held)
        shares = even_time(curves, micro_batch)
        replicas = stage.mesh.dp
        if shares is None or min(shares) < 1:
            shares = nearest_shares(micro_batch, replicas, (1,) * replicas)
            assert shares is not None  # `divides` holds
        taken = max(own.seconds[share] for own, share in zip(curves, shares, strict=True))
        every = range(micro_batch + 1)
        even = max(np.interp(micro_batch / replicas, every, own.seconds) for own in curves)
        equal = len(set(shares)) == 1
        return (() if equal else shares), float(taken / even)

    def _choices(
        self, start: int, stop: int, mesh: Mesh, count: int, held: int
    ) -> tuple[GroupChoice, ...]:
        solver = self.costing.solver
        swept = self.program(mesh, count).stage(start, stop, held)
        row = solver.row(stop, mesh, count, held)
        if swept and swept[0] <= count * row.seconds[start] + row.tail[start]:
            return swept[1]
        return solver.choices(start, stop, mesh, count, held)


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
    stages: Stages, takes: Takes, cuts: Ints, count: int, deepest: int, search: Search
) -> StageTables | None:
    """The tables of one micro-batch count; None where no mesh divides the micro-batch.

    They take a while, so None too where the search is out of its budget before they are done.

    Args:
        stages: Solves stages of the instance.
        takes: All of them.
        cuts: First groups of stages, and the end.
        count: Micro-batches of a step.
        deepest: Stages at most.
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
        parts.append(_blocks(stages, cuts, mesh, count, deepest))
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


def _blocks(stages: Stages, cuts: Ints, mesh: Mesh, count: int, deepest: int) -> Floats:
    """`Stages.block` by stages behind; one serves all where memory does not matter."""
    most = min(count, deepest)
    loose, tight = (stages.block(cuts, mesh, count, held) for held in (1, most))
    if np.array_equal(loose[0], tight[0]):
        return np.repeat(loose[None], deepest, axis=0)
    between = [stages.block(cuts, mesh, count, held) for held in range(2, most)]
    return np.stack([loose, *between, *[tight] * (deepest - most + 1)])


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
