from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
import pytest
from onnx import helper

from rlplace.errors import InputError
from rlplace.graph.formats.onnx_file import input_sizes, load_onnx, sink
from tests.graph.formats.onnx_files import write


def model(folder: Path, inputs: dict[str, Sequence[int | str]]) -> onnx.ModelProto:
    node = helper.make_node("Add", list(inputs)[:2], ["y"])
    return load_onnx(write(folder / "a.onnx", [node], inputs, {}))


def test_the_batch_is_the_named_first_dim(tmp_path: Path) -> None:
    two = model(tmp_path, {"a": ["N", "T"], "b": ["N", 4]})
    assert input_sizes(two, {"T": 7}, None) == ({"T": 7}, "N")
    assert input_sizes(two, {}, 9) == ({"T": 9}, "N")
    assert input_sizes(model(tmp_path, {"a": [6, 2], "b": [6, 2]}), {}, None) == ({}, 6)


def test_named_dims_need_sizes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'T, W'.*need a size"):
        input_sizes(model(tmp_path, {"a": ["N", "T"], "b": ["N", "W"]}), {}, 8)
    apart = model(tmp_path, {"a": ["N", 4], "b": ["M", 4]})
    with pytest.raises(InputError, match="name their batch differently"):
        input_sizes(apart, {}, None)
    assert input_sizes(apart, {"M": 3}, None) == ({"M": 3}, "N")


def test_a_graph_without_a_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no input with a batch dim"):
        input_sizes(model(tmp_path, {"a": [], "b": []}), {}, None)


def test_an_identity_of_an_initializer_is_the_initializer(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Identity", ["w"], ["copy"]),
        helper.make_node("Identity", ["copy"], ["again"]),
        helper.make_node("MatMul", ["x", "again"], ["h"]),
        helper.make_node("Identity", ["h"], ["y"]),
    ]
    found = load_onnx(write(tmp_path / "a.onnx", nodes, {"x": ["N", 4]}, {"w": [4, 4]}))
    assert [node.op_type for node in found.graph.node] == ["MatMul", "Identity"]
    assert list(found.graph.node[0].input) == ["x", "w"]


def test_what_depends_on_no_input_sinks_to_its_first_reader() -> None:
    names = {
        "mask": helper.make_node("Trilu", ["ones"], ["mask"]),
        "turned": helper.make_node("Transpose", ["w"], ["turned"]),
        "unused": helper.make_node("Neg", ["w"], ["unused"]),
        "first": helper.make_node("Relu", ["x"], ["first"]),
        "second": helper.make_node("MatMul", ["first", "turned"], ["second"]),
        "third": helper.make_node("Add", ["second", "mask"], ["third"]),
    }
    ordered = sink(list(names.values()), frozenset({"x"}))
    assert [node.output[0] for node in ordered] == [
        "first",
        "turned",
        "second",
        "mask",
        "third",
        "unused",
    ]
