"""What every group costs on every class of mesh, for all micro-batch sizes at once.

A stage-wise rollout looks at hundreds of (mesh, micro-batch count) pairs. The analytic cost of a
group is piecewise linear in its samples, so it is asked for at a few sample sizes and interpolated
between; the other ways to run a group (layout, ZeRO level, recompute) are columns. The exact
choices of a finished plan come from `StageSolver`, never from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import numpy as np
import numpy.typing as npt

from rlplace.cost.analytic import AnalyticCost
from rlplace.plan.types import GroupChoice, Instance, Mesh
from rlplace.simulate.stages import boundaries, boundary_bytes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Sets of groups that redo their forward, between none and all.
_STEPS = 5


#: Rows of `Columns.sums`.
FORWARD, BACKWARD, REDUCE, OPTIMIZER, STATIC, SAVED = range(6)


@dataclass(frozen=True)
class Columns:
    """All ways to run groups 0 to G - 1 on a mesh, as sums over the groups before a cut.

    Seconds and bytes, of one micro-batch where it matters.

    Args:
        sums: (6, C, O): forward, backward, reduce, optimizer, static, saved of the groups before
            each cut, in each way.
        first_reduce: (C - 1, O): gradient reduction of the first group after a cut.
        transient: (C - 1, O): the largest between a cut and the next.
    """

    sums: Floats
    first_reduce: Floats
    transient: Floats


@dataclass(frozen=True)
class _Class:
    """Costs on one class of mesh.

    Args:
        points: (P,): samples of a micro-batch on a replica at which the model was asked.
        timed: (P, 4, layouts, levels, modes, kinds): forward, backward, saved, transient.
        fixed: (3, layouts, levels, kinds): reduce, optimizer, static.
        steps: See `Rates._steps`.
    """

    points: Floats
    timed: Floats
    fixed: Floats
    steps: npt.NDArray[np.bool_]


@dataclass
class Rates:
    """Costs of one instance by class of mesh, built when first asked for.

    Args:
        instance: The question.
        cost: The cost model, shared with the solver so that it answers once.
    """

    instance: Instance
    cost: AnalyticCost = field(default_factory=AnalyticCost)

    def __post_init__(self) -> None:
        reads = boundaries(self.instance.graph)
        kinds: dict[tuple[int, tuple[float, float, float, float]], int] = {}
        self.owner = np.array(
            [
                kinds.setdefault((group.structure, reads[group.index]), len(kinds))
                for group in self.instance.graph.groups
            ]
        )
        self.kinds = tuple(kinds)
        #: ZeRO levels that are looked at; 2 is between its neighbours in memory and in traffic.
        levels = self.instance.zero_levels
        self.levels = tuple(z for z in levels if z != 2 or 3 not in levels or 1 not in levels)
        #: Recompute modes that are looked at: what keeps most and what keeps least.
        offered = self.instance.offered_recompute
        self._modes = tuple(dict.fromkeys((offered[0], offered[-1])))
        self._numbers: dict[object, int] = {}
        self._meshes: list[Mesh] = []
        self._classes: dict[int, _Class] = {}
        self._columns: dict[tuple[int, int, int], Columns] = {}

    def number(self, mesh: Mesh) -> int:
        """The class of a mesh; equal for meshes that cost the same."""
        key = (self.cost.view(self.instance.cluster, mesh), self.limit(mesh))
        if key not in self._numbers:
            self._numbers[key] = len(self._meshes)
            self._meshes.append(mesh)
        return self._numbers[key]

    def limit(self, mesh: Mesh) -> float:
        """Bytes for states and activations on the tightest device of a mesh."""
        cluster = self.instance.cluster
        kinds = {cluster.devices[d].kind: d for d in mesh.devices}
        return min(
            self.instance.memory_limit(device) - cluster.kind(device).reserve
            for device in kinds.values()
        )

    def mesh(self, number: int) -> Mesh:
        """A mesh of a class."""
        return self._meshes[number]

    def hidden(self, number: int) -> float:
        """Share of the gradient reduction that may hide behind backward on a class."""
        names = {self.instance.cluster.devices[d].kind for d in self.mesh(number).devices}
        return min(kind.overlap for kind in self.instance.cluster.kinds if kind.name in names)

    def columns(self, number: int, micro_batches: int, cuts: Ints) -> Columns:
        """All ways to run the groups on a class of mesh, summed up at some cuts.

        Args:
            number: The class.
            micro_batches: Micro-batches of a step.
            cuts: Increasing, from 0 to the number of groups.
        """
        key = (number, micro_batches, len(cuts))
        if key not in self._columns:
            self._columns[key] = self._sums(number, micro_batches, cuts)
        return self._columns[key]

    def _sums(self, number: int, micro_batches: int, cuts: Ints) -> Columns:
        known = self._class(number)
        timed = self._timed(number, micro_batches)
        shape = timed.shape[1:]
        fixed = np.broadcast_to(known.fixed[:, :, :, None], (3, *shape))
        # Forward, backward, reduce, optimizer, static, saved, transient.
        every = np.concatenate([timed[:2], fixed, timed[2:]])
        ways = self._ways(every, self._fastest(timed), known.steps)
        summed = np.zeros((6, len(self.owner) + 1, ways.shape[1]))
        grouped = ways[:, :, self.owner].transpose(0, 2, 1)
        np.cumsum(grouped[:6], axis=1, out=summed[:, 1:])
        return Columns(
            sums=np.ascontiguousarray(summed[:, cuts]),
            first_reduce=np.ascontiguousarray(grouped[REDUCE, cuts[:-1]]),
            transient=np.maximum.reduceat(grouped[6], cuts[:-1], axis=0),
        )

    @staticmethod
    def _fastest(timed: Floats) -> Ints:
        """The fastest layout of each kind of group, (levels, modes, kinds)."""
        return np.asarray((timed[0] + timed[1]).argmin(axis=0))

    @staticmethod
    def _ways(every: Floats, fast: Ints, steps: npt.NDArray[np.bool_]) -> Floats:
        """(rows, O, kinds): with the fastest layout of each group, then with the sharded one."""
        picked = every[:, :1]
        if every.shape[1] > 1:
            best = np.where(fast == 0, every[:, 0], every[:, -1])
            picked = np.stack([best, every[:, -1]], axis=1)
        both = np.where(steps, picked[:, :, :, -1:], picked[:, :, :, 0:1])
        return np.asarray(both.reshape(len(every), -1, every.shape[-1]))

    def _timed(self, number: int, micro_batches: int) -> Floats:
        """(4, layouts, levels, modes, kinds): forward, backward, saved, transient."""
        known, dp = self._class(number), self.mesh(number).dp
        return _at(known.points, known.timed, self.instance.global_batch / micro_batches / dp)

    def _class(self, number: int) -> _Class:
        if number not in self._classes:
            self._classes[number] = self._measure(number)
        return self._classes[number]

    def choices(self, number: int, micro_batches: int, way: int) -> tuple[GroupChoice, ...]:
        """What every group does in one of the ways (rows) of `columns`."""
        mesh, steps = self.mesh(number), self._class(number).steps
        fast = self._fastest(self._timed(number, micro_batches))
        levels = self.levels if mesh.dp_shard > 1 else (0,)
        rest, step = divmod(way, len(steps))
        sharded, level = divmod(rest, len(levels))
        modes = self._modes
        found = []
        for kind, (index, _) in enumerate(self.kinds):
            layouts = self.instance.graph.structures[index].layouts_at(mesh.tp)
            redo = int(steps[step, kind]) if len(modes) > 1 else 0
            wanted = sharded or fast[level, redo, kind] > 0
            layout = layouts[-1 if wanted else 0].name
            options = self.instance.recompute_options(self.instance.graph.structures[index].work)
            mode = modes[redo] if modes[redo] in options else options[0]
            found.append(GroupChoice(layout, levels[level], mode))  # type: ignore[arg-type]
        return tuple(found[kind] for kind in self.owner)

    def _steps(self, seconds: Floats, saved: Floats) -> npt.NDArray[np.bool_]:
        """Which kinds of group redo their forward, from none to all: (steps, kinds of group).

        Those come first that free most bytes for a second; a solver with a price on memory goes
        through the same sets. With many kinds, neighbours in that order go together.
        """
        if len(self._modes) < 2:
            return np.zeros((1, len(self.kinds)), np.bool_)
        repeats = np.bincount(self.owner, minlength=len(self.kinds))
        freed = np.maximum(saved[-1, 0, 0] - saved[-1, 0, -1], 0.0)
        slower = seconds[-1, 0, -1] - seconds[-1, 0, 0]
        order = np.argsort(slower / np.maximum(freed, 1.0), kind="stable")
        share = np.cumsum((freed * repeats)[order]) / max(float(freed @ repeats), 1.0)
        step = np.empty(len(order), np.int64)
        step[order] = np.minimum(np.ceil(share * _STEPS - 1e-9), _STEPS)
        found = [step <= level for level in range(_STEPS)]
        found[0] = np.zeros(len(order), np.bool_)
        return np.unique(np.array([*found, np.ones(len(order), np.bool_)]), axis=0)

    def _measure(self, number: int) -> _Class:
        """Ask the cost model about every kind of group at a few sample sizes."""
        mesh = self.mesh(number)
        most = self.instance.global_batch / mesh.dp
        points = np.unique([1.0, max(1.0, most**0.5), max(1.0, most)])
        levels = self.levels if mesh.dp_shard > 1 else (0,)
        modes = self._modes
        structures = self.instance.graph.structures
        width = min(2, max(len(structures[s].layouts_at(mesh.tp)) for s, _ in self.kinds))
        timed = np.zeros((len(points), 4, width, len(levels), len(modes), len(self.kinds)))
        fixed = np.zeros((3, width, len(levels), len(self.kinds)))
        for kind, (index, reads) in enumerate(self.kinds):
            structure = structures[index]
            names = [layout.name for layout in structure.layouts_at(mesh.tp)]
            for a, b, p, c in product(
                *(range(n) for n in (width, len(levels), len(points), len(modes)))
            ):
                choice = GroupChoice(names[-1 if a else 0], levels[b], modes[c])  # type: ignore[arg-type]
                kept = boundary_bytes(self.instance, reads, points[p])
                cost = self.cost.group(self.instance, structure, choice, mesh, points[p], kept)
                timed[p, :, a, b, c, kind] = cost.forward, cost.backward, cost.saved, cost.transient
                fixed[:, a, b, kind] = cost.reduce, cost.optimizer, cost.static
        middle = timed[len(points) // 2]
        return _Class(points, timed, fixed, self._steps(middle[0] + middle[1], middle[2]))


def _at(points: Floats, values: Floats, samples: float) -> Floats:
    """Interpolate linearly along the first axis."""
    right = int(np.clip(np.searchsorted(points, samples), 1, max(1, len(points) - 1)))
    if len(points) == 1:
        return np.asarray(values[0])
    left = right - 1
    weight = (samples - points[left]) / (points[right] - points[left])
    return np.asarray(values[left] * (1.0 - weight) + values[right] * weight)
