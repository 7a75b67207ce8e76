"""Rows of the CSV files that profiles come in."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from rlplace.errors import InputError, nearest_names


def read_rows(path: Path, wanted: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """The rows of a file, as text by column; those whose columns have the wanted values.

    Raises:
        InputError: If the file cannot be read, or has no such value, with the nearest.
    """
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise InputError("profile", str(path), f"cannot be read ({error.strerror})") from error
    for column, value in (wanted or {}).items():
        known = sorted({row[column] for row in rows})
        if value not in known:
            rule = f"{path.name} has no such {column}"
            raise InputError(column, value, rule, nearest_names(value, known) or ", ".join(known))
        rows = [row for row in rows if row[column] == value]
    return rows
