"""What the search for layouts needs to know of a piece, worked out once for all prices."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from rlplace.graph.program import Piece
from rlplace.graph.shapes import at_batch
from rlplace.graph.sharding.borders import WHOLE, Border, Held
from rlplace.graph.sharding.expert_rules import expert_strategies
from rlplace.graph.sharding.matmuls import matmul
from rlplace.graph.sharding.nodes import (
    CONVOLUTIONS,
    REARRANGES,
    op_name,
    run_count,
    shape,
    tensor_args,
)
from rlplace.graph.sharding.owned_rules import owned_strategies
from rlplace.graph.sharding.rules import REPLICATE, Copied, Strategy, divides, strategies
from rlplace.graph.types import Partial, Placement, Shard


@dataclass(frozen=True)
class Facts:
    """What the search needs to know of a piece, worked out once.

    Args:
        degree: Size of the axis.
        nodes: Calls, in order.
        outputs: Nodes that the piece returns.
        states: Placeholders of states -> fixed placement, or None where it is free.
        sizes: Float elements of each value, 0 for other dtypes.
        grads: Nodes that a gradient flows back to.
        flops: Matmul FLOPs of each node, forward and backward.
        options: Strategies of each node.
        last: Index of the last node that reads each value.
        given: How other placeholders are held, None where that is free.
        left: How `outputs` are left, likewise.
        summands: Placeholders of states whose gradients are left as summands.
        routes: As `Border.routes`.
    """

    degree: int
    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    states: dict[fx.Node, Placement | None]
    sizes: dict[fx.Node, float]
    grads: set[fx.Node]
    flops: dict[fx.Node, float]
    options: dict[fx.Node, list[Strategy]]
    last: dict[fx.Node, int]
    given: dict[fx.Node, Held]
    left: tuple[Held, ...]
    summands: frozenset[str]
    routes: bool = False

    def placed(self, placeholder: fx.Node) -> Placement | None:
        """How a placeholder is held, None where that is free."""
        states = self.states
        return states[placeholder] if placeholder in states else self.given[placeholder]

    @staticmethod
    def of(
        piece: Piece,
        degree: int,
        grads: Collection[str],
        pinned: Mapping[str, Placement],
        border: Border = WHOLE,
    ) -> Facts:
        """Work it out."""
        everything = list(piece.module.graph.nodes)
        nodes = tuple(node for node in everything if node.op == "call_function")
        outputs = tuple(everything[-1].args[0])
        names = dict(piece.states)
        twice = {n for n in names.values() if list(names.values()).count(n) > 1}
        states: dict[fx.Node, Placement | None] = {}
        for node in everything:
            if node.op == "placeholder" and node.name in names:
                whole = names[node.name] in twice or border.axis == "cp"
                states[node] = pinned.get(names[node.name], REPLICATE if whole else None)
        others = [n for n in everything if n.op == "placeholder" and n not in states]
        given = {n: border.reads.get(n.name, REPLICATE) for n in others}
        sizes = {n: _elements(n) for n in everything if n.op != "output"}
        flowing = {n for n in everything if n.op == "placeholder" and n.name in grads}
        for node in nodes:
            if _floats(node) and any(source in flowing for source in node.all_input_nodes):
                flowing.add(node)
        last = {source: i for i, node in enumerate(nodes) for source in tensor_args(node)}
        last |= dict.fromkeys(outputs, len(nodes))
        return Facts(
            degree,
            nodes,
            outputs,
            states,
            sizes,
            flowing,
            {node: _flops(node, flowing) for node in nodes},
            _options(nodes, states, given, degree, border),
            last,
            given,
            tuple(border.writes or (REPLICATE,) * len(outputs)),
            frozenset(n.name for n in states if n in flowing and border.axis == "cp"),
            border.routes,
        )


def _options(
    nodes: Sequence[fx.Node],
    states: Mapping[fx.Node, Placement | None],
    given: Mapping[fx.Node, Held],
    degree: int,
    border: Border,
) -> dict[fx.Node, list[Strategy]]:
    """Strategies of every node, from the shardings that its arguments can have."""
    blocks = sorted({1} | {run_count(node) for node in nodes})
    reachable = _states_reachable(states, degree, blocks)
    reachable |= _given_reachable(given, degree, border.lengths)
    # On cp no sharding starts inside: parameters are whole, and sequences are cut already.
    starts = blocks if border.axis == "tp" else []
    options: dict[fx.Node, list[Strategy]] = {}
    for node in nodes:
        if not isinstance(node.meta.get("val"), Tensor | list | tuple):
            continue
        owned = owned_strategies(node, degree, reachable) if border.routes else []
        options[node] = owned or strategies(node, degree, reachable, starts)
        options[node] += expert_strategies(node, reachable) if owned else []
        options[node] += _with_scattered(node, options[node], degree, border.lengths)
        # In a fixed order: every rank has to find the same layout.
        shards = [s.held for s in options[node] if isinstance(s.held, Shard)]
        reachable[node] = list(dict.fromkeys(shards))
    return options


def _states_reachable(
    states: Mapping[fx.Node, Placement | None], degree: int, blocks: Sequence[int]
) -> dict[fx.Node, list[Shard]]:
    reachable: dict[fx.Node, list[Shard]] = {}
    for state, fixed in states.items():
        if isinstance(fixed, Shard):
            reachable[state] = [fixed]
        elif fixed is None and any(op_name(user) in REARRANGES for user in state.users):
            reachable[state] = _all_shards(state, degree, blocks)
    return reachable


def _given_reachable(
    given: Mapping[fx.Node, Held], degree: int, lengths: Collection[int]
) -> dict[fx.Node, list[Shard]]:
    reachable: dict[fx.Node, list[Shard]] = {}
    for node, held in given.items():
        if isinstance(held, Shard):
            reachable[node] = [held]
        elif held is None:
            reachable[node] = _all_shards(node, degree, (1,))
        elif not _floats(node) and isinstance(node.meta.get("val"), Tensor):
            reachable[node] = _scattered(node, degree, lengths)  # ids are split for free
    return reachable


def _all_shards(node: fx.Node, degree: int, blocks: Sequence[int]) -> list[Shard]:
    return [
        Shard(dim, count)
        for dim, size in enumerate(shape(node))
        for count in blocks
        if divides(size, degree, count)
    ]


def _scattered(node: fx.Node, degree: int, lengths: Collection[int]) -> list[Shard]:
    """The way to cut the sequences in a value: dim 1, or the rows of all samples in dim 0."""
    sizes = node.meta["val"].shape
    if not lengths or not sizes:
        return []
    rows = at_batch(sizes[0], 1)
    length = sizes[1] if len(sizes) > 1 and isinstance(sizes[1], int) else 0
    if length in lengths and divides(length, degree):
        return [Shard(1)]
    if rows in lengths and not isinstance(sizes[0], int) and divides(rows, degree):
        return [Shard(0, run=rows)]
    return []


def _with_scattered(
    node: fx.Node, found: Sequence[Strategy], degree: int, lengths: Collection[int]
) -> list[Strategy]:
    """The strategies that make a sum, with the sum left as a shard.

    What is added to a sum is added to the shard, so it has to be a bias along the last dim.
    """
    value = node.meta["val"]
    if not lengths or not isinstance(value, Tensor) or op_name(node) in CONVOLUTIONS:
        return []
    return [
        Strategy(
            tuple(Copied() if want == REPLICATE else want for want in strategy.reads),
            strategy.output,
            shard,
        )
        for strategy in found
        if isinstance(strategy.output, Partial) and _adds_a_bias_at_most(node, strategy)
        for shard in _scattered(node, degree, lengths)
        if shard.dim < value.ndim - 1
    ]


def _adds_a_bias_at_most(node: fx.Node, strategy: Strategy) -> bool:
    reads = zip(tensor_args(node), strategy.reads, strict=True)
    whole = [arg for arg, want in reads if want == REPLICATE and _floats(arg)]
    return all(len(shape(arg)) <= 1 for arg in whole)


def _floats(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]


def _elements(node: fx.Node) -> float:
    """Float elements for one sample."""
    return float(sum(math.prod(at_batch(size, 1) for size in v.shape) for v in _floats(node)))


def _flops(node: fx.Node, grads: Collection[fx.Node]) -> float:
    """Matmul FLOPs for one sample, forward and backward."""
    products, factors = matmul(node)
    return 2.0 * products * (1 + sum(factor in grads for factor in factors))
