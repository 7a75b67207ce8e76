from __future__ import annotations

from typing import Any

import pytest
from onnx import NodeProto, TensorProto, helper

from rlplace.graph.formats.onnx_costs import Op, is_glued
from rlplace.graph.formats.onnx_shapes import Value


def op(
    kind: str, inputs: list[Any], output: Any, grads: list[bool] | None = None, **settings: Any
) -> Op:
    """An op on float tensors of these shapes; None leaves an input out."""
    names = [f"i{position}" if shape is not None else "" for position, shape in enumerate(inputs)]
    node: NodeProto = helper.make_node(kind, names, ["o0"], **settings)
    values = tuple(None if s is None else Value(tuple(s), TensorProto.FLOAT) for s in inputs)
    out = Value(tuple(output), TensorProto.FLOAT)
    return Op(node, values, (out,), tuple(grads or [True] * len(inputs)))


@pytest.mark.parametrize(
    ("made", "flops"),
    [
        (op("MatMul", [(5, 3, 4), (4, 7)], (5, 3, 7)), 2 * 5 * 3 * 4 * 7),
        (op("MatMul", [(4,), (4, 7)], (7,)), 2 * 4 * 7),
        (op("Gemm", [(3, 4), (4, 7), (7,)], (3, 7)), 2 * 3 * 4 * 7),
        (op("Gemm", [(4, 3), (7, 4)], (3, 7), transA=1, transB=1), 2 * 3 * 4 * 7),
        # Each of 2 groups sees 3 of 6 channels.
        (op("Conv", [(5, 6, 8, 8), (4, 3, 3, 3)], (5, 4, 8, 8), group=2), 2 * 5 * 4 * 64 * 27),
        (op("Conv", [(5, 6, 8), (4, 6, 3)], (5, 4, 8)), 2 * 5 * 4 * 8 * 18),
        (op("ConvTranspose", [(5, 6, 4, 4), (6, 2, 3, 3)], (5, 2, 9, 9)), 2 * 5 * 6 * 16 * 18),
        (op("Einsum", [(2, 3, 4), (2, 4, 5)], (2, 3, 5), equation="bij,bjk->bik"), 2 * 120),
        (op("Einsum", [(2, 3, 4), (4, 5)], (2, 3, 5), equation="...j, jk -> ...k"), 2 * 120),
        (op("LSTM", [(7, 2, 3), (1, 20, 3), (1, 20, 5)], (7, 1, 2, 5)), 2 * 7 * 2 * 20 * 8),
        (op("Attention", [(2, 4, 6, 8), (2, 4, 9, 8), (2, 4, 9, 5)], (2, 4, 6, 5)), 2 * 432 * 13),
        (
            op(
                "Attention",
                [(2, 6, 32), (2, 9, 16), (2, 9, 16)],
                (2, 6, 32),
                q_num_heads=4,
                kv_num_heads=2,
            ),
            2 * 432 * 16,
        ),
        (op("Relu", [(5, 5)], (5, 5)), 0),
    ],
)
def test_flops_of_the_forward_pass(made: Op, flops: int) -> None:
    assert made.flops == flops


def test_backward_flops_follow_the_gradients() -> None:
    def matmul(*grads: bool) -> float:
        return op("MatMul", [(3, 4), (4, 7)], (3, 7), list(grads)).backward_flops

    assert matmul(True, True) == 2 * matmul(True, False) == 2 * 2 * 3 * 4 * 7
    assert matmul(False, False) == 0
    # The bias has a gradient, but no product of its own.
    assert op("Gemm", [(3, 4), (4, 7), (7,)], (3, 7)).backward_flops == 2 * 2 * 3 * 4 * 7


def test_attention_keeps_its_scores_apart() -> None:
    made = op("Attention", [(2, 4, 6, 8), (2, 4, 9, 8), (2, 4, 9, 8)], (2, 4, 6, 8))
    assert made.scores == 2 * 4 * 6 * 9
    assert made.backward_flops == 2.5 * made.flops
    assert made.saved() == ["i0", "i1", "i2", "o0"]


@pytest.mark.parametrize(
    ("kind", "saved"),
    [("Relu", ["o0"]), ("Gelu", ["i0"]), ("Neg", []), ("Reshape", []), ("Sigmoid", ["o0"])],
)
def test_what_is_kept_for_the_backward_pass(kind: str, saved: list[str]) -> None:
    assert op(kind, [(3, 4)], (3, 4)).saved() == saved
    assert op(kind, [(3, 4)], (3, 4), [False]).saved() == []


def test_views_move_nothing_and_kernels_read_and_write() -> None:
    view, kernel = op("Transpose", [(3, 4)], (4, 3)), op("Gelu", [(3, 4)], (3, 4))
    assert (view.is_view, view.moved, view.backward_moved) == (True, 0, 0)
    assert (kernel.moved, kernel.backward_moved) == (24, 36)
    # A sum reads no saved tensor backward.
    assert op("Add", [(3, 4), (3, 4)], (3, 4)).backward_moved == 36
    assert op("Gelu", [(3, 4)], (3, 4), [False]).backward_moved == 0


def test_dropout_without_a_mask_is_a_view() -> None:
    assert op("Dropout", [(3, 4)], (3, 4)).is_view
    assert not op("Dropout", [(3, 4), (), ()], (3, 4)).is_view


def test_indices_are_kept_in_bytes() -> None:
    node = helper.make_node("Gather", ["table", "ids"], ["rows"])
    ids, rows = Value((3,), TensorProto.INT64), Value((3, 4), TensorProto.FLOAT)
    made = Op(node, (Value((9, 4), TensorProto.FLOAT), ids), (rows,), (True, False))
    assert made.saved() == []
    assert made.saved_bytes() == 24
    # It reads three rows of the table, not all nine.
    assert made.moved == 24
    assert op("MaxPool", [(1, 1, 4)], (1, 1, 2)).saved_bytes() == 16


def test_activations_and_biases_belong_to_what_they_are_applied_to() -> None:
    params = frozenset({"bias"})
    assert is_glued("Relu", ["x"], params)
    assert is_glued("Add", ["x", "bias"], params)
    assert not is_glued("Add", ["x", "y"], params)
    assert not is_glued("LayerNormalization", ["x", "bias"], params)
