"""Indexing, scatter and bags of embeddings: what is indexed stays whole, other dims pass.

The rows of an embedding bag are the exception: each device sums up those of its own rows, as for a
single embedding (`rlplace.graph.sharding.axis_bags`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx

from rlplace.graph.sharding.labels import Labels, Signature, SignatureRule, aligned, names, whole
from rlplace.graph.sharding.nodes import argument, op_name, shape, tensor_args


def _dim_signature(node: fx.Node) -> Signature | None:
    """gather, scatter, index_add and the like: dims along which nothing moves pass.

    Arguments of as many dims as the first share its labels; an index of one dim stays whole.
    """
    args = tensor_args(node)
    count = len(shape(args[0]))
    full = [shape(arg) for arg in (*args, node) if len(shape(arg)) == count]
    if count == 0 or any(len(shape(arg)) not in (0, 1, count) for arg in args):
        return None
    passes = whole(count, argument(node, 1, "dim"))
    equal = [len({sizes[dim] for sizes in full}) == 1 for dim in range(count)]
    # With an index of one dim, the dim that it indexes has other sizes too.
    labels = tuple(label if same else None for label, same in zip(passes, equal, strict=True))
    inputs = tuple(
        labels if len(shape(arg)) == count else (None,) * len(shape(arg)) for arg in args
    )
    return Signature(inputs, labels)


def _places(node: fx.Node) -> tuple[Labels, Labels]:
    """Labels of a tensor and of ``tensor[indices]``; a mask stands for as many dims as it has."""
    count = len(shape(tensor_args(node)[0]))
    labels: list[str | None] = list(names("d", count))
    taken: list[int] = []
    at = rank = 0
    for index in argument(node, 1, "indices"):
        width = 1
        if index is not None:
            value: Tensor = index.meta["val"]
            mask = value.dtype in (torch.bool, torch.uint8)
            width = value.ndim if mask else 1
            rank = max(rank, 1 if mask else value.ndim)
            taken += range(at, at + width)
        at += width
    kept = [label for dim, label in enumerate(labels) if dim not in taken]
    together = taken == list(range(taken[0], taken[-1] + 1))
    front = taken[0] if together else 0
    labels = [None if dim in taken else label for dim, label in enumerate(labels)]
    return tuple(labels), (*kept[:front], *(None,) * rank, *kept[front:])


def _whole_arguments(node: fx.Node, first: int, last: int | None = None) -> list[Labels]:
    return [(None,) * len(shape(arg)) for arg in tensor_args(node)[first:last]]


def _index(node: fx.Node) -> Signature:
    own, output = _places(node)
    return Signature((own, *_whole_arguments(node, 1)), output)


def _index_put(node: fx.Node) -> Signature:
    """Values are broadcast to what is replaced, or added to."""
    own, replaced = _places(node)
    sizes = dict(zip(own, shape(tensor_args(node)[0]), strict=True))
    full = [0 if label is None else sizes[label] for label in replaced]
    values = aligned(shape(tensor_args(node)[-1]), replaced, full)
    return Signature((own, *_whole_arguments(node, 1, -1), values), own)


_SUM, _MEAN = 0, 1


def _embedding_bag(node: fx.Node) -> Signature | None:
    """Features, or rows where bags are sums or means. Only the first result may be used."""
    used = [user for user in node.users if user.users or op_name(user) != "getitem"]
    if any(op_name(user) != "getitem" or user.args[1] != 0 for user in used):
        return None
    scaled, mode = argument(node, 3, "scale_grad_by_freq"), argument(node, 4, "mode", _SUM)
    rows = not (scaled or argument(node, 5, "sparse")) and mode in (_SUM, _MEAN)
    inputs: list[Labels] = [("v", "f"), *_whole_arguments(node, 1)]
    contracted = frozenset("v") if rows else frozenset[str]()
    origins = ("v", "f") if rows else ("f",)
    return Signature(tuple(inputs), (None, "f"), contracted, origins, solid=frozenset("v"))


_ALONG_A_DIM = "gather index_add index_copy index_fill index_select scatter scatter_add".split()

INDEX_SIGNATURES: Mapping[str, SignatureRule] = {
    **dict.fromkeys((*_ALONG_A_DIM, "scatter_reduce", "index_reduce"), _dim_signature),
    **dict.fromkeys(("index", "_unsafe_index"), _index),
    **dict.fromkeys(("index_put", "_unsafe_index_put"), _index_put),
    **dict.fromkeys(("embedding_bag", "_embedding_bag"), _embedding_bag),
}
