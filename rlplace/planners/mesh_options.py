"""What each group may do on one mesh, and what that costs, as arrays: the input of programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rlplace.cost.types import GroupCost
from rlplace.plan.degrees import spread
from rlplace.plan.types import GroupChoice, Mesh
from rlplace.planners.costing import Costing
from rlplace.planners.memory_program import memory_program
from rlplace.planners.meshes import alike
from rlplace.planners.strategies import data_meshes
from rlplace.simulate.stages import boundary_bytes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Picks among the choices that the solver offers for a structure.
Keep = Callable[[Sequence[GroupChoice]], Sequence[GroupChoice]]

#: At most so many limits of what comes and goes are tried.
_PEAKS = 6


@dataclass(frozen=True)
class MeshOptions:
    """Options of G groups, S at most.

    Args:
        choices: Of each group.
        forward, backward: Seconds of a micro-batch, (G, S); infinite where there is no such option,
            as in all that follows.
        once: Seconds once a step: optimizer, and the gradient reduction that the group's own
            backward does not hide.
        hides: Seconds of gradient reduction that may run beside backward.
        static: Bytes of states.
        saved: Bytes kept of a micro-batch in flight.
        transient: Bytes that come and go.
        limit: Bytes for all of that on the tightest device.
    """

    choices: tuple[tuple[GroupChoice, ...], ...]
    forward: Floats
    backward: Floats
    once: Floats
    hides: Floats
    static: Floats
    saved: Floats
    transient: Floats
    limit: float

    @cached_property
    def work(self) -> Floats:
        """Seconds of forward and backward of a micro-batch, (G, S)."""
        return self.forward + self.backward

    def solve(
        self,
        start: int,
        stop: int,
        micro_batches: int,
        held: int,
        switch: Floats | None = None,
    ) -> tuple[float, tuple[GroupChoice, ...]]:
        """Quickest choices of a stage [start, stop) that fit with `held` micro-batches in flight.

        What comes and goes is that of one group: for each of a few limits of it, the choices below
        it share what it leaves.

        Args:
            start: First group.
            stop: One past the last.
            micro_batches: Of a step.
            held: Of those, in flight at the peak.
            switch: Seconds of a step from each option of a group to each of the next, (S, S).

        Returns:
            Seconds of a step's work; infinite, with the leanest choices, where nothing fits.
        """
        own = slice(start, stop)
        seconds = micro_batches * self.work[own] + self.once[own]
        size = self.static[own] + held * self.saved[own]
        items = np.arange(stop - start)
        best, picks = (float("inf"), float("inf")), np.zeros(stop - start, np.int64)
        for peak in _peaks(self.transient[own]):
            allowed = np.where(self.transient[own] <= peak, seconds, np.inf)
            value, found = memory_program(allowed, size, self.limit - peak, switch)
            full = float(size[items, found].sum() + peak)
            if (value, full) < best:
                best, picks = (value, full), found
        rows = self.choices[own]
        return best[0], tuple(row[int(pick)] for row, pick in zip(rows, picks, strict=True))


def _peaks(transient: Floats) -> Floats:
    """Limits of what comes and goes: the least that is possible, up to what never binds."""
    least = transient.min(axis=1).max()
    values = np.unique(transient[np.isfinite(transient) & (transient >= least)])
    return np.array(spread(values.tolist(), _PEAKS))


def stage_meshes(costing: Costing, devices: tuple[int, ...], micro_batches: int) -> list[Mesh]:
    """Meshes of a stage on which plans cost differently: degrees and orders of dp and tp.

    Args:
        costing: Of the instance.
        devices: Of the stage; the outermost level cuts the largest runs of them.
        micro_batches: Of a step; the replicas of a mesh divide each.
    """
    instance, solver = costing.instance, costing.solver
    found: dict[int, Mesh] = {}
    for mesh in data_meshes(devices, instance.offered_tp):
        whole = instance.global_batch // micro_batches % mesh.dp == 0
        if whole and alike(instance, mesh) and solver.usable(mesh):
            found.setdefault(solver.mesh_class(mesh), mesh)
    return list(found.values())


@dataclass
class MeshTables:
    """`MeshOptions` of one instance, remembered by what a mesh looks like.

    Args:
        costing: Of the instance.
        keep: Which of the offered choices a planner considers; by default all.
        bordered: Whether layouts that cut activations between groups are offered too; a planner
            that takes them sees to it that neighbours agree.
    """

    costing: Costing
    keep: Keep = tuple
    bordered: bool = False
    _found: dict[tuple[int, int], MeshOptions] = field(default_factory=dict)

    def options(self, mesh: Mesh, micro_batches: int) -> MeshOptions:
        """The options of every group on a mesh that `StageSolver.usable` takes."""
        key = (self.costing.solver.mesh_class(mesh), micro_batches)
        if key not in self._found:
            self._found[key] = self._make(mesh, micro_batches)
        return self._found[key]

    def _offered(self, index: int, mesh: Mesh) -> tuple[GroupChoice, ...]:
        costing = self.costing
        offered = costing.solver.options(index, mesh)
        structure = costing.instance.graph.structures[index]
        if not self.bordered or mesh.tp == 1:
            return offered
        alike = [one for one in offered if one.layout == "replicate" and one.slices == 1]
        cut = (
            replace(choice, layout=layout.name)
            for layout in structure.layouts_with("tp", mesh.tp)
            if layout.reads or layout.writes
            for choice in alike
        )
        knows = costing.cost.knows
        known = (one for one in cut if knows(costing.instance, structure, one, mesh))
        return (*offered, *known)

    def _make(self, mesh: Mesh, micro_batches: int) -> MeshOptions:
        costing, graph = self.costing, self.costing.instance.graph
        offered = [
            tuple(self.keep(self._offered(index, mesh))) for index in range(len(graph.structures))
        ]
        samples = costing.instance.global_batch / micro_batches / mesh.dp
        kinds: dict[tuple[int, float], int] = {}
        rows: list[list[GroupCost]] = []
        owner = []
        for group in graph.groups:
            kept = boundary_bytes(costing.instance, costing.solver.reads[group.index], samples)
            key = (group.structure, kept)
            if key not in kinds:
                kinds[key] = len(rows)
                structure = graph.structures[group.structure]
                rows.append(
                    [
                        costing.cost.group(costing.instance, structure, choice, mesh, samples, kept)
                        for choice in offered[group.structure]
                    ]
                )
            owner.append(kinds[key])
        widest = max(len(row) for row in rows)

        def table(value: Callable[[GroupCost], float]) -> Floats:
            """(G, S), padded with infinity; groups that cost the same are asked once."""
            padded = [[value(one) for one in row] + [np.inf] * (widest - len(row)) for row in rows]
            return np.array(padded)[owner]

        return MeshOptions(
            tuple(offered[group.structure] for group in graph.groups),
            table(lambda cost: cost.forward),
            table(lambda cost: cost.backward),
            table(_once),
            table(lambda cost: cost.hidden * cost.reduce),
            table(lambda cost: cost.static),
            table(lambda cost: cost.saved),
            table(lambda cost: cost.transient),
            costing.solver.limit(mesh),
        )


def _once(cost: GroupCost) -> float:
    waits = max(0.0, cost.hidden * cost.reduce - cost.backward)
    return cost.optimizer + (1.0 - cost.hidden) * cost.reduce + waits
