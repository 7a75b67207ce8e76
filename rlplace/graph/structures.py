"""What isomorphic groups have in common: each distinct structure is counted and sharded once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx

from rlplace.graph.attention_layout import lay_out_attention
from rlplace.graph.count import Count, count
from rlplace.graph.groups.drafts import Draft
from rlplace.graph.layouts import find_bordered, find_layouts, legal_cuts_of
from rlplace.graph.program import Piece, Program, extract
from rlplace.graph.shapes import describe, stand_in
from rlplace.graph.tape import Role
from rlplace.graph.tracing.regions import stops_gradient
from rlplace.graph.types import Layout, Placement, Replicate, Shard, Structure, Weight
from rlplace.graph.weights import held_by, weights_of


@dataclass
class Structures:
    """The distinct structures found so far; each is measured when it is first seen."""

    program: Program
    degrees: Sequence[int]
    shared: frozenset[str]
    found: list[Structure] = field(default_factory=list)
    _known: dict[str, tuple[int, Count]] = field(default_factory=dict)
    _kept: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        lay_out_attention(self.program)
        self._grads = _requiring_grad(self.program)
        self._params = self.program.exported.graph_signature.inputs_to_parameters

    def index(self, draft: Draft) -> int:
        """Index of a group's structure. Groups come in topological order."""
        key = self._hash(draft)
        if key not in self._known:
            made, structure = self._describe(key, draft)
            self._known[key] = (len(self.found), made)
            self.found.append(structure)
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

    def _describe(self, key: str, draft: Draft) -> tuple[Count, Structure]:
        """Count a piece and search its layouts at the degrees that divide what they cut."""
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
        cuts = legal_cuts_of(piece, grads, lambda degree: self._pinned(nodes, degree))
        legal = [d for d in self.degrees if cuts and all(cut.size % d == 0 for cut in cuts)]
        whole: dict[str, Placement] = {self._name(node): Replicate() for node in nodes}
        layouts: list[Layout] = []
        bordered: list[Layout] = []
        for degree in self.degrees:
            pinned = self._pinned(nodes, degree)
            if degree in legal:
                layouts += find_layouts(piece, degree, roles, grads, pinned)
            elif cuts:  # sequences may be cut all the same
                pinned = whole
            bordered += find_bordered(piece, degree, roles, grads, pinned)
        made = count(piece.module, make_inputs, roles)
        states = zip(piece.states, roles, strict=False)
        own = {name for (_, name), role in states if role == "param" and name not in self.shared}
        weights = weights_of(piece, own)
        work = replace(made.work, weights=weights)
        sharded, cut = (_with_weights(found, weights) for found in (layouts, bordered))
        return made, Structure(key, work, sharded, cuts, cut)

    def _pinned(self, nodes: Sequence[fx.Node], degree: int) -> dict[str, Placement]:
        """One placement for all groups that share a state: cut dim 0 of a matrix if that goes."""
        return {
            self._name(node): _first_dim(node.meta["val"].shape, degree)
            for node in nodes
            if self._name(node) in self.shared
        }

    def _hash(self, draft: Draft) -> str:
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


def _with_weights(layouts: Sequence[Layout], weights: Sequence[Weight]) -> tuple[Layout, ...]:
    return tuple(
        replace(layout, work=replace(layout.work, weights=held_by(weights, layout)))
        for layout in layouts
    )


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
        elif stops_gradient(node) or not _is_float(node.meta.get("val")):
            continue
        elif any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _is_float(value: Any) -> bool:
    values = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(v, Tensor) and v.is_floating_point() for v in values)
