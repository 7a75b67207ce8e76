"""Overlap-aware dynamic program over stages: the strongest search here.

Decision space: contiguous stages, each on a mesh of its own shape, that takes any of the devices
that are left (`takes`): device kinds in any order, degrees that are no powers of two, stages that
span kinds. The choices inside a stage come from `StageSolver`, then from `overlap_program`.

Built from the last stage to the first, so that the micro-batches in flight of 1F1B, and with them
the memory, are known exactly. Of stage s, the first of k to the end, with m micro-batches, F and B
seconds of a forward and backward, c of the way to the next stage, and R of what follows the last
backward (the part of the gradient reduction that no backward hides, and the optimizer):

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

from collections.abc import Iterator
from itertools import product

import numba
import numpy as np
import numpy.typing as npt

from rlplace.plan.check import legal_micro_batches
from rlplace.plan.degrees import spread
from rlplace.plan.types import Instance, Mesh, Plan, Stage
from rlplace.plan.uniform import even_cuts, make_plan
from rlplace.planners.costing import Costing
from rlplace.planners.descent import descend
from rlplace.planners.search import Search, objective
from rlplace.planners.stage_tables import Stages, StageTables, stage_tables
from rlplace.planners.takes import Takes, all_takes
from rlplace.planners.types import Budget, PlannerResult

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_CUTS = 48
_DEPTH = 24
_COUNTS = 9
#: Predicted step times up to this many times that of the best plan are worth an estimate.
_MARGIN = 1.05
#: From so many of the best plans that differ in their meshes it goes down, with so many estimates.
_STARTS, _DESCENT = 4, 100


def overlap(
    instance: Instance,
    budget: Budget,
    rng: np.random.Generator,
    costing: Costing | None = None,
) -> PlannerResult:
    """The best plan of the overlap-aware program over all micro-batch counts, descended from."""
    search = Search("overlap", costing or Costing(instance), budget)
    stages = Stages(search.costing)
    # Of each line of meshes the best plan, and its step time.
    best: dict[tuple[Mesh, ...], tuple[float, Plan]] = {}
    for takes in all_takes(search.costing.solver):
        for count in micro_batch_counts(instance):
            if search.stopped:
                return search.result()
            most = search.best[1].step_time * _MARGIN if search.best else np.inf
            for plan in _found(stages, takes, count, most):
                value = objective(instance, search.offer(plan))
                line = tuple(stage.mesh for stage in plan.stages)
                if line not in best or value < best[line][0]:
                    best[line] = (value, plan)
    for _, plan in sorted(best.values(), key=lambda pair: pair[0])[:_STARTS]:
        descend(search, stages, plan, _DESCENT)
    return search.result()


def micro_batch_counts(instance: Instance) -> tuple[int, ...]:
    """Up to `_COUNTS` micro-batch counts, spread in the logarithm."""
    return spread(legal_micro_batches(instance.global_batch, 1), _COUNTS)


def _found(solver: Stages, takes: Takes, count: int, most: float) -> Iterator[Plan]:
    instance = solver.costing.instance
    cuts = even_cuts(instance, _CUTS)
    deepest = min(_DEPTH, len(instance.cluster.devices), len(cuts) - 1)
    tables = stage_tables(solver, takes, cuts, count, deepest)
    if tables is None:
        return
    seen = set()
    for value, parts in _solutions(tables, count, most):
        if parts not in seen:
            seen.add(parts)
            yield _make(solver, tables, parts, count)


#: Of a stage: its take, first and last cut.
_Part = tuple[int, int, int]


def _solutions(
    tables: StageTables, count: int, most: float
) -> Iterator[tuple[float, tuple[_Part, ...]]]:
    """Predicted seconds and stages of the best of each number of stages."""
    values, choice = _solve(
        tables.seconds,
        tables.forward,
        tables.tail,
        tables.kind,
        tables.takes.before,
        tables.takes.after,
        tables.takes.entry,
        tables.way,
        tables.transfer,
        _prefix_bound(tables, count),
        count,
        most,
    )
    yield from _ends(tables, values, choice)


def _prefix_bound(tables: StageTables, count: int) -> Floats:
    """No less is the time of all groups before each cut with what each state leaves (states, N)."""
    groups = np.arange(len(tables.cuts) - 1)
    alone = tables.seconds[:, :, groups, groups + 1].min(axis=1)
    work = np.concatenate([[0.0], np.cumsum((alone * tables.width[:, None]).min(axis=0))])
    left = np.array([sum(state) for state in tables.takes.states])
    with np.errstate(divide="ignore", invalid="ignore"):
        bound = count * work / left[:, None]
    return np.where(work == 0.0, 0.0, bound)


@numba.njit(cache=True)
def _solve(
    seconds: Floats,
    forward: Floats,
    tail: Floats,
    kind: Ints,
    before: Ints,
    after: Ints,
    entry: Ints,
    way: Ints,
    transfer: Floats,
    bound: Floats,
    count: int,
    most: float,
) -> tuple[Floats, Ints]:
    """Values (V, U, W) by stages behind, state, line of the first device, cut and label.

    Label 0 has the least V, label 1 the least U, label 2 the least W. With them, how each came
    about: take, next cut, line and label.
    """
    _, deepest, cuts, _ = seconds.shape
    states, lines = len(bound), way.shape[1]
    best = np.full((deepest + 1, states, lines, cuts, 3, 3), np.inf)
    choice = np.full((deepest + 1, states, lines, cuts, 3, 4), -1, np.int32)
    best[0, 0, 0, cuts - 1] = 0.0
    for k in range(deepest):
        held = min(k + 1, count)
        rounds, rest = (count + k) // (k + 1), (count - 1) % (k + 1)
        for take in range(len(kind)):
            c, a, b, own_line = kind[take], after[take], before[take], entry[take]
            for line in range(lines if k else 1):
                road = way[take, line]
                if k and road < 0:
                    continue
                for stop in range(1, cuts):
                    for label in range(3 if k else 1):
                        v, u, w = best[k, b, line, stop, label]
                        if v == np.inf:
                            break
                        if label and w == best[k, b, line, stop, 0, 2]:
                            continue
                        move = transfer[road, stop] if k else 0.0
                        for start in range(stop - 1, -1, -1):
                            own = seconds[c, k, start, stop]
                            if count * own >= most:
                                break
                            if bound[a, start] >= most:
                                continue
                            front = forward[c, k, start, stop]
                            new_w = w + 2 * move + own
                            wait = max(w + 2 * move - (held - 1) * front, 0.0)
                            new_u = max(count * own + wait, rest * front + rounds * new_w)
                            new_u = max(new_u, u + own + 2 * move)
                            new_v = max(front + move + v, new_u + tail[c, k, start, stop])
                            if new_v >= most:
                                break
                            new = (new_v, new_u, new_w)
                            target = best[k + 1, a, own_line, start]
                            came = choice[k + 1, a, own_line, start]
                            for place in range(3):
                                if new[place] < target[place, place] or (
                                    new[place] == target[place, place]
                                    and new_v < target[place, 0]
                                ):
                                    target[place] = new
                                    came[place, 0], came[place, 1] = take, stop
                                    came[place, 2], came[place, 3] = line, label
    return best, choice


def _ends(
    tables: StageTables, values: Floats, choice: Ints
) -> Iterator[tuple[float, tuple[_Part, ...]]]:
    """V and the stages of the best of each number of stages."""
    for depth, kept in product(range(len(values)), range(3)):
        own = values[depth, :, :, 0, kept, 0]
        state, line = (int(i) for i in np.unravel_index(int(own.argmin()), own.shape))
        if not np.isfinite(own[state, line]):
            continue
        value, stages, cut, label = float(own[state, line]), [], 0, kept
        for behind in range(depth, 0, -1):
            take, stop, line, label = (int(i) for i in choice[behind, state, line, cut, label])
            stages.append((take, cut, stop))
            state, cut = int(tables.takes.before[take]), stop
        yield value, tuple(stages)


def _make(
    solver: Stages, tables: StageTables, stages: tuple[_Part, ...], count: int
) -> Plan:
    made = []
    for index, (take, first, last) in enumerate(stages):
        mesh = tables.takes.meshes[take]
        start, stop = int(tables.cuts[first]), int(tables.cuts[last])
        held = min(count, len(stages) - index)
        choices = solver.choices(start, stop, mesh, count, held)
        made.append(Stage(start, stop, mesh, choices))
    return make_plan(solver.costing.instance, tuple(made), count)
