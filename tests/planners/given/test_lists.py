"""List schedules by hand: HEFT, CPOP, m-ETF and m-SCT."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rlplace.cost.given import makespan, median_makespan
from rlplace.cost.given.event_loop import event_arrays
from rlplace.graph.formats.doppler import read_doppler
from rlplace.graph.formats.giph import read_giph
from rlplace.graph.formats.read import read_instance
from rlplace.graph.formats.types import GivenInstance
from rlplace.planners.given.critical_path import critical_path_placement
from rlplace.planners.given.etf import earliest_first
from rlplace.planners.given.heft import heft_placement
from rlplace.planners.given.sct import favourite_children
from tests.graph.formats.examples import giph, shared
from tests.planners.given.cases import random_doppler, random_giph


def doppler(comp: list[float], comm: list[float], edges: list[list[int]]) -> GivenInstance:
    scaled = {"comp": [1e10 * c for c in comp], "comm": [1e10 * c for c in comm]}
    return read_doppler({**scaled, "edges": edges, "default_devices": 2}, "hand")


#: Op 0 feeds a long and a short op; a transfer takes 3.
FORK = doppler([1, 5, 1], [3, 0, 0], [[0, 1], [0, 2]])
DIAMOND = doppler([1, 2, 2, 1], [1, 1, 1, 0], [[0, 1], [0, 2], [1, 3], [2, 3]])


def test_heft_by_hand() -> None:
    # The second device is slow and far: op 2 ends at 7 behind op 1, and at 10 over there.
    assert heft_placement(event_arrays(read_giph(giph(), "0/0"))).tolist() == [0, 0, 0, 0]
    # The long op goes first. The short one ends at 7 behind it, and at 5 on the other device.
    assert heft_placement(event_arrays(FORK)).tolist() == [0, 0, 1]


def test_heft_is_as_good_as_that_of_the_makers_of_giph() -> None:
    path = shared("giph_small8dev.json")
    ratios = []
    for case in json.loads(path.read_text())["reference"]:
        found = read_instance(path, f"{case['network']}/{case['program']}")
        ours = heft_placement(event_arrays(found)).tolist()
        theirs = found.from_file_order(case["heft_placement"])
        ratios.append(median_makespan(found, ours) / median_makespan(found, theirs))
    assert len(ratios) == 12
    assert sum(ratio == pytest.approx(1.0) for ratio in ratios) >= 8
    assert np.mean(ratios) <= 1.0


def test_the_critical_path_stays_on_one_device() -> None:
    # The path 0, 1, 3 of the second device's speed; op 2 ends at 4 on the other, at 5 here.
    assert critical_path_placement(event_arrays(DIAMOND)).tolist() == [0, 0, 1, 0]
    # Op 1 may not run on device 1, where the rest of the path would be as slow: so device 0.
    assert critical_path_placement(event_arrays(read_giph(giph(), "0/0"))).tolist() == [0] * 4


def test_the_critical_path_goes_where_most_of_it_may_run() -> None:
    instance = random_giph(np.random.default_rng(3), 15, 5)
    arrays = event_arrays(instance)
    placed = critical_path_placement(arrays)
    assert np.isfinite(arrays.times[np.arange(15), placed]).all()


def test_the_pair_that_starts_first_is_scheduled_first() -> None:
    # Op 1 follows op 0 at 1; op 2 starts at 2 on the other device, at 3 here; op 3 then starts at
    # 4 beside op 2 and at 5 beside op 1.
    assert earliest_first(event_arrays(DIAMOND)).tolist() == [0, 0, 1, 1]
    # Both children could start at 1, the short one ends first, and the long one is not sent away.
    placed = earliest_first(event_arrays(FORK)).tolist()
    assert placed == [0, 0, 0]
    assert makespan(FORK, placed) == 7.0


def test_a_favourite_child_stays_and_its_sibling_is_sent_away() -> None:
    arrays = event_arrays(FORK)
    favourites = favourite_children(arrays)
    assert favourites.tolist() == [1, -1, -1]
    placed = earliest_first(arrays, favourites).tolist()
    assert placed == [0, 0, 1]
    assert makespan(FORK, placed) == 6.0


@pytest.mark.parametrize("seed", range(5))
def test_a_child_is_the_favourite_of_one_op_at_most(seed: int) -> None:
    arrays = event_arrays(random_doppler(np.random.default_rng(seed), 30, 3))
    favourites = favourite_children(arrays)
    children = favourites[favourites >= 0]
    assert len(children)
    assert len(children) == len(set(children.tolist()))
    for op, child in enumerate(favourites):
        out = arrays.readers[0][arrays.first[op] : arrays.first[op + 1]]
        assert child == -1 or child in out
