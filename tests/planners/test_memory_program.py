"""The program with a memory axis gives the optimum of what it is asked."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.planners.memory_program import memory_program


def _best(seconds: np.ndarray, size: np.ndarray, room: float, switch: np.ndarray | None) -> float:
    """By looking at everything."""
    items, options = seconds.shape
    best = np.inf
    for picks in product(range(options), repeat=items):
        total = seconds[range(items), picks].sum()
        if switch is not None:
            total += sum(switch[a, b] for a, b in pairwise(picks))
        if size[range(items), picks].sum() <= room:
            best = min(best, float(total))
    return best


@given(st.integers(0, 10_000), st.booleans())
@settings(max_examples=60, deadline=None)
def test_it_is_exact_where_bytes_are_whole_cells(seed: int, switches: bool) -> None:
    rng = np.random.default_rng(seed)
    seconds = rng.integers(1, 30, (5, 3)).astype(float)
    size = rng.integers(0, 20, (5, 3)).astype(float)
    switch = rng.integers(0, 8, (3, 3)).astype(float) if switches else None
    room = float(rng.integers(10, 80))
    value, picks = memory_program(seconds, size, room, switch)
    assert value == pytest.approx(_best(seconds, size, room, switch))
    if np.isfinite(value):
        assert size[range(5), picks].sum() <= room


def test_where_nothing_fits_the_leanest_are_told() -> None:
    seconds, size = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[5.0, 2.0], [2.0, 2.0]])
    value, picks = memory_program(seconds, size, 3.0)
    assert value == np.inf
    assert picks.tolist() == [1, 0]


def test_a_coarse_axis_never_says_that_what_does_not_fit_fits() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        seconds, size = rng.random((40, 4)), 1e9 * rng.random((40, 4))
        room = float(size.min(axis=1).sum() * 1.3)
        value, picks = memory_program(seconds, size, room, cells=64)
        assert size[range(40), picks].sum() <= room
        assert seconds[range(40), picks].sum() == pytest.approx(value)


def test_absent_options_are_not_taken() -> None:
    seconds = np.array([[1.0, np.inf], [np.inf, 2.0]])
    value, picks = memory_program(seconds, np.zeros((2, 2)), 1.0, np.zeros((2, 2)))
    assert (value, picks.tolist()) == (3.0, [0, 1])
