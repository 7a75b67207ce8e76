"""Units at the border, and the errors that refuse them."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.errors import InputError, nearest_names
from rlplace.units import (
    format_bytes,
    format_count,
    format_seconds,
    parse_bandwidth,
    parse_size,
    parse_time,
    ranges,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [("80 GB", 80e9), ("24GiB", 24 * 2.0**30), ("512 B", 512.0), ("1.5e3 MB", 1.5e9), (7, 7.0)],
)
def test_sizes(text: str | float, size: float) -> None:
    assert parse_size("memory", text) == size


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("200 Gb/s", 25e9),
        ("200 Gbit/s", 25e9),
        ("200 Gbps", 25e9),
        ("25 GB/s", 25e9),
        ("1 GiB/s", 2.0**30),
        (3e9, 3e9),
    ],
)
def test_bandwidths(text: str | float, rate: float) -> None:
    assert parse_bandwidth("nic", text) == rate


@pytest.mark.parametrize(
    ("text", "seconds"), [("5 us", 5e-6), ("5 µs", 5e-6), ("1.5 ms", 1.5e-3), ("3ns", 3e-9), (0, 0)]
)
def test_times(text: str | float, seconds: float) -> None:
    assert parse_time("latency", text) == pytest.approx(seconds)


@pytest.mark.parametrize("bad", ["80", "80 Gb", "80 GX", "-1 GB", "0 B", 0, -1.0, "", "nan GB"])
def test_bad_sizes(bad: str | float) -> None:
    with pytest.raises(InputError, match="memory"):
        parse_size("memory", bad)


def test_bits_are_told_from_bytes() -> None:
    with pytest.raises(InputError, match="in bits") as caught:
        parse_size("memory", "80 Gb")
    assert caught.value.nearest == "'80 GB'"


@pytest.mark.parametrize("bad", ["200 G", "200", "200 GB", "-1 GB/s", 0, float("nan"), "1 gb"])
def test_bad_bandwidths(bad: str | float) -> None:
    with pytest.raises(InputError, match="nic"):
        parse_bandwidth("nic", bad)


@pytest.mark.parametrize("bad", ["5", "5 minutes", "-1 us", -1.0, float("inf"), float("nan")])
def test_bad_times(bad: str | float) -> None:
    with pytest.raises(InputError, match="latency"):
        parse_time("latency", bad)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1.5 * 2**30, "1.50 GiB"),
        (12 * 2**20, "12.0 MiB"),
        (1023 * 2**20, "1023 MiB"),
        (80 * 2**30, "80.0 GiB"),
        (-3 * 2**30, "-3.00 GiB"),
    ],
)
def test_bytes_as_text(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.234, "1.23 s"),
        (0.0456, "45.6 ms"),
        (7.89e-6, "7.89 us"),
        (0.99999, "1000 ms"),
        (4321.0, "4321 s"),
        (0.0, "0 us"),
        (2.5e-8, "0.025 us"),
    ],
)
def test_seconds_as_text(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (768, "768"), (50257, "50.3 k"), (2.364e6, "2.36 M"), (8.749e14, "875 T")],
)
def test_counts_as_text(number: float, text: str) -> None:
    assert format_count(number) == text


@given(st.floats(1.0, 1e16))
def test_a_printed_size_reads_back(size: float) -> None:
    assert parse_size("size", format_bytes(size)) == pytest.approx(size, rel=0.006, abs=0.5)


def test_an_input_error_says_all_and_survives_pickling() -> None:
    error = InputError("global_batch", 3, "must be even", 4)
    assert str(error) == "global_batch=3: must be even (nearest legal: 4)"
    again = pickle.loads(pickle.dumps(error))
    assert (again.field, again.value, again.rule, again.nearest) == (
        "global_batch",
        3,
        error.rule,
        4,
    )
    assert str(again) == str(error)


def test_nearest_names() -> None:
    known = ("A100-40", "A100-80", "H100-80", "T4")
    assert nearest_names("a100-80", known) == "A100-80, H100-80, A100-40"
    assert nearest_names("quantum", known) is None


def test_ranges_are_sorted_runs() -> None:
    assert ranges([3, 0, 1, 2, 8, 6, 5]) == "0-3,5-6,8"
    assert ranges([]) == ""
