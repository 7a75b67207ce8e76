"""The solver of a stage against enumeration, and against the estimate of the same stage."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from rlplace.cluster.types import Link
from rlplace.graph.library import build
from rlplace.plan.check import check
from rlplace.plan.testing import chain, cluster, round_kind, transformer
from rlplace.plan.types import GroupChoice, Instance, Mesh, Stage
from rlplace.plan.uniform import make_plan
from rlplace.planners.stage_solver import StageSolver
from rlplace.simulate.estimate import Estimator

_KIND = round_kind(overlap=0.7)
_INSTANCE = Instance(transformer(3), cluster([[_KIND] * 8], intra=Link(20e9, 1e-6)), 16)
_GROUPS = len(_INSTANCE.graph.groups)


def _limited(instance: Instance, memory: float) -> Instance:
    kind = replace(_KIND, memory=int(memory))
    devices = replace(instance.cluster, kinds=(kind,))
    return replace(instance, cluster=devices, memory_margin=0.0)


def _whole(
    instance: Instance, mesh: Mesh, count: int, choices: tuple[GroupChoice, ...], held: int = 1
) -> tuple[float, float, float, float]:
    """Forward + backward, tail, memory and step time of one stage with all groups, estimated."""
    stage = Stage(0, len(instance.graph.groups), mesh, choices)
    # GPipe holds all micro-batches, 1F1B one: the two ends of what a single stage can hold.
    schedule = "1f1b" if held == 1 else "gpipe"
    found = Estimator(instance).estimate(make_plan(instance, (stage,), count, schedule))
    part = found.stages[0]
    tail = part.reduce + part.optimizer
    return part.forward + part.backward, tail, found.peak_memory[mesh.devices[0]], found.step_time


_MESHES = [
    Mesh((0,)),
    Mesh((0, 1, 2, 3), 1, 4),
    Mesh((0, 1, 2, 3), 2, 2),
    Mesh((0, 1), tp=2),
    Mesh(tuple(range(8)), 1, 2, 1, 4),
]


@pytest.mark.parametrize("mesh", _MESHES, ids=str)
@pytest.mark.parametrize(("count", "held"), [(1, 1), (4, 1), (4, 4)])
@pytest.mark.parametrize("memory", [80e9, 17e6, 8e6, 1e5])
def test_a_row_is_what_the_estimate_says(mesh: Mesh, count: int, held: int, memory: float) -> None:
    instance = _limited(_INSTANCE, memory)
    solver = StageSolver(instance)
    row = solver.row(_GROUPS, mesh, count, held)
    choices = solver.choices(0, _GROUPS, mesh, count, held)
    seconds, tail, peak, step = _whole(instance, mesh, count, choices, held)
    assert row.lean_seconds[0] == pytest.approx(seconds)
    if row.split[0] == _GROUPS:
        assert row.tail[0] == pytest.approx(tail)
        assert row.memory[0] == pytest.approx(peak)
        assert count * row.lean_seconds[0] + row.tail[0] == pytest.approx(step)
    assert row.tail[0] >= tail * (1 - 1e-9)
    assert row.memory[0] >= peak * (1 - 1e-9)
    if row.overflow[0] > 0:
        assert row.seconds[0] == np.inf
        assert row.overflow[0] == pytest.approx(peak - memory)
    else:
        assert row.seconds[0] == row.lean_seconds[0]
        assert peak <= memory


def test_every_start_of_a_row_is_a_stage_of_its_own() -> None:
    mesh, solver = Mesh((0, 1, 2, 3), 1, 4), StageSolver(_INSTANCE)
    estimator = Estimator(_INSTANCE)
    stop = 6
    row = solver.row(stop, mesh, 4, 2)
    for start in range(1, stop):
        stages = tuple(
            Stage(a, b, m, solver.choices(a, b, m, 4, 2))
            for a, b, m in ((0, start, Mesh((4,))), (start, stop, mesh), (stop, 8, Mesh((5,))))
        )
        part = estimator.estimate(make_plan(_INSTANCE, stages, 4)).stages[1]
        assert part.in_flight == 2
        assert row.forward[start] == pytest.approx(part.forward)
        assert row.seconds[start] == pytest.approx(part.forward + part.backward)
        assert row.tail[start] == pytest.approx(part.reduce + part.optimizer)
        assert row.memory[start] == pytest.approx(part.memory.total)


def _brute_force(instance: Instance, mesh: Mesh, count: int) -> float:
    """The least step time of one stage with all groups, over all choices of every group."""
    solver, limit = StageSolver(instance), instance.memory_limit(0)
    options = [solver.options(group.structure, mesh) for group in instance.graph.groups]
    found = [_whole(instance, mesh, count, choices) for choices in product(*options)]
    return min((step for _, _, memory, step in found if memory <= limit), default=np.inf)


def _solved(instance: Instance, mesh: Mesh, count: int) -> float:
    row = StageSolver(instance).row(len(instance.graph.groups), mesh, count, 1)
    return float(count * row.seconds[0] + row.tail[0])


_TINY = replace(_INSTANCE, graph=transformer(1, 128), zero_levels=(0, 1, 3))


@pytest.mark.parametrize("mesh", [Mesh((0,)), Mesh((0, 1), tp=2)], ids=str)
def test_optimal_where_memory_is_loose(mesh: Mesh) -> None:
    assert _solved(_TINY, mesh, 2) == pytest.approx(_brute_force(_TINY, mesh, 2))


@pytest.mark.parametrize("overlap", [0.0, 0.7])
def test_near_optimal_where_reduction_hides(overlap: float) -> None:
    """Exact if nothing hides; else the choices are coupled and it stays within 2 %."""
    kinds = (replace(_KIND, overlap=overlap),)
    instance = replace(
        _TINY,
        cluster=replace(_TINY.cluster, kinds=kinds),
        zero_levels=(0, 3),
        recompute_modes=("none",),
    )
    mesh = Mesh((0, 1), 1, 2)
    best = _brute_force(instance, mesh, 2)
    tolerance = 0.02 if overlap else 1e-9
    assert best * (1 - 1e-9) <= _solved(instance, mesh, 2) <= best * (1 + tolerance)


@pytest.mark.parametrize("share", [0.1, 0.35, 0.5, 0.65, 0.8, 0.95])
def test_feasible_and_near_optimal_where_memory_is_tight(share: float) -> None:
    """Within 20 %: of four groups each is a large lump (see the next test for many)."""
    mesh = Mesh((0, 1), 1, 2)
    loose = replace(_TINY, zero_levels=(0, 3), global_batch=32)
    solver = StageSolver(loose)
    options = [solver.options(group.structure, mesh) for group in loose.graph.groups]
    memory = [_whole(loose, mesh, 1, choices)[2] for choices in product(*options)]
    limit = min(memory) + share * (max(memory) - min(memory))
    instance = _limited(loose, limit)
    best, solved = _brute_force(instance, mesh, 1), _solved(instance, mesh, 1)
    assert np.isfinite(solved)
    assert best * (1 - 1e-9) <= solved <= 1.20 * best


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("held", [1, 3])
def test_as_many_layers_recompute_as_memory_asks_for(share: float, held: int) -> None:
    """No more than 2 % above the straight line from all layers to none."""
    instance = replace(_INSTANCE, graph=transformer(30))
    groups, mesh = len(instance.graph.groups), Mesh((0,))
    rich = StageSolver(instance).row(groups, mesh, 4, held)
    least = StageSolver(_limited(instance, 1.0)).row(groups, mesh, 4, held).memory[0]
    limit = least + share * (rich.memory[0] - least)
    lean = StageSolver(_limited(instance, least)).row(groups, mesh, 4, held)
    solver = StageSolver(_limited(instance, limit))
    row = solver.row(groups, mesh, 4, held)
    line = lean.seconds[0] + share * (rich.seconds[0] - lean.seconds[0])
    assert row.memory[0] <= limit
    assert rich.seconds[0] < row.seconds[0] <= 1.02 * line
    chosen = [choice.recompute for choice in solver.choices(0, groups, mesh, 4, held)]
    assert 0 < chosen.count("full") < groups
    assert row.split[0] < groups


def test_less_memory_never_makes_a_stage_faster() -> None:
    mesh = Mesh((0, 1, 2, 3), 1, 4)
    times = [_solved(_limited(_INSTANCE, memory), mesh, 2) for memory in np.geomspace(1e7, 1e9, 12)]
    assert times == sorted(times, reverse=True)
    assert np.isinf(times[0]) or times[0] > times[-1]


def test_meshes_that_cost_the_same_share_a_class() -> None:
    solver = StageSolver(_INSTANCE)
    assert solver.mesh_class(Mesh((0, 1), tp=2)) == solver.mesh_class(Mesh((4, 5), tp=2))
    assert solver.mesh_class(Mesh((0, 1), tp=2)) != solver.mesh_class(Mesh((0, 1), 1, 2))
    assert solver.row(5, Mesh((0, 1), tp=2), 2, 1) is solver.row(5, Mesh((6, 7), tp=2), 2, 1)
    slow = replace(_KIND, name="slow", memory=10**9)
    mixed = StageSolver(replace(_INSTANCE, cluster=cluster([[_KIND, slow]])))
    assert mixed.mesh_class(Mesh((0,))) != mixed.mesh_class(Mesh((1,)))


def test_options_of_a_group() -> None:
    solver = StageSolver(_INSTANCE)
    assert len(solver.options(1, Mesh((0,)))) == 2, "recompute or not"
    assert len(solver.options(1, Mesh((0, 1), 1, 2))) == 2 * 4, "and four ZeRO levels"
    assert len(solver.options(1, Mesh((0, 1, 2, 3), 1, 2, 1, 2))) == 2 * 4 * 2, "and two layouts"
    plain = StageSolver(replace(_INSTANCE, graph=chain([1.0])))
    assert {o.layout for o in plain.options(0, Mesh((0, 1), tp=2))} == {"replicate"}


def test_a_transfer_is_the_estimates() -> None:
    solver, estimator = StageSolver(_INSTANCE), Estimator(_INSTANCE)
    first, second = Mesh((0, 1), 2), Mesh((2, 3), tp=2)
    there = solver.transfer(4, first, second, 2)
    # Two groups of a plan: with one micro-batch of two, half of the samples.
    floats, _ = _INSTANCE.graph.crossings[4]
    size = floats(_INSTANCE.global_batch / 2)
    assert there == estimator.cost.transfer(_INSTANCE, first, second, size, 0.0)


@pytest.mark.parametrize("mesh", _MESHES, ids=str)
@pytest.mark.parametrize("memory", [80e9, 12e6, 4e6])
def test_a_tied_parameter_is_held_once(mesh: Mesh, memory: float) -> None:
    """Vocabulary and width are such that the table is most of the model."""
    graph = transformer(2, 64, vocab=4096, tied=True)
    instance = _limited(replace(_INSTANCE, graph=graph), memory)
    groups, solver = len(graph.groups), StageSolver(instance)
    row = solver.row(groups, mesh, 4, 1)
    choices = solver.choices(0, groups, mesh, 4, 1)
    _, _, peak, _ = _whole(instance, mesh, 4, choices)
    assert row.memory[0] >= peak * (1 - 1e-9)
    if row.split[0] == groups:
        assert row.memory[0] == pytest.approx(peak)
    # Without the first or the last group a stage holds its table all the same, and once.
    apart = StageSolver(replace(instance, graph=replace(graph, tied=())))
    assert (row.memory[1:] == apart.row(groups, mesh, 4, 1).memory[1:]).all()
    assert row.memory[0] < apart.row(groups, mesh, 4, 1).memory[0] or row.split[0] < groups


def test_slices_are_chosen_where_whole_weights_do_not_fit() -> None:
    graph = build("gpt", layers=1, hidden=64, heads=4, ffn=256, vocab=64, seq_len=4)
    asked = Instance(graph, _INSTANCE.cluster, 8, precision="fp32", recompute_modes=("none",))
    offered, mesh = replace(asked, slices=(1, 4)), Mesh((0, 1, 2, 3), 1, 4)
    every = [option for index in range(len(graph.structures)) for option in _options(asked, index)]
    more = [option for index in range(len(graph.structures)) for option in _options(offered, index)]
    assert {option for option in more if option.slices == 1} == set(every)
    assert {(o.zero, o.slices) for o in more if o.slices > 1} == {(3, 4)}

    def least(instance: Instance) -> float:
        """Memory of the leanest stage."""
        solver = StageSolver(_limited(instance, 1.0))
        choices = solver.choices(0, len(graph.groups), mesh, 1, 1)
        return _whole(_limited(instance, 80e9), mesh, 1, choices)[2]

    whole, cut = least(asked), least(offered)
    assert cut < whole
    for instance, slices in ((asked, {1}), (offered, {1, 4})):
        solver = StageSolver(_limited(instance, (whole + cut) / 2))
        choices = solver.choices(0, len(graph.groups), mesh, 1, 1)
        assert {choice.slices for choice in choices} == slices
        check(instance, make_plan(instance, (Stage(0, len(graph.groups), mesh, choices),), 1))


def _options(instance: Instance, structure: int) -> tuple[GroupChoice, ...]:
    return StageSolver(instance).options(structure, Mesh((0, 1, 2, 3), 1, 4))
