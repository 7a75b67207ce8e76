"""Which problems the rivals of the overlap-aware program meet it on, and what is told of them."""

from __future__ import annotations

import math

import pytest

from benchmarks.rivals import problems, rivals, table_of
from rlplace.bench.types import Key, Trial


def _trial(planner: str, problem: str, step_time: float | None) -> Trial:
    return Trial(Key("real", problem, problem, planner, 1.0, 10, 0), step_time)


@pytest.mark.parametrize(("mixed", "clusters"), [(True, 2), (False, 8)])
def test_problems_come_once_and_from_all_clusters_and_models(mixed: bool, clusters: int) -> None:
    every = problems(mixed, 1000)
    assert len({problem.name for problem in every}) == len(every) == 12 * clusters
    some = [problem.name.split(" on ") for problem in problems(mixed, 24)]
    assert len({family for family, _ in some}) == 12
    assert len({cluster for _, cluster in some}) == clusters
    assert all(("+" in cluster) == mixed for _, cluster in some)


def test_ratios_are_of_problems_that_both_solved() -> None:
    trials = [
        *(_trial("overlap", name, time) for name, time in [("a", 1.0), ("b", 2.0), ("c", None)]),
        *(_trial("grid", name, time) for name, time in [("a", 4.0), ("b", 2.0), ("c", 1.0)]),
        *(_trial("alpa", name, time) for name, time in [("a", 0.9), ("b", None), ("c", None)]),
        *(_trial("osdp", name, None) for name in "abc"),
    ]
    alpa, grid, osdp = rivals(trials)
    assert (alpa.planner, alpa.both, alpa.none, alpa.ours_none) == ("alpa", 1, 1, 0)
    assert alpa.better == (("a", 0.9),)
    assert (grid.planner, grid.both, grid.none, grid.ours_none) == ("grid", 2, 0, 1)
    assert (grid.mean, grid.most, grid.least) == pytest.approx((2.0, 4.0, 1.0))
    assert not grid.better
    assert osdp.none == 2
    assert math.isnan(osdp.mean)
    assert table_of([alpa, grid, osdp], "").row_count == 3
