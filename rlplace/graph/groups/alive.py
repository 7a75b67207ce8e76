"""Where a program may be cut, and how many tensors are alive there.

Not counted are tensors that have nothing to do with the place itself:

- *background*: several elements of a repeated module read it (an encoder's output, a shared
  position bias), or it is concatenated again and again (the features of a dense block);
- *passing*: it is made, or was last read, far away and is read next far away, so that it passes
  over several parts of the model (the long skip of a UNet, the output of another tower). The
  residual of a block passes over one part, and counts;
- *idle*: it waits to be joined with what is computed meanwhile and does not depend on it (the
  output of the first of two siamese towers).

A float input of the user counts between its first and its last reader, as the same tensor would if
an op had made it: a block is not cut for being the first one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import fx

from rlplace.graph.groups.adapters import find_adapters
from rlplace.graph.groups.anchors import (
    JOINS,
    SUMS,
    common,
    elements,
    is_anchor,
    is_lookup,
    is_matmul,
    kind,
    module_path,
)
from rlplace.graph.program import Program, base_of, writes_in_place
from rlplace.graph.shapes import size_of

_ACTIVATIONS = {"relu", "relu_", "gelu", "silu", "silu_", "tanh", "sigmoid", "leaky_relu", "elu"}
_ACTIVATIONS |= {"leaky_relu_", "elu_", "relu6", "hardtanh", "hardtanh_", "hardswish", "mish"}

#: A tensor that passes over more matmul-like ops than this is not of the place. Those of a sum of
#: linear maps count as one.
NEAR = 12
#: A module with so many matmul-like ops is a part of the model. What passes over two of them, of
#: which one depends on the other, is not of the place either.
PART = 2


@dataclass(frozen=True, order=True)
class Position:
    """A place between two body nodes; smaller is better, field by field.

    Args:
        alive: Tensors that cross, background and passing ones not counted; at least 1.
        inside: Whether no element of a repeated module begins or ends here.
        depth: Length of what the module paths on both sides have in common.
        bytes: Of all tensors that cross, at a batch of 2.
        splits: Whether it would part an activation function from what it is applied to.
        index: Of the node that follows.
    """

    alive: int
    inside: bool
    depth: int
    bytes: int
    splits: bool
    index: int


@dataclass(frozen=True)
class Gap:
    """The nodes between two neighbouring anchors, where a cut may be.

    Args:
        left: The anchor before.
        right: The anchor after.
        start: Index of the anchor before.
        stop: Index of the anchor after.
        legal: Positions where a cut is legal, at least one, in order.
    """

    left: fx.Node
    right: fx.Node
    start: int
    stop: int
    legal: tuple[Position, ...]

    @property
    def best(self) -> Position:
        """The best position."""
        return min(self.legal)

    @property
    def joins_lookup(self) -> bool:
        """Whether the second anchor is a table lookup that goes with the first one.

        Two lookups in a row are one embedding, and so is what positions are added to.
        """
        return is_lookup(self.right) and (is_lookup(self.left) or _is_added(self.right))


class Anchors:
    """The anchors of a body, each sum of linear maps taken as one."""

    def __init__(self, program: Program, body: Sequence[fx.Node]) -> None:
        self.adapters = find_adapters(program, body)
        inner = {i for first, last in self.adapters for i in range(first + 1, last)}
        self.all = [i for i, node in enumerate(body) if i not in inner and is_anchor(node)]
        self._matmuls = [i for i in self.all if is_matmul(body[i])]

    def matmuls(self, start: int, stop: int) -> list[int]:
        """Indices of the matmul-like ones from `start` on and before `stop`."""
        return self._matmuls[bisect_left(self._matmuls, start) : bisect_left(self._matmuls, stop)]


def find_gaps(program: Program, body: Sequence[fx.Node], anchors: Anchors) -> list[Gap]:
    """The gaps between neighbouring anchors, in order."""
    positions = _positions(program, body, anchors)
    gaps = []
    for start, stop in pairwise(anchors.all):
        legal = tuple(p for p in positions[start + 1 : stop + 1] if p is not None)
        if legal:
            gaps.append(Gap(body[start], body[stop], start, stop, legal))
    return gaps


def _positions(
    program: Program, body: Sequence[fx.Node], anchors: Anchors
) -> list[Position | None]:
    """What is alive before each body node; None where no cut is legal."""
    order = {node: index for index, node in enumerate(body)}
    distance, live = _Distance(body, anchors), _live(body)
    size, count, illegal = (_Spans(len(body)) for _ in range(3))
    for first, last in anchors.adapters:
        illegal.add(first + 1, last, 1)
    for index, node in enumerate(body):
        last = max((order[user] for user in node.users if user in order), default=index)
        bytes_ = _bytes(node)
        size.add(index + 1, last, bytes_ or 0)
        illegal.add(index + 1, last, bytes_ is None)
        illegal.add(_base(node, order, index) + 1, index, True)
    for node in (*body, *_float_inputs(program)):
        readers = sorted((user for user in node.users if user in live), key=order.__getitem__)
        if readers and not distance.is_background(readers):
            stops = [order[reader] for reader in readers]
            for start, stop in pairwise([order.get(node, stops[0]), *stops]):
                if not distance.passes(start, stop):
                    count.add(start + 1, stop, 1)
    paths = [module_path(node).split(".") for node in body]
    found: list[Position | None] = [None]
    totals = zip(illegal.totals(), count.totals(), size.totals(), strict=True)
    for index, (forbidden, alive, bytes_) in list(enumerate(totals))[1 : len(body)]:
        left, right = paths[index - 1], paths[index]
        inside = elements(left) == elements(right)
        splits = kind(body[index]) in _ACTIVATIONS
        depth = len(common([left, right]))
        place = Position(max(1, alive), inside, depth, bytes_, splits, index)
        found.append(None if forbidden else place)
    return found


class _Spans:
    """Sums over spans of positions."""

    def __init__(self, length: int) -> None:
        self._steps = [0] * (length + 2)

    def add(self, first: int, last: int, value: int) -> None:
        """Add a value at every position from `first` to `last`; none if `last` is smaller."""
        if first <= last:
            self._steps[first] += value
            self._steps[last + 1] -= value

    def totals(self) -> list[int]:
        """The sum at each position, 0 to the length."""
        return list(accumulate(self._steps))[:-1]


class _Distance:
    """How much of the model lies between the maker of a tensor and its last reader."""

    def __init__(self, body: Sequence[fx.Node], anchors: Anchors) -> None:
        self._body, self._anchors = body, anchors
        self._paths = [_call_path(node) for node in body]
        self._calls: dict[str, tuple[int, int]] = {}
        for index, path in enumerate(self._paths):
            for prefix in _prefixes(path):
                first, _ = self._calls.get(prefix, (index, index))
                self._calls[prefix] = (first, index)
        matmuls = anchors.matmuls(0, len(body))
        self._sizes = Counter(prefix for i in matmuls for prefix in _prefixes(self._paths[i]))

    def passes(self, start: int, stop: int) -> bool:
        """Whether a tensor made or read at `start`, and then at `stop`, just passes in between."""
        matmuls = self._anchors.matmuls(start + 1, stop)
        if len(matmuls) > NEAR or len(matmuls) < 2 * PART:
            return len(matmuls) > NEAR
        if self._passes_parts(start, stop, matmuls):
            return True
        joins = kind(self._body[stop]) in JOINS | SUMS
        return joins and not self._below([start], stop) & set(matmuls)

    def _passes_parts(self, start: int, stop: int, matmuls: Sequence[int]) -> bool:
        """Whether several parts of the model lie in between, in a row."""
        paths = [list(self._within(index, start, stop)) for index in matmuls]
        for depth in range(max(map(len, paths))):
            parts: dict[str, list[int]] = {}
            for index, path in zip(matmuls, paths, strict=True):
                if len(path) > depth:
                    parts.setdefault(path[depth], []).append(index)
            large = [found for found in parts.values() if len(found) >= PART]
            for first, second in pairwise(large):
                if self._below(first, stop) & set(second):
                    return True
        return False

    def is_background(self, readers: Sequence[fx.Node]) -> bool:
        """Whether several elements of one repeated module read a tensor, or several joins.

        Repeated are ``layers.3``, and ``layer3`` if it is a part of the model.
        """
        if sum(kind(node) in JOINS for node in readers) > 1:
            return True
        found: dict[str, set[str]] = {}
        for node in readers:
            for prefix in _prefixes(module_path(node)):
                stem = prefix.rstrip("0123456789")
                if stem != prefix and (stem.endswith(".") or self._sizes[prefix] >= PART):
                    found.setdefault(stem, set()).add(prefix)
        return any(len(several) > 1 for several in found.values())

    def _within(self, index: int, start: int, stop: int) -> Iterator[str]:
        """Modules of a node that begin and end between two others, the largest first."""
        for prefix in _prefixes(self._paths[index]):
            first, last = self._calls[prefix]
            if start < first and last < stop:
                yield prefix

    def _below(self, starts: Sequence[int], stop: int) -> set[int]:
        """Indices of the nodes before `stop` that depend on those at `starts`."""
        nodes = {self._body[start] for start in starts}
        found = set(starts)
        for index in range(starts[0], stop):
            if any(source in nodes for source in self._body[index].all_input_nodes):
                nodes.add(self._body[index])
                found.add(index)
        return found


def _prefixes(path: str) -> Iterator[str]:
    parts = path.split(".") if path else []
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])


def _call_path(node: fx.Node) -> str:
    """As `module_path`, but two calls of one module differ."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def _bytes(node: fx.Node) -> int | None:
    """Bytes of a node's tensor at a batch of 2; None for anything that is not one tensor."""
    value = node.meta.get("val")
    if value is None:
        return 0
    if not isinstance(value, torch.Tensor):
        return None
    return size_of(value, 2) * value.element_size()


def _base(node: fx.Node, order: Mapping[fx.Node, int], index: int) -> int:
    """Index of the maker of the tensor that a node writes into; its own if it writes into none.

    A tensor must not be changed by another group than the one that made it, but for its last
    reader: a group copies what it reads before it writes into it.
    """
    base = base_of(node)
    if not writes_in_place(node) or base not in order:
        return index
    same = [base]
    source = node.args[0]
    while isinstance(source, fx.Node) and source is not base:
        same.append(source)
        source = source.args[0]
    readers = {user for alias in same for user in alias.users} - {*same, node}
    views = any(getattr(n.target, "is_view", False) for n in (*same[1:], *readers))
    late = any(order.get(reader, -1) > index for reader in readers)
    return order[base] if views or late else index


def _live(body: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes that have an effect, or that such a node or the program's caller reads."""
    live: set[fx.Node] = set()
    for node in reversed(body):
        read = any(user.op == "output" or user in live for user in node.users)
        if read or writes_in_place(node):
            live.add(node)
    return live


def _is_added(node: fx.Node) -> bool:
    """Whether a tensor is only there to be added to another one."""
    while len(node.users) == 1:
        node = next(iter(node.users))
        if kind(node) in SUMS:
            return True
        if len(node.all_input_nodes) > 1:
            break
    return False


def _float_inputs(program: Program) -> list[fx.Node]:
    """Float inputs of the user, and the floats that the prologue makes of them."""
    found: dict[fx.Node, None] = {}
    for node in program.exported.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            made = node.name in program.prologue and any(s in found for s in node.all_input_nodes)
            if made or node.name in program.inputs:
                found[node] = None
    return list(found)
