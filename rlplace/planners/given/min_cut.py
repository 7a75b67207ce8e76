"""Balanced min-cut: parts of equal work with the least transfer between them.

The graph partitioning of arXiv 1906.08168, as METIS does it: edges lose their direction, a part is
a device, its work stays within a share of even, and the time of the cut edges is least. Decision
space: one device an op. Algorithm: a first cut along the order of the ops, then passes of Fiduccia
and Mattheyses (1982), in which every op moves at most once, always the move that lowers the cut
most (or raises it least) and keeps the balance, and the best prefix stays; until a pass brings
nothing. Once for each of a few tolerances of the balance, then from random placements as long as
the budget lasts. Complexity of a pass: V^2 D.

Even is what the fractional optimum gives: each op shared over its legal devices by their speed.
METIS itself is not called (its refinement is the same, its coarsening pays for graphs far larger
than these). The cut knows nothing of when ops run, which is what it loses by on a makespan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlplace.cost.given.event_loop import EventArrays, Floats, Ints
from rlplace.graph.formats.types import GivenInstance
from rlplace.planners.given.event_search import EventSearch
from rlplace.planners.given.ranks import mean_transfers
from rlplace.planners.given.types import Placed, Placement
from rlplace.planners.types import Limits

#: Load of a device over the even one, at most; in turn.
_TOLERANCES = (0.05, 0.2, 0.5)
#: Random starts where the budget does not end before, and passes from one start at most.
_STARTS, _PASSES = 12, 20


def min_cut(instance: GivenInstance, budget: Limits, rng: np.random.Generator) -> Placed[Placement]:
    """The best of the balanced cuts, by the makespan."""
    search = EventSearch("min_cut", instance, budget)
    graph = cut_graph(search.arrays)
    for start in range(len(_TOLERANCES) + _STARTS):
        most = graph.even * (1.0 + _TOLERANCES[start % len(_TOLERANCES)])
        first = in_order(graph) if start < len(_TOLERANCES) else search.any_placement(rng)
        search.look(refined(graph, first, most)[None])
        if search.stopped:
            break
    return search.result()


@dataclass(frozen=True)
class CutGraph:
    """An instance without directions. V ops, D devices.

    Args:
        times: Time on each device, infinite where it may not run (V, D).
        weights: Time of what passes between two ops, on the mean link (V, V), symmetric.
        even: Load of each device if all work could be shared at will.
    """

    times: Floats
    weights: Floats
    even: float

    def cut(self, placement: Ints) -> float:
        """Time of all edges between different devices."""
        apart = placement[:, None] != placement[None]
        return float((self.weights * apart).sum() / 2.0)

    def loads(self, placement: Ints) -> Floats:
        """Time of the ops of each device (D,)."""
        found = np.zeros(self.times.shape[1])
        np.add.at(found, placement, self.times[np.arange(len(placement)), placement])
        return found


def cut_graph(arrays: EventArrays) -> CutGraph:
    """The graph of an instance of the event forms."""
    weights = np.zeros((arrays.ops, arrays.ops))
    sources = np.repeat(np.arange(arrays.ops), np.diff(arrays.first))
    np.add.at(weights, (sources, arrays.readers[0]), mean_transfers(arrays))
    with np.errstate(divide="ignore"):
        # An op of time t[d] on device d, shared by speed, takes 1 / sum(1 / t[d]) of all of them.
        shared = 1.0 / (1.0 / arrays.times).sum(axis=1)
    return CutGraph(arrays.times, weights + weights.T, float(shared.sum()))


def in_order(graph: CutGraph) -> Ints:
    """Ops in their order, each on the first legal device that is not full, else the emptiest."""
    loads, placement = np.zeros(graph.times.shape[1]), np.zeros(len(graph.times), np.int64)
    for op, times in enumerate(graph.times):
        legal = np.flatnonzero(np.isfinite(times))
        after = loads[legal] + times[legal]
        room = np.flatnonzero(after <= graph.even)
        device = legal[room[0] if len(room) else int(np.argmin(after))]
        placement[op], loads[device] = device, loads[device] + times[device]
    return placement


def refined(graph: CutGraph, placement: Ints, most: float) -> Ints:
    """A cut that no pass makes better.

    Args:
        graph: The graph.
        placement: Where the passes begin, balanced or not (V,).
        most: Load of a device, at most; one that is over it may only lose ops.
    """
    best = placement
    for _ in range(_PASSES):
        after = _pass(graph, best, most)
        if _worth(graph, after, most) >= _worth(graph, best, most):
            break
        best = after
    return best


def _worth(graph: CutGraph, placement: Ints, most: float) -> tuple[float, float]:
    """Overload first, then the cut; rounded, so that a pass that changes nothing is the last."""
    over = np.maximum(graph.loads(placement) - most, 0.0).sum()
    return round(float(over), 9), round(graph.cut(placement), 9)


def _pass(graph: CutGraph, placement: Ints, most: float) -> Ints:
    """Every op moves at most once; what was best on the way."""
    now, free = placement.copy(), np.ones(len(placement), bool)
    best, best_worth = now.copy(), _worth(graph, now, most)
    while free.any():
        moves = _gains(graph, now, most)
        moves[~free] = -np.inf
        op, device = np.unravel_index(int(np.argmax(moves)), moves.shape)
        if np.isneginf(moves[op, device]):
            break
        now[op], free[op] = device, False
        worth = _worth(graph, now, most)
        if worth < best_worth:
            best, best_worth = now.copy(), worth
    return best


def _gains(graph: CutGraph, placement: Ints, most: float) -> Floats:
    """What each move takes off the cut (V, D); -inf where it is no move or breaks the balance."""
    ops, devices = graph.times.shape
    on = np.zeros((ops, devices))
    on[np.arange(ops), placement] = 1.0
    near = graph.weights @ on
    gains = near - near[np.arange(ops), placement][:, None]
    loads = graph.loads(placement)
    fits = loads + graph.times <= most * (1.0 + 1e-9)
    crowded = loads[placement] > most
    # Off a device that is too full, any other that gets less full than it was will do.
    relief = loads + graph.times < loads[placement][:, None]
    gains[~(fits | (crowded[:, None] & relief)) | (on > 0.0)] = -np.inf
    # A full device comes first.
    return np.where(crowded[:, None], gains + graph.weights.sum(), gains)
