"""Plans as vectors of decisions, for searches that know nothing of plans.

A vector says the order of islands, the micro-batch count, the number of stages, and for each stage
how many devices it has of those in line, how much work for their speed, and its tp degree; those of
stages that there are not say nothing. Devices and groups are shared out in proportion, so that
nearly every vector is a legal plan; the choices of groups are solved (`StageSolver`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rlplace.plan.check import legal_micro_batches, nearest_shares
from rlplace.plan.degrees import spread
from rlplace.plan.types import Mesh, Plan, Stage
from rlplace.plan.uniform import group_loads, make_plan
from rlplace.planners.costing import Costing
from rlplace.planners.meshes import device_orders, mesh_shapes
from rlplace.planners.search import Search, overflow

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_STAGES, _COUNTS = 12, 8
#: Devices of a stage for those of the others, and work of its devices for that of others.
_WIDTHS = (1, 2, 3, 4, 8)
_WORK = (0.5, 0.7, 0.85, 1.0, 1.15, 1.4, 2.0)
#: What a plan that does not fit costs: about as much as in `search.objective`, where it is little.
_PRICE = 4
#: Decisions of a plan, and of each stage.
_OF_PLAN, _OF_STAGE = 3, 3


@dataclass
class Encoding:
    """The vectors of an instance.

    Args:
        costing: Of the instance.
    """

    costing: Costing

    def __post_init__(self) -> None:
        instance = self.costing.instance
        self._orders = device_orders(instance)
        self._counts = spread(legal_micro_batches(instance.global_batch, 1), _COUNTS)
        self._stages = min(len(instance.cluster.devices), len(instance.graph.groups), _STAGES)
        dtype = instance.bytes.compute
        self._speed = [
            instance.cluster.kind(device.index).peak_flops[dtype]
            for device in instance.cluster.devices
        ]

    @cached_property
    def legal(self) -> Bools:
        """Which options each decision has, (V, D)."""
        plan = (len(self._orders), len(self._counts), self._stages)
        stage = (len(_WIDTHS), len(_WORK), len(self.costing.instance.offered_tp))
        sizes = np.array([*plan, *stage * self._stages])
        return np.asarray(np.arange(sizes.max()) < sizes[:, None])

    @property
    def default(self) -> Ints:
        """One stage of replicas on all devices, with equal shares and work where there are more."""
        found = np.zeros(len(self.legal), np.int64)
        found[_OF_PLAN + 1 :: _OF_STAGE] = _WORK.index(1.0)
        return found

    def said(self, vector: Ints) -> bytes:
        """What of a vector says something: equal for those of one plan."""
        stages = int(vector[2]) + 1
        return vector[: _OF_PLAN + _OF_STAGE * stages].tobytes()

    def plan(self, vector: Ints) -> Plan | None:
        """The plan that a vector says; None if a stage has no shape, or no known cost."""
        order, count = self._orders[vector[0]], self._counts[vector[1]]
        stages = int(vector[2]) + 1
        rows = vector[_OF_PLAN:].reshape(-1, _OF_STAGE)[:stages]
        widths = nearest_shares(len(order), stages, [_WIDTHS[row[0]] for row in rows])
        assert widths is not None, "there are no more stages than devices"
        meshes, taken = [], 0
        for row, width in zip(rows, widths, strict=True):
            mesh = self._mesh(order[taken : taken + width], int(row[2]), count)
            if mesh is None:
                return None
            meshes.append(mesh)
            taken += width
        work = [
            sum(self._speed[device] for device in mesh.devices) * _WORK[row[1]]
            for mesh, row in zip(meshes, rows, strict=True)
        ]
        return self._made(meshes, self._borders(work), count)

    def _mesh(self, devices: tuple[int, ...], degree: int, count: int) -> Mesh | None:
        """The shape with the wanted tp degree, on fewer devices where all cannot be used."""
        instance, solver = self.costing.instance, self.costing.solver
        wanted = instance.offered_tp[degree]
        for used in range(len(devices), 0, -1):
            shapes = mesh_shapes(instance, devices[:used], instance.global_batch // count)
            known = [mesh for mesh in shapes if solver.usable(mesh)]
            if known:
                return min(known, key=lambda mesh: (abs(mesh.tp - wanted), mesh.dp_replicate))
        return None

    def _borders(self, work: list[float]) -> list[int]:
        """Borders of stages that share the work in some proportions; none is empty."""
        loads = np.cumsum(self._loads)
        shares = np.cumsum(work)[:-1] / sum(work) * loads[-1]
        # The border whose sum is the nearest.
        middles = loads - self._loads / 2.0
        cuts, places = np.searchsorted(middles, shares), np.arange(1, len(work))
        rising = np.maximum.accumulate(np.maximum(cuts, places) - places) + places
        most = len(loads) - places[::-1]
        return [0, *np.minimum(rising, most).tolist(), len(loads)]

    @cached_property
    def _loads(self) -> Floats:
        return group_loads(self.costing.instance)

    def _made(self, meshes: list[Mesh], borders: list[int], count: int) -> Plan:
        solver, stages = self.costing.solver, []
        for index, mesh in enumerate(meshes):
            span, held = borders[index : index + 2], min(count, len(meshes) - index)
            choices = solver.choices(span[0], span[1], mesh, count, held)
            stages.append(Stage(span[0], span[1], mesh, choices))
        return make_plan(self.costing.instance, tuple(stages), count)


@dataclass
class VectorSearch:
    """A `Search` that looks at vectors, the default first; what was looked at is remembered.

    Args:
        search: Keeps the best plan.
    """

    search: Search
    _known: dict[bytes, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.encoding = Encoding(self.search.costing)
        self.look(self.encoding.default[None])

    @property
    def stopped(self) -> str | None:
        """Which part of the budget has run out, or None."""
        return self.search.stopped

    @property
    def left(self) -> int:
        """Evaluations that are left."""
        return max(1, self.search.budget.evaluations - self.search.evaluations)

    def look(self, vectors: Ints) -> Floats:
        """Step times, with a price for what does not fit; infinite where there is no plan."""
        return np.array([self._one(vector) for vector in vectors])

    def _one(self, vector: Ints) -> float:
        key = self.encoding.said(vector)
        if key in self._known:
            return self._known[key]
        if self.search.over(last=True):
            return float("inf")
        plan = self.encoding.plan(vector)
        value = float("inf")
        if plan is not None:
            estimate = self.search.offer(plan)
            over = overflow(self.search.costing.instance, estimate)
            value = estimate.step_time * (1.0 + over) ** _PRICE
        self._known[key] = value
        return value
