"""What the ops of an ONNX graph cost, by formula.

- FLOPs: matmul-like ops only, a multiply and an add are two. Backward: once for each operand that a
  gradient flows to.
- Moved: a kernel reads its float inputs and writes its float outputs; backward it reads the
  gradients of its outputs and what was saved, and writes the gradients of its inputs.
- Views (reshapes, transposes, slices, casts of nothing) launch nothing and move nothing.
- Saved: an op keeps its float inputs, or its outputs (activation functions that are their own
  derivative's argument), or nothing (sums and copies); indices and masks are kept in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlplace.graph.formats.onnx_shapes import Value

if TYPE_CHECKING:
    from onnx import NodeProto

VIEWS = {"Expand", "Flatten", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose"}
VIEWS |= {"Unsqueeze"}
_SAVE_NOTHING = {"Add", "AveragePool", "Cast", "Concat", "DepthToSpace", "GlobalAveragePool"}
_SAVE_NOTHING |= {"Mean", "Neg", "Pad", "ReduceMean", "ReduceSum", "Resize", "SpaceToDepth"}
_SAVE_NOTHING |= {"Sub", "Sum", "Tile", "Gather", "Where"}
_SAVE_OUTPUT = {"Elu", "Exp", "LogSoftmax", "Reciprocal", "Relu", "Sigmoid", "Softmax", "Sqrt"}
_SAVE_OUTPUT |= {"Tanh"}
_ACTIVATIONS = {"BatchNormalization", "Celu", "Elu", "Gelu", "HardSigmoid", "HardSwish"}
_ACTIVATIONS |= {"LeakyRelu", "Mish", "PRelu", "Relu", "Selu", "Sigmoid", "Softplus", "Swish"}
_ACTIVATIONS |= {"Tanh"}
#: Ops that keep an input which is no float: its position.
_SAVE_INDEX = {"Gather": 1, "GatherElements": 1, "GatherND": 1, "ScatterND": 1, "Where": 0}
_LOOKUPS = {"Gather", "GatherElements", "GatherND"}
_RECURRENT = {"RNN", "GRU", "LSTM"}
_INDEX_BYTES = 8


def attributes(node: NodeProto) -> dict[str, Any]:
    """Attributes of a node as plain values."""
    from onnx.helper import get_attribute_value

    return {attribute.name: get_attribute_value(attribute) for attribute in node.attribute}


@dataclass(frozen=True)
class Op:
    """A node with its tensors at one batch size.

    Args:
        node: The node.
        inputs: Its inputs by position; None for one that is left out.
        outputs: Its outputs.
        grads: Whether a gradient flows to each input.
    """

    node: NodeProto
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value, ...]
    grads: tuple[bool, ...]

    @property
    def is_view(self) -> bool:
        """Whether it only looks at its input in another way."""
        return self.node.op_type in VIEWS or (
            # Without a mask among its inputs dropout does nothing, as exported for inference.
            self.node.op_type == "Dropout" and len(self.node.input) < 3
        )

    @property
    def is_matmul(self) -> bool:
        """Whether it holds matmul-like work."""
        return self.node.op_type in _FLOPS

    @property
    def needs_grad(self) -> bool:
        """Whether it has a backward pass."""
        return any(self.grads)

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass."""
        return _FLOPS[self.node.op_type](self) if self.is_matmul else 0.0

    @property
    def backward_flops(self) -> float:
        """FLOPs of the backward pass: those of the forward pass for each operand with a gradient.

        An attention kernel has two products forward and five backward, as it redoes the scores; a
        recurrent one twice its products, as its states have gradients whatever its input has.
        """
        if self.node.op_type == "Attention":
            return 2.5 * self.flops if self.needs_grad else 0.0
        if self.node.op_type in _RECURRENT:
            return 2.0 * self.flops if self.needs_grad else 0.0
        return self.flops * sum(self.grads if self.node.op_type == "Einsum" else self.grads[:2])

    @property
    def read(self) -> int:
        """Float elements that it reads of its inputs; a look-up reads what it copies."""
        if self.node.op_type in _LOOKUPS:
            return self.written
        return sum(value.floats for value in self.inputs if value is not None)

    @property
    def written(self) -> int:
        """Float elements of its outputs."""
        return sum(value.floats for value in self.outputs)

    @property
    def moved(self) -> int:
        """Float elements that it reads and writes."""
        return 0 if self.is_view else self.read + self.written

    @property
    def backward_moved(self) -> int:
        """Float elements that its backward pass reads and writes."""
        if self.is_view or not self.needs_grad:
            return 0
        to_inputs = sum(v.floats for v, g in zip(self.inputs, self.grads, strict=True) if v and g)
        kept = self.written if self.node.op_type in _SAVE_OUTPUT else self.read
        return self.written + to_inputs + (0 if self.node.op_type in _SAVE_NOTHING else kept)

    @property
    def scores(self) -> int:
        """Elements of the score matrices of an attention kernel."""
        if self.node.op_type != "Attention":
            return 0
        batch, heads, queries, keys, _, _ = attention_sizes(self)
        return batch * heads * queries * keys

    def saved(self) -> list[str]:
        """Names of the float tensors that it keeps for the backward pass."""
        if self.is_view or not self.needs_grad or self.node.op_type in _SAVE_NOTHING:
            return []
        if self.node.op_type in _SAVE_OUTPUT:
            return [self.node.output[0]]
        values = zip(self.node.input, self.inputs, strict=True)
        names = [name for name, value in values if value is not None and value.is_float]
        return [*names, self.node.output[0]] if self.node.op_type == "Attention" else names

    def saved_bytes(self) -> int:
        """Bytes of indices and masks that it keeps."""
        if not self.needs_grad:
            return 0
        if self.node.op_type == "MaxPool":
            return self.outputs[0].elements * _INDEX_BYTES
        position = _SAVE_INDEX.get(self.node.op_type)
        value = self.inputs[position] if position is not None else None
        return value.other_bytes if value is not None else 0


def attention_sizes(op: Op) -> tuple[int, int, int, int, int, int]:
    """Batch, query heads, queries, keys, head size of q and k, head size of v of ``Attention``."""
    settings = attributes(op.node)
    q, k, v = (_required(op, position).shape for position in range(3))
    past = op.inputs[4].shape[2] if len(op.inputs) > 4 and op.inputs[4] is not None else 0
    if len(q) == 4:
        return q[0], q[1], q[2], k[2] + past, q[3], v[3]
    heads, kv_heads = settings["q_num_heads"], settings["kv_num_heads"]
    return q[0], heads, q[1], k[1] + past, q[2] // heads, v[2] // kv_heads


def _conv(op: Op) -> float:
    weight = _required(op, 1).shape
    return 2.0 * op.outputs[0].elements * math.prod(weight[1:])


def _conv_transpose(op: Op) -> float:
    weight = _required(op, 1).shape
    return 2.0 * _required(op, 0).elements * math.prod(weight[1:])


def _gemm(op: Op) -> float:
    inner = _required(op, 0).shape[0 if attributes(op.node).get("transA") else 1]
    return 2.0 * op.outputs[0].elements * inner


def _matmul(op: Op) -> float:
    return 2.0 * op.outputs[0].elements * _required(op, 0).shape[-1]


def _quantized_matmul(op: Op) -> float:
    return 2.0 * op.outputs[0].elements * _required(op, 0).shape[-1]


def _quantized_conv(op: Op) -> float:
    return 2.0 * op.outputs[0].elements * math.prod(_required(op, 3).shape[1:])


def _einsum(op: Op) -> float:
    """Two for each point of the index space: exact for two operands."""
    terms = attributes(op.node)["equation"].decode().replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, value in zip(terms, op.inputs, strict=True):
        letters = term.replace("...", "")
        shape = value.shape if value else ()
        inner = shape[len(shape) - len(letters) :] if term.startswith("...") else shape
        sizes.update(zip(letters, inner, strict=False))
        for place, size in enumerate(reversed(shape[: len(shape) - len(letters)])):
            sizes[f"...{place}"] = max(size, sizes.get(f"...{place}", 1))
    return 2.0 * math.prod(sizes.values())


def _attention(op: Op) -> float:
    batch, heads, queries, keys, size, value_size = attention_sizes(op)
    return 2.0 * batch * heads * queries * keys * (size + value_size)


def _recurrent(op: Op) -> float:
    """Input and recurrent products of every step, gate and direction."""
    steps, batch = _required(op, 0).shape[:2]
    weight, recurrent = _required(op, 1).shape, _required(op, 2).shape
    return 2.0 * steps * batch * (math.prod(weight) + math.prod(recurrent))


def _required(op: Op, position: int) -> Value:
    value = op.inputs[position]
    assert value is not None, f"{op.node.op_type} lacks input {position}"
    return value


_FLOPS: Mapping[str, Callable[[Op], float]] = {
    "Attention": _attention,
    "Conv": _conv,
    "ConvInteger": _conv,
    "ConvTranspose": _conv_transpose,
    "Einsum": _einsum,
    "GRU": _recurrent,
    "Gemm": _gemm,
    "LSTM": _recurrent,
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "QLinearConv": _quantized_conv,
    "QLinearMatMul": _quantized_matmul,
    "RNN": _recurrent,
}


def is_glued(op_type: str, inputs: Sequence[str], params: frozenset[str]) -> bool:
    """Whether an op belongs to what it is applied to: an activation function, a bias, a scale."""
    biased = op_type in {"Add", "Mul"} and any(name in params for name in inputs)
    return op_type in _ACTIVATIONS or biased


def is_anchor(op_type: str, inputs: Sequence[str], params: frozenset[str]) -> bool:
    """Whether a group is built around such an op: matmul-like, or a look-up in a parameter."""
    return op_type in _FLOPS or (op_type == "Gather" and inputs[0] in params)
