"""Choices of all groups of a stage by an integer linear program (Alpa, arXiv 2201.12023).

Alpa's intra-operator pass has x[g, o] = 1 where group g takes option o (here a layout, ZeRO level
and recompute mode), and minimises the groups' seconds, and those of laying tensors out anew between
neighbours: a product of two x that variables for pairs of options make linear. A plan has no such
step inside a stage: what one group hands on, the next one reads so; these seconds are zero or
infinite. Of most models there are then few ways to cut all borders of a stage, which are found by
looking (`find_ways`); each has a variable, and a group takes an option with the borders of the way
that is taken. Groups that are equal in all are one integer variable an option, how many of them
take it: else every exchange of equal layers would be another solution.

Beside the paper: bytes are limited, with a variable for the most that come and go; gradient
reduction hides behind backward, so that what remains is at least what groups up to some one reduce
less the backward of those before it. That is linear where these are whole classes of equal groups;
elsewhere it is left out, and the objective is a little too low. HiGHS solves what the bounds by
prices leave open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from rlplace.plan.degrees import spread

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: How far from the best an answer may be, and nodes of a branch and bound at most.
GAP = 1e-3
_NODES = 1000
#: Prices of memory that are tried.
_PRICES = 16
#: Rows for what remains of the reduction.
_REMAINS = 8


@dataclass(frozen=True)
class LayoutProgram:
    """The program of one stage. N groups, S options; infinite seconds where there is none.

    Args:
        seconds: Of a step, without the reduction that may hide, (N, S).
        backward: Of one micro-batch.
        hides: Of the reduction that may hide.
        size: Bytes that stay.
        transient: Bytes that come and go.
        borders: How each option has its borders, as a number.
        ways: The borders that each group has in each way, (W, N).
        room: Bytes that there are.
    """

    seconds: Floats
    backward: Floats
    hides: Floats
    size: Floats
    transient: Floats
    borders: Ints
    ways: Ints
    room: float = float("inf")

    def value(self, picks: Ints) -> float:
        """Seconds of a step with an option for each group."""
        rows = np.arange(len(picks))
        lag = 0.0
        for row in reversed(rows):
            pick = picks[row]
            lag = max(lag - self.backward[row, pick], 0.0) + self.hides[row, pick]
        return float(self.seconds[rows, picks].sum() + lag)

    def held(self, picks: Ints) -> float:
        """Bytes with an option for each group."""
        rows = np.arange(len(picks))
        return float(self.size[rows, picks].sum() + self.transient[rows, picks].max())

    def agrees(self, picks: Ints) -> bool:
        """Whether the borders are those of a way."""
        own = self.borders[np.arange(len(picks)), picks]
        return bool((self.ways == own).all(axis=1).any())

    def solve(
        self, gap: float = GAP, limit: float = float("inf"), seconds: float = float("inf")
    ) -> Ints | None:
        """The quickest options; None if none are found in `_NODES` nodes.

        Args:
            gap: How far from the best they may be, as a share.
            limit: Seconds of a step below which they are to be.
            seconds: How long it may take.
        """
        quick = self._apart()
        if self.agrees(quick) and self.held(quick) <= self.room:
            # No less is left of the reduction than the first group's.
            least = self.seconds[np.arange(len(quick)), quick].sum() + self.hides[0, quick[0]]
            if self.value(quick) <= least * (1.0 + gap):
                return quick
        least, found = self.bounds()
        if found is None or least >= limit:
            return None
        if self.value(found) <= least * (1.0 + gap):
            return found
        exact = _Model(self).solve(gap, seconds)
        return found if exact is None or self.value(exact) > self.value(found) else exact

    def bounds(self) -> tuple[float, Ints | None]:
        """Seconds of a step that any options take at least, and some that fit; none if none do.

        By prices of memory (Everett 1963): least of seconds and price times bytes, less the price
        of the room, is a bound for each price; and with the least price at which all fits, the last
        groups can often be what they are at a lower one. What comes and goes is that of one group:
        this is done for each limit of it.
        """
        least, best, found = np.inf, np.inf, None
        for way in self.ways:
            own = np.where(self.borders == way[:, None], self.seconds, np.inf)
            own[0] += np.where(np.isfinite(own[0]), self.hides[0], 0.0)
            exists = np.isfinite(own)
            size = np.where(exists, self.size, 0.0)
            floor = np.where(exists, self.transient, np.inf).min(axis=1).max()
            peaks = np.unique(self.transient[exists & (self.transient >= floor)])
            for peak in peaks if np.isfinite(self.room) else peaks[-1:]:
                tight = np.where(self.transient <= peak, own, np.inf)
                bound, picks = _priced(tight, size, self.room - peak)
                least = min(least, bound)
                if np.isfinite(bound) and (value := self.value(picks)) < best:
                    best, found = value, picks
        return least, found

    def _apart(self) -> Ints:
        """The quickest option of each group for itself."""
        own = self.seconds.copy()
        own[0] += np.where(np.isfinite(own[0]), self.hides[0], 0.0)
        return np.asarray(np.argmin(own, axis=1), np.int64)


def _priced(seconds: Floats, size: Floats, room: float) -> tuple[float, Ints]:
    """A bound for options that have room together, and such options; infinite if none have.

    Args:
        seconds: Of each group and option, infinite where there is none, (N, S).
        size: Bytes likewise.
        room: Bytes that there are.
    """
    rows = np.arange(len(seconds))
    rich = np.argmin(seconds, axis=1)
    lean = np.argmin(np.where(np.isfinite(seconds), size, np.inf), axis=1)
    if not size[rows, lean].sum() <= room or not np.isfinite(seconds[rows, lean]).all():
        return float("inf"), lean
    if size[rows, rich].sum() <= room:
        return float(seconds[rows, rich].sum()), rich
    bound = _narrow(seconds, size, room, lean, rich)
    _enrich(seconds, size, room, lean, rich)
    return bound, lean


@numba.njit(cache=True)
def _narrow(seconds: Floats, size: Floats, room: float, lean: Ints, rich: Ints) -> float:
    """The bound; `lean`, which fits, and `rich`, which does not, become those of about a price."""
    less, slow = _sums(seconds, size, lean)
    full, quick = _sums(seconds, size, rich)
    bound, now = quick, np.zeros_like(lean)
    for _ in range(_PRICES):
        # At this price both are worth the same.
        price = (slow - quick) / (full - less)
        for group in range(len(now)):
            now[group] = np.argmin(seconds[group] + price * size[group])
        held, total = _sums(seconds, size, now)
        bound = max(bound, total + price * (held - room))
        if held == full or held == less:
            break
        if held <= room:
            lean[:], less, slow = now, held, total
        else:
            rich[:], full, quick = now, held, total
    return bound


@numba.njit(cache=True)
def _enrich(seconds: Floats, size: Floats, room: float, lean: Ints, rich: Ints) -> None:
    """Give the last groups of `lean` the options of `rich`, as long as there is room."""
    left = room - _sums(seconds, size, lean)[0]
    for group in range(len(lean) - 1, -1, -1):
        more = size[group, rich[group]] - size[group, lean[group]]
        if more <= left and seconds[group, rich[group]] < seconds[group, lean[group]]:
            lean[group] = rich[group]
            left -= more


@numba.njit(cache=True)
def _sums(seconds: Floats, size: Floats, picks: Ints) -> tuple[float, float]:
    """Bytes and seconds of some options."""
    held, total = 0.0, 0.0
    for group in range(len(picks)):
        held += size[group, picks[group]]
        total += seconds[group, picks[group]]
    return held, total


@dataclass(frozen=True)
class _Class:
    """Groups that are equal in all, and the columns of the options that are worth a look."""

    groups: Ints
    options: Ints
    columns: Ints


class _Model:
    """The program as HiGHS takes it.

    Columns: how many groups of a class take an option; which way is taken; what remains of the
    reduction; the most bytes that come and go; whether a class has an option, where that is asked.
    Seconds and bytes are scaled to about one.
    """

    def __init__(self, asked: LayoutProgram) -> None:
        self._asked = asked
        self._classes = _classes(asked)
        self._taken = sum(len(one.columns) for one in self._classes)
        self._remains = self._taken + len(asked.ways)
        self._most = self._remains + 1
        self._upper = [float(len(c.groups)) for c in self._classes for _ in c.columns]
        self._upper += [1.0] * len(asked.ways) + [np.inf, np.inf]
        self._seconds = float(np.mean(asked.seconds[np.isfinite(asked.seconds)])) or 1.0
        self._bytes = max(asked.room, 1.0) if np.isfinite(asked.room) else 1.0
        self._parts: list[tuple[Ints, Ints, Floats]] = []
        self._low: list[float] = []
        self._high: list[float] = []

    def solve(self, gap: float, seconds: float) -> Ints | None:
        """An option for each group."""
        self._agree()
        self._wait()
        if np.isfinite(self._asked.room):
            self._fit()
        size = len(self._upper)
        goal = np.zeros(size)
        for own in self._classes:
            goal[own.columns] = self._asked.seconds[own.groups[0], own.options] / self._seconds
        goal[self._remains] = 1.0
        whole = ~np.isin(np.arange(size), (self._remains, self._most))
        rows, columns, values = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        matrix = coo_array((values, (rows, columns)), (len(self._low), size))
        found = milp(
            goal,
            integrality=whole.astype(np.int64),
            bounds=Bounds(0.0, np.array(self._upper)),
            constraints=LinearConstraint(matrix.tocsr(), self._low, self._high),
            options={"mip_rel_gap": gap, "node_limit": _NODES, "time_limit": seconds},
        )
        return None if found.x is None else self._picks(np.rint(found.x).astype(np.int64))

    def _picks(self, found: Ints) -> Ints:
        """Options of groups; of equal ones, the first have those that reduce least at the end."""
        picks = np.zeros(len(self._asked.seconds), np.int64)
        for own in self._classes:
            hides = self._asked.hides[own.groups[0], own.options]
            order = np.argsort(hides, kind="stable")
            picks[own.groups] = np.repeat(own.options[order], found[own.columns][order])
        return picks

    def _row(self, terms: Sequence[tuple[Ints, Floats | float]], low: float, high: float) -> None:
        for columns, values in terms:
            where = np.full(len(columns), len(self._low))
            self._parts.append((where, columns, np.broadcast_to(values, len(columns))))
        self._low.append(low)
        self._high.append(high)

    def _agree(self) -> None:
        """One way is taken, and every group an option with its borders."""
        ways = np.arange(self._taken, self._remains)
        self._row([(ways, 1.0)], 1.0, 1.0)
        for own in self._classes:
            first, count = own.groups[0], float(len(own.groups))
            has, wanted = self._asked.borders[first, own.options], self._asked.ways[:, first]
            for border in np.unique(np.concatenate([has, wanted])):
                taken, by = own.columns[has == border], ways[wanted == border]
                self._row([(taken, 1.0), (by, -count)], 0.0, 0.0)

    def _wait(self) -> None:
        """What remains is at least what groups up to one reduce, less the backward before it."""
        alone = [int(own.groups[0]) for own in self._classes if len(own.groups) == 1]
        inside = [
            group
            for group in sorted(alone)
            if all(own.groups[-1] <= group or own.groups[0] >= group for own in self._classes)
        ]
        for group in spread(inside, _REMAINS):
            terms: list[tuple[Ints, Floats | float]] = [(np.array([self._remains]), 1.0)]
            for own in self._classes:
                first = own.groups[0]
                if first <= group:
                    less = self._asked.hides[first, own.options]
                    if first < group:
                        less = less - self._asked.backward[first, own.options]
                    terms.append((own.columns, -less / self._seconds))
            self._row(terms, 0.0, np.inf)

    def _fit(self) -> None:
        """All that stays and the most that comes and goes have room."""
        most, asked = np.array([self._most]), self._asked
        stays = [
            (c.columns, asked.size[c.groups[0], c.options] / self._bytes) for c in self._classes
        ]
        self._row([*stays, (most, 1.0)], -np.inf, asked.room / self._bytes)
        floor = max(asked.transient[c.groups[0], c.options].min() for c in self._classes)
        self._row([(most, 1.0)], floor / self._bytes, np.inf)
        for own in self._classes:
            transient = asked.transient[own.groups[0], own.options]
            for column, bytes_ in zip(own.columns, transient, strict=True):
                if bytes_ > floor:
                    has = np.array([len(self._upper)])
                    self._upper.append(1.0)
                    taken = np.array([column])
                    self._row([(has, float(len(own.groups))), (taken, -1.0)], 0.0, np.inf)
                    self._row([(most, 1.0), (has, -bytes_ / self._bytes)], 0.0, np.inf)


def _classes(asked: LayoutProgram) -> list[_Class]:
    """Equal groups together; the first and the last one apart, for what remains after them."""
    tables = (asked.seconds, asked.backward, asked.hides, asked.size, asked.transient)
    rows = np.concatenate([*tables, asked.borders, asked.ways.T], axis=1)
    last = len(rows) - 1
    found: dict[tuple[bool, bool, bytes], list[int]] = {}
    for group, row in enumerate(rows):
        found.setdefault((group == 0, group == last, row.tobytes()), []).append(group)
    classes, column = [], 0
    for groups in found.values():
        options = np.flatnonzero(worthwhile(asked, groups[0]))
        columns = np.arange(column, column + len(options))
        classes.append(_Class(np.array(groups, np.int64), options, columns))
        column += len(options)
    return classes


def worthwhile(asked: LayoutProgram, group: int) -> npt.NDArray[np.bool_]:
    """Options of a group that no other one with its borders dominates, (S,).

    One is dominated if the other has no more bytes, and saves at least the seconds by which more
    of the reduction could remain.
    """
    seconds, backward, hides = (
        np.nan_to_num(table[group], posinf=0.0)
        for table in (asked.seconds, asked.backward, asked.hides)
    )
    exists = np.isfinite(asked.seconds[group])
    size, transient, borders = asked.size[group], asked.transient[group], asked.borders[group]
    more = hides[:, None] - hides + np.maximum(backward - backward[:, None], 0.0)
    beats = seconds[:, None] + np.maximum(more, 0.0) <= seconds
    beats &= (size[:, None] <= size) & (transient[:, None] <= transient)
    beats &= (borders[:, None] == borders) & exists[:, None]
    # Of two that are equal in all, the first one beats the other.
    first = np.tri(len(size), dtype=bool).T & ~np.eye(len(size), dtype=bool)
    beats &= first | ~beats.T
    return np.asarray(exists & ~beats.any(axis=0))
