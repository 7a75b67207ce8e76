"""CSV files into rows: what all tables share."""

from __future__ import annotations

import csv
import os
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.fidelity_tables.types import GraphSpec, Row, Value

#: Where the published tables lie, unless ``$RLPLACE_DATA`` or ``--data`` says otherwise.
DEFAULT_DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "published"

Columns = Mapping[str, str]


def data_folder(given: str | Path | None = None) -> Path:
    """The folder of the published tables: the argument, ``$RLPLACE_DATA`` or the default."""
    return Path(given or os.environ.get("RLPLACE_DATA") or DEFAULT_DATA)


def lines(path: Path) -> list[tuple[int, Columns]]:
    """Line numbers (the header is 1) and columns of a CSV file."""
    with path.open(newline="") as file:
        return [(number, row) for number, row in enumerate(csv.DictReader(file), start=2)]


def integer(text: str, default: int = 0) -> int:
    """A whole number, or the default where the column is empty."""
    return int(float(text)) if text else default


def number(text: str) -> float | None:
    """A number, or None where the column is empty."""
    return float(text) if text else None


def pick(columns: Columns, *names: str) -> dict[str, str]:
    """Some of the columns."""
    return {name: columns[name] for name in names}


def degrees(*sizes: int) -> tuple[int, ...]:
    """Degrees to capture layouts for: those that are used, 1 needs none."""
    return tuple(sorted({size for size in sizes if size > 1}))


def padded(vocab: int, tp: int) -> int:
    """Megatron-LM's vocabulary: a multiple of 128 times the tensor-parallel degree."""
    step = 128 * tp
    return -(-vocab // step) * step


def shape(**fields: Value) -> tuple[tuple[str, Value], ...]:
    """A shape as hashable data."""
    return tuple(sorted(fields.items()))


def gpt(columns: Columns, tp: int = 1, **changes: Value) -> GraphSpec:
    """GPT of the columns layers, hidden, heads, vocab and seq_len; `changes` go before them."""
    hidden = integer(str(changes.get("hidden") or columns["hidden"]))
    base: dict[str, Value] = {
        "layers": integer(columns["layers"]) if not changes.get("layers") else 0,
        "hidden": hidden,
        "heads": integer(columns.get("heads", "")),
        "ffn": 4 * hidden,
        "vocab": integer(columns.get("vocab", "")),
        "seq_len": integer(columns["seq_len"].rstrip("?")),
    }
    return GraphSpec("gpt", shape(**(base | changes)), degrees(tp))


def llama(columns: Columns, *sizes: int, **changes: Value) -> GraphSpec:
    """Llama of the columns layers, hidden, heads, kv_heads, ffn, vocab and seq_len.

    Args:
        columns: Of the row.
        sizes: Degrees of its tp and cp axes.
        changes: Go before the columns.
    """
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len")
    base: dict[str, Value] = {n: integer(columns[n]) for n in names if n not in changes}
    return GraphSpec("llama", shape(**(base | changes)), degrees(*sizes))


def redone(text: str) -> str:
    """What `uniform_plan` calls a recompute column: ``full`` redoes layer by layer."""
    return {"full": "layer", "selective": "attention"}.get(text, text or "none")


def split_off(rows: Iterable[Row], one_in: int) -> list[Row]:
    """Mark one row in `one_in` as a fit row: every `one_in`-th of a shuffle seeded by the table.

    Rows in which nothing was measured are never fit rows.
    """
    made = list(rows)
    measured = [
        index
        for index, row in enumerate(made)
        if row.measured.step_time is not None or row.measured.memory is not None
    ]
    if measured:
        random.Random(made[0].table).shuffle(measured)
    for index in measured[::one_in]:
        made[index] = replace(made[index], fit=True)
    return made
