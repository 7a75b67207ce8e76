from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlplace.cost.given import makespan_bound, median_makespan
from rlplace.errors import InputError
from rlplace.graph.formats.piper import read_piper
from rlplace.graph.formats.types import EventCosts, GivenInstance
from rlplace.planners.given.registry import EVENT_PLACERS, placers_of
from rlplace.planners.given.types import Placed, Placement
from rlplace.planners.types import Limits
from tests.graph.formats.examples import piper
from tests.planners.given.cases import random_doppler, random_giph

CASES = {
    "one op": random_doppler(np.random.default_rng(0), 1, 3),
    "one device": random_doppler(np.random.default_rng(1), 9, 1),
    "equal devices": random_doppler(np.random.default_rng(2), 12, 3),
    "no device runs all": random_giph(np.random.default_rng(3), 15, 5),
}


def place(name: str, instance: GivenInstance, evaluations: int, seed: int = 0) -> Placed[Placement]:
    budget = Limits(evaluations=evaluations)
    found: Any = EVENT_PLACERS[name](instance, budget, np.random.default_rng(seed))
    assert isinstance(found, Placed)
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", EVENT_PLACERS)
def test_what_a_placer_promises(name: str, case: str) -> None:
    instance = CASES[case]
    costs = instance.costs
    assert isinstance(costs, EventCosts)
    found = place(name, instance, 300)
    assert found.placement is not None
    assert all(d in legal for d, legal in zip(found.placement, costs.legal, strict=True))
    assert found.value == median_makespan(instance, found.placement)
    assert found.value >= makespan_bound(instance)
    assert found.placer == name
    assert 1 <= found.evaluations <= 300
    assert found.stopped in ("done", "evaluations")
    values = [value for _, value in found.curve]
    assert values == sorted(values, reverse=True)
    assert values[-1] == found.value
    again = place(name, instance, 300)
    assert (again.placement, again.evaluations) == (found.placement, found.evaluations)


@pytest.mark.parametrize("name", EVENT_PLACERS)
def test_one_evaluation_and_no_time_give_an_answer(name: str) -> None:
    instance = CASES["no device runs all"]
    found = place(name, instance, 1)
    assert (found.evaluations, found.placement is None) == (1, False)
    found = EVENT_PLACERS[name](instance, Limits(seconds=0.0), np.random.default_rng(0))
    assert found.placement is not None


def test_a_placer_refuses_another_form_and_none_is_listed_for_it() -> None:
    instance = read_piper(piper(), "tiny")
    for placer in EVENT_PLACERS.values():
        with pytest.raises(InputError, match="needs EventCosts"):
            placer(instance, Limits(evaluations=1), np.random.default_rng(0))
        assert placer not in placers_of(instance).values()
    assert placers_of(CASES["one op"]) == EVENT_PLACERS


@pytest.mark.parametrize("name", ["hill_climb", "anneal", "cross_entropy", "genetic", "best"])
@pytest.mark.parametrize("seed", range(3))
def test_the_searches_find_the_optimum_of_tiny_problems(name: str, seed: int) -> None:
    instance = random_giph(np.random.default_rng(seed + 10), 8, 3)
    optimum = place("exhaustive", instance, 10_000)
    assert optimum.stopped == "done"
    assert place(name, instance, 6_000).value == pytest.approx(optimum.value, rel=0.01)
