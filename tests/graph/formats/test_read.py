from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from rlplace.errors import InputError
from rlplace.graph.formats.read import (
    instance_names,
    is_graph_file,
    read_graph,
    read_instance,
    read_instances,
    read_model,
)
from rlplace.graph.formats.types import GivenInstance
from tests.graph.formats.examples import (
    DOPPLER_TEXT,
    dnn_partitioning,
    dnn_partitioning_table,
    doppler,
    giph,
    piper,
)


def written(folder: Path, content: Any, name: str = "file.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("content", "form"),
    [
        (dnn_partitioning(), "dnn-partitioning"),
        (dnn_partitioning_table(), "dnn-partitioning"),
        (piper(), "piper"),
        (doppler(), "doppler"),
        (DOPPLER_TEXT, "doppler"),
        (giph(), "giph"),
    ],
)
def test_the_content_says_which_form_it_is(content: Any, form: str, tmp_path: Path) -> None:
    path = written(tmp_path, content, "no-hint")
    found = read_instance(path, devices=2)
    assert found.format == form
    assert read_graph(path) == found.graph
    adapter = TypeAdapter(GivenInstance)
    assert adapter.validate_json(adapter.dump_json(found)) == found


def test_a_file_of_several_graphs_asks_for_a_name(tmp_path: Path) -> None:
    path = written(tmp_path, {"first": piper(), "second": doppler(), "comment": "mine"})
    assert instance_names(path) == ["first", "second"]
    assert read_instance(path, "second").format == "doppler"
    assert read_instances(path)["first"] == read_instance(path, "first")
    with pytest.raises(InputError, match=r"choose one.*first, second"):
        read_instance(path)
    with pytest.raises(InputError, match="nearest legal: second"):
        read_instance(path, "secnd")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"layers": []}, "looked for dnn-partitioning JSON"),
        ([1, 2], "looked for dnn-partitioning JSON"),
        ('{"nodes": [', "not JSON: line 1"),
        ("once upon a time", "not JSON: line 1"),
    ],
)
def test_unknown_content_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_instance(written(tmp_path, content))


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside JSON data."""
    pairs = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in pairs if isinstance(data, dict | list) else ():
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


@pytest.mark.parametrize("make", [dnn_partitioning, dnn_partitioning_table, piper, doppler, giph])
@pytest.mark.parametrize("damage", ["absent", None, "text", -7, {}])
def test_damage_anywhere_is_an_input_error_or_harmless(
    make: Callable[[], Any], damage: Any, tmp_path: Path
) -> None:
    refused = 0
    for *way, last in places(make()):
        data = make()
        inner = data
        for key in way:
            inner = inner[key]
        if damage == "absent":
            del inner[last]
        else:
            inner[last] = damage
        try:
            read_instances(written(tmp_path, data))
        except InputError:
            refused += 1
    assert refused > 0


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_instance(tmp_path / "absent.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(InputError, match="it is not text"):
        read_instance(tmp_path / "binary")


def test_no_plan_is_made_of_given_times(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"rlplace.cost.given"):
        read_model(str(written(tmp_path, piper())))


def test_files_are_told_from_names_of_models() -> None:
    assert is_graph_file("net.onnx")
    assert is_graph_file("a/b.JSON")
    assert not is_graph_file("llama-3-8b")
    assert not is_graph_file("model.py:make")
