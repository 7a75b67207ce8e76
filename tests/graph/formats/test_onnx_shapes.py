from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from rlplace.graph.formats.onnx_shapes import Value, dim_names, infer_shapes
from tests.graph.formats.onnx_files import write


def test_value_counts_floats_and_other_bytes_apart() -> None:
    assert Value((2, 3), onnx.TensorProto.BFLOAT16).floats == 6
    assert Value((2, 3), onnx.TensorProto.INT64).other_bytes == 48
    assert Value((2, 3), onnx.TensorProto.BOOL).other_bytes == 6
    assert Value((), onnx.TensorProto.FLOAT).elements == 1


def test_dims_are_numbers_or_names(tmp_path: Path) -> None:
    node = helper.make_node("Relu", ["x"], ["y"])
    model = onnx.load(write(tmp_path / "a.onnx", [node], {"x": ["N", 8, "T"]}, {}))
    model.graph.input[0].type.tensor_type.shape.dim[2].ClearField("dim_param")
    assert dim_names(model) == {"x": ["N", 8, "x.2"]}


@pytest.mark.parametrize("batch", [2, 5])
def test_a_reshape_by_computed_sizes_resolves(batch: int, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["n"], axis=0),
        helper.make_node("Div", ["shape", "half"], ["halves"]),
        helper.make_node("Gather", ["halves", "one"], ["wide"], axis=0),
        helper.make_node("Concat", ["n", "two", "wide"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
    ]
    model = onnx.load(write(tmp_path / "a.onnx", nodes, {"x": ["N", 8]}, {}))
    numbers = {"zero": [0], "one": [1], "half": [1, 2], "two": [2]}
    model.graph.initializer.extend(
        numpy_helper.from_array(np.array(value, np.int64), name) for name, value in numbers.items()
    )
    found = infer_shapes(model, {"N": batch}, tmp_path)
    assert found.values["y"].shape == (batch, 2, 4)
    assert found.computed == {0, 1, 2, 3, 4}
    assert {"target", "wide", "half"} <= found.constants
    assert "x" not in found.constants
