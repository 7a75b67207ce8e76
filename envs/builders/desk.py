"""What the stage-wise builder knows about one instance, worked out once for all its states."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rlplace.cost.analytic import AnalyticCost
from rlplace.cost.collectives import point_to_point
from rlplace.envs.builders.outlook import Rest, look_ahead, look_behind
from rlplace.envs.builders.rates import Rates
from rlplace.envs.builders.stage_table import StageTable, Ways, stage_table
from rlplace.plan.check import legal_micro_batches
from rlplace.plan.degrees import spread
from rlplace.plan.types import GroupChoice, Instance, Mesh, Stage
from rlplace.plan.uniform import even_cuts
from rlplace.planners.meshes import device_orders, mesh_shapes, runs
from rlplace.planners.stage_solver import StageSolver
from rlplace.simulate.bound import bound
from rlplace.simulate.stages import stage_cost

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Micro-batch counts that are offered, spread in the logarithm.
_COUNTS = 16
#: Cuts of the first look at every (micro-batch count, order), and of the look at a chosen one.
ROUGH, FINE = 12, 48
#: Longest pipeline, at the first look and afterwards.
_ROUGH_DEPTH, _DEPTH = 8, 16
#: Times that the period of the steady state is guessed anew.
_GUESSES = 2
#: Bytes of stage tables that an instance keeps.
_KEPT_BYTES = 64 * 2**20
#: What an overflow of the whole limit costs, in bounds.
_PENALTY = 30.0


@dataclass(frozen=True)
class Line:
    """Devices lined up, with the meshes that a stage may take from the line.

    Args:
        devices: Global ranks in the order of the line.
        meshes: All meshes whose replicas divide the global batch.
        classes, firsts, lasts: Of each mesh: class, first position, one past the last position.
        turns: Of each mesh: how much longer a stage takes when all ranks of its cores are busy.
        hops: (meshes, 2): seconds and seconds a byte, one way, over the mesh's later border.
        tied: Seconds to sum the gradients of tied parameters between each position and the end.
    """

    devices: tuple[int, ...]
    meshes: tuple[Mesh, ...]
    classes: Ints
    firsts: Ints
    lasts: Ints
    turns: Floats
    hops: Floats
    tied: Floats


@dataclass(frozen=True)
class Outlook:
    """What is ahead under one micro-batch count and one line of devices.

    Args:
        line: The devices.
        micro_batches: Micro-batches of a step.
        cuts: Where stages may begin and end.
        usable: Indices of the meshes of the line whose replicas divide the micro-batch.
        local: Class of each of them, as the first axis of `table` counts.
        period: Seconds a micro-batch in the steady state of a good pipeline.
        table: Costs of stages.
        rest: The best pipelines for what is left.
    """

    line: Line
    micro_batches: int
    cuts: Ints
    usable: Ints
    local: Ints
    period: float
    table: StageTable
    rest: Rest

    @property
    def bytes(self) -> int:
        """Size of the tables."""
        return sum(array.nbytes for array in (*self.table, *self.rest))


@dataclass
class Desk:
    """Everything that a rollout looks up: lines, costs of stages, outlooks.

    Args:
        instance: The question.
    """

    instance: Instance
    cost: AnalyticCost = field(default_factory=AnalyticCost)

    def __post_init__(self) -> None:
        self.solver = StageSolver(self.instance, self.cost)
        self.rates = Rates(self.instance, self.cost)
        self._last: tuple[object, StageTable] | None = None
        self._outlooks: OrderedDict[tuple[int, int, int], Outlook] = OrderedDict()

    @cached_property
    def bound(self) -> float:
        """The proved limit of the step time: the unit of every duration."""
        return bound(self.instance)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Micro-batch counts that are offered."""
        return spread(legal_micro_batches(self.instance.global_batch, 1), _COUNTS)

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """The devices with the islands in every order that is offered."""
        orders = device_orders(self.instance)
        if self.instance.graph.tied:
            orders += tuple(_closed(self.instance, order) for order in orders)
        return tuple(self._line(order) for order in dict.fromkeys(orders))

    def cuts(self, segments: int) -> Ints:
        """All cuts, or as many as asked for that share the work evenly."""
        return even_cuts(self.instance, segments)

    def outlook(self, count: int, line: int, segments: int) -> Outlook:
        """What is ahead; computed once, the ones used last are kept."""
        key = (count, line, len(self.cuts(segments)))
        if key in self._outlooks:
            self._outlooks.move_to_end(key)
            return self._outlooks[key]
        found = self._outlooks[key] = self._look(count, self.lines[line], segments)
        while len(self._outlooks) > 1 and self.bytes > _KEPT_BYTES:
            self._outlooks.popitem(last=False)
        return found

    def weigh(
        self,
        mesh: Mesh,
        choices: tuple[GroupChoice, ...],
        start: int,
        stop: int,
        count: int,
        held: int,
    ) -> tuple[float, float]:
        """(bytes over the limit, seconds of all micro-batches and the tail) of a stage."""
        cost = stage_cost(
            self.instance,
            Stage(start, stop, mesh, choices),
            count,
            self.cost,
            self.solver.reads,
        )
        states = cost.params + cost.gradients + cost.optimizer_states
        over = states + held * cost.saved + cost.transient - self.rates.limit(mesh)
        seconds = count * (cost.forward + cost.backward) + cost.exposed_reduce + cost.optimizer
        return max(0.0, over), seconds

    @property
    def penalty(self) -> float:
        """Seconds that an overflow of the whole limit costs."""
        return _PENALTY * self.bound

    @property
    def bytes(self) -> int:
        """Size of the tables that are kept."""
        return sum(outlook.bytes for outlook in self._outlooks.values())

    def _look(self, count: int, line: Line, segments: int) -> Outlook:
        micro_batch = self.instance.global_batch // count
        usable = np.array(
            [i for i, mesh in enumerate(line.meshes) if micro_batch % mesh.dp == 0], np.int64
        )
        cuts = self.cuts(segments)
        wanted, local = np.unique(line.classes[usable], return_inverse=True)
        depth = min(len(line.devices), len(cuts) - 1, _ROUGH_DEPTH if segments == ROUGH else _DEPTH)
        table = self._table(tuple(wanted.tolist()), count, cuts, depth)
        line_up = (
            local.astype(np.int64),
            line.firsts[usable],
            line.lasts[usable],
            line.turns[usable],
            self._transfers(line, usable, cuts, micro_batch),
            len(line.devices),
            count,
        )
        period = self.bound / count
        for _ in range(_GUESSES):
            behind = look_behind(table, *line_up, line.tied, period, self.penalty)
            period = behind.period
        rest = Rest(*look_ahead(table, behind, *line_up, line.tied, period, self.penalty))
        return Outlook(line, count, cuts, usable, line_up[0], period, table, rest)

    def _table(self, classes: tuple[int, ...], count: int, cuts: Ints, depth: int) -> StageTable:
        """Costs of stages; the last one is kept, for the other lines have the same."""
        key = (classes, count, len(cuts), depth)
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        found = [self.rates.columns(int(number), count, cuts) for number in classes]
        ways = Ways(
            np.array([columns.sums.shape[-1] for columns in found]),
            np.array([self.rates.hidden(int(number)) for number in classes]),
            np.array([self.rates.limit(self.rates.mesh(int(n))) for n in classes]),
            *(_stack([getattr(c, name) for c in found]) for name in Ways._fields[3:]),
        )
        table = StageTable(*stage_table(ways, count, depth))
        self._last = (key, table)
        return table

    def _transfers(self, line: Line, usable: Ints, cuts: Ints, micro_batch: int) -> Floats:
        """(meshes, cuts): seconds there and back over the later border of each mesh."""
        size = self.instance.bytes.activation
        moved = np.array(
            [
                floats(micro_batch) * size + other(micro_batch)
                for floats, other in (self.instance.graph.crossings[cut] for cut in cuts)
            ]
        )
        hops = line.hops[usable]
        return np.asarray(2.0 * (hops[:, :1] + hops[:, 1:] * moved[None]))

    def _line(self, order: tuple[int, ...]) -> Line:
        meshes: list[Mesh] = []
        places: list[tuple[int, int]] = []
        for first, last in runs(self.instance, order):
            for mesh in mesh_shapes(self.instance, order[first:last], self.instance.global_batch):
                meshes.append(mesh)
                places.append((first, last))
        firsts, lasts = np.array(places, np.int64).T
        tied = sum(elements for _, elements in self.instance.graph.tied)
        size = float(tied * self.instance.bytes.gradient)
        return Line(
            devices=order,
            meshes=tuple(meshes),
            classes=np.array([self.rates.number(mesh) for mesh in meshes]),
            firsts=firsts.copy(),
            lasts=lasts.copy(),
            turns=np.array([self._turns(mesh) for mesh in meshes]),
            hops=np.array(
                [self._hop(order, mesh, int(b)) for mesh, b in zip(meshes, lasts, strict=True)]
            ),
            tied=np.array(
                [2.0 * point_to_point(self.instance.cluster, (d,), order[-1:], size) for d in order]
            ),
        )

    def _turns(self, mesh: Mesh) -> float:
        """Ranks a core, over the ranks of this mesh a core: 1 where nothing is shared."""
        described = self.instance.cluster.devices
        cores = [described[device].core for device in mesh.devices]
        if None in cores:
            return 1.0
        ranks = [sum(other.core == core for other in described) for core in cores]
        return max(ranks) / max(cores.count(core) for core in cores)

    def _hop(self, order: tuple[int, ...], mesh: Mesh, border: int) -> tuple[float, float]:
        """Seconds and seconds a byte over a border, to a mesh of the same shape behind it.

        What is really behind it is not known yet.
        """
        if border == len(order):
            return 0.0, 0.0
        cluster = self.instance.cluster
        behind = order[border : border + len(mesh.devices)]
        ends = (mesh.devices[:: mesh.tp], behind[:: mesh.tp])
        base = point_to_point(cluster, *ends, 1.0)
        slope = (point_to_point(cluster, *ends, 1e9) - base) / 1e9
        nodes = {cluster.devices[device].node for device in (*mesh.devices, *behind)}
        copies = mesh.tp if len(nodes) > 1 else 1
        return base * copies, slope * copies


def _closed(instance: Instance, order: tuple[int, ...]) -> tuple[int, ...]:
    """The line with half of its last node at the head, so that its ends are on one node.

    Tied parameters of the first and the last stage are then summed inside a node.
    """
    node = instance.cluster.devices[order[-1]].node
    inside = [device for device in order if instance.cluster.devices[device].node == node]
    half = tuple(inside[: len(inside) // 2])
    return half + tuple(device for device in order if device not in half)


def _stack(arrays: list[Floats]) -> Floats:
    """Stack arrays whose last axes differ, padded with zeros that `Ways.number` leaves out."""
    widest = max(array.shape[-1] for array in arrays)
    out = np.zeros((len(arrays), *arrays[0].shape[:-1], widest))
    for index, array in enumerate(arrays):
        out[index, ..., : array.shape[-1]] = array
    return out
