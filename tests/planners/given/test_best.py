"""The published bars (figures: README of the public data), by a budget in evaluations."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rlplace.cost.given import median_makespan
from rlplace.graph.formats.read import read_instance
from rlplace.planners.given.best import best
from rlplace.planners.types import Limits
from tests.graph.formats.examples import shared


@pytest.mark.parametrize(("name", "bar"), [("chain_mm", 1300.0), ("ffnn", 63.1)])
def test_graphs_of_doppler_on_four_devices(name: str, bar: float) -> None:
    # 40,000 evaluations took 2 CPU seconds.
    instance = read_instance(shared("doppler_graphs.json"), name)
    found = best(instance, Limits(evaluations=40_000), np.random.default_rng(0))
    assert found.placement is not None
    assert found.value == median_makespan(instance, found.placement) <= bar


def test_two_moves_an_op_after_the_list_schedules_on_giph() -> None:
    path = shared("giph_small8dev.json")
    ratios = []
    for case in json.loads(path.read_text())["reference"]:
        instance = read_instance(path, f"{case['network']}/{case['program']}")
        heft = median_makespan(instance, instance.from_file_order(case["heft_placement"]))
        budget = Limits(evaluations=4 + 2 * len(instance.graph.groups))
        ratios.append(best(instance, budget, np.random.default_rng(0)).value / heft)
    assert len(ratios) == 12
    assert np.mean(ratios) <= 0.986
