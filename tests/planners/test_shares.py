"""Tests of unequal samples of replicas."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from rlplace.plan.testing import chain, cluster, round_kind
from rlplace.plan.types import GroupChoice, Instance, Mesh, Stage
from rlplace.planners.costing import Costing
from rlplace.planners.shares import Curve, curves_of, even_time


def line(slope: float, room: int = 100, fixed: float = 0.0) -> Curve:
    """A device with so many seconds a sample."""
    return Curve(np.concatenate([[0.0], fixed + slope * np.arange(1, 101)]), room)


def test_shares_are_in_proportion_to_speed() -> None:
    fast, slow = line(1.0), line(4.0)
    assert even_time([fast, slow], 10) == (8, 2)
    assert even_time([fast, fast, slow], 18) == (8, 8, 2)


def test_equal_devices_share_equally_or_differ_by_one() -> None:
    own = line(1.0)
    assert even_time([own] * 4, 12) == (3, 3, 3, 3)
    assert sorted(even_time([own] * 4, 14) or ()) == [3, 3, 4, 4]


def test_a_device_has_no_more_than_it_has_room_for() -> None:
    assert even_time([line(1.0, room=3), line(4.0)], 10) == (3, 7)
    assert even_time([line(1.0, room=3), line(4.0, room=6)], 10) is None


def test_a_device_that_takes_too_long_over_one_sample_has_none() -> None:
    assert even_time([line(1.0), line(1.0, fixed=50.0)], 10) == (10, 0)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_shares_end_earlier(seed: int) -> None:
    rng = np.random.default_rng(seed)
    curves = [
        Curve(np.concatenate([[0.0], np.cumsum(rng.random(9))]), int(rng.integers(3, 9)))
        for _ in range(3)
    ]
    samples = int(rng.integers(1, 9))
    shares = even_time(curves, samples)
    assert shares is not None
    assert sum(shares) == samples

    def ends(of: tuple[int, ...]) -> float:
        return float(max(own.seconds[n] for own, n in zip(curves, of, strict=True)))

    rooms = (range(own.room + 1) for own in curves)
    best = min(ends(of) for of in product(*rooms) if sum(of) == samples)
    assert ends(shares) == best


def test_a_curve_is_what_the_estimate_says_of_a_kind() -> None:
    # 1e10 FLOPs forward and twice as many backward: 30 ms a sample on the fast kind.
    kinds = round_kind("fast"), round_kind("slow", 0.25, memory=2e9)
    graph = chain([1e10], floats=1e8, params=10)
    instance = Instance(graph, cluster([kinds]), 8, memory_margin=0.0)
    stage = Stage(0, 1, Mesh((0, 1), 2), (GroupChoice(),))
    fast, slow = curves_of(Costing(instance), stage, 8)
    assert fast.seconds[1:] == pytest.approx(0.03 * np.arange(1, 9), rel=1e-3)
    assert slow.seconds[1:] == pytest.approx(0.12 * np.arange(1, 9), rel=1e-3)
    # Input and output of 1e8 bf16 elements: 400 MB a sample, and the slow kind has 2 GB.
    assert fast.room == 8
    assert slow.room in (3, 4)
