"""Units at the border: inside rlplace everything is in seconds, bytes, FLOPs and bytes/s."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rlplace.errors import InputError

GIB = float(1 << 30)
MIB = float(1 << 20)

_BYTES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_NUMBER = r"\s*([+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*"


def parse_size(field: str, value: str | float) -> float:
    """Bytes from ``"80 GB"``, ``"24 GiB"`` or a plain number of bytes.

    Raises:
        InputError: If the unit is missing or in bits, or the size is not positive.
    """
    if isinstance(value, int | float):
        return _positive(field, float(value), value)
    match = re.fullmatch(_NUMBER + r"([KMGT]i?)?([bB])", value)
    if match is None:
        raise InputError(field, value, "a size is a number with a unit of bytes", "'80 GB'")
    number, prefix, unit = float(match[1]), match[2] or "", match[3]
    if unit == "b":
        rule = "a size is in bytes (capital B), this is in bits"
        raise InputError(field, value, rule, f"'{match[1]} {prefix}B'")
    return _positive(field, number * (_BINARY | _BYTES)[prefix], value)


def parse_bandwidth(field: str, value: str | float) -> float:
    """Bytes/s from ``"200 Gb/s"``, ``"200 Gbit/s"`` (bits) or ``"25 GB/s"`` (bytes).

    A plain number is bytes/s. The unit must say bits or bytes: ``"200 G"`` and ``"200 Gbps"``
    without a clear letter are refused, for a factor of eight hides there.

    Raises:
        InputError: If the unit is missing or ambiguous, or the bandwidth is not positive.
    """
    if isinstance(value, int | float):
        return _positive(field, float(value), value)
    match = re.fullmatch(_NUMBER + r"([KMGT]i?)?(b|bit|B|byte)(?:/s|ps)", value)
    if match is None:
        raise InputError(
            field,
            value,
            "a bandwidth is a number with a unit that says bits or bytes a second",
            "'200 Gb/s' (bits) or '25 GB/s' (bytes)",
        )
    scale = (_BINARY | _BYTES)[match[2] or ""]
    bits = match[3] in ("b", "bit")
    return _positive(field, float(match[1]) * scale / (8.0 if bits else 1.0), value)


def parse_time(field: str, value: str | float) -> float:
    """Seconds from ``"5 us"``, ``"1.5 ms"`` or a plain number of seconds (zero is legal)."""
    if isinstance(value, int | float):
        number = float(value)
    else:
        match = re.fullmatch(_NUMBER + r"(s|ms|us|µs|ns)", value)
        if match is None:
            raise InputError(field, value, "a time is a number with a unit", "'5 us'")
        number = float(match[1]) * _SECONDS[match[2]]
    if not 0.0 <= number < float("inf"):
        raise InputError(field, value, "a time is not negative", "0")
    return number


def format_bytes(size: float) -> str:
    """``"1.50 GiB"``, ``"12.0 MiB"``: three significant digits, binary units."""
    for unit, scale in (("TiB", 2.0**40), ("GiB", GIB), ("MiB", MIB), ("KiB", 1024.0)):
        if abs(size) >= scale:
            return f"{_three_digits(size / scale)} {unit}"
    return f"{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """``"1.23 s"``, ``"45.6 ms"``, ``"7.89 us"``: three significant digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds / 1e-6)} us"


def format_count(number: float) -> str:
    """``"2.36 M"``, ``"805 G"``, ``"0"``: three significant digits, decimal prefixes."""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= scale:
            return f"{_three_digits(number / scale)} {prefix}"
    return f"{number:.0f}"


def _three_digits(number: float) -> str:
    """Three significant digits, all digits before the point from 1,000 on, never an exponent."""
    size = abs(number)
    digits = 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 else 3
    return f"{number:.{digits}f}" if number else "0"


def ranges(numbers: Iterable[int]) -> str:
    """``"0-7,16"``: numbers as sorted runs."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}-{b}" if a != b else str(a) for a, b in runs)


def _positive(field: str, number: float, value: object) -> float:
    if not 0.0 < number < float("inf"):
        raise InputError(field, value, "must be positive and finite")
    return number
