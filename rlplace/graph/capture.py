"""From a module to an `OpGraph`: export, coarsen, find what repeats, count each part once."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from rlplace.errors import InputError
from rlplace.graph.coarsen import MAX_GROUPS, coarsen, is_matmul, module_path
from rlplace.graph.count import Count, Role, count
from rlplace.graph.layouts import find_layouts
from rlplace.graph.program import Piece, Program, export_program, extract
from rlplace.graph.shapes import describe, elements, stand_in
from rlplace.graph.types import (
    Edge,
    Group,
    Layout,
    OpGraph,
    Placement,
    Replicate,
    Shard,
    Structure,
)


def capture(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    tokens_per_sample: int | None = None,
    granularity: str = "fine",
    degrees: Sequence[int] = (2, 4, 8),
    source: Mapping[str, str | int | float | bool | None] | None = None,
) -> OpGraph:
    """Capture a module as an op graph.

    Args:
        module: Returns a scalar loss (mean over the batch); its tensors have the batch in dim 0.
        args: Positional example inputs, of a batch of at least 2; meta tensors will do.
        kwargs: Keyword example inputs.
        name: Name of the model; by default the class of the module.
        tokens_per_sample: By default the length of the first (batch, length) integer input, or 1.
        granularity: ``fine`` (at most 200 groups) or ``coarse`` (at most 100).
        degrees: Degrees of the tp axis to find layouts for.
        source: How to build the model again (`OpGraph.source`).

    Raises:
        CaptureError: If `torch.export` refuses the module; says where in the user's code.
        InputError: If `granularity` is unknown.
    """
    if granularity not in MAX_GROUPS:
        rule = f"must be one of {', '.join(MAX_GROUPS)}"
        raise InputError("granularity", granularity, rule, "fine")
    program = export_program(module, args, kwargs)
    drafts = _drafts(program, coarsen(program, granularity))
    uses = Counter(param for draft in drafts for param in draft.params)
    structures = _Structures(program, degrees, frozenset(n for n in uses if uses[n] > 1))
    indices = [structures.index(draft) for draft in drafts]
    names = _names(drafts)
    groups = tuple(
        Group(i, names[i], indices[i], draft.ops, draft.modules, draft.params)
        for i, draft in enumerate(drafts)
    )
    sizes = {n: p.numel() for n, p in module.named_parameters() if p.requires_grad}
    tied = tuple((n, sizes[n]) for n in uses if n in sizes and uses[n] > 1)
    if tokens_per_sample is None:
        tokens_per_sample = _sequence_length((args, dict(kwargs or {})))
    return OpGraph(
        name=name or type(module).__name__,
        groups=groups,
        edges=_edges(drafts),
        structures=tuple(structures.found),
        tokens_per_sample=tokens_per_sample,
        tied=tied,
        source=dict(source or {}),
    )


@dataclass(frozen=True)
class _Draft:
    """A group before it is described: its nodes, what they read and what others read of it."""

    nodes: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]
    params: tuple[str, ...]

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.nodes)

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(module_path(node) for node in self.nodes))


def _drafts(program: Program, groups: Sequence[tuple[str, ...]]) -> list[_Draft]:
    by_name = {node.name: node for node in program.nodes}
    drafts = []
    for names in groups:
        nodes = tuple(by_name[name] for name in names)
        inside = set(nodes)
        outer = dict.fromkeys(s for n in nodes for s in n.all_input_nodes if s not in inside)
        states = (program.states[n.name] for n in outer if n.name in program.states)
        writes = tuple(n for n in nodes if any(_reads(u) and u not in inside for u in n.users))
        drafts.append(_Draft(nodes, tuple(outer), writes, tuple(dict.fromkeys(states))))
    return drafts


def _reads(user: fx.Node) -> bool:
    return "_assert" not in getattr(user.target, "__name__", "")


@dataclass
class _Structures:
    """The distinct structures found so far; each is measured when it is first seen."""

    program: Program
    degrees: Sequence[int]
    shared: frozenset[str]
    found: list[Structure] = field(default_factory=list)
    _known: dict[str, tuple[int, Count]] = field(default_factory=dict)
    _kept: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._grads = _requiring_grad(self.program)
        self._params = self.program.exported.graph_signature.inputs_to_parameters

    def index(self, draft: _Draft) -> int:
        """Index of a group's structure. Groups come in topological order."""
        key = self._hash(draft)
        if key not in self._known:
            made, layouts = self._describe(draft)
            self._known[key] = (len(self.found), made)
            self.found.append(Structure(key, made.work, layouts))
        index, made = self._known[key]
        self._kept |= {n for n, kept in zip(draft.writes, made.keeps, strict=True) if kept}
        return index

    def _role(self, node: fx.Node) -> Role:
        if node.name in self.program.states:
            return "param" if node.name in self._params else "buffer"
        if node.op == "placeholder" or node.name in self.program.prologue:
            return "constant"
        return "kept" if node in self._kept else "activation"

    def _name(self, node: fx.Node) -> str:
        """The parameter or buffer behind a placeholder; two placeholders may share one."""
        return self.program.states.get(node.name, node.name)

    def _describe(self, draft: _Draft) -> tuple[Count, tuple[Layout, ...]]:
        """Count a piece and search its layouts."""
        piece = extract(self.program, draft.ops, writes=[node.name for node in draft.writes])
        inputs = {node.name: node for node in draft.reads}
        nodes = [inputs[name] for name in _input_names(piece)]

        def make_inputs(batch: int) -> list[Any]:
            made: dict[str, Any] = {}
            for node in nodes:
                value = stand_in(node.meta["val"], batch, node in self._grads)
                made.setdefault(self._name(node), value)
            return [made[self._name(node)] for node in nodes]

        roles = [self._role(node) for node in nodes]
        grads = {node.name for node in nodes if node in self._grads}
        layouts = [
            layout
            for degree in self.degrees
            for layout in find_layouts(piece, degree, roles, grads, self._pinned(nodes, degree))
        ]
        return count(piece.module, make_inputs, roles), tuple(layouts)

    def _pinned(self, nodes: Sequence[fx.Node], degree: int) -> dict[str, Placement]:
        """One placement for all groups that share a state: cut dim 0 of a matrix if that goes."""
        return {
            self._name(node): _first_dim(node.meta["val"].shape, degree)
            for node in nodes
            if self._name(node) in self.shared
        }

    def _hash(self, draft: _Draft) -> str:
        """Equal for groups with the same ops, constants, shapes, inputs and outputs."""
        numbers: dict[fx.Node, int] = {}
        names: dict[str, int] = {}
        lines = []
        for node in draft.reads:
            numbers[node] = len(numbers)
            name = self._name(node)
            first = names.setdefault(name, numbers[node])
            value = describe(node.meta.get("val"))
            flags = f"{self._role(node)} {node in self._grads} {name in self.shared}"
            lines.append(f"in {first} {value} {flags}")
        for node in draft.nodes:
            numbers[node] = len(numbers)
            arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")
            lines.append(f"{node.target} {arguments} {describe(node.meta.get('val'))}")
        lines.append(f"out {[numbers[node] for node in draft.writes]}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _first_dim(shape: Sequence[int], degree: int) -> Placement:
    return Shard(0) if len(shape) > 1 and shape[0] % degree == 0 else Replicate()


def _input_names(piece: Piece) -> list[str]:
    return [*(name for name, _ in piece.states), *piece.inputs, *piece.reads]


def _requiring_grad(program: Program) -> set[fx.Node]:
    """Nodes that a gradient flows back to."""
    found: set[fx.Node] = set()
    for node in program.exported.graph.nodes:
        if node.op == "placeholder":
            if program.states.get(node.name) in program.trainable:
                found.add(node)
        elif _is_float(node.meta.get("val")) and any(s in found for s in node.all_input_nodes):
            found.add(node)
    return found


def _is_float(value: Any) -> bool:
    values = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(v, Tensor) and v.is_floating_point() for v in values)


def _edges(drafts: Sequence[_Draft]) -> tuple[Edge, ...]:
    makers = {node: index for index, draft in enumerate(drafts) for node in draft.nodes}
    edges = []
    for index, draft in enumerate(drafts):
        for node in draft.reads:
            if node in makers:
                value = node.meta["val"]
                assert isinstance(value, Tensor), f"{node.name} crosses a group and is no tensor"
                size = elements(value)
                if value.is_floating_point():
                    edges.append(Edge(makers[node], index, node.name, floats=size))
                else:
                    other = size * value.element_size()
                    edges.append(Edge(makers[node], index, node.name, other_bytes=other))
    return tuple(edges)


def _names(drafts: Sequence[_Draft]) -> list[str]:
    """What the working ops of a group have in common of their module paths, made unique."""
    paths = [_common_path(draft) or [""] for draft in drafts]
    while len({path[0] for path in paths}) == 1 and all(_can_drop_first(path) for path in paths):
        paths = [path[1:] for path in paths]
    names: list[str] = []
    for path in paths:
        name = ".".join(path) or "root"
        again = sum(n == name or n.startswith(f"{name}#") for n in names)
        names.append(f"{name}#{again + 1}" if again else name)
    return names


def _can_drop_first(path: Sequence[str]) -> bool:
    """Whether a path still says what it is without its first part (``3`` alone does not)."""
    return len(path) > 1 and not path[1].isdigit()


def _common_path(draft: _Draft) -> list[str]:
    anchors = [node for node in draft.nodes if is_matmul(node)] or list(draft.nodes)
    paths = [module_path(node).split(".") for node in anchors]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return shared


def _sequence_length(call: Any) -> int:
    for leaf in torch.utils._pytree.tree_leaves(call):
        if isinstance(leaf, Tensor) and leaf.ndim == 2 and not leaf.is_floating_point():
            return leaf.shape[1]
    return 1
