"""The dynamic program behind the planner of Sailor's problems: the least filling time under caps.

A pipeline is built from its last stage to its first, because then the micro-batches in flight in a
stage, and with them its memory, are known. A state is (stages placed, layer where the next stage
ends, kinds and tp of that stage, which fit its activations are sent by, devices used); its value is
the sum of the stage times so far. Stages slower than `slowest`, or whose gradients take longer than
`reduction`, are not taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SweepTables:
    """What the program reads; T types of stages, L layers, F sets of used devices, C kinds of hop.

    Args:
        compute: [T, L + 1, L + 1] seconds of layers [start, stop).
        reduction: [T, L + 1, L + 1] seconds to reduce their gradients.
        send: [C, L] seconds to send the output of a layer by a hop.
        hop: [T, T] the hop from a type to a type.
        lowest: [K, T, L + 1] first layer of the longest stage that ends there and fits into memory,
            with k micro-batches in flight.
        after: [F, T] devices used when a stage of a type is added; -1 if there are too few.
        first: [T] the same for the first stage that is placed.
        whole: [F] whether a plan may use exactly these.
        left: [F, T] how many stages of a type the devices that are left make, at most.
        pools: [T] types of one pool take the same devices.
    """

    compute: Floats
    reduction: Floats
    send: Floats
    hop: Ints
    lowest: Ints
    after: Ints
    first: Ints
    whole: NDArray[np.bool_]
    left: Floats
    pools: Ints

    @cached_property
    def fastest(self) -> Floats:
        """[L + 1] least seconds of the layers before each."""
        each = np.diagonal(self.compute, 1, axis1=1, axis2=2).min(axis=0)
        return np.concatenate(([0.0], np.cumsum(each))) * (1.0 - 1e-12)

    @property
    def states(self) -> int:
        """How many places the table of states needs."""
        types, stops, _ = self.compute.shape
        return int(stops * types * (len(self.send) + 1) * len(self.after))


@dataclass(frozen=True)
class Sweep:
    """A pipeline: its filling time, and (type, start, stop) of each stage in order."""

    filling: float
    stages: tuple[tuple[int, int, int], ...]


def sweep(
    tables: SweepTables, slowest: float, reduction: float, below: float, slots: NDArray[np.int32]
) -> Sweep | None:
    """The pipeline of least filling time under caps; None if there is none below `below`.

    Args:
        tables: See there.
        slowest: Seconds that no stage may exceed, for a micro-batch.
        reduction: Seconds that no stage's gradient reduction may exceed.
        below: Filling times that are not below this are of no interest.
        slots: Scratch, at least `tables.states` long and all -1; left so.
    """
    most = _most_layers(tables, slowest)
    filling, kinds, cuts = _run(
        slowest,
        reduction,
        below,
        tables.compute,
        tables.reduction,
        tables.send,
        tables.hop,
        tables.lowest,
        tables.after,
        tables.first,
        tables.whole,
        most,
        _capacity(tables, most),
        tables.fastest,
        slots,
    )
    if not len(kinds):
        return None
    stops = (*cuts[1:], tables.compute.shape[1] - 1)
    stages = zip(map(int, kinds), map(int, cuts), map(int, stops), strict=True)
    return Sweep(float(filling), tuple(stages))


def _most_layers(tables: SweepTables, slowest: float) -> Floats:
    """[T] layers that a stage of a type can have at most."""
    layers = np.arange(tables.compute.shape[1])
    length = layers[None, :] - layers[:, None]
    starts = np.broadcast_to(layers[:, None], length.shape)
    legal = (tables.compute <= slowest) & (starts >= tables.lowest[1][:, None, :])
    result: Floats = np.where(legal, length, 0).max(axis=(1, 2)).astype(np.float64)
    return result


def _capacity(tables: SweepTables, most: Floats) -> Floats:
    """[F] layers that the devices that are left can take at most."""
    each = tables.left * most[None, :]
    return sum(
        (each[:, tables.pools == pool].max(axis=1) for pool in np.unique(tables.pools)),
        start=np.zeros(len(each)),
    )


@numba.njit(cache=True)
def _run(  # noqa: C901 - one loop; its parts would each take all these arrays
    slowest: float,
    cap: float,
    below: float,
    compute: Floats,
    reduction: Floats,
    send: Floats,
    hop: Ints,
    lowest: Ints,
    after: Ints,
    first: Ints,
    whole: NDArray[np.bool_],
    most: Floats,
    capacity: Floats,
    fastest: Floats,
    slots: NDArray[np.int32],
) -> tuple[float, Ints, Ints]:
    types, stops, _ = compute.shape
    hops, sets = send.shape[0] + 1, after.shape[0]
    keys = np.empty(1024, np.int64)
    values = np.empty(1024)
    parents = np.empty(1024, np.int64)
    nodes = 0
    for kind in range(types):
        if first[kind] >= 0:
            keys[nodes] = (((stops - 1) * types + kind) * hops + hops - 1) * sets + first[kind]
            values[nodes] = 0.0
            parents[nodes] = -1
            nodes += 1
    best, last = below, -1
    begin, end, depth = 0, nodes, 1
    while end > begin and depth < len(lowest):
        for node in range(begin, end):
            rest, used = divmod(keys[node], sets)
            rest, way = divmod(rest, hops)
            stop, kind = divmod(rest, types)
            forward = 0.0 if depth == 1 else send[way, stop - 1]
            for start in range(stop - 1, lowest[depth, kind, stop] - 1, -1):
                own = compute[kind, start, stop]
                if own > slowest:
                    break
                if reduction[kind, start, stop] > cap:
                    continue
                if start == 0:
                    own += forward if depth <= 3 else 2 * forward
                    if own <= slowest and whole[used] and values[node] + own < best:
                        best, last = values[node] + own, node
                    continue
                for other in range(types):
                    now = after[used, other]
                    if now < 0 or start > most[other] + capacity[now]:
                        continue
                    back = send[hop[kind, other], start]
                    stage = own + (2 * back if depth == 1 else forward + back)
                    value = values[node] + stage
                    if stage > slowest or value + fastest[start] >= best:
                        continue
                    key = ((start * types + other) * hops + hop[other, kind]) * sets + now
                    place = slots[key]
                    if place < 0:
                        if nodes == len(keys):
                            keys = np.concatenate((keys, np.empty_like(keys)))
                            values = np.concatenate((values, np.empty_like(values)))
                            parents = np.concatenate((parents, np.empty_like(parents)))
                        place = nodes
                        slots[key] = place
                        keys[place] = key
                        nodes += 1
                    elif values[place] <= value:
                        continue
                    values[place] = value
                    parents[place] = node
        for node in range(end, nodes):
            slots[keys[node]] = -1
        begin, end, depth = end, nodes, depth + 1
    kinds, cuts = _pipeline(parents, keys // (sets * hops), types, last)
    return best, kinds, cuts


@numba.njit(cache=True)
def _pipeline(parents: Ints, places: Ints, types: int, last: int) -> tuple[Ints, Ints]:
    """Types and first layers of the stages, from the state of the first stage back to the last."""
    length, node = 0, last
    while node >= 0:
        length += 1
        node = parents[node]
    kinds = np.empty(length, np.int64)
    cuts = np.empty(length, np.int64)
    node, start = last, 0
    for place in range(length):
        stop, kinds[place] = divmod(places[node], types)
        cuts[place] = start
        start = stop
        node = parents[node]
    return kinds, cuts
