"""From ops to groups: where a model may be cut with little to carry over.

Groups are intervals of the export's topological order of body nodes, so each is convex by
construction: no path leaves an interval and comes back. The rule knows no model by name, only
module paths, what each op is and which tensors are alive at each position:

1. *Anchors* are the ops that hold the work: matmuls, convolutions, attention and table lookups.
2. Between two neighbouring anchors (not between two lookups) the best position is the one where
   the fewest tensors are alive, then the one where a repeated module begins or ends, then the
   shallowest module boundary, then the fewest bytes, then the earliest: right after a residual
   add, before the norm that follows it.
3. It is a cut if a single tensor is alive there, not counting *background*: tensors that several
   elements of a repeated module read, such as an encoder's output or a shared position bias.
4. An interval with very many anchors is cut at its best positions even so, and where there are
   too many groups the cuts inside repeated elements are dropped first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from rlplace.graph.program import Program, base_of, writes_in_place
from rlplace.graph.shapes import size_of

_MATMULS = {"linear", "addmm", "mm", "bmm", "matmul", "baddbmm", "einsum", "mv", "addmv"}
_MATMULS |= {"conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose3d"}
_MATMULS |= {"conv_transpose2d", "scaled_dot_product_attention", "_grouped_mm", "grouped_mm"}
_MATMULS |= {"grouped_mm_fallback"}
_ACTIVATIONS = {"relu", "relu_", "gelu", "silu", "silu_", "tanh", "sigmoid", "leaky_relu", "elu"}
_LOOKUPS = {"embedding", "embedding_bag", "_embedding_bag"}

#: An interval with more anchors than this is cut even where several tensors cross.
MAX_ANCHORS = 16
#: Granularity -> most groups of a model.
MAX_GROUPS = {"fine": 200, "coarse": 100}


@dataclass(frozen=True, order=True)
class _Position:
    """A place between two body nodes; smaller is better, field by field.

    Args:
        alive: Tensors that cross, background not counted; at least 1.
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


def coarsen(program: Program, granularity: str = "fine") -> list[tuple[str, ...]]:
    """Names of the body nodes of each group, in topological order.

    Args:
        program: The exported program.
        granularity: A key of `MAX_GROUPS`.
    """
    body = program.body()
    if not body:
        return []
    positions = _positions(body)
    gaps = _gaps(body, positions)
    cuts = [best for best in gaps if best.alive <= 1]
    cuts = _split_long(body, gaps, cuts)
    cuts = _drop_surplus(cuts, MAX_GROUPS[granularity])
    ends = [0, *(cut.index for cut in cuts), len(body)]
    return [tuple(node.name for node in body[a:b]) for a, b in pairwise(ends)]


def module_path(node: fx.Node) -> str:
    """Fully qualified name of the module whose forward made a node."""
    stack = node.meta.get("nn_module_stack") or {}
    path: str = list(stack.values())[-1][0] if stack else ""
    return re.sub(r"@\d+", "", path)


def is_matmul(node: fx.Node) -> bool:
    """Whether an op holds matmul-like work."""
    return _kind(node) in _MATMULS


def _kind(node: fx.Node) -> str:
    target: Any = node.target
    packet = getattr(target, "overloadpacket", target)
    return getattr(packet, "__name__", str(packet))


def _is_lookup(node: fx.Node) -> bool:
    return _kind(node) in _LOOKUPS


def _positions(body: Sequence[fx.Node]) -> list[_Position | None]:
    """What is alive before each body node; None where no cut is legal."""
    order = {node: index for index, node in enumerate(body)}
    count, size, illegal = ([0] * (len(body) + 1) for _ in range(3))
    for index, node in enumerate(body):
        last = max((order[user] for user in node.users if user in order), default=index)
        background = _is_background(node, order)
        bytes_ = _bytes(node)
        for position in range(index + 1, last + 1):
            size[position] += bytes_ or 0
            count[position] += 0 if background else 1
            illegal[position] += bytes_ is None
        for position in range(_base(node, order, index) + 1, index + 1):
            illegal[position] += 1
    found: list[_Position | None] = [None]
    for index in range(1, len(body)):
        if illegal[index]:
            found.append(None)
            continue
        left, right = (module_path(body[i]).split(".") for i in (index - 1, index))
        inside = _elements(left) == _elements(right)
        depth = sum(1 for _ in _common(left, right))
        found.append(
            _Position(
                max(1, count[index]),
                inside,
                depth,
                size[index],
                _kind(body[index]) in _ACTIVATIONS,
                index,
            )
        )
    return found


def _bytes(node: fx.Node) -> int | None:
    """Bytes of a node's tensor at a batch of 2; None for anything that is not one tensor."""
    value = node.meta.get("val")
    if value is None:
        return 0
    if not isinstance(value, torch.Tensor):
        return None
    return size_of(value, 2) * value.element_size()


def _base(node: fx.Node, order: dict[fx.Node, int], index: int) -> int:
    """Index of the maker of the tensor that a node writes into; its own if it writes into none.

    A tensor must not be changed by another group than the one that made it.
    """
    return order.get(base_of(node), index) if writes_in_place(node) else index


def _is_background(node: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether several elements of one repeated module read a tensor."""
    readers: dict[str, set[str]] = {}
    for user in node.users:
        if user in order:
            for element in _elements(module_path(user).split(".")):
                readers.setdefault(element.rpartition(".")[0], set()).add(element)
    return any(len(elements) > 1 for elements in readers.values())


def _elements(path: Sequence[str]) -> set[str]:
    """The repeated elements (``layers.3``) on a module path."""
    return {".".join(path[: i + 1]) for i, part in enumerate(path) if part.isdigit()}


def _common(left: Sequence[str], right: Sequence[str]) -> list[str]:
    same: list[str] = []
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        same.append(a)
    return same


def _gaps(body: Sequence[fx.Node], positions: Sequence[_Position | None]) -> list[_Position]:
    """The best position between each two neighbouring anchors."""
    anchors = [i for i, node in enumerate(body) if is_matmul(node) or _is_lookup(node)]
    best: list[_Position] = []
    for left, right in pairwise(anchors):
        if _is_lookup(body[left]) and _is_lookup(body[right]):
            continue
        legal = [p for p in positions[left + 1 : right + 1] if p is not None]
        if legal:
            best.append(min(legal))
    return best


def _split_long(
    body: Sequence[fx.Node], gaps: Sequence[_Position], cuts: list[_Position]
) -> list[_Position]:
    """Cut intervals of too many anchors at the best positions that they have left."""
    ends = [0, *(cut.index for cut in cuts), len(body)]
    for start, stop in pairwise(ends):
        inner = [gap for gap in gaps if start < gap.index < stop]
        if sum(is_matmul(node) for node in body[start:stop]) > MAX_ANCHORS and inner:
            fewest = min(gap.alive for gap in inner)
            more = [*cuts, *(gap for gap in inner if gap.alive == fewest)]
            return _split_long(body, gaps, sorted(more, key=lambda cut: cut.index))
    return cuts


def _drop_surplus(cuts: list[_Position], most: int) -> list[_Position]:
    """At most `most` groups: cuts inside repeated elements go first, then every second one."""
    if len(cuts) >= most:
        cuts = [cut for cut in cuts if not cut.inside] or cuts
    while len(cuts) >= most:
        cuts = cuts[1::2]
    return cuts
