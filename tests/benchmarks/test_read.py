"""What all tables share: numbers, degrees, vocabularies, fit rows."""

from dataclasses import replace

import pytest

from benchmarks.fidelity_tables.read import (
    data_folder,
    degrees,
    gpt,
    integer,
    llama,
    number,
    padded,
    redone,
    split_off,
)
from benchmarks.fidelity_tables.types import Measured, Row
from tests.benchmarks.results import result


def rows(count: int) -> list[Row]:
    return [result(1.0, line=line).row for line in range(count)]


def test_the_folder_is_the_argument_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPLACE_DATA", "/somewhere")
    assert str(data_folder()) == "/somewhere"
    assert str(data_folder("/else")) == "/else"


def test_numbers_of_columns() -> None:
    assert (integer("8.0"), integer(""), integer("", 1)) == (8, 0, 1)
    assert (number("0.5"), number("")) == (0.5, None)
    assert degrees(8, 1, 2, 8) == (2, 8)
    assert [redone(text) for text in ("full", "selective", "none", "")] == [
        *("layer", "attention", "none", "none")
    ]


def test_the_vocabulary_of_megatron() -> None:
    # GPT-2's, without and with tensor parallelism of 8.
    assert (padded(50257, 1), padded(50257, 8), padded(51200, 8)) == (50304, 51200, 51200)


def test_shapes_come_from_columns_and_changes() -> None:
    columns = {"layers": "2", "hidden": "64", "heads": "4", "vocab": "99", "seq_len": "32"}
    spec = gpt(columns, 4, vocab=128)
    assert dict(spec.shape) == {
        **{"layers": 2, "hidden": 64, "heads": 4, "ffn": 256, "vocab": 128, "seq_len": 32}
    }
    assert spec.degrees == (4,)
    more = llama({**columns, "kv_heads": "2", "ffn": "96"}, 2, 4, tie_embeddings=True)
    assert dict(more.shape)["kv_heads"] == 2
    assert more.degrees == (2, 4)


def test_one_row_in_so_many_is_a_fit_row() -> None:
    marked = split_off(rows(40), 10)
    assert sum(row.fit for row in marked) == 4
    assert [row.line for row in marked] == list(range(40))
    assert marked == split_off(rows(40), 10)


def test_rows_without_a_measurement_are_never_fit_rows() -> None:
    silent = [replace(row, measured=Measured()) for row in rows(9)]
    marked = split_off([*silent, *rows(1)], 1)
    assert [row.fit for row in marked] == [False] * 9 + [True]
