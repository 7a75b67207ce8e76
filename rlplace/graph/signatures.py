"""Ops in the manner of an einsum: a label for each dim that may be cut over the devices.

Cutting a label cuts every dim that carries it. An output without the label is then a sum over the
devices where the op contracts it, and illegal otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from rlplace.graph.nodes import argument, conv_groups, op_name, shape, tensor_args

Labels = tuple[str | None, ...]


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


# Each function may return None: this call has no sharded form.

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
    scaled_or_sparse = any(argument(node, 3 + i, n) for i, n in enumerate(_ODD_EMBEDDINGS))
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


def _whole(count: int, *dims: int) -> Labels:
    """Labels for all dims but some, which stay whole."""
    whole = {dim % count for dim in dims}
    return tuple(None if i in whole else label for i, label in enumerate(_names("d", count)))


def _along(node: fx.Node) -> Signature | None:
    """Softmax and the like: all dims pass but the one that the op works along."""
    dim = argument(node, 1, "dim")
    if not isinstance(dim, int):
        return None
    labels = _whole(len(shape(node)), dim)
    return Signature((labels,), labels)


def _reduction(node: fx.Node) -> Signature | None:
    """Reduced dims stay whole; a sum may also be of summands."""
    count = len(shape(tensor_args(node)[0]))
    dims = argument(node, 1, "dim")
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
        order = argument(node, 1, "dims")
    else:
        order = list(range(len(labels)))
        first, second = argument(node, 1, "dim0", 0), argument(node, 2, "dim1", -1)
        order[first], order[second] = order[second], order[first]
    return Signature((labels,), tuple(labels[dim] for dim in order))


def _slice(node: fx.Node) -> Signature:
    """All dims pass but the one that is cut; that one too where the slice is all of it."""
    own, dim = shape(tensor_args(node)[0]), argument(node, 1, "dim", 0)
    # A slice that keeps all of a dim and names its end by a size does not fit a shard.
    end = argument(node, 3, "end")
    full = own[dim] == shape(node)[dim] and (end is None or _is_open(end))
    labels = _names("d", len(own)) if full else _whole(len(own), dim)
    return Signature((labels,), labels)


def _is_open(end: Any) -> bool:
    return isinstance(end, int) and end > 2**62


def _select(node: fx.Node) -> Signature:
    count = len(shape(tensor_args(node)[0]))
    dim = argument(node, 1, "dim") % count
    labels = _whole(count, dim)
    return Signature((labels,), labels[:dim] + labels[dim + 1 :])


def _cat(node: fx.Node) -> Signature | None:
    count = len(shape(node))
    if any(len(shape(arg)) != count for arg in tensor_args(node)):
        return None
    labels = _whole(count, argument(node, 1, "dim", 0))
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
