"""How well the rest of a pipeline can still turn out: a dynamic program over what is left.

`look_behind` finds the best way to every state from the end of the
pipeline, `look_ahead` the best way from every state to its head. Both are numba loops over
plain arrays. The step time of a 1F1B pipeline with M micro-batches is taken as

    sum of stages and transfers + steady state + exposed tail.

Neighbouring stages s to s + L - 1 hold each other up: in 1F1B's fixed order, forward L of stage s
comes after forward 0 has gone down to stage s + L - 1 and a gradient has come back up, so L
micro-batches take at least S, the seconds of these stages and of the transfers among them. The
steady state is the largest (M - L) * S / L over all runs of stages; L = 1 is the slowest stage. To
find the worst run on the way, a period P is guessed: a run is as bad as its excess, the sum of
(seconds - P) and of its transfers, and the worst run that ends (or begins) at a stage follows from
the worst one at its neighbour. Where the guess is low, that run is too long; so runs of one and of
two stages are always looked at as well.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from rlplace.envs.builders.stage_table import StageTable

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Rest(NamedTuple):
    """The best pipeline found for what is left, by (stages behind, devices left, stop cut).

    Args:
        total: Sum of stage seconds, transfers, and the gradients of tied parameters.
        slowest: Slowest stage.
        steady: Seconds of the steady state, the worst run into the stages behind included.
        excess: Of the worst run that ends here, the transfer to the stages behind included.
        length: Stages of that run.
        edge: Seconds of the stage that ends here and of that transfer.
        backward: Sum of backward seconds and half of the transfers.
        tail: Longest tail that outlasts the backward of the stages before it.
        depth: Stages.
        overflow: Sum of the stages' overflow.
    """

    total: Floats
    slowest: Floats
    steady: Floats
    excess: Floats
    length: Ints
    edge: Floats
    backward: Floats
    tail: Floats
    depth: Ints
    overflow: Floats


class Behind(NamedTuple):
    """The stages behind a state, by (stages behind, devices left, stop cut).

    Args:
        excess: Of the worst run that begins with them, inf where no pipeline leads.
        length: Stages of that run.
        edge: Seconds of the first of them.
        period: Seconds a micro-batch of the best whole pipeline in the steady state (one number).
    """

    excess: Floats
    length: Ints
    edge: Floats
    period: float


@numba.njit(cache=True)
def _hold(excess: float, length: int, period: float, micro_batches: int) -> float:
    """Seconds of the steady state that a run of stages enforces."""
    return max(0, micro_batches - length) * (period + excess / length)


@numba.njit(cache=True)
def _holds(
    busy: float, run: float, length: int, pair: float, period: float, micro_batches: int
) -> float:
    """The largest that one stage, a run that it ends, and a pair (0 if none) enforce."""
    alone = (micro_batches - 1) * busy
    two = max(0, micro_batches - 2) * pair / 2.0
    return max(alone, two, _hold(run, length, period, micro_batches))


@numba.njit(cache=True)
def _price(overflow: float, penalty: float) -> float:
    return penalty * (1.0 + overflow) if overflow > 0.0 else 0.0


@numba.njit(cache=True)
def look_behind(
    table: StageTable,
    classes: Ints,
    firsts: Ints,
    lasts: Ints,
    turns: Floats,
    transfers: Floats,
    places: int,
    micro_batches: int,
    tied: Floats,
    period: float,
    penalty: float,
) -> Behind:
    """The best stages behind every state; the arguments are those of `look_ahead`."""
    _, depth, cuts, _ = table.seconds.shape
    shape = (depth + 1, places + 1, cuts)
    value, total = np.full(shape, np.inf), np.zeros(shape)
    steady, excess, overflow = np.zeros(shape), np.full(shape, np.inf), np.zeros(shape)
    length, edge = np.zeros(shape, np.int64), np.zeros(shape)
    tail = np.zeros(shape)
    root = (0, places, cuts - 1)
    value[root], excess[root] = 0.0, 0.0
    best, found = np.inf, period
    for k in range(depth):
        for mesh in range(len(classes)):
            a, b, v = firsts[mesh], lasts[mesh], classes[mesh]
            for stop in range(1, cuts):
                here = (k, b, stop)
                if value[here] == np.inf:
                    continue
                hop = transfers[mesh, stop] if k else 0.0
                joined = excess[here] + hop
                for start in range(stop):
                    own = table.seconds[v, k, start, stop]
                    busy = own * turns[mesh]
                    new_total = total[here] + hop + own
                    new_total += tied[a] if k and start == 0 else 0.0
                    run, count = busy - period, 1
                    if joined > 0.0:
                        run, count = run + joined, length[here] + 1
                    pair = busy + hop + edge[here] if k else 0.0
                    hold = _holds(busy, run, count, pair, period, micro_batches)
                    new_steady = max(steady[here], hold)
                    new_overflow = overflow[here] + table.overflow[v, k, start, stop]
                    back = table.backward[v, k, start, stop] + hop / 2.0
                    new_tail = max(table.tail[v, k, start, stop], tail[here] - back)
                    reached = new_total + max((micro_batches - 1) * period, new_steady) + new_tail
                    reached += _price(new_overflow, penalty)
                    if start == 0 and reached < best:
                        best = reached
                        found = new_steady / max(1, micro_batches - 1)
                    there = (k + 1, a, start)
                    if reached < value[there]:
                        value[there], total[there], steady[there] = reached, new_total, new_steady
                        excess[there], length[there], edge[there] = run, count, busy
                        overflow[there], tail[there] = new_overflow, new_tail
    return Behind(excess, length, edge, found)


@numba.njit(cache=True)
def look_ahead(
    table: StageTable,
    behind: Behind,
    classes: Ints,
    firsts: Ints,
    lasts: Ints,
    turns: Floats,
    transfers: Floats,
    places: int,
    micro_batches: int,
    tied: Floats,
    period: float,
    penalty: float,
) -> Rest:
    """The best rest for every state.

    Args:
        table: Costs of stages.
        behind: The stages that each state is taken to have behind it.
        classes: Class of each mesh.
        firsts: First position in the line of devices that it takes.
        lasts: One past the last position.
        turns: Factor by which ranks that share a core slow it down in the steady state.
        transfers: (meshes, cuts): seconds there and back from a mesh over its later border.
        places: Length of the line of devices.
        micro_batches: Micro-batches of a step.
        tied: Seconds for tied parameters of a pipeline that begins at each position (P,).
        period: Seconds a micro-batch; below it, a shorter steady state is worth nothing.
        penalty: Seconds that an overflow of the whole limit costs.
    """
    _, depth, cuts, _ = table.seconds.shape
    shape = (depth + 1, places + 1, cuts)
    value = np.full(shape, np.inf)
    total, slowest, steady = np.full(shape, np.inf), np.zeros(shape), np.zeros(shape)
    backward, tail, overflow = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    excess, length, edge = np.zeros(shape), np.zeros(shape, np.int64), np.zeros(shape)
    stages = np.zeros(shape, np.int64)
    value[:, :, 0] = total[:, :, 0] = 0.0
    for k in range(depth - 1, -1, -1):
        for mesh in range(len(classes)):
            a, b, v = firsts[mesh], lasts[mesh], classes[mesh]
            for stop in range(1, cuts):
                here = (k, b, stop)
                if behind.excess[here] == np.inf:
                    continue
                hop = transfers[mesh, stop] if k else 0.0
                for start in range(stop):
                    rest = (k + 1, a, start)
                    if value[rest] == np.inf:
                        continue
                    own = table.seconds[v, k, start, stop]
                    busy = own * turns[mesh]
                    new_total = total[rest] + own + hop
                    new_total += tied[a] if k and start == 0 else 0.0
                    run, count = busy - period, 1
                    if excess[rest] > 0.0:
                        run, count = run + excess[rest], length[rest] + 1
                    pair = busy + edge[rest] if start else 0.0
                    hold = _holds(busy, run, count, pair, period, micro_batches)
                    if k:
                        run += hop
                        worst, joined = run + behind.excess[here], count + behind.length[here]
                        pair = busy + hop + behind.edge[here]
                        far = _holds(busy, worst, joined, pair, period, micro_batches)
                        hold = max(hold, far)
                    new_steady = max(steady[rest], hold)
                    new_tail = max(tail[rest], table.tail[v, k, start, stop] - backward[rest])
                    new_overflow = overflow[rest] + table.overflow[v, k, start, stop]
                    reached = new_total + max((micro_batches - 1) * period, new_steady) + new_tail
                    reached += _price(new_overflow, penalty)
                    if reached < value[here]:
                        value[here], total[here], steady[here] = reached, new_total, new_steady
                        slowest[here] = max(slowest[rest], busy)
                        excess[here], length[here], edge[here] = run, count, busy + hop
                        back = table.backward[v, k, start, stop] + hop / 2.0
                        backward[here], tail[here] = backward[rest] + back, new_tail
                        overflow[here], stages[here] = new_overflow, stages[rest] + 1
    return Rest(total, slowest, steady, excess, length, edge, backward, tail, stages, overflow)
