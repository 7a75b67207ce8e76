"""Layouts of a piece on the tp and the cp axis, found by propagation through its ops.

Megatron's layouts (column-row pairs, head-wise attention, vocabulary-parallel loss) follow from the
rules of single ops and the search; no rule knows of models. A layout's work and collectives are
those of its lowered program, run on the meta device, so there is one source of truth.

What a piece reads and writes is given (`sharding.borders`): whole, or sequences cut over the
devices. With cut sequences the same search finds Megatron's sequence parallelism on tp, and on
cp, where parameters are whole, context parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx

from rlplace.errors import InputError
from rlplace.graph.count import count
from rlplace.graph.program import Piece
from rlplace.graph.shapes import BATCHES, stand_in
from rlplace.graph.sharding.axis import COLLECTIVES, MetaAxis, use_axis
from rlplace.graph.sharding.axis_routes import combine, dispatch, exchange_counts, routed_ends
from rlplace.graph.sharding.axis_rows import causal_mask
from rlplace.graph.sharding.borders import WHOLE, Border, cut_border, free_border
from rlplace.graph.sharding.cuts import legal_cuts
from rlplace.graph.sharding.expert_rules import expert_pins
from rlplace.graph.sharding.facts import Facts
from rlplace.graph.sharding.lower import Assignment, lower
from rlplace.graph.sharding.owned_rules import sent_values
from rlplace.graph.sharding.rules import REPLICATE
from rlplace.graph.sharding.search import Search
from rlplace.graph.tape import Role
from rlplace.graph.types import Affine, Collective, Cut, Layout, Placement, Shard

#: FLOPs that an element in a collective is worth, in the order in which the search tries them: an
#: A100 with NVLink (312 TFLOP/s against about 200 GB/s), then less, so that a model that is too
#: small for the first has a sharded layout as well. Whether it pays is the planner's question.
LINK_FLOPS = (3000.0, 300.0, 30.0)

_FREE = (*COLLECTIVES, causal_mask, exchange_counts, routed_ends, dispatch, combine)


def find_layouts(
    piece: Piece,
    degree: int,
    roles: Sequence[Role],
    grads: Collection[str],
    pinned: Mapping[str, Placement] | None = None,
) -> tuple[Layout, ...]:
    """The sharded layouts of a piece at a degree of the tp axis; empty where there is none.

    Args:
        piece: Extracted on the meta device; its nodes carry ``meta["val"]``.
        degree: Size of the tp axis, at least 2.
        roles: Of each input of ``piece.module``, as for `rlplace.graph.count.count`.
        grads: Placeholders (states and reads) that a gradient flows back to.
        pinned: Placement of states by fully qualified name, where it is not free. A parameter that
            several groups use must be held in one way: pin it in all of them (to `Replicate()`,
            or to ``Shard(0)``, which is sound as well, since every group can convert it).

    Returns:
        ``shard``, the cheapest that divides FLOPs or parameters, and of groups with grouped matmuls
        ``expert``, where each device has whole experts.
        `Layout.params` has one placement for each distinct name in ``piece.states``, in order.

    Raises:
        InputError: If the degree is below 2.
    """
    found = {"shard": solve(piece, degree, grads, pinned)}
    if experts := expert_pins(piece, degree):
        found["expert"] = solve(piece, degree, grads, {**(pinned or {}), **experts})
    return tuple(
        _layout(name, piece, assignment, roles, grads)
        for name, assignment in found.items()
        if assignment is not None
    )


def find_bordered(
    piece: Piece,
    degree: int,
    roles: Sequence[Role],
    grads: Collection[str],
    pinned: Mapping[str, Placement] | None = None,
) -> tuple[Layout, ...]:
    """Layouts that cut activations between groups, on the tp axis first.

    Arguments as for `find_layouts`. The names are those that `Layout` lists.

    Raises:
        InputError: If the degree is below 2.
    """
    activations = activations_of(piece, roles)
    found = []
    for name, border in borders_of(piece, activations, degree).items():
        experts = expert_pins(piece, degree) if border.routes else {}
        assignment = solve(piece, degree, grads, {**(pinned or {}), **experts}, border)
        if assignment is not None and (assignment.reads or assignment.writes):
            found.append(_layout(name, piece, assignment, roles, grads, border.axis))
    return tuple(found)


def borders_of(piece: Piece, activations: Collection[str], degree: int) -> dict[str, Border]:
    """The borders, other than whole ones, that a piece can have; by the name of the layout.

    Args:
        piece: Whose nodes carry ``meta["val"]``.
        activations: Those of its reads that other groups make.
        degree: Size of the axis.
    """
    sequence = cut_border(piece, activations, degree, "tp")
    routes = replace(sequence, routes=True) if sequence and expert_pins(piece, degree) else None
    borders = {
        "sequence": sequence,
        "expert-sequence": routes,
        "shard-through": free_border(piece, activations),
        "context": cut_border(piece, activations, degree, "cp"),
    }
    return {name: border for name, border in borders.items() if border is not None}


def activations_of(piece: Piece, roles: Sequence[Role]) -> tuple[str, ...]:
    """Reads that other groups make, in order."""
    own = roles[len(roles) - len(piece.reads) :]
    pairs = zip(piece.reads, own, strict=True)
    return tuple(name for name, role in pairs if role in ("activation", "kept"))


def _layout(
    name: str,
    piece: Piece,
    assignment: Assignment,
    roles: Sequence[Role],
    grads: Collection[str],
    axis: Literal["tp", "cp"] = "tp",
) -> Layout:
    degree = assignment.degree
    local = lower(piece, assignment)
    inputs = _LocalInputs(piece, assignment, frozenset(grads))
    free = {function: function for function in _FREE}
    with use_axis(MetaAxis(degree)):
        counted = count(local, inputs, roles, free)
    reads = tuple(assignment.held(read) for read in activations_of(piece, roles))
    return Layout(
        name,
        degree,
        counted.work,
        collectives_of(local, inputs, degree),
        tuple(placements_of(piece, assignment).values()),
        axis,
        reads if assignment.reads else (),
        assignment.writes,
        counted.gathered,
    )


def solve(
    piece: Piece,
    degree: int,
    grads: Collection[str],
    pinned: Mapping[str, Placement] | None = None,
    border: Border = WHOLE,
) -> Assignment | None:
    """The strategies of the layout with a border, or None if nothing can be sharded.

    The same arguments give the same assignment, and so do the placements of a `Layout` when they
    are pinned: the search runs once to place the states and once more with all of them pinned.

    Args:
        piece: As for `find_layouts`.
        degree: Size of the axis, at least 2.
        grads: As for `find_layouts`.
        pinned: Likewise; on the cp axis states are whole in any case.
        border: How activations are read and written.

    Raises:
        InputError: If the degree is below 2.
    """
    if degree < 2:
        raise InputError("degree", degree, f"a {border.axis} axis has at least 2 devices", 2)
    if border.axis == "cp":
        return _cheapest_sharded(piece, degree, grads, {}, border)
    placed = _cheapest_sharded(piece, degree, grads, pinned or {}, border)
    if placed is None:
        return None
    return _cheapest_sharded(piece, degree, grads, placements_of(piece, placed), border)


def _cheapest_sharded(
    piece: Piece,
    degree: int,
    grads: Collection[str],
    pinned: Mapping[str, Placement],
    border: Border,
) -> Assignment | None:
    """At the first price at which FLOPs are shared; else parameters or activations.

    If nothing is, None where the border is whole: else the border itself is what is wanted.
    """
    facts = Facts.of(piece, degree, grads, pinned, border)
    smaller: Assignment | None = None
    for link in LINK_FLOPS:
        found = Search(facts, link).run()
        if found is None or (border.routes and not _sends_rows(facts, found)):
            return None
        if any(flops and found.strategy(node).sharded for node, flops in facts.flops.items()):
            return found
        if any(isinstance(p, Shard) for p in (*found.states.values(), *found.writes)):
            smaller = smaller or found
    return smaller or (None if border.whole else found)


def _sends_rows(facts: Facts, found: Assignment) -> bool:
    return any(sent_values(node, found.strategy(node)) for node in facts.nodes)


def legal_cuts_of(
    piece: Piece,
    grads: Collection[str],
    pinned: Callable[[int], Mapping[str, Placement]] | None = None,
) -> tuple[Cut, ...]:
    """What the tp axis cuts in a piece; its legal degrees are the divisors of all these sizes.

    Args:
        piece: As for `find_layouts`.
        grads: Likewise.
        pinned: Of each degree.
    """
    return legal_cuts(
        piece, grads, lambda degree: solve(piece, degree, grads, pinned(degree) if pinned else None)
    )


def legal_degrees(piece: Piece, up_to: int) -> tuple[int, ...]:
    """Degrees from 2 to `up_to` that divide the heads, channels or whatever a piece's ops cut."""
    nodes = piece.module.graph.nodes
    cuts = legal_cuts_of(piece, [node.name for node in nodes if node.op == "placeholder"])
    degrees = range(2, up_to + 1 if cuts else 2)
    return tuple(d for d in degrees if all(cut.size % d == 0 for cut in cuts))


def placements_of(piece: Piece, assignment: Assignment) -> dict[str, Placement]:
    """Placement of each distinct state, by fully qualified name."""
    return {name: assignment.states.get(place, REPLICATE) for place, name in piece.states}


def collectives_of(
    local: fx.GraphModule, make_inputs: _LocalInputs, degree: int
) -> tuple[Collective, ...]:
    """What a local program sends, found by running it forward and backward without devices."""
    low, high = (_calls(local, make_inputs(batch), degree) for batch in BATCHES)
    return tuple(
        Collective(kind, phase, Affine.through(BATCHES[0], size, BATCHES[1], more))
        for (kind, phase, size), (_, _, more) in zip(low, high, strict=True)
    )


def _calls(local: fx.GraphModule, inputs: Sequence[Any], degree: int) -> list[tuple[Any, Any, int]]:
    meta = MetaAxis(degree)
    with use_axis(meta):
        outputs = local(*inputs)
    forward = len(meta.calls)
    ends = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
    sources = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    if ends and sources:
        seeds = [torch.empty_like(end) for end in ends]
        torch.autograd.grad(ends, sources, seeds, allow_unused=True)
    phases = ["forward" if i < forward else "backward" for i in range(len(meta.calls))]
    return [(kind, phase, n) for (kind, n), phase in zip(meta.calls, phases, strict=True)]


@dataclass(frozen=True)
class _LocalInputs:
    """Makes the inputs of a local program on the meta device; called with a batch size."""

    piece: Piece
    assignment: Assignment
    grads: frozenset[str]

    def __call__(self, batch: int) -> list[Any]:
        names = dict(self.piece.states)
        made: dict[str, Any] = {}
        places = [n for n in self.piece.module.graph.nodes if n.op == "placeholder"]
        for node in places:
            name = names.get(node.name, node.name)
            if name not in made:
                whole = stand_in(node.meta["val"], batch, node.name in self.grads)
                made[name] = self._local(node, whole)
        return [made[names.get(node.name, node.name)] for node in places]

    def _local(self, node: fx.Node, whole: Any) -> Any:
        placement = self.assignment.held(node.name)
        if not isinstance(placement, Shard):
            return whole
        size = list(whole.shape)
        size[placement.dim] //= self.assignment.degree
        return torch.empty(
            size, dtype=whole.dtype, device="meta", requires_grad=whole.requires_grad
        )
