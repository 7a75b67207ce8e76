"""Tests of the planner of Sailor's problems."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, combinations_with_replacement, pairwise, product
from pathlib import Path

import numpy as np
import pytest

from rlplace.cost.given.sailor import fits_memory, sailor_seconds
from rlplace.cost.given.sailor_form import (
    SailorFit,
    SailorInstance,
    SailorModel,
    SailorPlan,
    SailorStage,
    read_sailor_instance,
)
from rlplace.errors import InputError
from rlplace.planners.given.sailor import GAP, place_sailor
from rlplace.planners.types import Budget

SHARED = Path(__file__).parents[4] / "shared/data/profiles/sailor"

REPLICAS = (("fast", 1), ("fast", 2), ("slow", 1), ("slow", 2))


def toy(seed: int) -> SailorInstance:
    """Four layers, three fast and four slow devices, memory for about two layers, slow links."""
    rng = np.random.default_rng(seed)
    work = rng.uniform(0.5, 2.0, 4)
    scale = {"fast": 1.0, "slow": 2.5}
    times = {
        (kind, b, tp): tuple((work * b * scale[kind] / tp**0.8).tolist())
        for (kind, tp), b in product(REPLICAS, (1, 2))
    }
    params = rng.uniform(1e7, 1e8, 4)
    saved = rng.uniform(1e7, 5e7, 4)
    model = SailorModel(
        name="toy",
        times=times,
        updates={key: 0.01 for key in times},
        params={tp: tuple((params / tp).tolist()) for tp in (1, 2)},
        saved={tp: tuple((saved / tp).tolist()) for tp in (1, 2)},
        outputs=tuple(rng.uniform(1e7, 5e7, 4).tolist()),
    )
    fits = {
        (a, m, b, n): SailorFit(0.0, 0.01, 0.4 * min(m, n))
        for (a, b), m, n in product(product(scale, repeat=2), (1, 2), (1, 2))
    }
    nodes = (("fast", 2), ("fast", 2), ("slow", 2), ("slow", 2))
    return SailorInstance(model, nodes, 8, fits, {"fast": 9e9, "slow": 7e9})


def all_plans(instance: SailorInstance) -> Iterator[SailorPlan]:
    """Every plan of at most three stages and three replicas, in the planner's decision space."""
    pure = [frozenset((one,)) for one in REPLICAS]
    mixed = [frozenset(two) for two in combinations(REPLICAS, 2) if len({k for k, _ in two}) == 2]
    for b, count, stages in product((1, 2), (1, 2, 3), (1, 2, 3)):
        filled = [
            of
            for of in combinations_with_replacement(REPLICAS, count)
            if frozenset(of) in (*pure, *mixed)
        ]
        for cuts in combinations(range(1, 4), stages - 1):
            bounds = (0, *cuts, 4)
            for chosen in product(filled, repeat=stages):
                if sum(len(set(of)) > 1 for of in chosen) <= 1:
                    ranges = ((*cut, of) for cut, of in zip(pairwise(bounds), chosen, strict=True))
                    yield SailorPlan(b, tuple(SailorStage(*stage) for stage in ranges))


def least(instance: SailorInstance) -> float:
    best = math.inf
    for plan in all_plans(instance):
        try:
            best = min(best, sailor_seconds(instance, plan))
        except InputError:
            continue
    return best


@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_best_of_all_plans(seed: int) -> None:
    instance = toy(seed)
    found = place_sailor(instance, Budget(), np.random.default_rng(0))
    assert found.stopped == "done"
    assert found.placement is not None
    assert fits_memory(instance, found.placement)
    assert found.value == sailor_seconds(instance, found.placement)
    best = least(instance)
    assert found.bound <= best
    assert found.value <= best / (1.0 - GAP)


def test_nothing_fits() -> None:
    instance = replace(toy(0), memory={"fast": 2e9, "slow": 2e9})
    found = place_sailor(instance, Budget(), np.random.default_rng(0))
    assert (found.placement, found.value, found.bound) == (None, math.inf, math.inf)


def test_a_budget_of_programs_is_kept_and_repeats() -> None:
    instance = toy(1)
    runs = [
        place_sailor(instance, Budget(evaluations=20), np.random.default_rng(s)) for s in (0, 1)
    ]
    assert runs[0].placement == runs[1].placement
    assert (runs[0].evaluations, runs[0].stopped) == (20, "evaluations")
    times = [seconds for _, seconds in runs[0].curve]
    assert times == sorted(times, reverse=True)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the published profiles")
@pytest.mark.parametrize(
    ("model", "batch", "devices", "most"),
    [
        ("OPT-350", 1024, 8, 22.46),
        ("OPT-350", 1024, 16, 12.07),
        ("GPT-Neo-2.7", 2048, 8, 144.5),
    ],
)
def test_below_what_sailor_finds(model: str, batch: int, devices: int, most: float) -> None:
    # Sailor: 22.991, 13.005 and 163.745 s; Metis the same as here on the first two.
    counts = {"A100-40": devices, "V100-16": devices}
    instance = read_sailor_instance(SHARED, model, counts, batch)
    found = place_sailor(instance, Budget(evaluations=500), np.random.default_rng(0))
    assert found.value <= most
