"""Fits on made-up figures whose truth is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.cluster.figures import RankFigures, cpu_cluster, fit_curves, fit_line
from rlplace.cluster.types import CollectiveCurve, CollectiveKind

SIZES = [4096.0, 65536.0, 524288.0, 8388608.0]
FLOPS = [1e7, 1e8, 1e9, 4e9]


@given(st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-7))
def test_line_is_recovered(intercept: float, slope: float) -> None:
    fitted = fit_line(SIZES, [intercept + slope * size for size in SIZES])
    assert fitted == pytest.approx((intercept, slope), rel=1e-6)


@given(st.lists(st.floats(1e-6, 1.0), min_size=4, max_size=4))
def test_line_never_falls(seconds: list[float]) -> None:
    intercept, slope = fit_line(SIZES, seconds)
    assert intercept >= 0
    assert slope > 0


def test_small_sizes_count_as_much_as_large_ones() -> None:
    seconds = [1e-4, 1e-4 + 65536e-9, 1e-4 + 524288e-9, (1e-4 + 8388608e-9) * 1.1]
    intercept, _ = fit_line(SIZES, seconds)
    assert intercept == pytest.approx(1e-4, rel=0.1)


CASES: list[tuple[CollectiveKind, int]] = [("p2p", 2), ("all_reduce", 2), ("all_reduce", 4)]


def figures(rate: float = 1e11, half: float = 1e7) -> RankFigures:
    """A rank whose core does `rate` FLOP/s and moves 20 GB/s at best."""
    return RankFigures(
        matmuls=tuple((x, (x + half) / rate) for x in FLOPS),
        streams=((3e6, 3e6 / 1e10), (2e6, 2e6 / 5e9)),
        convolutions=((1e8, (1e8 + 1e7) / 5e10), (4e8, (4e8 + 1e7) / 5e10)),
        attention=((1e9, 1e9 / 2e10),),
        updates=((28e6, 28e6 / 2e10),),
        launch=2e-6,
        resident=300 << 20,
        collectives=tuple(
            (kind, ranks, size, 1e-4 * ranks + 1e-9 * size)
            for kind, ranks in CASES
            for size in SIZES
        ),
    )


def test_what_else_a_core_does_is_measured_beside_its_matmuls() -> None:
    kind = cpu_cluster([figures()], 1, memory=1 << 30).kinds[0]
    assert kind.conv_efficiency == pytest.approx(0.5)
    assert kind.attention_efficiency * kind.peak_flops["fp32"] == pytest.approx(2e10)
    assert kind.stream == kind.bandwidth == pytest.approx(2e10)
    assert kind.bandwidth * kind.memory_efficiency == pytest.approx(1e10 * 5 / 7)


@pytest.mark.parametrize(("ranks", "cores"), [(2, 2), (3, 2), (4, 2), (1, 4)])
def test_the_kind_is_one_core_at_full_speed(ranks: int, cores: int) -> None:
    cluster = cpu_cluster([figures()] * ranks, cores, memory=ranks << 30)
    kind = cluster.kinds[0]
    assert kind.peak_flops["fp32"] * kind.max_efficiency == pytest.approx(1e11)
    assert kind.half_flops == pytest.approx(1e7)
    assert kind.bandwidth == pytest.approx(2e10)
    assert kind.memory_efficiency == pytest.approx(5 / 14)
    assert kind.launch_overhead == pytest.approx(2e-6)
    assert kind.memory == 1 << 30
    assert kind.overlap == 0.0
    assert [device.core for device in cluster.devices] == [rank % cores for rank in range(ranks)]


def test_curves_and_link() -> None:
    cluster = cpu_cluster([figures()] * 4, 2, memory=4 << 30)
    curves = {(curve.kind, curve.ranks): curve for curve in cluster.curves}
    assert set(curves) == {("p2p", 2), ("all_reduce", 2), ("all_reduce", 4)}
    assert curves["all_reduce", 4].latency == pytest.approx(4e-4)
    assert cluster.link(0, 3).bandwidth == pytest.approx(1e9)
    assert cluster.link(0, 3).latency == pytest.approx(2e-4)


def test_a_slow_outlier_does_not_count() -> None:
    cluster = cpu_cluster([figures(), figures(rate=1e9), figures()], 3, memory=3 << 30)
    assert cluster.kinds[0].peak_flops["fp32"] == pytest.approx(1e11)


def test_no_rate_exceeds_the_peak() -> None:
    cluster = cpu_cluster([figures(half=0.0)], 1, memory=1 << 30)
    kind = cluster.kinds[0]
    assert 0 < kind.max_efficiency <= 1
    assert kind.half_flops > 0
    assert kind.peak_flops["fp32"] >= max(x / t for x, t in figures(half=0.0).matmuls)


def test_points_are_the_mean_of_the_ranks_and_do_not_fall() -> None:
    slow = replace(figures(), collectives=(("p2p", 2, 4e3, 3e-4), ("p2p", 2, 8e6, 1e-2)))
    fast = replace(figures(), collectives=(("p2p", 2, 4e3, 1e-4), ("p2p", 2, 8e6, 2e-2)))
    (curve,) = fit_curves([slow, fast])
    assert [size for size, _ in curve.points] == [4e3, 8e6]
    assert [time for _, time in curve.points] == pytest.approx([2e-4, 1.5e-2])
    upside_down = replace(figures(), collectives=(("p2p", 2, 4e3, 3e-4), ("p2p", 2, 8e3, 1e-4)))
    assert [time for _, time in fit_curves([upside_down])[0].points] == [3e-4, 3e-4]


def test_a_curve_follows_its_points() -> None:
    curve = CollectiveCurve("p2p", 2, 1e-4, 1e-9, ((1e3, 1e-4), (1e6, 1e-3), (3e6, 7e-3)))
    assert [curve.seconds(size) for size in (1e3, 1e6, 3e6)] == pytest.approx([1e-4, 1e-3, 7e-3])
    assert curve.seconds(10.0) == 1e-4, "a message of a few bytes costs as the smallest"
    assert curve.seconds(2e6) == pytest.approx(4e-3)
    assert curve.seconds(5e6) == pytest.approx(13e-3), "the slope of the last two goes on"
    assert replace(curve, points=()).seconds(1e6) == pytest.approx(1.1e-3)


@given(st.lists(st.floats(0, 1e9), min_size=2, max_size=20))
def test_curves_do_not_fall(sizes: list[float]) -> None:
    for curve in fit_curves([figures()]):
        times = [curve.seconds(size) for size in sorted(sizes)]
        assert times == sorted(times)
