"""What a Piper stage costs: for every stage, degree and number of micro-batches in flight.

The second level of Piper (Tarnawski et al., NeurIPS 2021, section 4): given the groups of a stage,
its degree and the micro-batches in flight, one variant a group so that memory suffices and time is
least. That is a knapsack; like the authors' program, and for any number of variants, it starts from
the quickest ones and buys memory where a byte costs least time, until all fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from rlplace.cost.given.common import costs_of
from rlplace.graph.formats.types import GivenInstance, PiperCosts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StageTables:
    """Costs of stages. S stages, T degrees, Y most micro-batches in flight.

    The load of a stage on d copies is ``(seconds + (d - 1) * exchange) / d``.

    Args:
        degrees: The tensor-parallel degrees, (T,).
        seconds: Compute and transfers of one copy with y + 1 in flight, infinite where nothing
            fits; (S, T, Y), never less with more in flight.
        exchange: Seconds of the data-parallel exchange, (S, T).
    """

    degrees: Ints
    seconds: Floats
    exchange: Floats


@dataclass(frozen=True)
class Variants:
    """The variants of all groups as arrays, padded with infinite times. G groups, V variants.

    Args:
        degrees: The degrees that occur, (T,).
        labels: Names of the variants of each group at each degree.
        time, each, fixed, params: As in `rlplace.graph.formats.types.Variant`, (T, G, V).
        ends: Source and target of each edge, (E, 2).
        bytes_: Bytes of each edge, (E,).
        sync_in: What a variant of the target adds to an edge, (T, E, V).
        sync_out: What a variant of the source adds, (T, E, V).
        bandwidth, micro_batches, cap: Of the instance.
    """

    degrees: Ints
    labels: tuple[tuple[tuple[str, ...], ...], ...]
    time: Floats
    each: Floats
    fixed: Floats
    params: Floats
    ends: Ints
    bytes_: Floats
    sync_in: Floats
    sync_out: Floats
    bandwidth: float
    micro_batches: int
    cap: float

    def tables(self, members: npt.NDArray[np.bool_], most: int) -> StageTables:
        """The costs of stages.

        Args:
            members: The groups of each stage, (S, G).
            most: Micro-batches in flight, at most.
        """
        shape = (len(members), len(self.degrees))
        seconds, exchange = np.full((*shape, most), np.inf), np.zeros(shape)
        for index in range(len(self.degrees)):
            _fill(
                members,
                (self.time[index], self.each[index], self.fixed[index]),
                self.ends,
                self.bytes_,
                (self.sync_in[index], self.sync_out[index]),
                (self.bandwidth, self.cap),
                seconds[:, index],
            )
            heaviest = self.params[index].max(axis=1)
            exchange[:, index] = 4.0 * (members @ heaviest) / self.micro_batches / self.bandwidth
        return StageTables(self.degrees, seconds, exchange)

    def choice(self, members: npt.NDArray[np.bool_], degree: int, in_flight: int) -> Ints:
        """The variant of each group of a stage, (G,); of no meaning for the other groups."""
        index = int(np.flatnonzero(self.degrees == degree)[0])
        time = np.empty_like(self.time[index])
        _times(
            members,
            self.time[index],
            self.ends,
            (self.sync_in[index], self.sync_out[index]),
            self.bandwidth,
            time,
        )
        picks = np.zeros(len(time), np.int64)
        bytes_ = self.each[index] * in_flight + self.fixed[index]
        _knapsack(np.flatnonzero(members), time, bytes_, self.cap, picks)
        return picks

    def names(self, groups: Sequence[int], degree: int, picks: Ints) -> tuple[str, ...]:
        """Names of what `choice` picked for the groups of a stage."""
        labels = self.labels[int(np.flatnonzero(self.degrees == degree)[0])]
        return tuple(labels[group][int(picks[group])] for group in groups)


def variants_of(instance: GivenInstance) -> Variants:
    """The variants of a Piper instance as arrays."""
    costs = costs_of(instance, PiperCosts)
    degrees = sorted({v.degree for group in costs.variants for v in group})
    own = [[[v for v in group if v.degree == t] for group in costs.variants] for t in degrees]
    widest = max(len(group) for groups in own for group in groups)

    def padded(rows: Sequence[Sequence[Sequence[float]]], filler: float) -> Floats:
        return np.array([[[*r, *[filler] * (widest - len(r))] for r in row] for row in rows])

    def column(name: str, filler: float) -> Floats:
        rows = [[[getattr(v, name) for v in group] for group in groups] for groups in own]
        return padded(rows, filler)

    edges = instance.graph.edges
    into = [[[dict(v.sync_in)[e.src] for v in groups[e.dst]] for e in edges] for groups in own]
    out = [[[dict(v.sync_out)[e.dst] for v in groups[e.src]] for e in edges] for groups in own]
    return Variants(
        degrees=np.array(degrees, np.int64),
        labels=tuple(tuple(tuple(v.name for v in group) for group in groups) for groups in own),
        time=column("time", np.inf),
        each=column("memory_each", 0.0),
        fixed=column("memory_fixed", 0.0),
        params=column("params", 0.0),
        ends=np.array([(e.src, e.dst) for e in edges], np.int64).reshape(-1, 2),
        bytes_=np.array(costs.edge_bytes, float),
        sync_in=padded(into, 0.0).reshape(len(degrees), len(edges), widest),
        sync_out=padded(out, 0.0).reshape(len(degrees), len(edges), widest),
        bandwidth=costs.bandwidth,
        micro_batches=costs.micro_batches,
        cap=costs.memory_cap,
    )


@numba.njit(cache=True)
def _fill(
    members: npt.NDArray[np.bool_],
    variants: tuple[Floats, Floats, Floats],
    ends: Ints,
    bytes_: Floats,
    sync: tuple[Floats, Floats],
    limits: tuple[float, float],
    seconds: Floats,
) -> None:
    """Fill `seconds` (S, Y) of one degree."""
    plain, each, fixed = variants
    bandwidth, cap = limits
    time, picks = np.empty_like(plain), np.zeros(len(plain), np.int64)
    for stage in range(len(members)):
        inside = members[stage]
        groups = np.flatnonzero(inside)
        _times(inside, plain, ends, sync, bandwidth, time)
        crossing = 0.0
        for edge in range(len(ends)):
            if inside[ends[edge, 0]] != inside[ends[edge, 1]]:
                crossing += 2.0 * bytes_[edge] / bandwidth
        leanest = False
        for y in range(seconds.shape[1]):
            need = each * (y + 1.0) + fixed
            if leanest:
                used = 0.0
                for group in groups:
                    used += need[group, picks[group]]
                fits = used <= cap
            else:
                fits = _knapsack(groups, time, need, cap, picks)
                leanest = _leanest(groups, time, need, each, picks)
            if not fits:
                break
            total = crossing
            for group in groups:
                total += time[group, picks[group]]
            seconds[stage, y] = max(total, seconds[stage, y - 1]) if y else total


@numba.njit(cache=True)
def _leanest(groups: Ints, time: Floats, need: Floats, each: Floats, picks: Ints) -> bool:
    """Whether no variant takes fewer bytes, now or with more in flight: then no pick changes."""
    for group in groups:
        now = picks[group]
        for other in range(time.shape[1]):
            fewer = need[group, other] < need[group, now] or each[group, other] < each[group, now]
            if time[group, other] < np.inf and fewer:
                return False
    return True


@numba.njit(cache=True)
def _times(
    inside: npt.NDArray[np.bool_],
    plain: Floats,
    ends: Ints,
    sync: tuple[Floats, Floats],
    bandwidth: float,
    time: Floats,
) -> None:
    """Time of each variant with what it adds to the edges that cross the border; into `time`."""
    time[:] = plain
    for edge in range(len(ends)):
        source, target = ends[edge]
        if inside[target] and not inside[source]:
            time[target] += 2.0 * sync[0][edge] / bandwidth
        if inside[source] and not inside[target]:
            time[source] += 2.0 * sync[1][edge] / bandwidth


@numba.njit(cache=True)
def _knapsack(groups: Ints, time: Floats, need: Floats, cap: float, picks: Ints) -> bool:
    """Pick variants of the groups; whether they fit."""
    used = 0.0
    for group in groups:
        picks[group] = np.argmin(time[group])
        if time[group, picks[group]] == np.inf:
            return False
        used += need[group, picks[group]]
    while used > cap:
        best, at, to = np.inf, -1, 0
        for group in groups:
            now = picks[group]
            for other in range(time.shape[1]):
                saved = need[group, now] - need[group, other]
                if saved > 0.0 and time[group, other] < np.inf:
                    price = (time[group, other] - time[group, now]) / saved
                    if price < best:
                        best, at, to = price, group, other
        if at < 0:
            return False
        used += need[at, to] - need[at, picks[at]]
        picks[at] = to
    return True
