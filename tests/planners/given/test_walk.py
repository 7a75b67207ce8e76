from __future__ import annotations

import numpy as np
import pytest

from rlplace.cost.given.event_loop import run_many
from rlplace.cost.given.events import TIE_ORDERS
from rlplace.planners.given.event_search import EventSearch
from rlplace.planners.given.walk import Walker
from rlplace.planners.types import Limits
from tests.planners.given.cases import random_giph


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_walk_knows_where_it_is_and_what_was_best(temperature: float) -> None:
    search = EventSearch("walk", random_giph(np.random.default_rng(0), 20, 4), Limits())
    rng = np.random.default_rng(1)
    walker = Walker(search, search.any_placement(rng), rng)
    assert search.evaluations == 1
    for _ in range(10):
        before, best = walker.guide, walker.best
        assert walker.walk(50, temperature) == 50
        here = np.median(run_many(search.arrays, TIE_ORDERS, walker.at[None]))
        assert walker.guide == pytest.approx(here)
        assert walker.best <= min(best, walker.guide)
        assert walker.guide <= before or temperature > 0.0
        assert search.legal[np.arange(20), walker.at].all()
    assert 1 < search.evaluations <= 501


def test_heat_makes_a_walk_climb_out() -> None:
    guides = {}
    for temperature in (0.0, 100.0):
        search = EventSearch("walk", random_giph(np.random.default_rng(0), 20, 4), Limits())
        walker = Walker(
            search, search.any_placement(np.random.default_rng(2)), np.random.default_rng(3)
        )
        walker.walk(400, temperature)
        guides[temperature] = walker.guide, walker.best
    assert guides[0.0][0] == guides[0.0][1]
    assert guides[100.0][0] > guides[100.0][1]


def test_a_walk_ends_with_the_budget() -> None:
    budget = Limits(evaluations=30)
    search = EventSearch("walk", random_giph(np.random.default_rng(0), 20, 4), budget)
    rng = np.random.default_rng(1)
    walker = Walker(search, search.any_placement(rng), rng)
    while not search.stopped:
        walker.walk(1000, 1.0)
    assert search.evaluations == 30
