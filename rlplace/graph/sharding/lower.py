"""From a piece and a strategy for each of its nodes to the program that one device runs.

The local program has the signature of the piece; states are the device's shards. Nodes are copied
with the sizes in their arguments made local, and the conversions between placements, which are
calls of `sharding.axis`, are inserted where a node reads a value in another way than it was
made. Each conversion of a value is made once and shared by all that read it so: q, k and v
projections read one `copy` of the hidden state, which costs one all-reduce of its gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from rlplace.graph.program import Piece
from rlplace.graph.sharding import axis
from rlplace.graph.sharding.axis_bags import one_of_several
from rlplace.graph.sharding.axis_rows import causal_mask, row_cross_entropy
from rlplace.graph.sharding.local_args import LocalCall, local_call
from rlplace.graph.sharding.nodes import (
    argument,
    is_tensor,
    op_name,
    shape,
    tensor_args,
    written_args,
)
from rlplace.graph.sharding.row_rules import is_causal
from rlplace.graph.sharding.rules import (
    REPLICATE,
    Copied,
    Strategy,
    Want,
)
from rlplace.graph.types import Partial, Placement, Replicate, Shard

aten = torch.ops.aten


@dataclass(frozen=True)
class Assignment:
    """A strategy for each node of a piece.

    Args:
        degree: Size of the axis.
        strategies: By name of the node; a node that is not named runs replicated.
        states: Placement of each state, by placeholder; replicated if not named.
        reads: Of other placeholders, likewise.
        writes: Of the results; empty if all are replicated.
        summands: Placeholders of states whose gradients are left as summands.
    """

    degree: int
    strategies: Mapping[str, Strategy] = field(default_factory=dict)
    states: Mapping[str, Placement] = field(default_factory=dict)
    reads: Mapping[str, Placement] = field(default_factory=dict)
    writes: tuple[Replicate | Shard, ...] = ()
    summands: frozenset[str] = frozenset()

    def held(self, placeholder: str) -> Placement:
        """How the devices hold what they are given."""
        return {**self.reads, **self.states}.get(placeholder, REPLICATE)

    def strategy(self, node: fx.Node) -> Strategy:
        """How a node runs."""
        if node.name in self.strategies:
            return self.strategies[node.name]
        return Strategy((REPLICATE,) * len(tensor_args(node)), REPLICATE)


def route(base: Placement | Copied, want: Want) -> tuple[Want, ...]:
    """The forms that a value takes, one after the other, from how it is held to how it is read.

    Each step is a call of `sharding.axis`. From `Replicate`: to `Copied` it is `copy`, to a
    `Shard` it is `split`. From a `Shard`: to `Replicate` it is `gather`, to `Copied`
    `gather_copy`, to a shard of another dim `exchange`. A state whose gradient is a summand is
    held as `Copied`: to `Replicate` it is `once`, to a `Shard` it is `part`.
    """
    if want == base:
        return ()
    if isinstance(base, Shard) and isinstance(want, Shard) and base.dim == want.dim:
        return (REPLICATE, want)
    return (want,)


def lower(piece: Piece, assignment: Assignment) -> fx.GraphModule:
    """The local program of a piece.

    Args:
        piece: The unsharded piece; its nodes carry ``meta["val"]``.
        assignment: A strategy for each node (`rlplace.graph.layouts.solve` finds one).

    Returns:
        ``local(*states, *inputs, *reads)`` gives the tuple that the piece gives, on every device
        of the axis, under `rlplace.graph.sharding.axis.use_axis`.
    """
    return _Lowering(assignment).run(piece)


@dataclass
class _Lowering:
    """What has been lowered so far.

    Args:
        assignment: What to do.
        values: Each value of the piece as it is held in the local graph.
        held: How it is held.
        forms: The other forms of it that exist.
    """

    assignment: Assignment
    graph: fx.Graph = field(default_factory=fx.Graph)
    values: dict[fx.Node, fx.Node] = field(default_factory=dict)
    held: dict[fx.Node, Placement | Copied] = field(default_factory=dict)
    forms: dict[tuple[fx.Node, Want], fx.Node] = field(default_factory=dict)

    def run(self, piece: Piece) -> fx.GraphModule:
        """Lower node after node."""
        for node in piece.module.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self.graph.placeholder(node.name)
                summand = node.name in self.assignment.summands
                self.held[node] = Copied() if summand else self.assignment.held(node.name)
            elif node.op == "output":
                wants = self.assignment.writes or (REPLICATE,) * len(node.args[0])
                pairs = zip(node.args[0], wants, strict=True)
                self.graph.output(tuple(self.read(out, want) for out, want in pairs))
            else:
                self.call(node, self.assignment.strategy(node))
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def read(self, node: fx.Node, want: Want) -> fx.Node:
        """A value in the form that its reader wants."""
        value, base = self.values[node], self.held[node]
        for step in route(base, want):
            if (node, step) not in self.forms:
                self.forms[node, step] = self._convert(node, value, base, step)
            value, base = self.forms[node, step], step
        return value

    def _convert(
        self, node: fx.Node, value: fx.Node, base: Placement | Copied, step: Want
    ) -> fx.Node:
        differentiable = node.meta["val"].is_floating_point()
        if isinstance(base, Copied):
            if isinstance(step, Shard):
                return self._emit(axis.part, value, *_parts(step))
            return self._emit(axis.once, value)
        if isinstance(base, Shard):
            if isinstance(step, Shard):
                return self._emit(axis.exchange, value, _parts(base), _parts(step))
            summed = isinstance(step, Copied) and differentiable
            return self._emit(axis.gather_copy if summed else axis.gather, value, *_parts(base))
        if isinstance(step, Copied):
            return self._emit(axis.copy, value) if differentiable else value
        assert isinstance(step, Shard), "a replicated value is copied or split"
        return self._emit(axis.split, value, *_parts(step))

    def _emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def call(self, node: fx.Node, strategy: Strategy) -> None:
        """Lower one node."""
        if not is_tensor(node) and tensor_args(node):
            self.values[node] = self._size(node)
            return
        wants = iter(strategy.reads)
        args, kwargs = torch.utils._pytree.tree_map(
            lambda leaf: self._argument(leaf, wants), (list(node.args), dict(node.kwargs))
        )
        if strategy.sharded:
            value = self._local(node, strategy, args, kwargs)
        else:
            value = self._emit(node.target, *args, **kwargs)
        self.values[node] = value
        self.held[node] = strategy.held
        if written_args(node):
            self.forms.clear()  # what was converted before is stale now

    def _size(self, node: fx.Node) -> fx.Node:
        """A number that a tensor gives: its size in a dim, which a shard knows as well."""
        (source,) = tensor_args(node)
        held = self.held[source]
        if op_name(node) != "sym_size" or not isinstance(held, Shard):
            value = self.read(source, REPLICATE)
            return self._emit(node.target, value, *node.args[1:], **node.kwargs)
        size = self._emit(node.target, self.values[source], *node.args[1:])
        cut = held.dim == node.args[1]
        return self._emit(operator.mul, size, self.assignment.degree) if cut else size

    def _argument(self, leaf: Any, wants: Iterator[Want]) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        return self.read(leaf, next(wants)) if is_tensor(leaf) else self.values[leaf]

    def _local(self, node: fx.Node, strategy: Strategy, args: list[Any], kwargs: Any) -> fx.Node:
        """The op on shards."""
        rows = self._on_rows(node, strategy, args, kwargs)
        if rows is not None:
            return rows
        call = local_call(node, strategy, args, self.assignment.degree)
        if isinstance(strategy.output, Partial):
            partial = self._emit(call.target, *call.args, **kwargs)
            if strategy.scattered is None:
                total = self._emit(axis.reduce, partial)
            else:
                total = self._emit(axis.reduce_scatter, partial, *_parts(strategy.scattered))
            return self._after_sum(call, total)
        return self._drawn(node, call.target, call.args, kwargs)

    def _drawn(self, node: fx.Node, target: Any, args: list[Any], kwargs: Any) -> fx.Node:
        """A call that draws other random numbers on every device, where it draws any."""
        if not _is_random(node):
            return self._emit(target, *args, **kwargs)
        states = self._emit(axis.rank_seed, args[0])
        out = self._emit(target, *args, **kwargs)
        self._emit(axis.restore_seed, states, args[0])
        return out

    def _on_rows(
        self, node: fx.Node, strategy: Strategy, args: list[Any], kwargs: Any
    ) -> fx.Node | None:
        """Ops that need to know which rows they have; None for others."""
        name, first = op_name(node), strategy.reads[0] if strategy.reads else None
        if not isinstance(first, Shard):
            return None
        if name == "cross_entropy_loss" and first.dim == 0:
            return self._emit(row_cross_entropy, *args, **kwargs)
        causal = name == "scaled_dot_product_attention" and is_causal(node)
        if not causal or first.dim != len(shape(node)) - 2:
            return None
        query, key, value = args[:3]
        dropout = argument(node, 4, "dropout_p", 0.0)
        mask = self._emit(causal_mask, query, key)
        options = {k: v for k, v in kwargs.items() if k in ("scale", "enable_gqa")}
        return self._drawn(node, node.target, [query, key, value, mask, dropout], options)

    def _after_sum(self, call: LocalCall, total: fx.Node) -> fx.Node:
        """A bias is added once, to the sum."""
        added = call.added
        if call.added_shape:
            added = self._emit(aten.view.default, added, list(call.added_shape))
        if added is not None:
            total = self._emit(aten.add.Tensor, total, added)
        return self._emit(one_of_several, total) if call.as_tuple else total


def _parts(shard: Shard) -> tuple[int, int, int]:
    return shard.dim, shard.blocks, shard.run


def _is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers: two devices must not draw the same for two shards."""
    name = op_name(node).rstrip("_")
    if name == "dropout":
        return bool(node.args[1]) and bool(node.args[2])
    if name == "scaled_dot_product_attention":
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p"))
    return False
