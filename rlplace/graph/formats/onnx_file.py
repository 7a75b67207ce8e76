"""Opens an ONNX file, without its weights, and says which dim of its inputs is the batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlplace.errors import InputError, MissingExtraError
from rlplace.graph.formats.onnx_shapes import dim_names

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


def load_onnx(path: Path) -> ModelProto:
    """The model in a file: functions inlined, no initializer behind an ``Identity``.

    Raises:
        InputError: If the file cannot be read, is damaged, or has no nodes.
        MissingExtraError: If the package onnx is not installed.
    """
    try:
        import onnx
        import onnx.inliner
    except ImportError as error:
        rule = "an ONNX file needs the package onnx: pip install 'rlplace[onnx]'"
        raise MissingExtraError(rule) from error
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, load_external_data=False)
    except OSError as error:
        raise InputError("file", str(path), f"cannot be read ({error.strerror})") from error
    except DecodeError as error:
        raise InputError("file", str(path), "is not an ONNX file, or is cut off") from error
    if not model.graph.node:
        raise InputError("file", str(path), "is not an ONNX file, or has no nodes")
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    return _without_aliases(model)


def input_sizes(
    model: ModelProto, given: dict[str, int], seq_len: int | None
) -> tuple[dict[str, int], str | int]:
    """A size for every named dim but the batch; the batch's name, or its fixed size.

    Raises:
        InputError: If a named dim has no size, or the inputs name their batch differently.
    """
    inputs = [dims for dims in dim_names(model).values() if dims]
    if not inputs:
        raise InputError("onnx inputs", [], "the graph has no input with a batch dim")
    named = dict.fromkeys(dim for dims in inputs for dim in dims if isinstance(dim, str))
    first = dict.fromkeys(dims[0] for dims in inputs if dims[0] not in given)
    symbols = [dim for dim in first if isinstance(dim, str)]
    if len(symbols) > 1:
        rule = "inputs name their batch differently: give the size of all but one in dims"
        raise InputError("onnx inputs", symbols, rule)
    batch: str | int = symbols[0] if symbols else next(iter(first), 1)
    missing = [dim for dim in named if dim != batch and dim not in given]
    if len(missing) == 1 and seq_len is not None:
        given[missing.pop()] = seq_len
    if missing:
        rule = "these named dims need a size: give it in dims, or as seq_len if it is one"
        raise InputError("dims", ", ".join(map(str, missing)), rule)
    return given, batch


def sink(nodes: Sequence[NodeProto], inputs: frozenset[str]) -> list[NodeProto]:
    """The nodes in order, but those that depend on no input just before their first reader.

    Exporters put what only depends on parameters (a transpose, a mask) at the top of the file.
    """
    maker = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    depends = set(inputs)
    free = []
    for node in nodes:
        free.append(depends.isdisjoint(node.input))
        depends |= set() if free[-1] else set(node.output)
    order: dict[int, None] = {}

    def place(position: int) -> None:
        for name in nodes[position].input:
            source = maker.get(name)
            if source is not None and free[source] and source not in order:
                place(source)
        order[position] = None

    for position in range(len(nodes)):
        if not free[position]:
            place(position)
    return [nodes[i] for i in [*order, *(i for i in range(len(nodes)) if i not in order)]]


def _without_aliases(model: ModelProto) -> ModelProto:
    """The model with every ``Identity`` of an initializer replaced by what it stands for.

    So exporters write equal or tied initializers.
    """
    stored = {tensor.name: tensor.name for tensor in model.graph.initializer}
    left = []
    for node in model.graph.node:
        if node.op_type == "Identity" and not node.domain and node.input[0] in stored:
            stored[node.output[0]] = stored[node.input[0]]
            continue
        for position, name in enumerate(node.input):
            node.input[position] = stored.get(name, name)
        left.append(node)
    del model.graph.node[:]
    model.graph.node.extend(left)
    return model
