"""The integer program against every choice, on stages small enough to look at all of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from rlplace.graph import library
from rlplace.plan import testing
from rlplace.plan.choices import check_choices
from rlplace.plan.types import Instance, Mesh, Stage
from rlplace.plan.uniform import make_plan, uniform_plan
from rlplace.planners.costing import Costing
from rlplace.planners.layout_program import LayoutProgram, _Model, worthwhile
from rlplace.planners.layout_tables import LayoutTables, find_ways
from rlplace.simulate.estimate import estimate


def _random(seed: int, share: float) -> LayoutProgram:
    """Five groups, two of them equal, of four options in two ways to cut borders."""
    rng = np.random.default_rng(seed)
    like = np.array([0, 1, 2, 2, 3])
    seconds, backward, hides, size, transient = (
        rng.uniform(0.5, 4.0, (4, 4))[like] for _ in "abcde"
    )
    borders = np.tile([0, 0, 1, 1], (5, 1))
    ways = np.array([[0] * 5, [1] * 5])
    asked = LayoutProgram(seconds, backward, hides, size, transient, borders, ways)
    least, most = size.min(axis=1).sum(), size.max(axis=1).sum()
    room = least + share * (most - least) + transient.min(axis=1).max()
    return replace(asked, room=float(room))


def _every(asked: LayoutProgram) -> float:
    """The least value of all choices that fit."""
    groups, options = asked.seconds.shape
    every = (np.array(picks) for picks in product(range(options), repeat=groups))
    fits = (p for p in every if asked.agrees(p) and asked.held(p) <= asked.room)
    return min((asked.value(p) for p in fits), default=float("inf"))


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 1.5])
@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_best_of_all_choices(seed: int, share: float) -> None:
    asked = _random(seed, share)
    asked = replace(asked, hides=0.0 * asked.hides)
    best, found = _every(asked), asked.solve(0.0)
    if found is None:
        assert best == float("inf")
        return
    assert asked.agrees(found)
    assert asked.held(found) <= asked.room * (1.0 + 1e-9)
    assert asked.value(found) == pytest.approx(best, rel=1e-6)
    exact = _Model(asked).solve(0.0, float("inf"))
    assert exact is not None
    assert asked.value(exact) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_the_reduction_that_hides_is_in_the_objective(seed: int) -> None:
    """Exactly where no groups are equal, for each end of the queue is then a row."""
    asked = _random(seed, 0.5)
    own = [0, 1, 2, 4]
    names = ("seconds", "backward", "hides", "size", "transient", "borders")
    tables = {name: getattr(asked, name)[own] for name in names}
    asked = replace(asked, ways=asked.ways[:, own], room=asked.room * 0.9, **tables)
    found = _Model(asked).solve(0.0, float("inf"))
    assert found is not None
    assert asked.value(found) == pytest.approx(_every(asked), rel=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_bounds_are_bounds_and_what_is_found_fits(seed: int) -> None:
    asked = _random(seed, 0.4)
    least, found = asked.bounds()
    best = _every(asked)
    assert least <= best * (1.0 + 1e-9)
    assert (found is None) == (best == float("inf"))
    if found is not None:
        assert asked.agrees(found)
        assert asked.held(found) <= asked.room * (1.0 + 1e-9)
        assert asked.value(found) >= best * (1.0 - 1e-9)


def test_a_limit_below_the_bound_ends_it() -> None:
    asked = _random(1, 0.4)
    best = _every(asked)
    assert asked.solve(limit=0.5 * best) is None
    assert asked.solve(limit=1.1 * best) is not None


def test_only_what_nothing_dominates_is_worth_a_look() -> None:
    asked = _random(0, 1.0)
    seconds, size = np.array([[1.0, 2.0, 1.0, 0.5]]), np.array([[3.0, 4.0, 3.0, 1.0]])
    none = np.zeros((1, 4))
    borders = np.array([[0, 0, 0, 1]])
    own = replace(asked, seconds=seconds, size=size, backward=none, hides=none, transient=none)
    own = replace(own, borders=borders)
    # The second is slower and larger; the third equals the first; the last is of other borders.
    assert worthwhile(own, 0).tolist() == [True, False, False, True]


def test_ways_are_those_on_which_neighbours_agree() -> None:
    # Three groups: read and write whole (0), cut (1); the middle one can also turn whole into cut.
    borders = np.array([[0, 1, 9], [0, 1, 2], [0, 1, 9]])
    same = np.array([0, 1, -1])
    reads, writes = np.array([0, 1, 0]), np.array([0, 1, 1])
    pairs = [(0, 1, same, reads), (1, 2, writes, same)]
    found = find_ways(borders, [2, 3, 2], pairs)
    assert sorted(found.tolist()) == [[0, 0, 0], [0, 2, 1], [1, 1, 1]]


def test_borders_of_a_model_agree_and_are_cut_where_memory_asks_for_it() -> None:
    graph = library.build("gpt", layers=1, hidden=64, heads=4, ffn=256, vocab=64, seq_len=64)
    cut, kept = 0.0, []
    for memory in (80e9, 0.0):
        cluster = testing.cluster([[testing.round_kind(memory=memory or 1.001 * cut)] * 2])
        instance = Instance(
            graph,
            cluster,
            16,
            "fp32",
            memory_margin=0.0,
            zero_levels=(0,),
            recompute_modes=("none",),
            tp_degrees=(2,),
        )
        mesh, groups = Mesh((0, 1), tp=2), len(graph.groups)
        value, choices = LayoutTables(Costing(instance)).solve(0, groups, mesh, 1, 1)
        assert np.isfinite(value)
        check_choices(instance, 0, Stage(0, groups, mesh, choices))
        kept.append("sequence" in {choice.layout for choice in choices})
        whole = uniform_plan(instance, tp=2, micro_batches=1, sequence_parallel=True)
        cut = max(estimate(instance, whole).peak_memory)
    assert kept == [False, True]


def test_equal_stages_are_solved_once_and_fewer_in_flight_serve_for_more() -> None:
    graph = testing.transformer(6)
    instance = Instance(graph, testing.cluster([[testing.round_kind()] * 2]), 4)
    tables, mesh = LayoutTables(Costing(instance)), Mesh((0, 1), 1, 2)
    first = tables.solve(1, 5, mesh, 2, 1)
    assert tables.solve(3, 7, mesh, 2, 1) == first
    assert tables.solve(1, 5, Mesh((1, 0), 1, 2), 2, 2) == first
    assert len(tables._known) == 1


@pytest.mark.parametrize("overlap", [0.0, 0.9])
def test_its_value_is_the_estimate_of_a_lone_stage(overlap: float) -> None:
    graph = testing.transformer(2)
    instance = Instance(graph, testing.cluster([[testing.round_kind(overlap=overlap)] * 4]), 8)
    mesh, groups = Mesh((0, 1, 2, 3), 1, 2, 1, 2), len(graph.groups)
    value, choices = LayoutTables(Costing(instance)).solve(0, groups, mesh, 2, 1)
    plan = make_plan(instance, (Stage(0, groups, mesh, choices),), 2)
    assert value == pytest.approx(estimate(instance, plan).step_time, rel=1e-6)
