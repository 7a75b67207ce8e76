"""What the tp axis cuts in a piece, and so its legal degrees: the divisors of all those sizes.

The sizes are those of an assignment that the search found at a small degree: the heads that it
went between, the channels of a fused block, the vocabulary. At another degree that does not divide
them the search would still find something (the columns of a projection, gathered at once), but
not that layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from torch import fx

from rlplace.graph.program import Piece
from rlplace.graph.sharding.facts import Facts
from rlplace.graph.sharding.lower import Assignment
from rlplace.graph.sharding.nodes import CONVOLUTIONS, conv_groups, op_name, shape, tensor_args
from rlplace.graph.types import Cut, Shard

#: Degrees at which a layout is looked for: heads may be odd in number.
SMALL_DEGREES = (2, 3, 5, 7)
#: A node with less than this share of the FLOPs (a router) may run whole.
NEGLIGIBLE = 0.001

#: Solves a piece at a degree with some states pinned (`rlplace.graph.layouts.solve`).
Solver = Callable[[int], Assignment | None]


def legal_cuts(piece: Piece, grads: Collection[str], solver: Solver) -> tuple[Cut, ...]:
    """What is cut by the layout that shares most FLOPs; empty if there is none.

    Args:
        piece: Whose nodes carry ``meta["val"]``.
        grads: As for `rlplace.graph.layouts.solve`.
        solver: Finds an assignment at a degree.
    """
    lengths = {size for place in _states(piece) for size in shape(place)}
    best, most = None, -1.0
    for degree in SMALL_DEGREES:
        if any(length and length % degree == 0 for length in lengths):
            assignment = solver(degree)
            shared = -1.0 if assignment is None else _shared(piece, grads, assignment)
            if shared > most:
                best, most = assignment, shared
            if shared == 1.0:
                break
    return () if best is None else cuts_of(piece, best)


def _states(piece: Piece) -> list[fx.Node]:
    names = {place for place, _ in piece.states}
    return [node for node in piece.module.graph.nodes if node.name in names]


def _shared(piece: Piece, grads: Collection[str], assignment: Assignment) -> float:
    """Share of the matmul FLOPs that the devices share, 1 if all but negligible ones."""
    flops = Facts.of(piece, assignment.degree, grads, {}).flops
    total = sum(flops.values())
    whole = [count for node, count in flops.items() if not assignment.strategy(node).sharded]
    if all(count <= NEGLIGIBLE * total for count in whole):
        return 1.0
    return 1.0 - sum(whole) / total


def cuts_of(piece: Piece, assignment: Assignment) -> tuple[Cut, ...]:
    """The sizes that an assignment cuts, one for each module that makes what is cut."""
    sizes: dict[str, int] = {}
    names = dict(piece.states)
    for node in piece.module.graph.nodes:
        if node.op != "call_function":
            continue
        strategy = assignment.strategy(node)
        held = list(zip(tensor_args(node), strategy.reads, strict=True))
        for value, placement in [*held, (node, strategy.output)]:
            if isinstance(placement, Shard):
                owner = _owner(value, names)
                units = shape(value)[placement.dim] // placement.blocks
                sizes[owner] = math.gcd(sizes.get(owner, 0), units)
        grouped = op_name(node) in (*CONVOLUTIONS, "group_norm") and conv_groups(node) > 1
        if grouped and strategy.sharded and isinstance(strategy.output, Shard):
            owner = _owner(node, names)
            sizes[owner] = math.gcd(sizes[owner], conv_groups(node))
    return tuple(Cut(what, size) for what, size in sizes.items() if size)


def _owner(node: fx.Node, names: Mapping[str, str]) -> str:
    """The last part of the name of the module whose parameter made a value, through its views."""
    while True:
        sources = tensor_args(node) if node.op == "call_function" else [node]
        state = next((names[s.name] for s in reversed(sources) if s.name in names), None)
        if state is not None:
            return state.rsplit(".", 2)[-2] if "." in state else state
        if node.op != "call_function" or not sources:
            return node.name
        node = sources[0]
