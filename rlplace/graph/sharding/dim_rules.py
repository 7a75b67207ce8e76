"""Signatures of the ops that move dims about, or work along some of them: the others pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from rlplace.graph.sharding.labels import Labels, Signature, SignatureRule, names, passing, whole
from rlplace.graph.sharding.nodes import argument, op_name, shape, tensor_args


def _along(position: int, default: int | None = None, name: str = "dim") -> SignatureRule:
    """Softmax and the like: all dims pass but those that the op works along."""

    def rule(node: fx.Node) -> Signature | None:
        dims = argument(node, position, name, default)
        dims = [dims] if isinstance(dims, int) else dims
        if not isinstance(dims, list | tuple) or not dims:
            return None
        return passing(whole(len(shape(node)), *dims))

    return rule


def _reduction(position: int = 1) -> SignatureRule:
    """Reduced dims stay whole; a sum may also be of summands."""

    def rule(node: fx.Node) -> Signature | None:
        count = len(shape(tensor_args(node)[0]))
        dims = argument(node, position, "dim")
        if isinstance(dims, bool):
            return None  # `unbiased`, of all dims
        dims = [dims] if isinstance(dims, int) else dims or range(count)
        reduced = {dim % count for dim in dims} if count else set()
        kept = whole(count, *reduced)
        output: Labels = tuple(label for i, label in enumerate(kept) if i not in reduced)
        if len(shape(node)) == count:
            output = kept
        if op_name(node) not in ("sum", "nansum"):
            return passing(kept, output=output)
        contracted = frozenset(f"d{dim}" for dim in reduced)
        return Signature((names("d", count),), output, contracted)

    return rule


def _extremum(node: fx.Node) -> Signature | None:
    """Max and min: of two tensors, or along a dim."""
    if isinstance(argument(node, 1, "dim"), int):
        return _reduction()(node)
    return None


def _permute(node: fx.Node) -> Signature:
    labels = names("d", len(shape(node)))
    if op_name(node) == "permute":
        order = [dim % len(labels) for dim in argument(node, 1, "dims")]
        return passing(labels, output=[labels[dim] for dim in order])
    order = list(range(len(labels)))
    first, second = argument(node, 1, "dim0", 0), argument(node, 2, "dim1", -1)
    if op_name(node) in ("mT", "adjoint"):
        first, second = -2, -1
    if labels:
        order[first], order[second] = order[second], order[first]
    return passing(labels, output=[labels[dim] for dim in order])


def _movedim(node: fx.Node) -> Signature:
    """The moved dims go to their places, the others fill the rest in order."""
    count = len(shape(node))
    pairs: Any = node.args[1:3]
    source, target = (
        [dim % count for dim in ([dims] if isinstance(dims, int) else dims)] for dims in pairs
    )
    rest = iter(dim for dim in range(count) if dim not in source)
    order = [source[target.index(i)] if i in target else next(rest) for i in range(count)]
    return passing(names("d", count), output=[f"d{dim}" for dim in order])


def _slice(node: fx.Node) -> Signature:
    """All dims pass but the one that is cut; that one too where the slice is all of it."""
    own, dim = shape(tensor_args(node)[0]), argument(node, 1, "dim", 0)
    # A slice that keeps all of a dim and names its end by a size does not fit a shard.
    end = argument(node, 3, "end")
    full = own[dim] == shape(node)[dim] and (end is None or _is_open(end))
    return passing(names("d", len(own)) if full else whole(len(own), dim))


def _is_open(end: Any) -> bool:
    return isinstance(end, int) and end > 2**62


def _select(node: fx.Node) -> Signature:
    count = len(shape(tensor_args(node)[0]))
    dim = argument(node, 1, "dim") % count
    labels = whole(count, dim)
    return passing(labels, output=labels[:dim] + labels[dim + 1 :])


def _cat(node: fx.Node) -> Signature | None:
    count = len(shape(node))
    if any(len(shape(arg)) != count for arg in tensor_args(node)):
        return None
    return passing(whole(count, argument(node, 1, "dim", 0)), len(tensor_args(node)))


def _stack(node: fx.Node) -> Signature:
    count = len(shape(node))
    dim = argument(node, 1, "dim", 0) % count
    labels = names("d", count - 1)
    return passing(labels, len(tensor_args(node)), (*labels[:dim], None, *labels[dim:]))


def _windows(node: fx.Node) -> Signature:
    """unfold: windows along one dim become another one, the last."""
    labels = whole(len(shape(node)) - 1, argument(node, 1, "dimension"))
    return passing(labels, output=(*labels, None))


def _pad(node: fx.Node) -> Signature:
    """Padded dims stay whole; the paddings come in pairs, for the last dim first."""
    sizes = list(argument(node, 1, "pad"))
    count = len(shape(node))
    padded = {count - 1 - i // 2 for i, size in enumerate(sizes) if size != 0}
    return passing(whole(count, *padded))


def _triangle(node: fx.Node) -> Signature:
    return passing(whole(len(shape(node)), -2, -1))


def _one_hot(node: fx.Node) -> Signature:
    labels = names("d", len(shape(node)) - 1)
    return passing(labels, output=(*labels, None))


def _repeat_interleave(node: fx.Node) -> Signature | None:
    """Each entry so many times in a row, so that a run stays a run."""
    dim = argument(node, 2, "dim")
    if dim is None or not isinstance(node.args[1], int) or node.kwargs:
        return None
    return passing(names("d", len(shape(node))))


_SUMS = "sum nansum mean nanmean amax amin var std var_mean std_mean prod any all argmax argmin"
_SUMS += " logsumexp count_nonzero median mode"
_PADS = (
    "pad",
    "constant_pad_nd",
    *(f"{w}_pad{n}d" for w in ("reflection", "replication") for n in (1, 2, 3)),
)

DIM_SIGNATURES: Mapping[str, SignatureRule] = {
    **dict.fromkeys(
        ("softmax", "log_softmax", "_softmax", "_log_softmax", "_safe_softmax"), _along(1)
    ),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"), _along(1)),
    **dict.fromkeys(("sort", "argsort"), _along(1, -1)),
    **dict.fromkeys(_SUMS.split(), _reduction()),
    **dict.fromkeys(("linalg_vector_norm", "norm"), _reduction(2)),
    **dict.fromkeys(("max", "min"), _extremum),
    **dict.fromkeys(
        ("permute", "transpose", "t", "swapaxes", "swapdims", "mT", "adjoint"), _permute
    ),
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    **dict.fromkeys(_PADS, _pad),
    **dict.fromkeys(("tril", "triu"), _triangle),
    "flip": _along(1, name="dims"),
    "movedim": _movedim,
    "narrow": _along(1),
    "one_hot": _one_hot,
    "repeat_interleave": _repeat_interleave,
    "roll": _along(2, name="dims"),
    "select": _select,
    "slice": _slice,
    "stack": _stack,
    "topk": _along(2, -1),
    "unfold": _windows,
}
