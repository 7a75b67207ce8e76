"""Piper's planner of its own form: the least largest load of a stage.

Tarnawski et al., "Piper: Multidimensional Planner for DNN Parallelization", NeurIPS 2021
(arXiv 2111.05972). Decision space: stages that are differences of ideals, each with data- and
tensor-parallel degrees and one variant a group. A stage holds as many micro-batches as the copies
of it and the later stages over its own copies, so the program runs from the last stage to the
first, over (ideal still to be cut, copies so far).

Theirs keeps the least load for each number of devices. Here the load is the limit and devices are
what is least: for a limit every state has one number, and the least feasible limit is found by
bisection between a proven bound and the load of the best plan so far. Complexity: bisections x
stages x degrees x copies. The result is within `_CLOSE` of the optimum of this space (with the
knapsack of `piper_tables`, which is a heuristic there too). Left out: nothing; groups without time
that hang on one other join it first where memory cannot bind, which loses nothing, and graphs of
more than `_IDEALS` ideals are cut along one topological order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import networkx as nx
import numba
import numpy as np
import numpy.typing as npt

from rlplace.cost.given import PiperStage, piper_load
from rlplace.cost.given.common import costs_of
from rlplace.graph.formats.types import GivenInstance, PiperCosts
from rlplace.planners.given.ideals import Ideals, find_ideals
from rlplace.planners.given.piper_tables import StageTables, Variants, variants_of
from rlplace.planners.given.search import PlacementSearch
from rlplace.planners.given.types import Placed
from rlplace.planners.types import Limits

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Stages = tuple[PiperStage, ...]

_IDEALS = 800
#: Bisection ends when the bound is so close to the best load.
_CLOSE = 1e-7
#: What the second limit is over the lower bound, as a share of that.
_FIRST = 0.02
#: Above every load, and below the infinity of what does not fit.
_NO_LIMIT = 1e200


@dataclass(frozen=True)
class _Program:
    """Inputs of the program. S stages, I ideals.

    Args:
        variants: The variants of all groups.
        tables: Costs of the stages.
        members: Groups of each stage, (S, G).
        ends: Lower and upper ideal of each stage, (S, 2), upper ones from the largest down.
        copies: The data-parallel degrees.
        work: Device-seconds of each ideal, at least, (I,).
        devices: Number of devices.
    """

    variants: Variants
    tables: StageTables
    members: npt.NDArray[np.bool_]
    ends: Ints
    copies: Ints
    work: Floats
    devices: int


def piper(instance: GivenInstance, budget: Limits, rng: np.random.Generator) -> Placed[Stages]:
    """The stages with the least largest load; each evaluation is one limit on it."""
    costs_of(instance, PiperCosts)
    search = PlacementSearch[Stages]("piper", lambda stages: piper_load(instance, stages), budget)
    program = _prepare(instance)
    low, high = float(program.work[-1]) / program.devices, np.inf
    limit, step = _NO_LIMIT, _FIRST * low
    while True:
        stages = _cut(program, limit)
        if stages:
            high = min(high, search.offer(stages))
        else:
            search.evaluations += 1
            low, step = limit, 2.0 * step
        if search.stopped or high <= low * (1.0 + _CLOSE) or np.isinf(high):
            return search.result()
        limit = min(low + step, (low + high) / 2.0)


def _prepare(instance: GivenInstance) -> _Program:
    costs, variants = costs_of(instance, PiperCosts), variants_of(instance)
    unit_of = _units(instance, costs)
    ideals = _ideals(instance, unit_of)
    held = np.array([[ideal >> unit & 1 for unit in unit_of] for ideal in ideals.members], bool)
    ends = [
        (lower, upper)
        for upper in range(len(ideals) - 1, 0, -1)
        for lower in range(upper)
        if ideals.members[lower] & ~ideals.members[upper] == 0
    ]
    lower, upper = np.array(ends, np.int64).T
    members = held[upper] & ~held[lower]
    most = min(costs.devices, costs.micro_batches)
    divisors = [d for d in range(1, most + 1) if costs.micro_batches % d == 0]
    alone = variants.time * variants.degrees[:, None, None]
    return _Program(
        variants=variants,
        tables=variants.tables(members, most),
        members=members,
        ends=np.stack([lower, upper], axis=1),
        copies=np.array(divisors, np.int64),
        work=held @ alone.min(axis=(0, 2)),
        devices=costs.devices,
    )


def _units(instance: GivenInstance, costs: PiperCosts) -> list[int]:
    """The unit of each group: one without time that hangs on one other goes with it.

    That is exact where it has no parameters, its other edges carry nothing, and memory cannot
    bind.
    """
    most = min(costs.devices, costs.micro_batches)
    bytes_ = sum(
        max(v.memory_each * most + v.memory_fixed for v in group) for group in costs.variants
    )
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(costs.variants)))
    graph.add_edges_from((edge.src, edge.dst) for edge in instance.graph.edges)
    home = list(range(len(costs.variants)))
    heavy: dict[int, set[int]] = {group: set() for group in home}
    for edge, size in zip(instance.graph.edges, costs.edge_bytes, strict=True):
        into = [dict(v.sync_in)[edge.src] for v in costs.variants[edge.dst]]
        out = [dict(v.sync_out)[edge.dst] for v in costs.variants[edge.src]]
        if size or any(into) or any(out):
            heavy[edge.src].add(edge.dst)
            heavy[edge.dst].add(edge.src)
    free = [all(v.time == 0.0 == v.params for v in group) for group in costs.variants]
    for group in home if bytes_ <= costs.memory_cap else ():
        for ends in (set(graph.predecessors(group)), set(graph.successors(group))):
            if free[group] and len(ends) == 1 and heavy[group] <= ends and home[group] == group:
                (other,) = ends
                if home[other] == other and not any(home[g] == group != g for g in heavy):
                    home[group] = other
    numbers = {group: number for number, group in enumerate(sorted(set(home)))}
    return [numbers[group] for group in home]


def _ideals(instance: GivenInstance, unit_of: list[int]) -> Ideals:
    """Ideals of the units; of one topological order where they are too many."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(max(unit_of) + 1))
    pairs = ((unit_of[edge.src], unit_of[edge.dst]) for edge in instance.graph.edges)
    graph.add_edges_from((a, b) for a, b in pairs if a != b)
    before = [sorted(graph.predecessors(unit)) for unit in range(len(graph))]
    ideals = find_ideals(before, _IDEALS)
    if ideals is None:
        order = list(nx.lexicographical_topological_sort(graph))
        for earlier, later in pairwise(order):
            before[later] = [earlier]
        ideals = find_ideals(before, len(order) + 1)
    assert ideals is not None, "a line has one ideal a unit"
    return ideals


def _cut(program: _Program, limit: float) -> Stages:
    """Stages with no load over the limit; none where the devices do not suffice."""
    most = program.tables.seconds.shape[2]
    shape = (len(program.work), most + 1)
    used, came = np.full(shape, program.devices + 1), np.full((*shape, 3), -1)
    used[-1, 0] = 0
    needed = np.ceil(program.work / limit * (1.0 - 1e-9))
    _fill(
        program.ends,
        program.copies,
        (program.tables.degrees, program.tables.seconds, program.tables.exchange),
        needed.astype(np.int64),
        limit,
        program.devices,
        used,
        came,
    )
    copies = int(np.argmin(used[0]))
    if used[0, copies] > program.devices:
        return ()
    stages: list[PiperStage] = []
    ideal = 0
    while ideal < len(program.work) - 1:
        index, degree, own = (int(value) for value in came[ideal, copies])
        copies -= own
        stages.append(_stage(program, index, degree, own, -(-(own + copies) // own)))
        ideal = int(program.ends[index, 1])
    return tuple(stages)


def _stage(program: _Program, index: int, degree: int, copies: int, in_flight: int) -> PiperStage:
    members, variants = program.members[index], program.variants
    picks = variants.choice(members, degree, in_flight)
    groups = tuple(int(group) for group in np.flatnonzero(members))
    return PiperStage(groups, copies, degree, variants.names(groups, degree, picks))


@numba.njit(cache=True)
def _fill(
    ends: Ints,
    copies: Ints,
    tables: tuple[Ints, Floats, Floats],
    needed: Ints,
    limit: float,
    devices: int,
    used: Ints,
    came: Ints,
) -> None:
    """Fewest devices of the stages behind each (ideal, copies behind), and the stage before."""
    degrees, seconds, exchange = tables
    most = seconds.shape[2]
    for stage in range(len(ends)):
        lower, upper = ends[stage]
        if used[upper].min() > devices:
            continue
        for index in range(len(degrees)):
            for own in copies:
                if own * degrees[index] > devices:
                    break
                allowed = limit * own * (1.0 + 1e-12) - (own - 1.0) * exchange[stage, index]
                # Most micro-batches in flight with which the stage keeps the limit.
                fits = np.searchsorted(seconds[stage, index], allowed, side="right")
                if seconds[stage, index, 0] == np.inf or fits == 0:
                    continue
                room = devices - own * degrees[index] - needed[lower]
                for behind in range(min(own * (fits - 1), most - own) + 1):
                    if used[upper, behind] <= room:
                        total = used[upper, behind] + own * degrees[index]
                        if total < used[lower, behind + own]:
                            used[lower, behind + own] = total
                            came[lower, behind + own, 0] = stage
                            came[lower, behind + own, 1] = degrees[index]
                            came[lower, behind + own, 2] = own
