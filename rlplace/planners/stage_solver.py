"""Per-group choices inside one stage, shared by the dynamic program and the stage-wise builder.

For a mesh and a number of micro-batches in flight every group has a few options (layout, ZeRO
level, recompute), each with seconds and bytes. The boundaries of all layouts are replicated, so
no option costs its neighbour anything: the Viterbi pass over the groups falls apart into one
argmin a group, and only memory couples them. A multiplier on memory (Everett 1963) turns that
coupling into a price: for each price of a ladder every group takes its cheapest option, and prefix
sums then give every interval of groups at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numba
import numpy as np
import numpy.typing as npt

from rlplace.cost.analytic import AnalyticCost
from rlplace.cost.types import GroupCost
from rlplace.plan.types import GroupChoice, Instance, Mesh
from rlplace.simulate.stages import boundaries, boundary_bytes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Prices of memory, relative to (all seconds / all bytes) of the graph on the mesh.
_PRICES = (0.0, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0, 1e6)
#: Shares of the reduction that may hide which a choice is charged for.
_REDUCE_WEIGHTS = (0.0, 1.0)
_PROHIBITIVE = 1e30


@dataclass(frozen=True)
class StageRow:
    """The best stages [start, stop) found for every start, on one mesh. Shapes (stop,).

    Args:
        seconds: Forward + backward of one micro-batch; inf where nothing fits.
        forward: Forward of one micro-batch.
        tail: Exposed gradient reduction and optimizer, once a step.
        memory: Bytes on the heaviest device.
        overflow: Bytes over the limit with the leanest choices; 0 where something fits.
        level: Which price was taken, for `StageSolver.choices`.
        lean_seconds: Seconds of the leanest choices, also where they do not fit.
    """

    seconds: Floats
    forward: Floats
    tail: Floats
    memory: Floats
    overflow: Floats
    level: Ints
    lean_seconds: Floats


@dataclass(frozen=True)
class _Table:
    """Every group's pick at every price, as sums over the groups before it: (P, G + 1).

    `pick` and `transient` are of each group itself, (P, G).
    """

    options: tuple[tuple[GroupChoice, ...], ...]
    pick: Ints
    forward: Floats
    backward: Floats
    reduce: Floats
    hidden: float
    optimizer: Floats
    bytes: Floats
    transient: Floats


@dataclass
class StageSolver:
    """Solves stages of one instance; results are cached by what they depend on.

    Args:
        instance: The question.
        cost: The cost model.
    """

    instance: Instance
    cost: AnalyticCost = field(default_factory=AnalyticCost)
    _classes: dict[Mesh, int] = field(default_factory=dict)
    _numbers: dict[tuple[object, ...], int] = field(default_factory=dict)
    _tables: dict[tuple[int, int, int], _Table] = field(default_factory=dict)
    _rows: dict[tuple[int, int, int, int], StageRow] = field(default_factory=dict)

    def row(self, stop: int, mesh: Mesh, micro_batches: int, in_flight: int) -> StageRow:
        """The best stage [start, stop) for every start in 0..stop-1.

        Args:
            stop: One past the last group.
            mesh: Where the stage runs; `dp_shard` may be used by ZeRO.
            micro_batches: Micro-batches of a step.
            in_flight: Micro-batches held at the peak.
        """
        key = (self.mesh_class(mesh), micro_batches, in_flight, stop)
        if key not in self._rows:
            table = self._table(mesh, micro_batches, in_flight)
            limit = self._limit(mesh)
            self._rows[key] = _row(table, stop, micro_batches, limit)
        return self._rows[key]

    def choices(
        self, start: int, stop: int, mesh: Mesh, micro_batches: int, in_flight: int
    ) -> tuple[GroupChoice, ...]:
        """The choices behind `row(...)` at `start`; the leanest ones where nothing fits."""
        level = self.row(stop, mesh, micro_batches, in_flight).level[start]
        table = self._table(mesh, micro_batches, in_flight)
        own = self.instance.graph.groups[start:stop]
        return tuple(
            table.options[group.structure][table.pick[level, group.index]] for group in own
        )

    def transfer(self, cut: int, source: Mesh, target: Mesh, micro_batches: int) -> float:
        """Seconds of one micro-batch from `source` to `target` at the cut before group `cut`."""
        floats, other = self.instance.graph.crossings[cut]
        size = self.instance.global_batch / micro_batches
        return self.cost.transfer(self.instance, source, target, floats(size), other(size))

    def options(self, structure: int, mesh: Mesh) -> tuple[GroupChoice, ...]:
        """The choices that a group of this structure has on a mesh."""
        layouts = self.instance.graph.structures[structure].layouts_at(mesh.tp)
        levels = self.instance.zero_levels if mesh.dp_shard > 1 else (0,)
        return tuple(
            GroupChoice(layout.name, zero, recompute)  # type: ignore[arg-type]
            for layout in layouts
            for zero in levels
            for recompute in self.instance.recompute_modes
        )

    @cached_property
    def reads(self) -> tuple[tuple[float, float, float, float], ...]:
        """What each group reads (see `boundaries`)."""
        return boundaries(self.instance.graph)

    def mesh_class(self, mesh: Mesh) -> int:
        """A number that is equal for meshes on which every stage costs the same."""
        if mesh not in self._classes:
            looks = self.cost.view(self.instance.cluster, mesh)
            number = self._numbers.setdefault((looks, self._limit(mesh)), len(self._numbers))
            self._classes[mesh] = number
        return self._classes[mesh]

    def _limit(self, mesh: Mesh) -> float:
        """Bytes for states and activations on the tightest device of the mesh."""
        kinds = {self.instance.cluster.devices[d].kind: d for d in mesh.devices}
        return min(
            self.instance.memory_limit(device) - self.instance.cluster.kind(device).reserve
            for device in kinds.values()
        )

    def _table(self, mesh: Mesh, micro_batches: int, in_flight: int) -> _Table:
        key = (self.mesh_class(mesh), micro_batches, in_flight)
        if key not in self._tables:
            self._tables[key] = self._build(mesh, micro_batches, in_flight)
        return self._tables[key]

    def _build(self, mesh: Mesh, micro_batches: int, in_flight: int) -> _Table:
        graph = self.instance.graph
        options = tuple(self.options(index, mesh) for index in range(len(graph.structures)))
        samples = self.instance.global_batch / micro_batches / mesh.dp
        kinds: dict[tuple[int, float], int] = {}
        owner = []
        for group in graph.groups:
            kept = boundary_bytes(self.instance, self.reads[group.index], samples)
            owner.append(kinds.setdefault((group.structure, kept), len(kinds)))
        costs = [
            [
                self.cost.group(self.instance, graph.structures[s], o, mesh, samples, kept)
                for o in options[s]
            ]
            for s, kept in kinds
        ]
        return _table(options, costs, np.array(owner, np.int64), micro_batches, in_flight)


def _table(
    options: tuple[tuple[GroupChoice, ...], ...],
    costs: list[list[GroupCost]],
    owner: Ints,
    micro_batches: int,
    in_flight: int,
) -> _Table:
    widest = max(len(row) for row in costs)

    def column(name: str) -> Floats:
        """One field of all costs, (kinds of group, options), padded with a prohibitive value."""
        rows = [[getattr(cost, name) for cost in row] for row in costs]
        return np.array([row + [_PROHIBITIVE] * (widest - len(row)) for row in rows])

    forward, backward, reduce = column("forward"), column("backward"), column("reduce")
    optimizer, transient = column("optimizer"), column("transient")
    size = column("static") + in_flight * column("saved")
    hidden = min(cost.hidden for row in costs for cost in row)
    step = forward + backward + ((1.0 - hidden) * reduce + optimizer) / micro_batches
    unit = step.min(axis=1)[owner].sum() / max(size.min(axis=1)[owner].sum(), 1.0)
    picks = np.array(
        [
            np.argmin(step + weight * hidden * reduce / micro_batches + price * unit * size, axis=1)
            for weight in _REDUCE_WEIGHTS
            for price in _PRICES
        ]
    )

    def chosen(column: Floats) -> Floats:
        """(P, G): the column at each group's pick."""
        return np.take_along_axis(column[None], picks[:, :, None], axis=2)[:, owner, 0]

    def sums(values: Floats) -> Floats:
        return np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)

    return _Table(
        options=options,
        pick=picks[:, owner],
        forward=sums(chosen(forward)),
        backward=sums(chosen(backward)),
        reduce=sums(chosen(reduce)),
        hidden=hidden,
        optimizer=sums(chosen(optimizer)),
        bytes=sums(chosen(size)),
        transient=chosen(transient),
    )


def _row(table: _Table, stop: int, micro_batches: int, limit: float) -> StageRow:
    columns = np.empty((6, stop))
    level = np.empty(stop, np.int64)
    _fill_row(
        table.forward,
        table.backward,
        table.reduce,
        table.optimizer,
        table.bytes,
        table.transient,
        table.hidden,
        stop,
        micro_batches,
        limit,
        columns,
        level,
    )
    seconds, forward, tail, memory, overflow, lean = columns
    return StageRow(seconds, forward, tail, memory, overflow, level, lean)


@numba.njit(cache=True)
def _fill_row(
    forward: Floats,
    backward: Floats,
    reduce: Floats,
    optimizer: Floats,
    size: Floats,
    transient: Floats,
    hidden: float,
    stop: int,
    micro_batches: int,
    limit: float,
    columns: Floats,
    level: Ints,
) -> None:
    """Fill a `StageRow`: for each start the quickest price that fits, else the leanest.

    `lag` is by how much the reductions of the groups so far end after their backward: the
    recursion of `exposed_reduce`, which a start further to the front continues.
    """
    prices = len(forward)
    peak, lag = np.zeros(prices), np.zeros(prices)
    for start in range(stop - 1, -1, -1):
        best, leanest, best_total, least = -1, 0, np.inf, np.inf
        for price in range(prices):
            own_backward = backward[price, start + 1] - backward[price, start]
            own_reduce = reduce[price, start + 1] - reduce[price, start]
            lag[price] = max(lag[price] - own_backward, 0.0) + hidden * own_reduce
            peak[price] = max(peak[price], transient[price, start])
            memory = size[price, stop] - size[price, start] + peak[price]
            if memory < least:
                leanest, least = price, memory
            if memory > limit:
                continue
            front = forward[price, stop] - forward[price, start]
            back = backward[price, stop] - backward[price, start]
            tail = _tail(reduce, optimizer, hidden, price, start, stop) + lag[price]
            if micro_batches * (front + back) + tail < best_total:
                best, best_total = price, micro_batches * (front + back) + tail
        chosen = best if best >= 0 else leanest
        front = forward[chosen, stop] - forward[chosen, start]
        back = backward[chosen, stop] - backward[chosen, start]
        memory = size[chosen, stop] - size[chosen, start] + peak[chosen]
        level[start] = chosen
        columns[0, start] = front + back if best >= 0 else np.inf
        columns[1, start] = front
        columns[2, start] = _tail(reduce, optimizer, hidden, chosen, start, stop) + lag[chosen]
        columns[3, start] = memory
        columns[4, start] = 0.0 if best >= 0 else memory - limit
        columns[5, start] = front + back


@numba.njit(cache=True)
def _tail(
    reduce: Floats, optimizer: Floats, hidden: float, price: int, start: int, stop: int
) -> float:
    """Seconds of the reduction that cannot hide, and of the optimizer."""
    bare = (1.0 - hidden) * (reduce[price, stop] - reduce[price, start])
    return float(bare + optimizer[price, stop] - optimizer[price, start])
