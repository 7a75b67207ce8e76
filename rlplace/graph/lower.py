"""From a piece and a strategy for each of its nodes to the program that one device runs.

The local program has the signature of the piece; states are the device's shards. Nodes are copied
with the sizes in their arguments made local, and the conversions between placements, which are
calls of `rlplace.graph.axis`, are inserted where a node reads a value in another way than it was
made. Each conversion of a value is made once and shared by all that read it so: q, k and v
projections read one `copy` of the hidden state, which costs one all-reduce of its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from rlplace.graph import axis
from rlplace.graph.axis_bags import one_of_several
from rlplace.graph.local_args import LocalCall, local_call
from rlplace.graph.nodes import is_tensor, op_name, tensor_args, written_args
from rlplace.graph.program import Piece
from rlplace.graph.rules import (
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
        degree: Size of the tp axis.
        strategies: By name of the node; a node that is not named runs replicated.
        states: Placement of each state, by placeholder; replicated if not named.
    """

    degree: int
    strategies: Mapping[str, Strategy] = field(default_factory=dict)
    states: Mapping[str, Placement] = field(default_factory=dict)

    def strategy(self, node: fx.Node) -> Strategy:
        """How a node runs."""
        if node.name in self.strategies:
            return self.strategies[node.name]
        return Strategy((REPLICATE,) * len(tensor_args(node)), REPLICATE)


def route(base: Placement, want: Want) -> tuple[Want, ...]:
    """The forms that a value takes, one after the other, from how it is held to how it is read.

    Each step is one collective: to `Copied` it is `copy`, to a `Shard` it is `split`, and from a
    `Shard` to `Replicate` it is `gather`.
    """
    if want == base:
        return ()
    gathered: tuple[Want, ...] = (REPLICATE,) if isinstance(base, Shard) else ()
    return gathered if isinstance(want, Replicate) else (*gathered, want)


def lower(piece: Piece, assignment: Assignment) -> fx.GraphModule:
    """The local program of a piece.

    Args:
        piece: The unsharded piece; its nodes carry ``meta["val"]``.
        assignment: A strategy for each node (`rlplace.graph.layouts.solve` finds one).

    Returns:
        ``local(*states, *inputs, *reads)`` gives the tuple that the piece gives, on every device
        of the axis, under `rlplace.graph.axis.use_axis`.
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
    held: dict[fx.Node, Placement] = field(default_factory=dict)
    forms: dict[tuple[fx.Node, Want], fx.Node] = field(default_factory=dict)

    def run(self, piece: Piece) -> fx.GraphModule:
        """Lower node after node."""
        for node in piece.module.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self.graph.placeholder(node.name)
                self.held[node] = self.assignment.states.get(node.name, REPLICATE)
            elif node.op == "output":
                self.graph.output(tuple(self.read(out, REPLICATE) for out in node.args[0]))
            else:
                self.call(node, self.assignment.strategy(node))
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def read(self, node: fx.Node, want: Want) -> fx.Node:
        """A value in the form that its reader wants."""
        value, base = self.values[node], self.held[node]
        for step in route(base, want):
            if (node, step) not in self.forms:
                self.forms[node, step] = self._convert(node, value, base, step)
            value = self.forms[node, step]
        return value

    def _convert(self, node: fx.Node, value: fx.Node, base: Placement, step: Want) -> fx.Node:
        if isinstance(step, Copied):
            differentiable = node.meta["val"].is_floating_point()
            return self._emit(axis.copy, value) if differentiable else value
        if isinstance(step, Shard):
            return self._emit(axis.split, value, step.dim, step.blocks)
        assert isinstance(base, Shard), "only a shard is gathered"
        return self._emit(axis.gather, value, base.dim, base.blocks)

    def _emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def call(self, node: fx.Node, strategy: Strategy) -> None:
        """Lower one node."""
        wants = iter(strategy.reads)
        args, kwargs = torch.utils._pytree.tree_map(
            lambda leaf: self._argument(leaf, wants), (list(node.args), dict(node.kwargs))
        )
        if strategy.sharded:
            value = self._local(node, strategy, args, kwargs)
        else:
            value = self._emit(node.target, *args, **kwargs)
        self.values[node] = value
        reduced = isinstance(strategy.output, Partial)
        self.held[node] = REPLICATE if reduced else strategy.output
        if written_args(node):
            self.forms.clear()  # what was converted before is stale now

    def _argument(self, leaf: Any, wants: Iterator[Want]) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        return self.read(leaf, next(wants)) if is_tensor(leaf) else self.values[leaf]

    def _local(self, node: fx.Node, strategy: Strategy, args: list[Any], kwargs: Any) -> fx.Node:
        """The op on shards."""
        call = local_call(node, strategy, args, self.assignment.degree)
        if isinstance(strategy.output, Partial):
            partial = self._emit(call.target, *call.args, **kwargs)
            return self._after_sum(call, self._emit(axis.reduce, partial))
        if not _is_random(node):
            return self._emit(call.target, *call.args, **kwargs)
        states = self._emit(axis.rank_seed, call.args[0])
        out = self._emit(call.target, *call.args, **kwargs)
        self._emit(axis.restore_seed, states, call.args[0])
        return out

    def _after_sum(self, call: LocalCall, total: fx.Node) -> fx.Node:
        """A bias is added once, to the sum."""
        added = call.added
        if call.added_shape:
            added = self._emit(aten.view.default, added, list(call.added_shape))
        if added is not None:
            total = self._emit(aten.add.Tensor, total, added)
        return self._emit(one_of_several, total) if call.as_tuple else total


def _is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers: two devices must not draw the same for two shards."""
    name = op_name(node).rstrip("_")
    if name == "dropout":
        return bool(node.args[1]) and bool(node.args[2])
    if name == "scaled_dot_product_attention":
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p"))
    return False
