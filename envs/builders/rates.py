"""What every group costs on every class of mesh, for all micro-batch sizes at once.

A stage-wise rollout looks at hundreds of (mesh, micro-batch count) pairs. The analytic cost of a
group is piecewise linear in its samples, so it is asked for at a few sample sizes and interpolated
between; the other ways to run a group (layout, ZeRO level, recompute) are columns. The exact
choices of a finished plan come from `StageSolver`, never from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlplace.cost.analytic import AnalyticCost
from rlplace.plan.types import GroupChoice, Instance, Mesh
from rlplace.simulate.stages import boundaries, boundary_bytes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Sets of groups that redo their forward, between none and all.
_STEPS = 6


@dataclass(frozen=True)
class Columns:
    """All ways to run groups 0 to G - 1 on a mesh, as sums over the groups before a cut.

    Shapes: forward, backward, reduce, optimizer, static, saved (O, C): sums over the groups
    before each cut; first_reduce, transient (O, C - 1): of the first group after a cut, and the
    largest between a cut and the next. Seconds and bytes, of one micro-batch where it matters.
    """

    forward: Floats
    backward: Floats
    reduce: Floats
    optimizer: Floats
    static: Floats
    saved: Floats
    first_reduce: Floats
    transient: Floats


@dataclass(frozen=True)
class _Class:
    """Costs on one class of mesh: axes (points, layouts, levels, modes, kinds of group)."""

    points: Floats
    forward: Floats
    backward: Floats
    saved: Floats
    transient: Floats
    reduce: Floats
    optimizer: Floats
    static: Floats


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
        known = self._classes.get(number)
        if known is None:
            known = self._classes[number] = self._measure(number)
        samples = self.instance.global_batch / micro_batches / self.mesh(number).dp
        forward, backward, saved, transient = (
            _at(known.points, values, samples)
            for values in (known.forward, known.backward, known.saved, known.transient)
        )
        fast, steps = self._ways(forward + backward, saved)
        shape = forward.shape
        fixed = [
            np.broadcast_to(values[:, :, None], shape)
            for values in (known.reduce, known.optimizer, known.static)
        ]

        def ways(values: Floats) -> Floats:
            """(O, G): with the fastest layout of each group, then with the sharded one."""
            picked = np.take_along_axis(values, fast, axis=0)
            both = picked if len(values) == 1 else np.concatenate([picked, values[-1:]])
            both = np.where(steps, both[:, :, -1:], both[:, :, 0:1])
            return both.reshape(-1, shape[-1])[:, self.owner]

        def sums(values: Floats) -> Floats:
            total = np.cumsum(ways(values), axis=1)
            return np.concatenate([np.zeros((len(total), 1)), total], axis=1)[:, cuts]

        return Columns(
            forward=sums(forward),
            backward=sums(backward),
            reduce=sums(fixed[0]),
            optimizer=sums(fixed[1]),
            static=sums(fixed[2]),
            saved=sums(saved),
            first_reduce=ways(fixed[0])[:, cuts[:-1]],
            transient=np.maximum.reduceat(ways(transient), cuts[:-1], axis=1),
        )

    def choices(self, number: int, micro_batches: int, way: int) -> tuple[GroupChoice, ...]:
        """What every group does in one of the ways (rows) of `columns`."""
        known, mesh = self._classes[number], self.mesh(number)
        samples = self.instance.global_batch / micro_batches / mesh.dp
        forward, backward, saved = (
            _at(known.points, values, samples)
            for values in (known.forward, known.backward, known.saved)
        )
        fast, steps = self._ways(forward + backward, saved)
        levels = self.levels if mesh.dp_shard > 1 else (0,)
        rest, step = divmod(way, len(steps))
        sharded, level = divmod(rest, len(levels))
        modes = self.instance.recompute_modes
        found = []
        for kind, (index, _) in enumerate(self.kinds):
            layouts = self.instance.graph.structures[index].layouts_at(mesh.tp)
            redo = int(steps[step, kind]) if len(modes) > 1 else 0
            wanted = len(layouts) - 1 if sharded else int(fast[0, level, redo, kind])
            layout = layouts[min(wanted, len(layouts) - 1)].name
            mode = modes[redo]
            found.append(GroupChoice(layout, levels[level], mode))  # type: ignore[arg-type]
        return tuple(found[kind] for kind in self.owner)

    def _ways(self, seconds: Floats, saved: Floats) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """The fastest layout of each kind (1, levels, modes, kinds), and who redoes what."""
        return seconds.argmin(axis=0)[None], self._steps(seconds, saved)

    def _steps(self, seconds: Floats, saved: Floats) -> npt.NDArray[np.bool_]:
        """Which kinds of group redo their forward, from none to all: (steps, kinds of group).

        Those come first that free most bytes for a second; a solver with a price on memory goes
        through the same sets. With many kinds, neighbours in that order go together.
        """
        if len(self.instance.recompute_modes) < 2:
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
        modes = self.instance.recompute_modes
        structures = self.instance.graph.structures
        width = max(len(structures[s].layouts_at(mesh.tp)) for s, _ in self.kinds)
        shape = (len(points), width, len(levels), len(modes), len(self.kinds))
        found = {name: np.zeros(shape) for name in ("forward", "backward", "saved", "transient")}
        once = {
            name: np.zeros(shape[1:3] + shape[4:]) for name in ("reduce", "optimizer", "static")
        }
        for kind, (index, reads) in enumerate(self.kinds):
            layouts = structures[index].layouts_at(mesh.tp)
            for a in range(width):
                layout = layouts[min(a, len(layouts) - 1)].name
                for b, level in enumerate(levels):
                    for p, samples in enumerate(points):
                        kept = boundary_bytes(self.instance, reads, samples)
                        for c, mode in enumerate(modes):
                            choice = GroupChoice(layout, level, mode)  # type: ignore[arg-type]
                            cost = self.cost.group(
                                self.instance, structures[index], choice, mesh, samples, kept
                            )
                            for name, values in found.items():
                                values[p, a, b, c, kind] = getattr(cost, name)
                    for name, values in once.items():
                        values[a, b, kind] = getattr(cost, name)
        return _Class(points=points, **found, **once)


def _at(points: Floats, values: Floats, samples: float) -> Floats:
    """Interpolate linearly along the first axis."""
    right = int(np.clip(np.searchsorted(points, samples), 1, max(1, len(points) - 1)))
    if len(points) == 1:
        return np.asarray(values[0])
    left = right - 1
    weight = (samples - points[left]) / (points[right] - points[left])
    return np.asarray(values[left] * (1.0 - weight) + values[right] * weight)
