"""Which shardings each ATen op can run on: an allow-list, everything else runs replicated.

Most ops are described by a `sharding.signatures.Signature`; reshapes, splits and the cross
entropy have rules of their own. Nothing here knows of models or modules.

A sharding starts at ops that multiply (`Signature.origins`) and elsewhere only follows one that is
there already, so sequence and batch dims stay whole unless the piece reads or writes them cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, fx

from rlplace.graph.shapes import at_batch
from rlplace.graph.sharding.expert_rules import expert_strategies, unrouted
from rlplace.graph.sharding.labels import Signature
from rlplace.graph.sharding.nodes import (
    FACTORIES,
    RESHAPES,
    SPLITS,
    argument,
    op_name,
    shape,
    split_parts,
    tensor_args,
)
from rlplace.graph.sharding.row_rules import attention_rows, cross_entropy_rows
from rlplace.graph.sharding.run_rules import glu, made, repeat
from rlplace.graph.sharding.signatures import SIGNATURES
from rlplace.graph.sharding.strategy import REPLICATE as REPLICATE
from rlplace.graph.sharding.strategy import Copied as Copied
from rlplace.graph.sharding.strategy import Strategy as Strategy
from rlplace.graph.sharding.strategy import Want as Want
from rlplace.graph.sharding.strategy import divides as divides
from rlplace.graph.types import Partial, Placement, Shard


def strategies(
    node: fx.Node,
    degree: int,
    reachable: Mapping[fx.Node, Collection[Shard]],
    block_counts: Collection[int] = (1,),
) -> list[Strategy]:
    """All ways to run a node on an axis, the replicated one first.

    Args:
        node: A call of a function.
        degree: Size of the axis.
        reachable: The shardings that each argument can have.
        block_counts: `Shard.blocks` to try where a sharding starts.
    """
    args = tensor_args(node)
    found = [Strategy((REPLICATE,) * len(args), REPLICATE)]
    name = op_name(node)
    routed, reachable = reachable, {arg: unrouted(reachable.get(arg, ())) for arg in args}
    if name == "scaled_dot_product_attention":
        found += attention_rows(node, degree, list(reachable.get(args[0], ())))
    if name in FACTORIES:
        found += made(node, degree, reachable, block_counts)
    elif name in _OWN_RULES:
        for index, arg in enumerate(args):
            for shard in reachable.get(arg, ()):
                if not shard.run or name in _KEEP_RUNS:
                    found += _OWN_RULES[name](node, degree, index, shard)
    elif rule := SIGNATURES.get(name) or SIGNATURES.get(name.rstrip("_")):
        signature = rule(node)
        if signature is not None:
            found += _labelled(node, signature, degree, reachable, block_counts)
    found += expert_strategies(node, routed)
    return list(dict.fromkeys(found))


def _labelled(
    node: fx.Node,
    signature: Signature,
    degree: int,
    reachable: Mapping[fx.Node, Collection[Shard]],
    block_counts: Collection[int],
) -> list[Strategy]:
    """Strategies that cut one label of a signature."""
    args = tensor_args(node)
    starts = [(label, blocks, 0) for label in signature.origins for blocks in block_counts]
    for arg, labels in zip(args, signature.inputs, strict=True):
        for shard in reachable.get(arg, ()):
            label = labels[shard.dim] if shard.dim < len(labels) else None
            starts += [(label, shard.blocks, shard.run)] if label is not None else []
    found = (_cut(node, signature, degree, *start) for start in dict.fromkeys(starts))
    return [strategy for strategy in found if strategy is not None]


def _cut(
    node: fx.Node, signature: Signature, degree: int, label: str, blocks: int, run: int
) -> Strategy | None:
    args = tensor_args(node)
    labelled = [*zip(args, signature.inputs, strict=True), (node, signature.output)]
    sizes = {shape(each)[labels.index(label)] for each, labels in labelled if label in labels}
    sizes |= {signature.units.get(label, 0)} - {0}
    if (blocks > 1 or run) and label in signature.solid:
        return None
    if not (sizes == {0} if run else all(divides(size, degree, blocks) for size in sizes)):
        return None
    output: Placement = Partial()
    after: set[int] = set()  # what is added after a sum
    if label in signature.output:
        output = Shard(signature.output.index(label), blocks, run)
    elif label in signature.contracted:
        after = {i for i, arg in enumerate(args) if i in signature.added or not _is_float(arg)}
    else:
        return None
    reads: list[Want] = [REPLICATE if i in after else Copied() for i in range(len(args))]
    for i, labels in enumerate(signature.inputs):
        if label in labels:
            reads[i] = Shard(labels.index(label), blocks, run)
    return Strategy(tuple(reads), output)


def _is_float(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.is_floating_point()


# Rules of their own: (node, degree, index of an argument, how that argument is cut) -> strategies.

_OwnRule = Callable[[fx.Node, int, int, Shard], list[Strategy]]


def reshaped(
    source: Sequence[int], target: Sequence[int], shard: Shard, degree: int
) -> Shard | None:
    """Where a sharding goes in a reshape, or None if the result would not be a `Shard`.

    Both shapes are cut into the shortest runs of dims with equal products. Within its run, a
    sharded dim behind dims of product p is a run of ``p * blocks`` equal pieces, each cut over
    the devices; it lands on the output dim that can be cut in that way. The number of pieces may
    grow with the batch (`Shard.run`).

    Args:
        source: Shape before, with `BATCH` samples.
        target: Shape after, likewise.
        shard: The sharding before.
        degree: Size of the axis.
    """
    for inside, outside in _runs(source, target):
        if shard.dim not in inside:
            continue
        blocks = source[shard.dim] // shard.run if shard.run else shard.blocks
        pieces = blocks * math.prod(source[i] for i in inside if i < shard.dim)
        for position in reversed(range(len(outside))):
            dim, before = outside[position], math.prod(target[i] for i in outside[:position])
            if pieces % before or target[dim] % (pieces // before * degree):
                continue
            own = pieces // before
            if target[dim] % BATCH != 0:
                return Shard(dim, own)
            if own % BATCH == 0:
                return Shard(dim, 1, target[dim] // own)
    return None


#: Stands for the batch in a reshape: a prime that no size of a model contains.
BATCH = 1_000_003


def _runs(source: Sequence[int], target: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Dims before and after of the shortest runs with equal products."""
    runs: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(source) and j < len(target):
        inside, outside = [i], [j]
        left, right = source[i], target[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, inside, i = left * source[i], [*inside, i], i + 1
            else:
                right, outside, j = right * target[j], [*outside, j], j + 1
        runs.append((inside, outside))
    return runs


def _reshape(node: fx.Node, degree: int, index: int, shard: Shard) -> list[Strategy]:
    if index:  # view_as and reshape_as read another tensor for its shape
        return []
    source = shape(tensor_args(node)[0])
    # squeeze drops dims that happen to be 1, which the dim of a shard may become.
    if op_name(node) == "squeeze" and source[shard.dim] == degree:
        return []
    before, after = (
        [at_batch(size, BATCH) for size in value.meta["val"].shape]
        for value in (tensor_args(node)[0], node)
    )
    target = reshaped(before, after, shard, degree)
    if target is None:
        return []
    return [Strategy((shard, *[target] * (len(tensor_args(node)) - 1)), target)]


def _split(node: fx.Node, degree: int, index: int, shard: Shard) -> list[Strategy]:
    """A whole dim may be split in any way, a sharded one into as many parts as it has runs."""
    dim, parts = split_parts(node)
    if dim != shard.dim:
        return [Strategy((shard,), shard)]
    equal = len(set(parts)) == 1 and shard.blocks % len(parts) == 0
    return [Strategy((shard,), Shard(dim, shard.blocks // len(parts)))] if equal else []


def _unbind(node: fx.Node, degree: int, index: int, shard: Shard) -> list[Strategy]:
    dim = argument(node, 1, "dim", 0) % len(shape(tensor_args(node)[0]))
    if dim == shard.dim:
        return []
    return [Strategy((shard,), replace(shard, dim=shard.dim - (dim < shard.dim)))]


def _getitem(node: fx.Node, degree: int, index: int, shard: Shard) -> list[Strategy]:
    return [Strategy((shard,), shard)]


def _cross_entropy(node: fx.Node, degree: int, index: int, shard: Shard) -> list[Strategy]:
    """Logits (rows, classes) with the classes or the rows cut; the loss comes out whole."""
    if index == 0 and shard.run:
        return cross_entropy_rows(node, shard)
    smoothing = argument(node, 5, "label_smoothing")
    plain = argument(node, 2, "weight") is None and not smoothing
    logits, target = (arg.meta["val"] for arg in tensor_args(node)[:2])
    indices = not target.is_floating_point() and logits.ndim == 2
    if index == 0 and shard == Shard(1) and plain and indices:
        return [Strategy((shard, REPLICATE), REPLICATE)]
    return []


#: Own rules that know of `Shard.run`.
_KEEP_RUNS = RESHAPES | SPLITS | {"unbind", "getitem", "cross_entropy_loss"}

_OWN_RULES: Mapping[str, _OwnRule] = {
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys(SPLITS, _split),
    "unbind": _unbind,
    "getitem": _getitem,
    "glu": glu,
    "repeat": repeat,
    "tile": repeat,
    "cross_entropy_loss": _cross_entropy,
}
