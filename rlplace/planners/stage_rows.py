"""Rows and blocks of stages from prices of memory: the arithmetic of `StageSolver`, compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from rlplace.plan.types import GroupChoice

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Prices of memory, relative to (all seconds / all bytes) of the graph on the mesh.
_PRICES = (0.0, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0, 1e6)
#: Shares of the reduction that may hide which a choice is charged for.
_REDUCE_WEIGHTS = (0.0, 1.0)
PROHIBITIVE = 1e30
#: Rows of `Sums.before`.
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


#: Columns of `Costs`, as `GroupCost` has them.
COLUMNS = ("forward", "backward", "reduce", "optimizer", "static", "saved", "transient")


class Costs(NamedTuple):
    """What kinds of groups cost with each option, (K, S), padded with a prohibitive value.

    Args:
        options: Options of each structure.
        owner: Kind of each group.
        forward, backward, reduce, optimizer, static, saved, transient: As in `GroupCost`.
        hidden: Share of a reduction that may hide.
    """

    options: tuple[tuple[GroupChoice, ...], ...]
    owner: Ints
    forward: Floats
    backward: Floats
    reduce: Floats
    optimizer: Floats
    static: Floats
    saved: Floats
    transient: Floats
    hidden: float


class Sums(NamedTuple):
    """What all groups take at every price. P prices, G groups.

    Args:
        before: `_FORWARD` to `_SIZE` of the groups before each group, (5, P, G + 1).
        transient: Bytes that come and go while each group runs, (P, G).
        pairs: A group that uses a tied parameter and the next one that does, (K, 2).
        twice: Bytes of states that `before` counts for the second of each pair, though a stage
            with both holds them once, (P, K).
        hidden: Share of a reduction that may hide.
    """

    before: Floats
    transient: Floats
    pairs: Ints
    twice: Floats
    hidden: float


@dataclass(frozen=True)
class Table:
    """What every group takes at every price.

    Args:
        options: Options of each structure.
        pick: Option of each group, (P, G).
        sums: Of what they take.
    """

    options: tuple[tuple[GroupChoice, ...], ...]
    pick: Ints
    sums: Sums


def table_of(costs: Costs, micro_batches: int, in_flight: int) -> Table:
    """What each group takes at every price, with so many micro-batches in flight."""
    options, owner, hidden, transient = costs.options, costs.owner, costs.hidden, costs.transient
    forward, backward, reduce = costs.forward, costs.backward, costs.reduce
    optimizer, size = costs.optimizer, costs.static + in_flight * costs.saved
    step = forward + backward + ((1.0 - hidden) * reduce + optimizer) / micro_batches
    slices = any(choice.slices > 1 for row in options for choice in row)
    priced = size + transient / len(owner) if slices else size
    unit = step.min(axis=1)[owner].sum() / max(size.min(axis=1)[owner].sum(), 1.0)
    picks = _picks(step, hidden * reduce / micro_batches, unit * priced)[:, owner]
    before = _sums((forward, backward, reduce, optimizer, size), owner, picks)
    pairs, twice = np.zeros((0, 2), np.int64), np.zeros((len(picks), 0))
    return Table(options, picks, Sums(before, transient[owner, picks], pairs, twice, hidden))


@numba.njit(cache=True)
def _picks(step: Floats, reduce: Floats, priced: Floats) -> Ints:
    """The option that each kind of group takes at each price, (P, K).

    Args:
        step: Seconds of a micro-batch, but for reductions that may hide, (K, S), as all.
        reduce: Seconds of a micro-batch of those.
        priced: Seconds that the bytes cost at a price of 1.
    """
    found = np.empty((len(_REDUCE_WEIGHTS) * len(_PRICES), len(step)), np.int64)
    for number in range(len(found)):
        weight = _REDUCE_WEIGHTS[number // len(_PRICES)]
        price = _PRICES[number % len(_PRICES)]
        for kind in range(len(step)):
            found[number, kind] = np.argmin(
                step[kind] + weight * reduce[kind] + price * priced[kind]
            )
    return found


@numba.njit(cache=True)
def _sums(columns: tuple[Floats, ...], owner: Ints, picks: Ints) -> Floats:
    """`Sums.before` of columns (K, S), with the picks of each group (P, G)."""
    found = np.zeros((len(columns), len(picks), len(owner) + 1))
    for row in range(len(columns)):
        for price in range(len(picks)):
            for group in range(len(owner)):
                own = columns[row][owner[group], picks[price, group]]
                found[row, price, group + 1] = found[row, price, group] + own
    return found


def row_of(table: Table, stop: int, micro_batches: int, limit: float) -> StageRow:
    """See `StageSolver.row`."""
    columns = np.empty((6, stop))
    level, split = np.empty((2, stop), np.int64)
    _fill_row(table.sums, stop, micro_batches, limit, np.inf, columns, level, split)
    seconds, forward, tail, memory, overflow, lean = columns
    return StageRow(seconds, forward, tail, memory, overflow, level, split, lean)


def block_of(table: Table, cuts: Ints, micro_batches: int, limit: float, most: float) -> Floats:
    """See `StageSolver.block`."""
    found = np.full((4, len(cuts), len(cuts)), np.inf)
    _fill_block(table.sums, cuts, micro_batches, limit, most, found)
    return found


def by_depth(block: Callable[[int], Floats], micro_batches: int, deepest: int) -> Floats:
    """Blocks of stages with 0, 1, ... `deepest` - 1 stages behind, one after the other.

    One serves all where memory does not matter.

    Args:
        block: The block with so many micro-batches in flight; its first row are seconds.
        micro_batches: Of a step.
        deepest: Stages at most.
    """
    most = min(micro_batches, deepest)
    loose, tight = block(1), block(most)
    if np.array_equal(loose[0], tight[0]):
        return np.repeat(loose[None], deepest, axis=0)
    between = [block(held) for held in range(2, most)]
    return np.stack([loose, *between, *[tight] * (deepest - most + 1)])


@numba.njit(cache=True)
def _fill_block(
    sums: Sums, cuts: Ints, micro_batches: int, limit: float, most: float, found: Floats
) -> None:
    """Fill seconds, forward, tail and lean seconds of `StageSolver.block`."""
    columns = np.empty((6, cuts[-1]))
    level, split = np.empty(cuts[-1], np.int64), np.empty(cuts[-1], np.int64)
    for last in range(1, len(cuts)):
        _fill_row(sums, cuts[last], micro_batches, limit, most, columns, level, split)
        for first in range(last):
            found[:3, first, last] = columns[:3, cuts[first]]
            found[3, first, last] = columns[5, cuts[first]]


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
    table: Sums,
    stop: int,
    micro_batches: int,
    limit: float,
    most: float,
    columns: Floats,
    level: Ints,
    split: Ints,
) -> None:
    """Fill a `StageRow`: for each start the quickest that fits, else the leanest.

    Where even the choices of the first price, which are the quickest, take `most` seconds of a
    step, nothing is looked for: from there to the front all columns are infinite.

    `lag` is by how much the reductions of the groups from a start on end after their backward:
    the recursion of `exposed_reduce`, which a start further to the front continues.
    """
    sums, transient, hidden = table.before, table.transient, table.hidden
    prices, ladder = sums.shape[1], len(_PRICES)
    twice = _counted_twice(table.pairs, table.twice, stop)
    peak, lag = np.zeros(prices), np.zeros((prices, stop + 1))
    # Where the first price of a ladder fits all of it, no other is looked at.
    roomy = np.zeros(prices // ladder, np.bool_)
    for number in range(len(roomy)):
        free = limit - sums[_SIZE, number * ladder, stop]
        roomy[number] = transient[number * ladder, :stop].max() <= free
    for start in range(stop - 1, -1, -1):
        if _least(sums, hidden, start, stop, micro_batches) >= most:
            columns[:, : start + 1] = np.inf
            break
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
def _least(sums: Floats, hidden: float, start: int, stop: int, micro_batches: int) -> float:
    """No choices of the groups [start, stop) take less of a step, by themselves."""
    work = _total(sums, _FORWARD, 0, start, stop, stop)
    work += _total(sums, _BACKWARD, 0, start, stop, stop)
    once = (1.0 - hidden) * _total(sums, _REDUCE, 0, start, stop, stop)
    return micro_batches * work + once + _total(sums, _OPTIMIZER, 0, start, stop, stop)


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
