"""Shapes of an ONNX graph at given sizes of its named dims, and what is constant in it.

One walk through the nodes: an op whose inputs are all known and small is computed (so that
``Shape -> Gather -> Concat -> Reshape`` chains resolve), any other is inferred by onnx itself. The
weights are never read: a parameter is its shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlplace.errors import InputError

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto, TypeProto

#: A larger tensor is never computed, only inferred.
_SMALL = 4096
#: Bytes of an element of each `TensorProto.DataType`.
_BYTES = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 8: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8, 14: 8}
_BYTES |= {15: 16, 16: 2, **dict.fromkeys(range(17, 21), 1)}
_FLOATS = {1, 10, 11, 16, 17, 18, 19, 20}


@dataclass(frozen=True)
class Value:
    """A tensor of the graph.

    Args:
        shape: Its sizes.
        dtype: A `TensorProto.DataType`.
    """

    shape: tuple[int, ...]
    dtype: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether it is a floating-point tensor."""
        return self.dtype in _FLOATS

    @property
    def floats(self) -> int:
        """Elements, if it is a floating-point tensor."""
        return self.elements if self.is_float else 0

    @property
    def other_bytes(self) -> int:
        """Bytes, if it is not."""
        return 0 if self.is_float else self.elements * _BYTES.get(self.dtype, 1)


@dataclass(frozen=True)
class Shapes:
    """What is known of a graph at given sizes.

    Args:
        values: Every tensor by name.
        constants: Names of tensors that depend on no input and no parameter, only on sizes.
        computed: Positions of the nodes that make them: they cost nothing at run time.
    """

    values: dict[str, Value]
    constants: frozenset[str]
    computed: frozenset[int]


def infer_shapes(model: ModelProto, dims: Mapping[str, int], folder: Path) -> Shapes:
    """Walk through a graph.

    Args:
        model: The model, functions inlined.
        dims: A size for every named dim of its inputs (`dim_names`).
        folder: Where tensors outside the file lie.

    Raises:
        InputError: On an op that onnx does not know, one with a body of its own (If, Loop, Scan),
            or one whose output shape depends on data; names the node.
    """
    return _Walk(model, dims, folder).run()


def dim_names(model: ModelProto) -> dict[str, list[str | int]]:
    """The sizes of each input: a number, or the name of the dim (``input.axis`` if it has none)."""
    stored = {tensor.name for tensor in model.graph.initializer}
    found: dict[str, list[str | int]] = {}
    for value in model.graph.input:
        if value.name not in stored:
            found[value.name] = [
                dim.dim_value if dim.HasField("dim_value") else dim.dim_param or f"{value.name}.{i}"
                for i, dim in enumerate(value.type.tensor_type.shape.dim)
            ]
    return found


class _Walk:
    def __init__(self, model: ModelProto, dims: Mapping[str, int], folder: Path) -> None:
        import onnx

        self.model, self.folder, self.onnx = model, folder, onnx
        self.versions = {entry.domain: entry.version for entry in model.opset_import}
        self.types: dict[str, TypeProto] = {}
        self.known: dict[str, np.ndarray[Any, Any]] = {}
        self.computed: set[int] = set()
        for name, sizes in dim_names(model).items():
            entry = next(value for value in model.graph.input if value.name == name)
            shape = [size if isinstance(size, int) else dims[size] for size in sizes]
            self.types[name] = self._type(entry.type.tensor_type.elem_type, shape)
        for tensor in model.graph.initializer:
            self.types[tensor.name] = self._type(tensor.data_type, tensor.dims)
            if _is_constant(tensor):
                self.known[tensor.name] = onnx.numpy_helper.to_array(tensor, str(folder))

    def run(self) -> Shapes:
        for position, node in enumerate(self.model.graph.node):
            if any(attribute.HasField("g") for attribute in node.attribute):
                raise self._refuse(node, "has a body of its own, whose cost is not fixed")
            if not (self._compute(position, node) or self._infer(node)):
                raise self._refuse(node, "the shape of its output depends on data")
        values = {
            name: Value(
                tuple(dim.dim_value for dim in kind.tensor_type.shape.dim),
                kind.tensor_type.elem_type,
            )
            for name, kind in self.types.items()
        }
        return Shapes(values, frozenset(self.known), frozenset(self.computed))

    def _compute(self, position: int, node: NodeProto) -> bool:
        """Compute a node of known inputs; whether that was possible."""
        inputs = [name for name in node.input if name]
        if node.op_type == "Shape" and inputs[0] in self.types:
            made = [self._sizes(node, inputs[0])]
        elif all(name in self.known for name in inputs) and not node.op_type.startswith("Random"):
            try:
                made = self._evaluate(node, inputs)
            except Exception:  # the reference evaluator lacks some ops: then infer
                return False
        else:
            return False
        if any(np.size(array) > _SMALL for array in made):
            return False
        for name, array in zip(node.output, made, strict=False):
            value = np.asarray(array)
            self.known[name] = value
            kind = self.onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
            self.types[name] = self._type(kind, value.shape)
        self.computed.add(position)
        return True

    def _sizes(self, node: NodeProto, name: str) -> np.ndarray[Any, Any]:
        shape = [dim.dim_value for dim in self.types[name].tensor_type.shape.dim]
        limits = {attribute.name: attribute.i for attribute in node.attribute}
        return np.array(shape[limits.get("start", 0) : limits.get("end", len(shape))], np.int64)

    def _evaluate(self, node: NodeProto, inputs: list[str]) -> list[Any]:
        from onnx.reference import ReferenceEvaluator

        helper = self.onnx.helper
        ends = [
            [helper.make_empty_tensor_value_info(name) for name in names if name]
            for names in (dict.fromkeys(inputs), node.output)
        ]
        graph = helper.make_graph([node], "one", *ends)
        one = helper.make_model(graph, opset_imports=self.model.opset_import)
        return list(ReferenceEvaluator(one).run(None, {name: self.known[name] for name in inputs}))

    def _infer(self, node: NodeProto) -> bool:
        """Infer the outputs of a node; whether all their sizes are known."""
        defs, helper = self.onnx.defs, self.onnx.helper
        version = self.versions.get(node.domain, self.versions.get("", 1))
        if not defs.has(node.op_type, version, node.domain):
            raise self._refuse(node, f"onnx knows no such op (domain {node.domain or 'ai.onnx'})")
        inputs = [name for name in node.input if name]
        for name in inputs:
            if name not in self.types:
                raise self._refuse(node, f"reads {name!r}, which nothing before it makes")
        data = {
            name: self.onnx.numpy_helper.from_array(self.known[name], name)
            for name in inputs
            if name in self.known
        }
        try:
            found = self.onnx.shape_inference.infer_node_outputs(
                defs.get_schema(node.op_type, version, node.domain),
                node,
                {name: self.types[name] for name in inputs},
                data,
                opset_imports=[helper.make_opsetid(d, v) for d, v in self.versions.items()],
                ir_version=self.model.ir_version,
            )
        except (RuntimeError, self.onnx.shape_inference.InferenceError) as error:
            raise self._refuse(node, str(error).strip().splitlines()[-1]) from error
        self.types.update(found)
        return all(name in found and _is_fixed(found[name]) for name in node.output if name)

    def _type(self, kind: int, shape: Any) -> TypeProto:
        made: TypeProto = self.onnx.helper.make_tensor_type_proto(kind, list(shape))
        return made

    def _refuse(self, node: NodeProto, rule: str) -> InputError:
        where = f"{node.op_type} {node.name or node.output[0]}"
        return InputError("onnx node", where, rule)


def _is_constant(tensor: TensorProto) -> bool:
    """Whether an initializer is a setting, not a parameter: small and integer, or one number."""
    elements: int = math.prod(tensor.dims)
    return elements <= (1 if tensor.data_type in _FLOATS else _SMALL)


def _is_fixed(kind: TypeProto) -> bool:
    tensor = kind.tensor_type
    sizes = [dim.HasField("dim_value") for dim in tensor.shape.dim]
    return bool(tensor.HasField("shape")) and all(sizes)
