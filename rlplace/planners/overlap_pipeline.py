"""Pipelines of stages whose tails hide behind the backward of the stages before them.

A pipeline is built from the last stage to the first, so that the micro-batches in flight of 1F1B,
and with them the memory, are known exactly. Of stage s, with k stages from it to the end and m
micro-batches, let F and B be the seconds of a forward and backward, c of the way to the next stage,
and R of what follows the last backward (the part of the gradient reduction that no backward hides,
and the optimizer):

    W_s = F_s + B_s + 2 c_s + W_(s+1)                    one micro-batch, there and back
    Y_s = max(m (F_s + B_s) + max(0, 2 c_s + W_(s+1) - (min(k, m) - 1) F_s),
              ((m - 1) mod k) F_s + ceil(m / k) W_s)
    U_s = max(U_(s+1) + F_s + B_s + 2 c_s, Y_s)          until its last backward
    V_s = max(V_(s+1) + F_s + c_s, U_s + R_s)            until all is over

Y is what a stage needs if nothing keeps it waiting but its own work and the first answer, or the
answers of every k-th micro-batch; V lets the tail of a late stage hide behind the backward of those
before it. Of each state (stages behind, devices left, first group) the program keeps the ways on
with the least V, U and W, as far as no bound says that they are worse than the best plan so far.
"""

from __future__ import annotations

from itertools import product

import numba
import numpy as np
import numpy.typing as npt

from rlplace.planners.stage_tables import StageTables, TableArrays

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]

#: Of a stage: its take, first and last cut.
Part = tuple[int, int, int]

#: Values of a way on, each of which one that is kept has the least of.
_OVER, _BACK, _ALONE = range(3)


def pipelines(tables: StageTables, count: int, most: float) -> list[tuple[Part, ...]]:
    """The best pipelines of each number of stages, by each of V, U and W; each once.

    Args:
        tables: What stages take.
        count: Micro-batches of a step.
        most: Seconds; none that takes as long is looked at.
    """
    values, choice = _solve(tables.arrays, _prefix_bound(tables, count), count, most)
    found: dict[tuple[Part, ...], None] = {}
    for depth, kept in product(range(len(values)), range(3)):
        own = values[depth, :, :, 0, kept, _OVER]
        state, line = (int(index) for index in np.unravel_index(int(own.argmin()), own.shape))
        if np.isfinite(own[state, line]):
            found.setdefault(_backtrack(tables, choice, (depth, state, line, kept)))
    return list(found)


def _backtrack(
    tables: StageTables, choice: Ints, end: tuple[int, int, int, int]
) -> tuple[Part, ...]:
    """The stages of a way on: that of (stages, state, line, label) at the first cut."""
    depth, state, line, label = end
    stages, cut = [], 0
    for behind in range(depth, 0, -1):
        take, stop, line, label = (int(i) for i in choice[behind, state, line, cut, label])
        stages.append((take, cut, stop))
        state, cut = int(tables.arrays.before[take]), stop
    return tuple(stages)


def _prefix_bound(tables: StageTables, count: int) -> Floats:
    """No less is the time of all groups before each cut with what each state leaves (states, N)."""
    groups = np.arange(tables.arrays.seconds.shape[-1] - 1)
    alone = tables.arrays.seconds[:, :, groups, groups + 1].min(axis=1)
    work = np.concatenate([[0.0], np.cumsum((alone * tables.width[:, None]).min(axis=0))])
    left = np.array([sum(state) for state in tables.states])
    with np.errstate(divide="ignore", invalid="ignore"):
        bound = count * work / left[:, None]
    return np.where(work == 0.0, 0.0, bound)


@numba.njit(cache=True)
def _solve(tables: TableArrays, bound: Floats, count: int, most: float) -> tuple[Floats, Ints]:
    """Values (V, U, W) by stages, state, line of the first device, cut and label.

    Label 0 has the least V, label 1 the least U, label 2 the least W. With them, how each came
    about: take, next cut, line and label.
    """
    _, deepest, cuts, _ = tables.seconds.shape
    states, lines = len(bound), tables.way.shape[1]
    best = np.full((deepest + 1, states, lines, cuts, 3, 3), np.inf)
    choice = np.full((deepest + 1, states, lines, cuts, 3, 4), -1, np.int32)
    best[0, 0, 0, cuts - 1] = 0.0
    for behind in range(deepest):
        for take in range(len(tables.kind)):
            before, after = tables.before[take], tables.after[take]
            for line in range(lines if behind else 1):
                road = tables.way[take, line]
                if behind and road < 0:
                    continue
                for stop in range(1, cuts):
                    move = tables.transfer[road, stop] if behind else 0.0
                    for label in range(3 if behind else 1):
                        way = best[behind, before, line, stop, label]
                        if way[_OVER] == np.inf or _known(best[behind, before, line, stop], label):
                            continue
                        _extend(
                            tables,
                            bound[after],
                            count,
                            most,
                            behind,
                            (take, stop, line, label),
                            way,
                            move,
                            best[behind + 1, after, tables.entry[take]],
                            choice[behind + 1, after, tables.entry[take]],
                        )
    return best, choice


@numba.njit(cache=True)
def _known(ways: Floats, label: int) -> bool:
    """Whether a label before has the same way on."""
    for other in range(label):
        if (ways[other] == ways[label]).all():
            return True
    return False


@numba.njit(cache=True)
def _extend(
    tables: TableArrays,
    bound: Floats,
    count: int,
    most: float,
    behind: int,
    came: tuple[int, int, int, int],
    way: Floats,
    move: float,
    best: Floats,
    choice: Ints,
) -> None:
    """Put a stage of a take before the stages of a way on, for every first cut."""
    take, stop = came[0], came[1]
    kind = tables.kind[take]
    stages = behind + 1
    held = min(stages, count)
    rounds, rest = (count + behind) // stages, (count - 1) % stages
    round_trip = way[_ALONE] + 2 * move
    for start in range(stop - 1, -1, -1):
        own = tables.seconds[kind, behind, start, stop]
        if count * own >= most:
            break
        if bound[start] >= most:
            continue
        front = tables.forward[kind, behind, start, stop]
        alone = round_trip + own
        wait = max(round_trip - (held - 1) * front, 0.0)
        back = max(count * own + wait, rest * front + rounds * alone, way[_BACK] + own + 2 * move)
        over = max(front + move + way[_OVER], back + tables.tail[kind, behind, start, stop])
        if over >= most:
            break
        _keep(best[start], choice[start], (over, back, alone), came)


@numba.njit(cache=True)
def _keep(
    best: Floats,
    choice: Ints,
    new: tuple[float, float, float],
    came: tuple[int, int, int, int],
) -> None:
    """Remember a way on for each value of which it has the least; of equal ones, by V."""
    for place in range(3):
        old = best[place, place]
        if new[place] < old or (new[place] == old and new[_OVER] < best[place, _OVER]):
            for field in range(3):
                best[place, field] = new[field]
            for field in range(4):
                choice[place, field] = came[field]
