"""Which dim of each input is the batch: found, or told by the user."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rlplace.errors import CaptureError, InputError, nearest_names

#: The batch dim of all inputs, or of some by name; None for an input without a batch.
BatchDim = int | Mapping[str, int | None] | None


def batch_dims(arguments: Sequence[tuple[str, Any]], batch_dim: BatchDim = None) -> dict[int, int]:
    """The batch dim of each tensor by ``id``; tensors without one are static.

    Args:
        arguments: Name and value of each argument of the call; values may be nested.
        batch_dim: A number for all tensors: those with more dims that have the batch size there,
            and one-dimensional ones (labels) of that size. A mapping from argument names is for
            all tensors of an argument, None for no batch; others as found. By default dim 0 of
            the first tensor is the batch, and of every other tensor with that size. Only where all
            inputs have 3 dims or more and differ in dim 0 alone, which are sequences of (length,
            batch, features), it is dim 1, with a warning.

    Raises:
        CaptureError: If no tensor has a batch of at least 2.
        InputError: If `batch_dim` names an unknown argument or a dim that a tensor does not have,
            or if the sizes differ.
    """
    given = batch_dim if isinstance(batch_dim, Mapping) else {}
    names = [name for name, _ in arguments]
    for name in given:
        if name not in names:
            rule = f"no argument of the call is named so; there are {', '.join(names)}"
            raise InputError("batch_dim", name, rule, nearest_names(name, names))
    named: dict[int, int] = {}
    free: list[Tensor] = []
    for name, value in arguments:
        tensors = _tensors(value)
        dim = given.get(name)
        if name not in given:
            free += tensors
        elif dim is not None:
            named |= {id(tensor): _checked(dim, tensor, name) for tensor in tensors if tensor.ndim}
    everything = [tensor for _, value in arguments for tensor in _tensors(value)]
    sizes = {t.shape[named[id(t)]] for t in everything if id(t) in named}
    if len(sizes) > 1:
        rule = f"the inputs must have one batch size, they have {sorted(sizes)}"
        raise InputError("batch_dim", dict(given), rule)
    if isinstance(batch_dim, int):
        found = _at(batch_dim, free)
    elif sizes:
        found = {id(t): 0 for t in free if t.ndim and t.shape[0] in sizes}
    else:
        found = _found(free)
    chosen = named | found
    _check_size([t.shape[chosen[id(t)]] for t in everything if id(t) in chosen])
    return chosen


def _found(tensors: Iterable[Tensor]) -> dict[int, int]:
    shaped = [tensor for tensor in tensors if tensor.ndim]
    if not shaped:
        return {}
    size = shaped[0].shape[0]
    if any(tensor.shape[0] != size for tensor in shaped) and _lengths_first(shaped):
        warnings.warn(
            "dim 1 of all inputs is taken for the batch, as they differ in dim 0 alone; "
            "batch_dim=0 or batch_dim=1 says which it is",
            stacklevel=2,
        )
        return {id(tensor): 1 for tensor in shaped}
    return {id(tensor): 0 for tensor in shaped if tensor.shape[0] == size}


def _lengths_first(tensors: Sequence[Tensor]) -> bool:
    """Whether these are sequences of (length, batch, ...) that differ in their lengths."""
    return tensors[0].ndim > 2 and len({tuple(tensor.shape[1:]) for tensor in tensors}) == 1


def _at(dim: int, tensors: Iterable[Tensor]) -> dict[int, int]:
    shaped = [tensor for tensor in tensors if tensor.ndim > dim >= 0]
    if not shaped:
        raise InputError("batch_dim", dim, "no input tensor has this dim", 0)
    size = shaped[0].shape[dim]
    found = {id(tensor): dim for tensor in shaped if tensor.shape[dim] == size}
    flat = [tensor for tensor in tensors if tensor.ndim == 1 and tensor.shape[0] == size]
    return {id(tensor): 0 for tensor in flat} | found


def _checked(dim: int, tensor: Tensor, name: str) -> int:
    if not 0 <= dim < tensor.ndim:
        rule = f"input {name} has {tensor.ndim} dims"
        raise InputError("batch_dim", dim, rule, f"0 to {tensor.ndim - 1}")
    return dim


def _check_size(sizes: Sequence[int]) -> None:
    if not sizes or sizes[0] < 2:
        size = sizes[0] if sizes else "none"
        raise CaptureError(
            f"the first tensor input must have a batch dim of at least 2, it has {size}: "
            "torch.export makes a constant of a batch of one; pass a batch of 2 or more, or name "
            "the dim with batch_dim"
        )


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
