"""An ONNX file as an op graph that every planner takes.

An ONNX file says nothing of training: its float initializers of more than one element count as
trainable (running statistics of batch norm excepted), all costs come from formulas (`onnx_costs`),
and groups have the layout ``replicate`` only, since sharding rules work on PyTorch programs. An
initializer that several groups read is tied; exporters merge equal initial values too, so export a
trained model, or one with the tensors you mean.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlplace.errors import InputError
from rlplace.graph.formats.onnx_costs import Op, attributes, is_anchor, is_glued
from rlplace.graph.formats.onnx_file import input_sizes, load_onnx, sink
from rlplace.graph.formats.onnx_groups import Body, intervals
from rlplace.graph.formats.onnx_names import group_names, module_of
from rlplace.graph.formats.onnx_shapes import Shapes, Value, dim_names, infer_shapes
from rlplace.graph.types import Affine, Edge, Group, OpGraph, Structure, Work

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

#: Two batch sizes give every quantity as base + per_sample * batch.
_LOW, _HIGH = 2, 3
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
    model = load_onnx(Path(path))
    sizes, batch = input_sizes(model, dict(dims or {}), seq_len)
    folder = Path(path).parent
    if isinstance(batch, str):
        low, high = (infer_shapes(model, {**sizes, batch: b}, folder) for b in (_LOW, _HIGH))
        return _Reader(Path(path).stem, model, low, high, None).graph()
    shapes = infer_shapes(model, sizes, folder)
    return _Reader(Path(path).stem, model, shapes, shapes, batch).graph()


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
        self.body = sink(nodes, self.inputs)
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
        labels = group_names([part.nodes for part in parts], self.stored)
        groups = []
        for index, (part, name) in enumerate(zip(parts, labels, strict=True)):
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
        glued = frozenset(
            position
            for position, node in enumerate(self.body)
            if is_glued(node.op_type, node.input, self.stored)
        )
        body = Body(anchors, spans, len(self.body), glued)
        return [self._part(start, stop) for start, stop in intervals(body)]

    def _part(self, start: int, stop: int) -> _Part:
        nodes = tuple(self.body[start:stop])
        made = {name for node in nodes for name in node.output}
        outer = dict.fromkeys(n for node in nodes for n in node.input if n and n not in made)
        reads = tuple(name for name in outer if name not in self.constants)
        return _Part(nodes, reads, tuple(name for name in reads if name in self.stored))

    def _saved(self, part: _Part) -> list[str]:
        """Float tensors that a part keeps; inputs of the graph are there anyway."""
        free = self.stored | self.constants | self.inputs
        return [
            name
            for node in part.nodes
            for name in self._op(node, self.low).saved()
            if self.roots.get(name, name) not in free
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
