"""The call of an op as one device of the tp axis makes it: sizes of the whole become local."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from rlplace.graph.sharding import axis, axis_bags, axis_experts, axis_routes
from rlplace.graph.sharding.expert_rules import GROUPED, Routed
from rlplace.graph.sharding.nodes import (
    CONVOLUTIONS,
    FACTORIES,
    SPLITS,
    conv_groups,
    groups_position,
    op_name,
    shape,
    split_parts,
)
from rlplace.graph.sharding.owned_rules import Owned, PerDevice
from rlplace.graph.sharding.strategy import Strategy
from rlplace.graph.types import Partial, Shard

aten = torch.ops.aten


@dataclass(frozen=True)
class LocalCall:
    """What one device calls for a node.

    Args:
        target: The op, or a function of `rlplace.graph.sharding.axis` and the like.
        args: Its arguments.
        added: Added once to the sum over the devices, where the node makes summands.
        added_shape: The view of it that is added, or empty.
        as_tuple: Whether the sum is the first of several results.
    """

    target: Any
    args: list[Any]
    added: Any = None
    added_shape: tuple[int, ...] = ()
    as_tuple: bool = False


def local_call(node: fx.Node, strategy: Strategy, args: list[Any], degree: int) -> LocalCall:
    """The call of an op on shards; `args` are those of the node, read as the strategy says."""
    name = op_name(node)
    call = LocalCall(node.target, local_args(node, strategy, args, degree))
    if name == "cross_entropy_loss":
        return replace(call, target=axis.vocab_cross_entropy)
    if name in GROUPED and strategy.reads[1] == Shard(0):
        return _own_experts(node, strategy, call)
    if isinstance(strategy.output, Partial) and name in _SUMMANDS:
        return _SUMMANDS[name](node, call)
    return call


def _own_experts(node: fx.Node, strategy: Strategy, call: LocalCall) -> LocalCall:
    """A grouped matmul of rows that are taken out, or are the device's own already."""
    if isinstance(strategy.reads[2], PerDevice):
        return _sent_to_experts(node, strategy, call)
    take = not isinstance(strategy.reads[0], Routed)
    put = not isinstance(strategy.output, Routed)
    return replace(call, target=axis_experts.grouped, args=[node.target, *call.args, take, put])


def _sent_to_experts(node: fx.Node, strategy: Strategy, call: LocalCall) -> LocalCall:
    """A grouped matmul of rows that are sent to the devices of their experts, and back.

    The numbers of rows are exchanged once for all grouped matmuls with the same ends.
    """
    rows, matrices, ends = call.args
    emit = ends.graph.call_function
    known = [user for user in ends.users if user.target is axis_routes.exchange_counts]
    counts = known[0] if known else emit(axis_routes.exchange_counts, (ends,))
    if isinstance(strategy.reads[0], Owned):
        rows = emit(axis_routes.dispatch, (rows, counts))
    args = [rows, matrices, emit(axis_routes.routed_ends, (counts,))]
    if not isinstance(strategy.output, Owned):
        return replace(call, args=args)
    out = emit(node.target, tuple(args))
    return replace(call, target=axis_routes.combine, args=[out, counts])


def _row_embedding(node: fx.Node, call: LocalCall) -> LocalCall:
    return replace(call, target=axis.vocab_embedding, args=call.args[:3])


def _row_bags(node: fx.Node, call: LocalCall) -> LocalCall:
    given = [*call.args, *_BAG_DEFAULTS[len(call.args) :]]
    # All but `scale_grad_by_freq` and `sparse`, which are false here.
    options = [*given[:3], given[4], *given[6:]]
    return replace(call, target=axis_bags.vocab_embedding_bag, args=options, as_tuple=True)


_BAG_DEFAULTS = (None, None, None, False, 0, False, None, False, -1)


def _added_last(node: fx.Node, call: LocalCall) -> LocalCall:
    """Of linear and convolutions: the third argument is a bias."""
    if len(call.args) < 3 or call.args[2] is None:
        return call
    positions = len(shape(node)) - 2 if op_name(node) in CONVOLUTIONS else 0
    view = (-1, *[1] * positions) if positions else ()
    args = [*call.args[:2], None, *call.args[3:]]
    return replace(call, args=args, added=call.args[2], added_shape=view)


def _added_first(product: Any) -> Callable[[fx.Node, LocalCall], LocalCall]:
    """Of addmm and the like: the first argument is added to a product."""

    def rule(node: fx.Node, call: LocalCall) -> LocalCall:
        return replace(call, target=product, args=call.args[1:], added=call.args[0])

    return rule


_SUMMANDS: Mapping[str, Callable[[fx.Node, LocalCall], LocalCall]] = {
    **dict.fromkeys(CONVOLUTIONS, _added_last),
    **dict.fromkeys(("embedding_bag", "_embedding_bag"), _row_bags),
    "addbmm": _added_first(axis_bags.summed_bmm),
    "addmm": _added_first(aten.mm.default),
    "addmv": _added_first(aten.mv.default),
    "baddbmm": _added_first(aten.bmm.default),
    "embedding": _row_embedding,
    "linear": _added_last,
}


def local_args(node: fx.Node, strategy: Strategy, args: list[Any], degree: int) -> list[Any]:
    """The arguments of an op with the sizes of a shard."""
    name, output = op_name(node), strategy.output
    local = list(args)
    if name in _SIZED and isinstance(output, Shard):
        place = _SIZED[name]
        local[place] = _shorter(args[place], output.dim, degree)
    elif name == "unflatten" and isinstance(output, Shard):
        first = int(args[1]) % node.args[0].meta["val"].ndim  # type: ignore[union-attr]  # a node
        if 0 <= output.dim - first < len(args[2]):
            local[2] = _shorter(args[2], output.dim - first, degree)
    elif name in SPLITS and name != "chunk":
        read = strategy.reads[0]
        if isinstance(read, Shard) and split_parts(node)[0] == read.dim:
            sizes = args[1]
            whole = isinstance(sizes, int)
            local[1] = sizes // degree if whole else [size // degree for size in sizes]
    elif (name in CONVOLUTIONS and conv_groups(node) > 1) or name == "group_norm":
        cut = isinstance(output, Shard) and output.dim == 1
        place = groups_position(node)
        local[place] = args[place] // degree if cut else args[place]
    return local


#: Which argument is the size of the result.
_SIZED: Mapping[str, int] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "expand"), 1),
    **{name: int(name.startswith("new_")) for name in FACTORIES},
}


def _shorter(sizes: list[Any], dim: int, degree: int) -> list[Any]:
    """Sizes with that of one dim made local; -1 is worked out by the op itself."""
    local = list(sizes)
    if isinstance(local[dim], fx.Node):  # a size that grows with the batch
        local[dim] = local[dim].graph.call_function(operator.floordiv, (local[dim], degree))
    elif local[dim] != -1:
        local[dim] = local[dim] // degree
    return local
