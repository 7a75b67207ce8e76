"""The best stage known of a span of groups on a mesh, and how its replicas share samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from rlplace.plan.check import nearest_shares
from rlplace.plan.types import GroupChoice, Mesh, Stage
from rlplace.planners.costing import Costing
from rlplace.planners.mesh_options import MeshTables
from rlplace.planners.meshes import may_share
from rlplace.planners.overlap_stage import OverlapProgram
from rlplace.planners.shares import Curve, curve, curves_of, even_time, gain, replica_kinds

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
    _curves: dict[tuple[int, str, int], Curve] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tables = MeshTables(self.costing)

    def program(self, mesh: Mesh, count: int) -> OverlapProgram:
        """The program of a mesh, for steps of `count` micro-batches."""
        key = (self.costing.solver.mesh_class(mesh), count)
        if key not in self._programs:
            self._programs[key] = OverlapProgram(self._tables.options(mesh, count), count)
        return self._programs[key]

    def block(self, cuts: Ints, mesh: Mesh, count: int, most: float, held: int) -> Floats:
        """Seconds, forward and tail of the stages between any two cuts (see `StageSolver.block`).

        Args:
            cuts: Ascending groups, the last one past the end (N,).
            mesh: Where the stages run.
            count: Micro-batches of a step.
            most: Seconds; a stage whose step takes as long may be left out.
            held: Micro-batches in flight at the peak.
        """
        gain = self._gain(mesh, count)
        # With equal shares a stage takes up to so much more.
        most /= gain
        swept = self.program(mesh, count).block(cuts, held, most)
        priced = self.costing.solver.block(cuts, mesh, count, held, most)[:3]
        better = count * swept[0] + swept[2] <= count * priced[0] + priced[2]
        found = np.where(better, swept, priced)
        found[:2] *= gain
        return found

    def stage(self, part: Part, count: int, held: int) -> Stage:
        """The stage behind `block`; the leanest one where nothing fits.

        Replicas of unequal devices have as many samples as make them end together.
        """
        start, stop, mesh = part
        stage = Stage(*part, self._choices(start, stop, mesh, count, held))
        if not self._unequal(mesh, count):
            return stage
        micro_batch = self.costing.instance.global_batch // count
        shares = _shares(curves_of(self.costing, stage, micro_batch, held=held), micro_batch)
        return replace(stage, shares=shares if len(set(shares)) > 1 else ())

    def divides(self, mesh: Mesh, micro_batch: int) -> bool:
        """Whether replicas of a mesh can share the samples of a micro-batch."""
        instance = self.costing.instance
        return micro_batch % mesh.dp == 0 or may_share(instance, mesh.devices, mesh.dp, micro_batch)

    def _unequal(self, mesh: Mesh, count: int) -> bool:
        instance = self.costing.instance
        uneven = instance.global_batch // count % mesh.dp > 0
        return mesh.dp > 1 and (uneven or len(set(replica_kinds(instance, mesh))) > 1)

    def _gain(self, mesh: Mesh, count: int) -> float:
        """What unequal shares make of the seconds that equal ones take, of the whole model."""
        if not self._unequal(mesh, count):
            return 1.0
        key = (self.costing.solver.mesh_class(mesh), count)
        if key not in self._gains:
            micro_batch = self.costing.instance.global_batch // count
            curves = [self._alone(one, mesh, micro_batch) for one in _replicas(mesh)]
            self._gains[key] = gain(curves, _shares(curves, micro_batch))
        return self._gains[key]

    def _alone(self, replica: Mesh, mesh: Mesh, samples: int) -> Curve:
        """The curve of one replica with the whole model and all the memory that it needs.

        By itself it is the same in many meshes. Where rules or a profile leave it nothing to do by
        itself, as where all weights have to be sharded, it is measured in its mesh.
        """
        solver, instance = self.costing.solver, self.costing.instance
        where = replica if solver.usable(replica) else mesh
        device = replica.devices[0]
        key = (solver.mesh_class(where), instance.cluster.devices[device].kind, samples)
        if key not in self._curves:
            groups = instance.graph.groups
            first = tuple(solver.options(group.structure, where)[0] for group in groups)
            whole = Stage(0, len(groups), where, first)
            self._curves[key] = curve(self.costing, whole, device, samples, roomy=True)
        return self._curves[key]

    def _choices(
        self, start: int, stop: int, mesh: Mesh, count: int, held: int
    ) -> tuple[GroupChoice, ...]:
        solver = self.costing.solver
        swept = self.program(mesh, count).stage(start, stop, held)
        row = solver.row(stop, mesh, count, held)
        if swept and swept[0] <= count * row.seconds[start] + row.tail[start]:
            return swept[1]
        return solver.choices(start, stop, mesh, count, held)


def _replicas(mesh: Mesh) -> list[Mesh]:
    """The mesh of each replica by itself."""
    size = mesh.cp * mesh.tp
    starts = range(0, len(mesh.devices), size)
    return [Mesh(mesh.devices[at : at + size], cp=mesh.cp, tp=mesh.tp) for at in starts]


def _shares(curves: Sequence[Curve], micro_batch: int) -> tuple[int, ...]:
    """With these replicas end together; where there is no room, they are as equal as can be."""
    shares = even_time(curves, micro_batch)
    if shares is None or min(shares) < 1:
        shares = nearest_shares(micro_batch, len(curves), (1,) * len(curves))
        assert shares is not None  # `Stages.divides` holds
    return shares
