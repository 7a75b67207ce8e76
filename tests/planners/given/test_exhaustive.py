from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from rlplace.cost.given import median_makespan
from rlplace.cost.given.event_loop import event_arrays
from rlplace.graph.formats.giph import read_giph
from rlplace.planners.given.exhaustive import all_placements, exhaustive
from rlplace.planners.types import Limits
from tests.graph.formats.examples import giph
from tests.planners.given.cases import random_doppler, random_giph


def test_equal_devices_are_used_in_their_order() -> None:
    arrays = event_arrays(random_doppler(np.random.default_rng(0), 4, 3))
    found = list(all_placements(arrays))
    # Partitions of four ops into at most three parts: 1 + 7 + 6.
    assert len(found) == len(set(found)) == 14
    assert all(placed[0] == 0 for placed in found)


def test_other_devices_are_not_exchanged_and_rules_hold() -> None:
    found = set(all_placements(event_arrays(read_giph(giph(), "0/0"))))
    # Op 1 runs on device 0 only.
    assert found == {p for p in product((0, 1), repeat=4) if p[1] == 0}


@pytest.mark.parametrize("seed", range(4))
def test_the_optimum_is_that_of_all_products(seed: int) -> None:
    rng = np.random.default_rng(seed)
    instance = (random_giph if seed % 2 else random_doppler)(rng, 5, 3)
    legal = instance.costs.legal  # type: ignore[union-attr]  # both have EventCosts
    least = min(median_makespan(instance, placement) for placement in product(*legal))
    found = exhaustive(instance, Limits(), rng)
    assert (found.value, found.stopped) == (least, "done")
