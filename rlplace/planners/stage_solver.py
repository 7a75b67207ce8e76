"""Per-group choices inside one stage, shared by the dynamic program and the stage-wise builder.

For a mesh and a number of micro-batches in flight every group has a few options (layout, ZeRO
level, recompute), each with seconds and bytes. The boundaries of all layouts are replicated, so
no option costs its neighbour anything: the Viterbi pass over the groups falls apart into one
argmin a group, and only memory couples them. A multiplier on memory (Everett 1963) turns that
coupling into a price: for each price of a ladder every group takes its cheapest option, and prefix
sums then give every interval of groups at once. Equal layers all change their option at the same
price, so between the last price that does not fit and the first one that does, a stage takes the
former from some group on: as many layers recompute as memory asks for, not all or none.

Bytes that come and go are those of the group that has most, and have no price. Where weights may be
cut into slices, which free nothing else, each of equal groups pays its part of one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numba
import numpy as np
import numpy.typing as npt

from rlplace.cost.analytic import AnalyticCost
from rlplace.cost.types import CostModel, GroupCost
from rlplace.plan.types import GroupChoice, Instance, Mesh
from rlplace.simulate.stages import boundaries, boundary_bytes, tied_states

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Prices of memory, relative to (all seconds / all bytes) of the graph on the mesh.
_PRICES = (0.0, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0, 1e6)
#: Shares of the reduction that may hide which a choice is charged for.
_REDUCE_WEIGHTS = (0.0, 1.0)
_PROHIBITIVE = 1e30
#: Rows of `_Table.sums`.
_FORWARD, _BACKWARD, _REDUCE, _OPTIMIZER, _SIZE = range(5)


@dataclass(frozen=True)
class StageRow:
    """The best stages [start, stop) found for every start, on one mesh. Shapes (stop,).

    Args:
        seconds: Forward + backward of one micro-batch; inf where nothing fits.
        forward: Forward of one micro-batch.
        tail: Exposed gradient reduction and optimizer, once a step; at most, where two prices meet.
        memory: Bytes on the heaviest device; likewise at most.
        overflow: Bytes over the limit with the leanest choices; 0 where something fits.
        level: Which price was taken, for `StageSolver.choices`.
        split: The group from which on the next lower price was taken; `stop` where there is none.
        lean_seconds: Seconds of the leanest choices, also where they do not fit.
    """

    seconds: Floats
    forward: Floats
    tail: Floats
    memory: Floats
    overflow: Floats
    level: Ints
    split: Ints
    lean_seconds: Floats


@dataclass(frozen=True)
class _Table:
    """What every group takes at every price. P prices, G groups.

    Args:
        options: Options of each structure.
        pick: Option of each group, (P, G).
        sums: `_FORWARD` to `_SIZE` of the groups before each group, (5, P, G + 1).
        transient: Bytes that come and go while each group runs, (P, G).
        hidden: Share of a reduction that may hide.
        pairs: A group that uses a tied parameter and the next one that does, (K, 2).
        twice: Bytes of states that the sums count for the second of each pair, though a stage
            with both holds them once, (P, K).
    """

    options: tuple[tuple[GroupChoice, ...], ...]
    pick: Ints
    sums: Floats
    transient: Floats
    hidden: float
    pairs: Ints
    twice: Floats


@dataclass
class StageSolver:
    """Solves stages of one instance; results are cached by what they depend on.

    Args:
        instance: The question.
        cost: The cost model.
    """

    instance: Instance
    cost: CostModel = field(default_factory=AnalyticCost)
    _classes: dict[Mesh, int] = field(default_factory=dict)
    _limits: dict[Mesh, float] = field(default_factory=dict)
    _numbers: dict[tuple[object, ...], int] = field(default_factory=dict)
    _tables: dict[tuple[int, int, int], _Table] = field(default_factory=dict)
    _rows: dict[tuple[int, int, int, int], StageRow] = field(default_factory=dict)
    _options: dict[tuple[int, int], tuple[GroupChoice, ...]] = field(default_factory=dict)

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
            limit = self.limit(mesh)
            self._rows[key] = _row(table, stop, micro_batches, limit)
        return self._rows[key]

    def block(self, cuts: Ints, mesh: Mesh, micro_batches: int, in_flight: int) -> Floats:
        """Seconds, forward and tail (see `StageRow`) of the stages between any two cuts.

        Args:
            cuts: Ascending groups, the last one past the end (N,).
            mesh: Where the stages run.
            micro_batches: Micro-batches of a step.
            in_flight: Micro-batches held at the peak.

        Returns:
            (3, N, N) by first and last cut; seconds are infinite where nothing fits.
        """
        table = self._table(mesh, micro_batches, in_flight)
        found = np.full((3, len(cuts), len(cuts)), np.inf)
        _fill_block(
            table.sums,
            table.transient,
            table.pairs,
            table.twice,
            table.hidden,
            len(_PRICES),
            cuts,
            micro_batches,
            self.limit(mesh),
            found,
        )
        return found

    def choices(
        self, start: int, stop: int, mesh: Mesh, micro_batches: int, in_flight: int
    ) -> tuple[GroupChoice, ...]:
        """The choices behind `row(...)` at `start`; the leanest ones where nothing fits."""
        row = self.row(stop, mesh, micro_batches, in_flight)
        table = self._table(mesh, micro_batches, in_flight)
        level, split = int(row.level[start]), int(row.split[start])
        picks = [*table.pick[level, start:split], *table.pick[level - 1, split:stop]]
        own = self.instance.graph.groups[start:stop]
        return tuple(
            table.options[group.structure][pick] for group, pick in zip(own, picks, strict=True)
        )

    def transfer(self, cut: int, source: Mesh, target: Mesh, micro_batches: int) -> float:
        """Seconds of one micro-batch from `source` to `target` at the cut before group `cut`."""
        floats, other = self.instance.graph.crossings[cut]
        size = self.instance.global_batch / micro_batches
        return self.cost.transfer(self.instance, source, target, floats(size), other(size))

    def usable(self, mesh: Mesh) -> bool:
        """Whether every group has a choice on a mesh of which the cost is known."""
        return all(
            self.options(index, mesh) for index in range(len(self.instance.graph.structures))
        )

    def options(self, structure: int, mesh: Mesh) -> tuple[GroupChoice, ...]:
        """The choices of which the cost is known that a group of this structure has on a mesh."""
        key = (structure, self.mesh_class(mesh))
        if key not in self._options:
            self._options[key] = self._find_options(structure, mesh)
        return self._options[key]

    def _find_options(self, structure: int, mesh: Mesh) -> tuple[GroupChoice, ...]:
        described = self.instance.graph.structures[structure]
        layouts = described.layouts_at(mesh.tp)
        levels = self.instance.zero_levels if mesh.dp_shard > 1 else (0,)
        offered = (
            GroupChoice(layout.name, zero, recompute, offload, slices)  # type: ignore[arg-type]  # a mode
            for layout in layouts
            for zero in levels
            for recompute in self.instance.recompute_options(described.work)
            for offload in self.instance.offered_offload
            for slices in self.instance.slice_options(layout.work, zero, recompute)
        )
        knows = self.cost.knows
        return tuple(one for one in offered if knows(self.instance, described, one, mesh))

    @cached_property
    def reads(self) -> tuple[tuple[float, float, float, float], ...]:
        """What each group reads (see `boundaries`)."""
        return boundaries(self.instance.graph)

    def mesh_class(self, mesh: Mesh) -> int:
        """A number that is equal for meshes on which every stage costs the same."""
        if mesh not in self._classes:
            looks = self.cost.looks(self.instance, mesh)
            number = self._numbers.setdefault((looks, self.limit(mesh)), len(self._numbers))
            self._classes[mesh] = number
        return self._classes[mesh]

    def limit(self, mesh: Mesh) -> float:
        """Bytes for states and activations on the tightest device of the mesh."""
        if mesh not in self._limits:
            self._limits[mesh] = self._find_limit(mesh)
        return self._limits[mesh]

    def _find_limit(self, mesh: Mesh) -> float:
        instance = self.instance
        kinds = {instance.cluster.devices[d].kind: d for d in mesh.devices}
        free = min(
            instance.memory_limit(device) - instance.cluster.kind(device).reserve
            for device in kinds.values()
        )
        execution = instance.execution
        return (free - execution.reserve) / (1.0 + execution.fragmentation)

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
        table = _table(options, costs, np.array(owner, np.int64), micro_batches, in_flight)
        return self._with_tied(table, mesh)

    def _with_tied(self, table: _Table, mesh: Mesh) -> _Table:
        """The table with what it counts twice of tied parameters."""
        graph = self.instance.graph
        pairs, columns = [], []
        for tied in graph.tied:
            own = [group for group in graph.groups if tied[0] in group.params]
            for before, after in pairwise(own):
                choices = table.options[after.structure]
                held = [tied_states(self.instance, after, c, mesh, tied).total for c in choices]
                pairs.append((before.index, after.index))
                columns.append(np.array(held)[table.pick[:, after.index]])
        if not pairs:
            return table
        return replace(table, pairs=np.array(pairs, np.int64), twice=np.stack(columns, axis=1))


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
    slices = any(choice.slices > 1 for row in options for choice in row)
    priced = size + transient / len(owner) if slices else size
    unit = step.min(axis=1)[owner].sum() / max(size.min(axis=1)[owner].sum(), 1.0)
    picks = np.array(
        [
            np.argmin(
                step + weight * hidden * reduce / micro_batches + price * unit * priced, axis=1
            )
            for weight in _REDUCE_WEIGHTS
            for price in _PRICES
        ]
    )

    def chosen(column: Floats) -> Floats:
        """(P, G): the column at each group's pick."""
        return np.take_along_axis(column[None], picks[:, :, None], axis=2)[:, owner, 0]

    def sums(values: Floats) -> Floats:
        return np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)

    summed = (forward, backward, reduce, optimizer, size)
    return _Table(
        options=options,
        pick=picks[:, owner],
        sums=np.stack([sums(chosen(column)) for column in summed]),
        transient=chosen(transient),
        hidden=hidden,
        pairs=np.zeros((0, 2), np.int64),
        twice=np.zeros((len(picks), 0)),
    )


def _row(table: _Table, stop: int, micro_batches: int, limit: float) -> StageRow:
    columns = np.empty((6, stop))
    level, split = np.empty((2, stop), np.int64)
    _fill_row(
        table.sums,
        table.transient,
        _counted_twice(table.pairs, table.twice, stop),
        table.hidden,
        len(_PRICES),
        stop,
        micro_batches,
        limit,
        columns,
        level,
        split,
    )
    seconds, forward, tail, memory, overflow, lean = columns
    return StageRow(seconds, forward, tail, memory, overflow, level, split, lean)


@numba.njit(cache=True)
def _fill_block(
    sums: Floats,
    transient: Floats,
    pairs: Ints,
    twice: Floats,
    hidden: float,
    ladder: int,
    cuts: Ints,
    micro_batches: int,
    limit: float,
    found: Floats,
) -> None:
    """Fill seconds, forward and tail of `StageSolver.block`."""
    columns = np.empty((6, cuts[-1]))
    level, split = np.empty(cuts[-1], np.int64), np.empty(cuts[-1], np.int64)
    for last in range(1, len(cuts)):
        stop = cuts[last]
        shared = _counted_twice(pairs, twice, stop)
        _fill_row(
            sums,
            transient,
            shared,
            hidden,
            ladder,
            stop,
            micro_batches,
            limit,
            columns,
            level,
            split,
        )
        for first in range(last):
            found[:, first, last] = columns[:3, cuts[first]]


@numba.njit(cache=True)
def _counted_twice(pairs: Ints, twice: Floats, stop: int) -> Floats:
    """Of each price and start (P, stop): what tied parameters in [start, stop) count too often."""
    found = np.zeros((len(twice), stop))
    for pair in range(len(pairs)):
        if pairs[pair, 1] < stop:
            for start in range(pairs[pair, 0] + 1):
                found[:, start] += twice[:, pair]
    return found


@numba.njit(cache=True)
def _fill_row(
    sums: Floats,
    transient: Floats,
    twice: Floats,
    hidden: float,
    ladder: int,
    stop: int,
    micro_batches: int,
    limit: float,
    columns: Floats,
    level: Ints,
    split: Ints,
) -> None:
    """Fill a `StageRow`: for each start the quickest that fits, else the leanest.

    `lag` is by how much the reductions of the groups from a start on end after their backward:
    the recursion of `exposed_reduce`, which a start further to the front continues.
    """
    prices = sums.shape[1]
    peak, lag = np.zeros(prices), np.zeros((prices, stop + 1))
    # Where the first price of a ladder fits all of it, no other is looked at.
    roomy = np.zeros(prices // ladder, np.bool_)
    for number in range(len(roomy)):
        free = limit - sums[_SIZE, number * ladder, stop]
        roomy[number] = transient[number * ladder, :stop].max() <= free
    for start in range(stop - 1, -1, -1):
        best, best_cut, best_total = -1, stop, np.inf
        leanest, least, too_much = 0, np.inf, False
        for price in range(prices):
            if price % ladder and roomy[price // ladder]:
                continue
            own_backward = sums[_BACKWARD, price, start + 1] - sums[_BACKWARD, price, start]
            own_reduce = sums[_REDUCE, price, start + 1] - sums[_REDUCE, price, start]
            waits = max(lag[price, start + 1] - own_backward, 0.0)
            lag[price, start] = waits + hidden * own_reduce
            peak[price] = max(peak[price], transient[price, start])
            memory = sums[_SIZE, price, stop] - sums[_SIZE, price, start] + peak[price]
            memory -= twice[price, start]
            if memory < least:
                leanest, least = price, memory
            first, before_too_much, too_much = price % ladder == 0, too_much, memory > limit
            if too_much or not (first or before_too_much):
                continue  # it does not fit, or a lower price does, which is quicker
            cut = stop
            if not first:
                room = limit - max(peak[price], peak[price - 1])
                room += min(twice[price, start], twice[price - 1, start])
                cut = _cut(sums[_SIZE, price], sums[_SIZE, price - 1], start, stop, room)
            front, back, tail, _ = _stage(sums, lag, peak, twice, hidden, price, start, cut, stop)
            if micro_batches * (front + back) + tail < best_total:
                best, best_cut = price, cut
                best_total = micro_batches * (front + back) + tail
        level[start] = best if best >= 0 else leanest
        split[start] = best_cut
        front, back, tail, memory = _stage(
            sums, lag, peak, twice, hidden, level[start], start, best_cut, stop
        )
        columns[0, start] = front + back if best >= 0 else np.inf
        columns[1, start] = front
        columns[2, start] = tail
        columns[3, start] = memory
        columns[4, start] = 0.0 if best >= 0 else memory - limit
        columns[5, start] = front + back


@numba.njit(cache=True)
def _cut(lean: Floats, rich: Floats, start: int, stop: int, room: float) -> int:
    """The first group from which on the `rich` picks may be taken, so that all have `room`.

    Bisection over prefix sums of bytes; a lower price never takes fewer bytes.
    """
    low, high = start, stop
    while low < high:
        middle = (low + high) // 2
        if lean[middle] - lean[start] + rich[stop] - rich[middle] <= room:
            high = middle
        else:
            low = middle + 1
    return high


@numba.njit(cache=True)
def _stage(
    sums: Floats,
    lag: Floats,
    peak: Floats,
    twice: Floats,
    hidden: float,
    price: int,
    start: int,
    cut: int,
    stop: int,
) -> tuple[float, float, float, float]:
    """Forward, backward, tail and memory of a stage that takes the price before from `cut` on.

    The tail is the reduction that cannot hide, what of the rest is not hidden, and the optimizer.
    The lag of the front part alone is not known, that of the whole stage at its price bounds it.
    """
    late, most, less = lag[price, start], peak[price], twice[price, start]
    if cut < stop:
        before = sums[_BACKWARD, price, cut] - sums[_BACKWARD, price, start]
        late = max(late, lag[price - 1, cut] - before)
        most = max(most, peak[price - 1])
        less = min(less, twice[price - 1, start])
    reduce = _total(sums, _REDUCE, price, start, cut, stop)
    tail = (1.0 - hidden) * reduce + late + _total(sums, _OPTIMIZER, price, start, cut, stop)
    return (
        _total(sums, _FORWARD, price, start, cut, stop),
        _total(sums, _BACKWARD, price, start, cut, stop),
        tail,
        _total(sums, _SIZE, price, start, cut, stop) + most - less,
    )


@numba.njit(cache=True)
def _total(sums: Floats, row: int, price: int, start: int, cut: int, stop: int) -> float:
    """A row of `sums` over [start, cut) at a price and [cut, stop) at the price before."""
    front = sums[row, price, cut] - sums[row, price, start]
    if cut == stop:
        return float(front)
    return float(front + sums[row, price - 1, stop] - sums[row, price - 1, cut])
