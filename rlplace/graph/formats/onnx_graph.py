"""An ONNX file as an op graph that every planner takes.

An ONNX file says nothing of training: its float initializers of more than one element count as
trainable (running statistics of batch norm excepted), all costs come from formulas (`onnx_costs`),
and groups have the layout ``replicate`` only, since sharding rules work on PyTorch programs. An
initializer that several groups read is tied; exporters merge equal initial values too, so export a
trained model, or one with the tensors you mean.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlplace.errors import InputError, MissingExtraError
from rlplace.graph.formats.onnx_costs import Op, attributes, is_anchor
from rlplace.graph.formats.onnx_groups import Body, intervals
from rlplace.graph.formats.onnx_shapes import Shapes, Value, dim_names, infer_shapes
from rlplace.graph.types import Affine, Edge, Group, OpGraph, Structure, Work

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

#: Two batch sizes give every quantity as base + per_sample * batch.
_LOW, _HIGH = 2, 3
_SCOPES = "pkg.torch.onnx.name_scopes"
#: Inputs of an op that are states, not parameters: mean and variance.
_STATISTICS = {"BatchNormalization": (3, 4)}


def read_onnx(
    path: str | Path, *, dims: Mapping[str, int] | None = None, seq_len: int | None = None
) -> OpGraph:
    """The op graph of an ONNX file. The weights are not read.

    The batch is the named dim 0 of the inputs. A file with a fixed batch is taken to be
    proportional to it.

    Args:
        path: The file.
        dims: Sizes of the other named dims.
        seq_len: Size of the one named dim that `dims` leaves out.

    Raises:
        InputError: If the file cannot be read or is damaged, a named dim has no size, or an op is
            unknown, has a body of its own, or a shape that depends on data.
        MissingExtraError: If the package onnx is not installed.
    """
    model = _load(Path(path))
    sizes, batch = _sizes(model, dict(dims or {}), seq_len)
    folder = Path(path).parent
    if isinstance(batch, str):
        low, high = (infer_shapes(model, {**sizes, batch: b}, folder) for b in (_LOW, _HIGH))
        return _Reader(Path(path).stem, model, low, high, None).graph()
    shapes = infer_shapes(model, sizes, folder)
    return _Reader(Path(path).stem, model, shapes, shapes, batch).graph()


def _load(path: Path) -> ModelProto:
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


def _sizes(
    model: ModelProto, given: dict[str, int], seq_len: int | None
) -> tuple[dict[str, int], str | int]:
    """A size for every named dim but the batch; the batch's name, or its fixed size."""
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


@dataclass(frozen=True)
class _Part:
    """A group before it is described: its nodes, what it reads from outside, what others read."""

    nodes: tuple[NodeProto, ...]
    reads: tuple[str, ...]
    params: tuple[str, ...]


class _Reader:
    """Turns a model with known shapes into an op graph."""

    def __init__(
        self, name: str, model: ModelProto, low: Shapes, high: Shapes, fixed: int | None
    ) -> None:
        self.name, self.model = name, model
        self.low, self.high, self.fixed = low.values, high.values, fixed
        self.constants = low.constants & high.constants
        self.inputs = frozenset(dim_names(model))
        computed = low.computed & high.computed
        nodes = [node for i, node in enumerate(model.graph.node) if i not in computed]
        self.body = _sink(nodes, self.inputs)
        if not self.body:
            raise InputError("onnx graph", name, "no op of it depends on an input or a parameter")
        stored = {tensor.name for tensor in model.graph.initializer} - self.constants
        states = {
            node.input[position]
            for node in self.body
            for position in _STATISTICS.get(node.op_type, ())
        }
        floats = {name for name in stored if self.low[name].is_float}
        self.stored, self.trainable = frozenset(stored), frozenset(floats - states)
        self.grads = self._with_gradient()
        self.roots = self._roots()

    def graph(self) -> OpGraph:
        parts = self._parts()
        uses = Counter(name for part in parts for name in part.params)
        structures: dict[str, Structure] = {}
        numbers: dict[str, int] = {}
        kept: set[str] = set()
        groups = []
        for index, (part, name) in enumerate(zip(parts, _names(parts), strict=True)):
            key = self._hash(part, kept)
            if key not in structures:
                numbers[key] = len(numbers)
                structures[key] = Structure(key, self._work(part, kept))
            kept |= {self.roots.get(n, n) for n in self._saved(part)}
            ops = tuple(node.name or node.output[0] for node in part.nodes)
            modules = tuple(dict.fromkeys(module_of(node, self.stored) for node in part.nodes))
            groups.append(Group(index, name, numbers[key], ops, modules, part.params))
        return OpGraph(
            name=self.name,
            groups=tuple(groups),
            edges=self._edges(parts),
            structures=tuple(structures.values()),
            tokens_per_sample=self._tokens(),
            tied=tuple(
                (name, self.low[name].elements)
                for name, count in uses.items()
                if count > 1 and name in self.trainable
            ),
        )

    def _with_gradient(self) -> frozenset[str]:
        found = set(self.trainable)
        for node in self.body:
            if any(name in found for name in node.input):
                found |= {n for n in node.output if n in self.low and self.low[n].is_float}
        return frozenset(found)

    def _roots(self) -> dict[str, str]:
        """The tensor behind each view."""
        roots: dict[str, str] = {}
        for node in self.body:
            if self._op(node, self.low).is_view:
                source = roots.get(node.input[0], node.input[0])
                roots |= dict.fromkeys(node.output, source)
        return roots

    def _op(self, node: NodeProto, values: Mapping[str, Value]) -> Op:
        return Op(
            node,
            tuple(values[name] if name else None for name in node.input),
            tuple(values[name] for name in node.output if name in values),
            tuple(name in self.grads for name in node.input),
        )

    def _parts(self) -> list[_Part]:
        maker = {name: i for i, node in enumerate(self.body) for name in node.output if name}
        last = dict.fromkeys(maker, 0)
        for position, node in enumerate(self.body):
            last |= {name: position for name in node.input if name in maker}
        spans = [
            (maker[name], last[name], self.low[name].elements, name in self.grads)
            for name in maker
            if name in self.low
        ]
        anchors = [
            position
            for position, node in enumerate(self.body)
            if is_anchor(node.op_type, node.input, self.stored)
        ]
        return [self._part(a, b) for a, b in intervals(Body(anchors, spans, len(self.body)))]

    def _part(self, start: int, stop: int) -> _Part:
        nodes = tuple(self.body[start:stop])
        made = {name for node in nodes for name in node.output}
        outer = dict.fromkeys(n for node in nodes for n in node.input if n and n not in made)
        reads = tuple(name for name in outer if name not in self.constants)
        return _Part(nodes, reads, tuple(name for name in reads if name in self.stored))

    def _saved(self, part: _Part) -> list[str]:
        return [
            name
            for node in part.nodes
            for name in self._op(node, self.low).saved()
            if name not in self.stored and name not in self.constants
        ]

    def _hash(self, part: _Part, kept: set[str]) -> str:
        """Equal for groups of the same ops, settings, shapes and inner edges."""
        numbers: dict[str, int] = {}
        lines = []
        for name in part.reads:
            numbers[name] = len(numbers)
            role = "param" if name in self.trainable else "state" if name in self.stored else "in"
            flags = f"{name in self.grads} {self.roots.get(name, name) in kept}"
            lines.append(f"{role} {self.low[name]} {self.high[name]} {flags}")
        for node in part.nodes:
            inputs = [numbers.get(n, "constant" if n else "") for n in node.input]
            numbers |= {name: len(numbers) + i for i, name in enumerate(node.output)}
            shapes = [(self.low.get(name), self.high.get(name)) for name in node.output]
            settings = sorted((name, str(v)) for name, v in attributes(node).items())
            lines.append(f"{node.domain} {node.op_type} {inputs} {settings} {shapes}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def _work(self, part: _Part, kept: set[str]) -> Work:
        pairs = [(self._op(node, self.low), self._op(node, self.high)) for node in part.nodes]

        def total(quantity: Callable[[Op], float]) -> Affine:
            ends = (sum(map(quantity, ops)) for ops in zip(*pairs, strict=True))
            return self._line(*ends)

        largest = max(pairs, key=lambda pair: pair[1].read + pair[1].written)
        transient = self._line(*(op.read + op.written for op in largest))
        saved = {self.roots.get(name, name) for name in self._saved(part)} - kept
        params = [name for name in part.params if name in self.trainable]
        sizes = {name: self.low[name].elements for name in part.params}
        return Work(
            flops=total(lambda op: op.flops),
            backward_flops=total(lambda op: op.backward_flops),
            matmuls=sum(low.is_matmul for low, _ in pairs),
            kernels=sum(not low.is_view for low, _ in pairs),
            moved=total(lambda op: op.moved),
            backward_moved=total(lambda op: op.backward_moved),
            attention_flops=total(lambda op: op.flops if op.node.op_type == "Attention" else 0.0),
            score_floats=total(lambda op: op.scores),
            saved=self._line(*(sum(v[n].floats for n in saved) for v in (self.low, self.high))),
            saved_bytes=total(lambda op: op.saved_bytes()),
            transient=transient,
            chunked_transient=transient,
            params=sum(sizes[name] for name in params),
            frozen_params=sum(sizes.values()) - sum(sizes[name] for name in params),
        )

    def _line(self, low: float, high: float) -> Affine:
        if self.fixed is not None:
            return Affine(0.0, low / self.fixed)
        return Affine.through(_LOW, low, _HIGH, high)

    def _edges(self, parts: Sequence[_Part]) -> tuple[Edge, ...]:
        maker = {n: i for i, part in enumerate(parts) for node in part.nodes for n in node.output}
        return tuple(
            Edge(
                maker[name],
                index,
                name,
                self._line(self.low[name].floats, self.high[name].floats),
                self._line(self.low[name].other_bytes, self.high[name].other_bytes),
            )
            for index, part in enumerate(parts)
            for name in part.reads
            if name in maker
        )

    def _tokens(self) -> int:
        """Length of the first (batch, length) integer input, or 1."""
        values = (self.low[name] for name in dim_names(self.model))
        lengths = (v.shape[1] for v in values if len(v.shape) == 2 and not v.is_float)
        return next(lengths, 1)


def _sink(nodes: Sequence[NodeProto], inputs: frozenset[str]) -> list[NodeProto]:
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


def module_of(node: NodeProto, stored: frozenset[str]) -> str:
    """Module path of a node: from the exporter's notes, its own name, or its parameters."""
    notes = {entry.key: entry.value for entry in node.metadata_props}
    if _SCOPES in notes:
        scopes: list[str] = ast.literal_eval(notes[_SCOPES])
        return scopes[-2] if len(scopes) > 1 else ""
    if node.name.startswith("/"):
        return ".".join(node.name.strip("/").split("/")[:-1])
    params = (name for name in node.input if name in stored)
    return next(params, "").rpartition(".")[0]


def _names(parts: Sequence[_Part]) -> list[str]:
    """What the working ops of each part have in common of their module paths, made unique."""
    seen: Counter[str] = Counter()
    names = []
    for part in parts:
        stored = frozenset(part.params)
        anchors = [n for n in part.nodes if is_anchor(n.op_type, n.input, stored)]
        paths = [module_of(node, stored).split(".") for node in anchors or part.nodes]
        shared = [a[0] for a in zip(*paths, strict=False) if len(set(a)) == 1]
        name = ".".join(_prefix(paths, len(shared))) or (anchors or part.nodes)[0].op_type
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names


def _prefix(paths: Sequence[Sequence[str]], most: int) -> list[str]:
    """The parts with which all paths begin."""
    for length in range(most, 0, -1):
        if len({tuple(path[:length]) for path in paths}) == 1:
            return [part for part in paths[0][:length] if part]
    return []
