"""Whole tensors to the parts that the devices of an axis hold, and back (see `Shard`).

A cut dim is runs one behind the other: `blocks` of them, or one for every `run` elements. Each run
is cut over the devices, so the elements of one device are spread over the dim. "By run" is the
order of the whole tensor, "by device" has all elements of device 0 first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def runs_of(length: int, blocks: int, run: int) -> int:
    """Number of runs of a dim of a whole tensor."""
    return length // run if run else blocks


def cut(tensor: Tensor, dim: int, blocks: int, rank: int, size: int, run: int = 0) -> Tensor:
    """The part of a whole tensor that one device holds, contiguous."""
    blocks = runs_of(tensor.shape[dim], blocks, run)
    if blocks == 1:
        return tensor.chunk(size, dim)[rank].contiguous()
    runs = tensor.reshape(*tensor.shape[:dim], blocks, size, -1, *tensor.shape[dim + 1 :])
    return runs.select(dim + 1, rank).flatten(dim, dim + 1).contiguous()


def join(shards: Sequence[Tensor], dim: int, blocks: int, run: int = 0) -> Tensor:
    """The whole tensor from the parts of all devices, in the order of their ranks."""
    together = torch.cat(list(shards), dim)
    return by_run(together, dim, runs_of(together.shape[dim], blocks, run), len(shards))


def by_run(tensor: Tensor, dim: int, blocks: int, size: int) -> Tensor:
    """A dim from device-major order to the order of the whole tensor."""
    return _swap(tensor, dim, size, blocks)


def by_device(tensor: Tensor, dim: int, blocks: int, size: int) -> Tensor:
    """The inverse of `by_run`: then the equal chunks of the dim are the devices' parts."""
    return _swap(tensor, dim, blocks, size)


def _swap(tensor: Tensor, dim: int, outer: int, inner: int) -> Tensor:
    if 1 in (outer, inner):
        return tensor
    pieces = tensor.reshape(*tensor.shape[:dim], outer, inner, -1, *tensor.shape[dim + 1 :])
    return pieces.transpose(dim, dim + 1).flatten(dim, dim + 2)


def padded(part: Tensor, dim: int, blocks: int, rank: int, size: int) -> Tensor:
    """A whole tensor that is zero but for the part of one device: the transpose of `cut`."""
    shape = list(part.shape)
    shape[dim] *= size
    whole = part.new_zeros(shape)
    runs = whole.view(*shape[:dim], blocks, size, -1, *shape[dim + 1 :])
    own = runs.select(dim + 1, rank)
    own.copy_(part.reshape(own.shape))
    return whole
