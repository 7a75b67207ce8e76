"""Experts on their devices: grouped matmuls whose matrices are cut between experts.

Rows are sorted by expert, so those of the experts of one device are a run of them. The first
grouped matmul takes the run out of rows that every device has; what it makes exists nowhere else
(`Routed`), and the ops on single rows that follow work on it; the next grouped matmul puts its
result at its place among zeros, a summand. So a device multiplies the rows of its own experts
alone, whatever the number of matmuls in a row.

Where each device has other rows, they are sent instead (`rlplace.graph.sharding.owned_rules`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import fx

from rlplace.graph.program import Piece
from rlplace.graph.shapes import BATCHES, at_batch
from rlplace.graph.sharding.labels import Signature
from rlplace.graph.sharding.nodes import SPLITS, op_name, shape, split_parts, tensor_args
from rlplace.graph.sharding.signatures import ELEMENTWISE, SIGNATURES
from rlplace.graph.sharding.strategy import REPLICATE, Copied, Strategy, Want
from rlplace.graph.types import Partial, Placement, Shard

GROUPED = ("_grouped_mm", "grouped_mm", "grouped_mm_fallback")


@dataclass(frozen=True, slots=True)
class Internal(Shard):
    """A way to hold a value between ops of one piece; it is never converted."""


@dataclass(frozen=True, slots=True)
class Routed(Internal):
    """A device holds the rows of its own experts, as many as there are.

    Args:
        ends: Name of the value that says where the rows of each expert end.
    """

    ends: str = ""


EXPERTS = Shard(0)


def unrouted(shards: Collection[Shard]) -> list[Shard]:
    """The shards that every rule knows."""
    return [shard for shard in shards if not isinstance(shard, Internal)]


def expert_strategies(
    node: fx.Node, reachable: Mapping[fx.Node, Collection[Shard]]
) -> list[Strategy]:
    """The ways to run a node on the rows of the device's own experts.

    A grouped matmul has them where its matrices can be cut between experts and in no other way.
    """
    args = tensor_args(node)
    found = {s for arg in args for s in reachable.get(arg, ()) if isinstance(s, Routed)}
    if op_name(node) in GROUPED:
        return _grouped(node, args, reachable)
    if len(found) != 1 or length_is_read(node):
        return []
    (routed,) = found
    if op_name(node) == "getitem":
        return [Strategy((routed,), routed)]
    if op_name(node) in SPLITS:
        return [Strategy((routed,), routed)] if split_parts(node)[0] != 0 else []
    return _on_rows(node, args, routed, [routed in reachable.get(arg, ()) for arg in args])


def length_is_read(node: fx.Node) -> bool:
    """Whether the number of rows of a value is used, which a device does not know."""
    return any(op_name(user) == "sym_size" and user.args[1] == 0 for user in node.users)


def _grouped(
    node: fx.Node, args: list[fx.Node], reachable: Mapping[fx.Node, Collection[Shard]]
) -> list[Strategy]:
    ranks = [len(shape(arg)) for arg in args]
    if node.kwargs or len(node.args) > 3 or ranks != [2, 3, 1]:
        return []
    if set(reachable.get(args[1], ())) != {EXPERTS}:
        return []
    routed = Routed(0, ends=args[2].name)
    rows: list[Want] = [Copied(), *[routed] * (routed in reachable.get(args[0], ()))]
    made: list[Placement] = [*[routed] * (not length_is_read(node)), Partial()]
    return [Strategy((read, EXPERTS, REPLICATE), out) for read in rows for out in made]


def _on_rows(node: fx.Node, args: list[fx.Node], routed: Routed, own: list[bool]) -> list[Strategy]:
    """Elementwise ops whose other arguments have no rows."""
    name = op_name(node).rstrip("_")
    signature: Signature | None = SIGNATURES[name](node) if name in ELEMENTWISE else None
    if signature is None or not signature.output:
        return []
    rank = len(signature.output)
    if any(len(shape(arg)) >= rank and not mine for arg, mine in zip(args, own, strict=True)):
        return []
    reads = tuple(routed if mine else Copied() for mine in own)
    return [Strategy(reads, routed)]


def expert_pins(piece: Piece, degree: int) -> dict[str, Placement]:
    """The states that hold one matrix for each expert, cut between experts; empty if not legal.

    They are found by how they are used: as the matrices of a grouped matmul, through views.

    Args:
        piece: Whose nodes carry ``meta["val"]``.
        degree: Size of the axis; it must divide the number of experts, and for the counts on the
            meta device the number of rows.
    """
    names = dict(piece.states)
    pins: dict[str, Placement] = {}
    for node in piece.module.graph.nodes:
        if op_name(node) not in GROUPED:
            continue
        matrices = tensor_args(node)[1]
        while op_name(matrices) in ("transpose", "mT", "to", "contiguous"):
            matrices = tensor_args(matrices)[0]
        rows = tensor_args(node)[0].meta["val"].shape[0]
        uneven = any(at_batch(rows, batch) % degree for batch in BATCHES)
        if matrices.name not in names or shape(matrices)[0] % degree or uneven:
            return {}
        pins[names[matrices.name]] = EXPERTS
    return pins
