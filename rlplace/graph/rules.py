"""Which shardings each ATen op can run on: an allow-list, everything else runs replicated.

Most ops are described in the manner of an einsum: each dim of each tensor argument has a label, and
cutting a label over the devices cuts every dim that carries it. An output without the label is
then a sum over the devices where the op contracts it, and illegal otherwise. Reshapes, splits and
the cross entropy have rules of their own. Nothing here knows of models or modules.

A sharding starts at ops that multiply (`Signature.origins`) and elsewhere only follows one that is
there already, so sequence and batch dims, on which nothing is to be won, stay whole.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from rlplace.graph.shapes import at_batch
from rlplace.graph.types import Partial, Placement, Replicate, Shard


@dataclass(frozen=True, slots=True)
class Copied:
    """A replicated value read by an op that works on a shard: its gradient is a sum."""


#: How an op reads one of its tensor arguments.
Want = Replicate | Copied | Shard

Labels = tuple[str | None, ...]

REPLICATE = Replicate()

#: Where ops are known by name. The transformers library wraps grouped matmuls in ops of its own.
_NAMESPACES = ("aten", "transformers")


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run a node.

    Args:
        reads: One for each tensor argument (`tensor_args`), in order.
        output: Placement of the result, of every part of it where it is a tuple. `Partial` is
            reduced at once.
    """

    reads: tuple[Want, ...]
    output: Placement

    @property
    def sharded(self) -> bool:
        """Whether the devices share the work."""
        return any(isinstance(want, Shard) for want in self.reads)


@dataclass(frozen=True, slots=True)
class Signature:
    """Labels of the dims of the arguments and of the output; None for a dim that stays whole.

    Args:
        inputs: One for each tensor argument, in order.
        output: Of the result.
        contracted: Labels that are summed over.
        origins: Labels on which a sharding may start.
        units: Labels whose dims are so many equal units, between which alone they may be cut.
    """

    inputs: tuple[Labels, ...]
    output: Labels
    contracted: frozenset[str] = frozenset()
    origins: tuple[str, ...] = ()
    units: Mapping[str, int] = field(default_factory=dict)


def op_name(node: fx.Node) -> str:
    """``linear`` of ``aten.linear.default``, ``getitem``, or an empty string."""
    if node.target is operator.getitem:
        return "getitem"
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace in _NAMESPACES:
        return str(target.overloadpacket.__name__)
    return ""


def is_tensor(node: fx.Node) -> bool:
    """Whether a node makes a tensor or a tuple of tensors."""
    value: Any = node.meta.get("val")
    value = value[0] if isinstance(value, list | tuple) and value else value
    return isinstance(value, Tensor)


def tensor_args(node: fx.Node) -> list[fx.Node]:
    """Arguments that are tensors (or tuples of tensors), with repeats, in order."""
    leaves = torch.utils._pytree.tree_leaves((node.args, node.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, fx.Node) and is_tensor(leaf)]


def shape(node: fx.Node) -> tuple[int, ...]:
    """Shape of a node's tensor; 0 stands for a size that depends on the batch."""
    value = node.meta["val"]
    value = value[0] if isinstance(value, list | tuple) else value
    return tuple(size if isinstance(size, int) else 0 for size in value.shape)


def written_args(node: fx.Node) -> list[fx.Node]:
    """Tensor arguments that a node writes into: they must be what it reads, not a copy."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return []
    if op_name(node) == "batch_norm":  # running statistics; the schema does not say so
        return [arg for arg in node.args[3:5] if isinstance(arg, fx.Node)]
    formal = zip(target._schema.arguments, node.args, strict=False)
    return [
        arg
        for argument, arg in formal
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and isinstance(arg, fx.Node)
    ]


def strategies(
    node: fx.Node,
    degree: int,
    reachable: Mapping[fx.Node, Collection[Shard]],
    block_counts: Collection[int] = (1,),
) -> list[Strategy]:
    """All ways to run a node on a tp axis, the replicated one first.

    Args:
        node: A call of a function.
        degree: Size of the axis.
        reachable: The shardings that each argument can have.
        block_counts: `Shard.blocks` to try where a sharding starts.
    """
    args = tensor_args(node)
    found = [Strategy((REPLICATE,) * len(args), REPLICATE)]
    name = op_name(node)
    if name in _OWN_RULES:
        for index, arg in enumerate(args):
            for shard in reachable.get(arg, ()):
                found += _OWN_RULES[name](node, degree, index, shard)
    elif rule := SIGNATURES.get(name) or SIGNATURES.get(name.rstrip("_")):
        signature = rule(node)
        if signature is not None:
            found += _labelled(args, signature, degree, reachable, block_counts)
    return list(dict.fromkeys(found))


def _labelled(
    args: Sequence[fx.Node],
    signature: Signature,
    degree: int,
    reachable: Mapping[fx.Node, Collection[Shard]],
    block_counts: Collection[int],
) -> list[Strategy]:
    """Strategies that cut one label of a signature."""
    starts = [(label, blocks) for label in signature.origins for blocks in block_counts]
    for arg, labels in zip(args, signature.inputs, strict=True):
        for shard in reachable.get(arg, ()):
            label = labels[shard.dim] if shard.dim < len(labels) else None
            starts += [(label, shard.blocks)] if label is not None else []
    found = (_cut(args, signature, degree, *start) for start in dict.fromkeys(starts))
    return [strategy for strategy in found if strategy is not None]


def _cut(
    args: Sequence[fx.Node], signature: Signature, degree: int, label: str, blocks: int
) -> Strategy | None:
    sizes = {
        shape(arg)[labels.index(label)]
        for arg, labels in zip(args, signature.inputs, strict=True)
        if label in labels
    }
    sizes |= {signature.units.get(label, 0)} - {0}
    if not all(divides(size, degree, blocks) for size in sizes):
        return None
    output: Placement = Partial()
    rest: Want = REPLICATE  # what is not summed over is added after the sum (a bias)
    if label in signature.output:
        output, rest = Shard(signature.output.index(label), blocks), Copied()
    elif label not in signature.contracted:
        return None
    reads = tuple(
        Shard(labels.index(label), blocks) if label in labels else rest
        for labels in signature.inputs
    )
    return Strategy(reads, output)


def divides(size: int, degree: int, blocks: int = 1) -> bool:
    """Whether a dim of a known size can be cut into equal parts."""
    return size > 0 and size % (degree * blocks) == 0


# Signatures. Each function may return None: this call has no sharded form.

_SignatureRule = Callable[[fx.Node], Signature | None]


def _names(prefix: str, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}{index}" for index in range(count))


def _broadcast(node: fx.Node) -> Signature:
    """Elementwise, with broadcasting: dims are aligned on the right."""
    out = shape(node)
    labels = _names("d", len(out))
    inputs = []
    for arg in tensor_args(node):
        own = shape(arg)
        aligned = labels[len(out) - len(own) :]
        whole = zip(own, out[len(out) - len(own) :], aligned, strict=True)
        inputs.append(tuple(a if size == full else None for size, full, a in whole))
    return Signature(tuple(inputs), labels)


def _linear(node: fx.Node) -> Signature | None:
    rank = len(shape(tensor_args(node)[0]))
    if len(shape(tensor_args(node)[1])) != 2:
        return None
    lead = _names("r", rank - 1)
    inputs: tuple[Labels, ...] = ((*lead, "k"), ("n", "k"), ("n",))
    return Signature(inputs[: len(tensor_args(node))], (*lead, "n"), frozenset("k"), ("n", "k"))


def _addmm(node: fx.Node) -> Signature | None:
    bias = shape(tensor_args(node)[0])
    if node.kwargs or len(bias) != 1 or bias != shape(node)[1:]:
        return None
    inputs = (("n",), ("m", "k"), ("k", "n"))
    return Signature(inputs, ("m", "n"), frozenset("k"), ("n", "k"))


def _matmul(node: fx.Node) -> Signature | None:
    """mm, bmm and matmul, with batch dims broadcast and aligned on the right."""
    left, right = (shape(arg) for arg in tensor_args(node))
    if len(left) < 2 or len(right) < 2:
        return None
    out = shape(node)
    batch = _names("b", len(out) - 2)

    def lead(own: tuple[int, ...]) -> Labels:
        sizes = zip(own[:-2], out[len(out) - len(own) : -2], strict=True)
        aligned = batch[len(out) - len(own) :]
        return tuple(a if s == o else None for a, (s, o) in zip(aligned, sizes, strict=True))

    inputs = ((*lead(left), "m", "k"), (*lead(right), "k", "n"))
    return Signature(inputs, (*batch, "m", "n"), frozenset("k"), ("n", "k"))


def _grouped_mm(node: fx.Node) -> Signature | None:
    """Rows, sorted by group, times the matrix of their group."""
    args = tensor_args(node)
    if [len(shape(arg)) for arg in args] != [2, 3, 1]:
        return None
    return Signature(
        (("m", "k"), (None, "k", "n"), (None,)), ("m", "n"), frozenset("k"), ("n", "k")
    )


_ODD_EMBEDDINGS = ("scale_grad_by_freq", "sparse")


def _embedding(node: fx.Node) -> Signature | None:
    """Rows may be cut too: each device looks up its own, and the rest is zero."""
    scaled_or_sparse = any(_argument(node, 3 + i, n) for i, n in enumerate(_ODD_EMBEDDINGS))
    lead = _names("i", len(shape(node)) - 1)
    origins = ("f",) if scaled_or_sparse else ("v", "f")
    contracted: frozenset[str] = frozenset() if scaled_or_sparse else frozenset("v")
    return Signature((("v", "f"), lead), (*lead, "f"), contracted, origins)


def _attention(node: fx.Node) -> Signature | None:
    """Batch dims, of which the heads are one; grouped keys are cut with the queries they serve."""
    args = tensor_args(node)
    rank = len(shape(args[0]))
    if rank < 3 or any(len(shape(arg)) != rank for arg in args[:3]):
        return None
    batch = _names("b", rank - 2)
    inputs: list[Labels] = [(*batch, None, None)] * 3
    for mask in args[3:]:
        own = shape(mask)
        aligned = (*batch, None, None)[rank - len(own) :]
        inputs.append(tuple(a if s != 1 else None for a, s in zip(aligned, own, strict=True)))
    return Signature(tuple(inputs), (*batch, None, None))


def _conv2d(node: fx.Node) -> Signature | None:
    """Out channels, in channels (a sum), or whole groups of channels."""
    args = tensor_args(node)
    if len(shape(args[0])) != 4:
        return None
    biases: list[Labels] = [("o",)] * (len(args) - 2)
    groups = conv_groups(node)
    if groups > 1:
        inputs = (("b", "o", None, None), ("o", None, None, None), *biases)
        return Signature(inputs, ("b", "o", None, None), units={"o": groups})
    inputs = (("b", "c", None, None), ("o", "c", None, None), *biases)
    return Signature(inputs, ("b", "o", None, None), frozenset("c"), ("o", "c"))


def conv_groups(node: fx.Node) -> int:
    """`groups` of a conv2d."""
    return int(_argument(node, 6, "groups", 1))


def _batch_norm(node: fx.Node) -> Signature | None:
    args = tensor_args(node)
    lead: Labels = ("b", "c", *(None for _ in shape(args[0])[2:]))
    return Signature((lead, *[("c",)] * (len(args) - 1)), lead)


def _channels(node: fx.Node) -> Signature | None:
    """Pools: all dims but the last two pass."""
    labels: Labels = (*_names("d", len(shape(node)) - 2), None, None)
    return Signature((labels,), labels)


def _layer_norm(node: fx.Node) -> Signature | None:
    """The normalized dims stay whole."""
    normalized = node.args[1]
    assert isinstance(normalized, list | tuple), "normalized_shape is a list"
    lead = _names("d", len(shape(node)) - len(normalized))
    whole = (None,) * len(normalized)
    params: list[Labels] = [whole] * (len(tensor_args(node)) - 1)
    return Signature(((*lead, *whole), *params), (*lead, *whole))


def _argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument that may be given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _whole(count: int, *dims: int) -> Labels:
    """Labels for all dims but some, which stay whole."""
    whole = {dim % count for dim in dims}
    return tuple(None if i in whole else label for i, label in enumerate(_names("d", count)))


def _along(node: fx.Node) -> Signature | None:
    """Softmax and the like: all dims pass but the one that the op works along."""
    dim = _argument(node, 1, "dim")
    if not isinstance(dim, int):
        return None
    labels = _whole(len(shape(node)), dim)
    return Signature((labels,), labels)


def _reduction(node: fx.Node) -> Signature | None:
    """Reduced dims stay whole; a sum may also be of summands."""
    count = len(shape(tensor_args(node)[0]))
    dims = _argument(node, 1, "dim")
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, list | tuple) or not dims:
        return None
    reduced = {dim % count for dim in dims}
    kept = _whole(count, *dims)
    names = _names("d", count)
    output = tuple(label for label in kept if label is not None)
    if len(shape(node)) == count:
        output = kept  # type: ignore[assignment]
    if op_name(node) != "sum":
        return Signature((kept,), output)
    return Signature((names,), output, frozenset(f"d{dim}" for dim in reduced))


def _permute(node: fx.Node) -> Signature:
    labels = _names("d", len(shape(node)))
    if op_name(node) == "permute":
        order = _argument(node, 1, "dims")
    else:
        order = list(range(len(labels)))
        first, second = _argument(node, 1, "dim0", 0), _argument(node, 2, "dim1", -1)
        order[first], order[second] = order[second], order[first]
    return Signature((labels,), tuple(labels[dim] for dim in order))


def _slice(node: fx.Node) -> Signature:
    """All dims pass but the one that is cut; that one too where the slice is all of it."""
    own, dim = shape(tensor_args(node)[0]), _argument(node, 1, "dim", 0)
    # A slice that keeps all of a dim and names its end by a size does not fit a shard.
    end = _argument(node, 3, "end")
    full = own[dim] == shape(node)[dim] and (end is None or _is_open(end))
    labels = _names("d", len(own)) if full else _whole(len(own), dim)
    return Signature((labels,), labels)


def _is_open(end: Any) -> bool:
    return isinstance(end, int) and end > 2**62


def _select(node: fx.Node) -> Signature:
    count = len(shape(tensor_args(node)[0]))
    dim = _argument(node, 1, "dim") % count
    labels = _whole(count, dim)
    return Signature((labels,), labels[:dim] + labels[dim + 1 :])


def _cat(node: fx.Node) -> Signature | None:
    count = len(shape(node))
    if any(len(shape(arg)) != count for arg in tensor_args(node)):
        return None
    labels = _whole(count, _argument(node, 1, "dim", 0))
    return Signature((labels,) * len(tensor_args(node)), labels)


_ELEMENTWISE = """
    abs add addcdiv addcmul alias atan bitwise_and bitwise_not bitwise_or ceil celu clamp clamp_max
    clamp_min clone contiguous cos detach div dropout elu eq erf exp expm1 floor full_like ge gelu
    gt hardsigmoid hardswish hardtanh isnan le leaky_relu lerp log log1p logical_and logical_not
    logical_or lt masked_fill maximum minimum mish mul nan_to_num ne neg ones_like pow reciprocal
    relu relu6 round rsqrt rsub sigmoid sign silu sin softplus sqrt square sub tan tanh to
    type_as where zeros_like __and__ __or__ _to_copy
""".split()

SIGNATURES: Mapping[str, _SignatureRule] = {
    **dict.fromkeys(_ELEMENTWISE, _broadcast),
    **dict.fromkeys(("mm", "bmm", "matmul"), _matmul),
    **dict.fromkeys(("_grouped_mm", "grouped_mm", "grouped_mm_fallback"), _grouped_mm),
    **dict.fromkeys(("softmax", "log_softmax", "_softmax", "cumsum"), _along),
    **dict.fromkeys(("mean", "sum", "amax", "amin", "var", "std"), _reduction),
    **dict.fromkeys(("permute", "transpose", "t"), _permute),
    **dict.fromkeys(("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d"), _channels),
    **dict.fromkeys(("layer_norm", "rms_norm"), _layer_norm),
    "addmm": _addmm,
    "batch_norm": _batch_norm,
    "cat": _cat,
    "conv2d": _conv2d,
    "embedding": _embedding,
    "expand": _broadcast,
    "linear": _linear,
    "scaled_dot_product_attention": _attention,
    "select": _select,
    "slice": _slice,
}


# Rules of their own: (node, degree, index of an argument, how that argument is cut) -> strategies.

_OwnRule = Callable[[fx.Node, int, int, Shard], list[Strategy]]


def reshaped(
    source: Sequence[int], target: Sequence[int], shard: Shard, degree: int
) -> Shard | None:
    """Where a sharding goes in a reshape, or None if the result would not be a `Shard`.

    Both shapes are cut into the shortest runs of dims with equal products. Within its run, a
    sharded dim behind dims of product p is a run of ``p * blocks`` equal pieces, each cut over
    the devices; it lands on the output dim that can be cut in that way.

    Args:
        source: Shape before, with `BATCH` samples.
        target: Shape after, likewise.
        shard: The sharding before.
        degree: Size of the axis.
    """
    for inside, outside in _runs(source, target):
        if shard.dim not in inside:
            continue
        pieces = shard.blocks * math.prod(source[i] for i in inside if i < shard.dim)
        for position in reversed(range(len(outside))):
            dim, before = outside[position], math.prod(target[i] for i in outside[:position])
            fixed = target[dim] % BATCH != 0
            if fixed and pieces % before == 0 and divides(target[dim], degree, pieces // before):
                return Shard(dim, pieces // before)
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
    source = shape(tensor_args(node)[0])
    # squeeze drops dims that happen to be 1, which the dim of a shard may become.
    if op_name(node) == "squeeze" and source[shard.dim] == degree:
        return []
    before, after = (
        [at_batch(size, BATCH) for size in value.meta["val"].shape]
        for value in (tensor_args(node)[0], node)
    )
    target = reshaped(before, after, shard, degree)
    return [] if target is None else [Strategy((shard,), target)]


def _split(node: fx.Node, degree: int, index: int, shard: Shard) -> list[Strategy]:
    """A whole dim may be split in any way, a sharded one into as many parts as it has runs."""
    dim, parts = split_parts(node)
    if dim != shard.dim:
        return [Strategy((shard,), shard)]
    equal = len(set(parts)) == 1 and shard.blocks % len(parts) == 0
    return [Strategy((shard,), Shard(dim, shard.blocks // len(parts)))] if equal else []


def split_parts(node: fx.Node) -> tuple[int, list[int]]:
    """The dim of a split or chunk, and the sizes of its parts."""
    values: Sequence[Tensor] = node.meta["val"]
    dim = _argument(node, 2, "dim", 0) % values[0].ndim
    return dim, [size if isinstance(size := value.shape[dim], int) else 0 for value in values]


def _unbind(node: fx.Node, degree: int, index: int, shard: Shard) -> list[Strategy]:
    dim = _argument(node, 1, "dim", 0) % len(shape(tensor_args(node)[0]))
    if dim == shard.dim:
        return []
    return [Strategy((shard,), Shard(shard.dim - (dim < shard.dim), shard.blocks))]


def _getitem(node: fx.Node, degree: int, index: int, shard: Shard) -> list[Strategy]:
    return [Strategy((shard,), shard)]


def _cross_entropy(node: fx.Node, degree: int, index: int, shard: Shard) -> list[Strategy]:
    """Logits (rows, classes) with the classes cut; the loss comes out whole."""
    smoothing = _argument(node, 5, "label_smoothing")
    plain = _argument(node, 2, "weight") is None and not smoothing
    logits, target = (arg.meta["val"] for arg in tensor_args(node)[:2])
    indices = not target.is_floating_point() and logits.ndim == 2
    if index == 0 and shard == Shard(1) and plain and indices:
        return [Strategy((shard, REPLICATE), REPLICATE)]
    return []


RESHAPES = frozenset(
    {"view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze"}
)
SPLITS = frozenset({"split", "chunk", "split_with_sizes"})

_OWN_RULES: Mapping[str, _OwnRule] = {
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys(SPLITS, _split),
    "unbind": _unbind,
    "getitem": _getitem,
    "cross_entropy_loss": _cross_entropy,
}
