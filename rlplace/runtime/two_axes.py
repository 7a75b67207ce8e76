"""A piece as one rank of a mesh with a cp and a tp axis runs it.

Each axis has its own assignment, as if the other were not there. A value is then held in a way on
each of them (`rlplace.runtime.moves`), and an op runs on what is local on both.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from rlplace.errors import InputError
from rlplace.graph.program import Piece
from rlplace.graph.sharding import axis as conjugate
from rlplace.graph.sharding.axis_bags import one_of_several
from rlplace.graph.sharding.axis_rows import causal_mask, row_cross_entropy
from rlplace.graph.sharding.local_args import LocalCall, local_args, local_call
from rlplace.graph.sharding.lower import Assignment
from rlplace.graph.sharding.nodes import (
    argument,
    is_tensor,
    op_name,
    shape,
    tensor_args,
    written_args,
)
from rlplace.graph.sharding.row_rules import is_causal
from rlplace.graph.sharding.strategy import REPLICATE, Copied, Strategy, Want
from rlplace.graph.types import Partial, Shard
from rlplace.runtime.axes import cut_cross_entropy, over_cp, parts_of
from rlplace.runtime.boundary import AxisName
from rlplace.runtime.draws import draws
from rlplace.runtime.moves import Held, moves


def lower_both(piece: Piece, outer: Assignment, inner: Assignment) -> fx.GraphModule:
    """The local program of a piece.

    Args:
        piece: The whole piece; its nodes carry ``meta["val"]``.
        outer: A strategy for each node on cp.
        inner: And on tp.

    Returns:
        As `rlplace.graph.sharding.lower.lower`, to be run under `rlplace.runtime.axes.Axes.used`.

    Raises:
        InputError: If an op cannot be cut on both axes as the assignments say.
    """
    return _Lowering(outer, inner).run(piece)


@dataclass
class _Lowering:
    """What has been lowered so far: see `rlplace.graph.sharding.lower`."""

    outer: Assignment
    inner: Assignment
    graph: fx.Graph = field(default_factory=fx.Graph)
    values: dict[fx.Node, fx.Node] = field(default_factory=dict)
    held: dict[fx.Node, Held] = field(default_factory=dict)
    forms: dict[tuple[fx.Node, Held], fx.Node] = field(default_factory=dict)

    def run(self, piece: Piece) -> fx.GraphModule:
        """Lower node after node."""
        for node in piece.module.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self.graph.placeholder(node.name)
                summand = node.name in self.outer.summands
                cp = Copied() if summand else self.outer.held(node.name)
                self.held[node] = Held(cp, self.inner.held(node.name))
            elif node.op == "output":
                self._output(node.args[0])
            else:
                self._call(node)
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def _output(self, outputs: Any) -> None:
        whole = (REPLICATE,) * len(outputs)
        wants = zip(outputs, self.outer.writes or whole, self.inner.writes or whole, strict=True)
        found = [self._read(out, cp, tp) for out, cp, tp in wants]
        for _, held in found:
            if held.outer != "cp":
                raise _refusal("a value is handed on with heads that tp has cut first")
        self.graph.output(tuple(value for value, _ in found))

    def _read(
        self, node: fx.Node, cp: Want, tp: Want, outer: AxisName = "cp"
    ) -> tuple[fx.Node, Held]:
        """A value in the form that its reader wants."""
        value, held = self.values[node], self.held[node]
        differentiable = node.meta["val"].is_floating_point() if _is_single(node) else False
        for name, step in moves(held, cp, tp, outer):
            after = held.moved(name, step, outer == "tp")
            assert after is not None, "the way was looked for"
            if (node, after) not in self.forms:
                self.forms[node, after] = self._converted(value, held, name, step, differentiable)
            value, held = self.forms[node, after], after
        return value, held

    def _converted(
        self, value: fx.Node, held: Held, name: AxisName, step: Want, differentiable: bool
    ) -> fx.Node:
        base = held.on(name)
        own, wanted = self._parts(name, base, held), self._parts(name, step, held)
        if isinstance(base, Copied):
            if wanted:
                return self._emit_on(name, conjugate.part, value, *wanted)
            return self._emit_on(name, conjugate.once, value)
        if own and wanted:
            return self._emit_on(name, conjugate.exchange, value, own, wanted)
        if own:
            summed = isinstance(step, Copied) and differentiable
            gather = conjugate.gather_copy if summed else conjugate.gather
            return self._emit_on(name, gather, value, *own)
        if wanted:
            return self._emit_on(name, conjugate.split, value, *wanted)
        return self._emit_on(name, conjugate.copy, value) if differentiable else value

    def _parts(self, name: AxisName, shard: object, held: Held) -> tuple[int, ...]:
        """Dim, blocks and run of a shard on an axis, of what the other has left."""
        if not isinstance(shard, Shard):
            return ()
        return parts_of(shard, held.cp if name == "tp" else None, self.outer.degree)

    def _emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def _emit_on(self, name: AxisName, function: Any, *args: Any) -> fx.Node:
        return self._emit(over_cp(function) if name == "cp" else function, *args)

    def _call(self, node: fx.Node) -> None:
        """Lower one node."""
        if not is_tensor(node) and tensor_args(node):
            self.values[node] = self._size(node)
            return
        cp, tp = self.outer.strategy(node), self.inner.strategy(node)
        wants, orders = iter(zip(cp.reads, tp.reads, strict=True)), set[AxisName]()
        first = self._cut_first(node, cp, tp)

        def read(leaf: Any) -> Any:
            if not isinstance(leaf, fx.Node):
                return leaf
            if not is_tensor(leaf):
                return self.values[leaf]
            value, held = self._read(leaf, *next(wants), first)
            orders.update([held.outer] if held.shared else [])
            return value

        args, kwargs = torch.utils._pytree.tree_map(read, (list(node.args), dict(node.kwargs)))
        if len(orders) > 1:
            raise _refusal(f"{node.name} reads a dim that cp and tp have cut in two orders")
        self.values[node] = self._local(node, cp, tp, args, kwargs)
        self.held[node] = Held(cp.held, tp.held, *orders)
        if not self.held[node].shared:
            self.held[node] = Held(cp.held, tp.held)
        if written_args(node):
            self.forms.clear()  # what was converted before is stale now

    def _cut_first(self, node: fx.Node, cp: Strategy, tp: Strategy) -> AxisName:
        """Which axis cuts first what an op reads cut by both: of heads, and what follows, tp."""
        reads = zip(tensor_args(node), cp.reads, tp.reads, strict=True)
        kept = [self.held[arg] for arg, *wants in reads if _as_held(self.held[arg], wants)]
        attends = op_name(node) == "scaled_dot_product_attention"
        heads = attends and Held(cp.reads[0], tp.reads[0]).shared
        return "tp" if heads or any(held.outer == "tp" for held in kept) else "cp"

    def _size(self, node: fx.Node) -> fx.Node:
        """A number that a tensor gives: its size in a dim, which a shard knows as well."""
        (source,) = tensor_args(node)
        if op_name(node) != "sym_size":
            value, _ = self._read(source, REPLICATE, REPLICATE)
            return self._emit(node.target, value, *node.args[1:], **node.kwargs)
        held, factor = self.held[source], 1
        for placement, degree in ((held.cp, self.outer.degree), (held.tp, self.inner.degree)):
            if isinstance(placement, Shard) and placement.dim == node.args[1]:
                factor *= degree
        size = self._emit(node.target, self.values[source], *node.args[1:])
        return self._emit(operator.mul, size, factor) if factor > 1 else size

    def _local(
        self, node: fx.Node, cp: Strategy, tp: Strategy, args: list[Any], kwargs: Any
    ) -> Any:
        """The op on what is local."""
        rows = self._on_rows(node, cp, tp, args, kwargs)
        if rows is not None:
            return rows
        call = self._local_call(node, cp, tp, args)
        axes: list[tuple[AxisName, Strategy]] = [("cp", cp), ("tp", tp)]
        sums = [(name, own) for name, own in axes if isinstance(own.output, Partial)]
        if not sums:
            return self._drawn(node, cp, tp, call.target, call.args, kwargs)
        total = self._emit(call.target, *call.args, **kwargs)
        held = Held(cp.held, tp.held)
        for name, own in sums:
            if own.scattered is None:
                total = self._emit_on(name, conjugate.reduce, total)
            else:
                parts = self._parts(name, own.scattered, held)
                total = self._emit_on(name, conjugate.reduce_scatter, total, *parts)
        return self._after_sum(call, total)

    def _local_call(self, node: fx.Node, cp: Strategy, tp: Strategy, args: list[Any]) -> LocalCall:
        """Its target and arguments; what only one axis changes the other leaves alone."""
        if not cp.sharded:
            call = LocalCall(node.target, args)
            return local_call(node, tp, args, self.inner.degree) if tp.sharded else call
        by_cp = local_call(node, cp, args, self.outer.degree)
        plain = by_cp.target is node.target and by_cp.added is None
        if not tp.sharded:
            return by_cp if plain else replace(by_cp, target=self._target_over_cp(by_cp.target))
        if not plain:
            raise _refusal(f"{node.name} is summed over cp in a way of its own")
        local = local_args(node, cp, args, self.outer.degree)
        return local_call(node, tp, local, self.inner.degree)

    def _target_over_cp(self, target: Any) -> Any:
        return target if isinstance(target, torch._ops.OpOverload) else over_cp(target)

    def _drawn(
        self, node: fx.Node, cp: Strategy, tp: Strategy, target: Any, args: list[Any], kwargs: Any
    ) -> fx.Node:
        """A call that draws other random numbers on every device that shares its work."""
        axes: list[tuple[AxisName, Strategy]] = [("cp", cp), ("tp", tp)] if draws(node) else []
        names = [name for name, own in axes if own.sharded]
        states = [(name, self._emit_on(name, conjugate.rank_seed, args[0])) for name in names]
        out = self._emit(target, *args, **kwargs)
        for name, state in reversed(states):
            self._emit_on(name, conjugate.restore_seed, state, args[0])
        return out

    def _on_rows(
        self, node: fx.Node, cp: Strategy, tp: Strategy, args: list[Any], kwargs: Any
    ) -> fx.Node | None:
        """Ops that need to know which rows they have; None for others."""
        own = _rows_of(node, cp), _rows_of(node, tp)
        if not any(own):
            return None
        if op_name(node) == "cross_entropy_loss":
            if not own[0]:
                return self._emit(row_cross_entropy, *args, **kwargs)
            cut = {"classes": tp.sharded and not own[1], "rows": own[1]}
            return self._emit(cut_cross_entropy, *args, **kwargs, **cut)
        if all(own):
            raise _refusal(f"{node.name} has its queries cut by both")
        query, key, value = args[:3]
        mask = self._emit_on("cp" if own[0] else "tp", causal_mask, query, key)
        options = {k: v for k, v in kwargs.items() if k in ("scale", "enable_gqa")}
        dropout = argument(node, 4, "dropout_p", 0.0)
        masked = [query, key, value, mask, dropout]
        return self._drawn(node, cp, tp, node.target, masked, options)

    def _after_sum(self, call: LocalCall, total: fx.Node) -> fx.Node:
        """A bias is added once, to the sum."""
        added = call.added
        if call.added_shape:
            added = self._emit(torch.ops.aten.view.default, added, list(call.added_shape))
        if added is not None:
            total = self._emit(torch.ops.aten.add.Tensor, total, added)
        return self._emit(one_of_several, total) if call.as_tuple else total


def heads_left(piece: Piece, outer: Assignment, inner: Assignment) -> bool:
    """Whether the heads that tp leaves to a rank can be cut as an assignment on cp wants it."""
    for node in _attentions(piece):
        wants = zip(outer.strategy(node).reads, inner.strategy(node).reads, strict=True)
        for arg, (cp, tp) in zip(tensor_args(node)[:3], wants, strict=False):
            if isinstance(cp, Shard) and isinstance(tp, Shard) and cp.dim == tp.dim:
                if arg.meta["val"].shape[cp.dim] % (outer.degree * inner.degree):
                    return False
    return True


@contextmanager
def fewer_heads(piece: Piece, inner: Assignment) -> Iterator[None]:
    """While this lasts, the nodes of a piece say that attention reads the heads that tp leaves it.

    So that an assignment on cp which is looked for meanwhile cuts only what is left to be cut.
    """
    kept: dict[fx.Node, Any] = {}
    for node in _attentions(piece):
        for arg, want in zip(tensor_args(node)[:3], inner.strategy(node).reads, strict=False):
            if isinstance(want, Shard) and arg not in kept:
                kept[arg] = value = arg.meta["val"]
                left = value.shape[want.dim] // inner.degree
                arg.meta["val"] = value.narrow(want.dim, 0, left)
    try:
        yield
    finally:
        for node, value in kept.items():
            node.meta["val"] = value


def _attentions(piece: Piece) -> list[fx.Node]:
    nodes = piece.module.graph.nodes
    return [node for node in nodes if op_name(node) == "scaled_dot_product_attention"]


def _rows_of(node: fx.Node, strategy: Strategy) -> bool:
    """Whether a strategy cuts the rows of an op that has to know which it has."""
    first = strategy.reads[0] if strategy.reads else None
    if not isinstance(first, Shard):
        return False
    if op_name(node) == "cross_entropy_loss":
        return first.dim == 0
    causal = op_name(node) == "scaled_dot_product_attention" and is_causal(node)
    return causal and first.dim == len(shape(node)) - 2


def _as_held(held: Held, wants: Sequence[Want]) -> bool:
    """Whether a value that both axes cut in one dim is read as it is."""
    return held.shared and [held.cp, held.tp] == list(wants)


def _is_single(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], Tensor)


def _refusal(rule: str) -> InputError:
    return InputError("plan.stages.mesh", "cp and tp", rule, "cp=1")
