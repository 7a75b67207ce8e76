"""Errors, orders, regret, healthy rows and confusion on rows made by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fidelity_tables.metrics import (
    group_regret,
    group_tau,
    healthy_lines,
    memory_score,
    time_score,
)
from benchmarks.fidelity_tables.types import Result
from tests.benchmarks.results import result


def series(measured: list[float], predicted: list[float], group: str = "g") -> list[Result]:
    pairs = zip(measured, predicted, strict=True)
    return [result(m, p, line=i, group=group) for i, (m, p) in enumerate(pairs)]


def test_errors_are_relative_to_what_was_measured() -> None:
    score = time_score(series([1.0, 2.0, 4.0], [1.1, 1.0, 4.0]))
    assert score is not None
    assert score.n == 3
    assert score.median == pytest.approx(0.1)
    assert score.bias == pytest.approx(0.0)
    assert score.p90 == pytest.approx(0.1 + 0.8 * 0.4)  # between 0.1 and 0.5


def test_tau_counts_pairs_in_the_wrong_order() -> None:
    assert group_tau(series([1, 2, 3, 4], [10, 20, 30, 40])) == pytest.approx(1.0)
    assert group_tau(series([1, 2, 3, 4], [4, 3, 2, 1])) == pytest.approx(-1.0)
    # One of six pairs is the wrong way round: (5 - 1) / 6.
    assert group_tau(series([1, 2, 3, 4], [2, 1, 3, 4])) == pytest.approx(4 / 6)


def test_regret_is_what_the_predicted_best_costs() -> None:
    assert group_regret(series([3.0, 2.0, 5.0], [1.0, 2.0, 3.0])) == pytest.approx(0.5)
    assert group_regret(series([3.0, 2.0, 5.0], [2.0, 1.0, 3.0])) == pytest.approx(0.0)


def test_times_of_different_batches_are_compared_a_sample() -> None:
    small, large = result(1.0, 1.0, batch=1), result(1.5, 1.5, line=1, batch=2)
    assert group_regret([small, large]) == pytest.approx(0.0)
    assert group_tau([small, large]) == pytest.approx(1.0)


def test_only_groups_of_four_have_an_order() -> None:
    rows = series([1, 2, 3], [3, 2, 1], "small") + series([1, 2, 3, 4], [1, 2, 3, 4], "large")
    score = time_score(rows)
    assert score is not None
    assert (score.groups, score.tau, score.tau_mean) == (1, 1.0, 1.0)
    alone = time_score(series([1, 2, 3], [3, 2, 1]))
    assert alone is not None
    assert math.isnan(alone.tau)
    assert math.isnan(alone.regret)


def test_the_mean_of_tau_weighs_groups_by_their_rows() -> None:
    rows = series([1, 2, 3, 4], [4, 3, 2, 1], "a") + series(list(range(1, 9)), list(range(8)), "b")
    score = time_score(rows)
    assert score is not None
    assert score.tau == pytest.approx(0.0)
    assert score.tau_mean == pytest.approx((4 * -1 + 8 * 1) / 12)


def test_healthy_rows_have_half_of_the_best_throughput_of_their_group() -> None:
    rows = [r.row for r in series([1.0, 2.0, 2.01], [1, 1, 1])]
    rows.append(result(5.0, line=3, group="other").row)
    rows.append(result(None, line=4).row)
    assert healthy_lines(rows) == {("table", 0), ("table", 1), ("table", 3)}


def test_rows_without_an_estimate_are_not_counted() -> None:
    assert time_score([result(problem="no"), result(None)]) is None
    score = memory_score([result(memory=(1.0, 1.0), problem="no")])
    assert (score.n, score.ran) == (0, 0)
    assert math.isnan(score.within)


def test_memory_counts_rows_within_a_share() -> None:
    rows = [result(memory=pair) for pair in ((100.0, 114.0), (100.0, 84.0), (100.0, 100.0))]
    score = memory_score([*rows, result()])
    assert score.n == 3
    assert score.within == pytest.approx(2 / 3)
    assert score.median == pytest.approx(0.14)
    assert score.bias == pytest.approx(0.0)


def test_confusion_of_what_ran_with_what_fits() -> None:
    rows = [
        result(ran=True, feasible=True),
        result(ran=True, feasible=False),
        result(None, ran=False, feasible=False),
        result(None, ran=False, feasible=True),
        result(None, ran=False, feasible=False),
        result(ran=None, feasible=False),
    ]
    score = memory_score(rows)
    assert (score.ran_feasible, score.ran) == (1, 2)
    assert (score.oom_infeasible, score.oom) == (2, 3)


@given(st.lists(st.floats(0.1, 10.0), min_size=4, max_size=12, unique=True), st.floats(0.1, 10.0))
def test_a_constant_factor_changes_errors_but_no_order(times: list[float], factor: float) -> None:
    score = time_score(series(times, [factor * time for time in times]))
    assert score is not None
    assert score.median == pytest.approx(abs(factor - 1.0), abs=1e-9)
    assert score.regret == pytest.approx(0.0)
    assert score.tau > 0.99
