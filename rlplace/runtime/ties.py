"""Gradients of a parameter that stages on several meshes use, summed over all that hold a part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from rlplace.graph.types import Placement, Shard
from rlplace.runtime.buckets import Bucket, ScatteredBucket


@dataclass(frozen=True)
class Tied:
    """A parameter that stages on several meshes use.

    Args:
        param: This rank's copy, or its shard.
        group: Process group of all ranks that hold a part of it.
        shape: Shape of the whole parameter.
        placement: How it is held on the tp axis of this rank.
        rank, size: Coordinate and size of that axis.
    """

    param: nn.Parameter
    group: Any
    shape: tuple[int, ...]
    placement: Placement
    rank: int = 0
    size: int = 1


class Exchange:
    """The sum of one tied gradient over all ranks, whatever they hold of it.

    Each puts what it has into the whole, and takes out what it needs.

    Args:
        tied: The parameter.
        bucket: Where its gradients are.
    """

    def __init__(self, tied: Tied, bucket: Bucket | ScatteredBucket) -> None:
        self._tied, self._bucket = tied, bucket
        summands, start = bucket.summands
        numel = tied.param.numel()
        local = summands.new_zeros(numel)
        stop = min(start + summands.numel(), numel)
        local[start:stop] = summands[: stop - start]
        self._whole = summands.new_zeros(tied.shape)
        part = self._part()
        # A replicated gradient is the same on every tp rank, and counts once.
        share = 1.0 if isinstance(tied.placement, Shard) else 1.0 / tied.size
        part.add_(local.view(part.shape), alpha=share)
        self._work = dist.all_reduce(self._whole, group=tied.group, async_op=True)

    @property
    def bytes(self) -> int:
        """Bytes that this rank gives to the sum."""
        return self._whole.numel() * self._whole.element_size()

    def settle(self) -> None:
        """Wait for the sum and take this rank's part."""
        self._work.wait()
        sums, start = self._bucket.sums
        numel = self._tied.param.numel()
        stop = min(start + sums.numel(), numel)
        sums[: stop - start] = self._part().reshape(-1)[start:stop]

    def _part(self) -> Tensor:
        """This rank's part of the whole as a view."""
        placement, shape = self._tied.placement, self._tied.shape
        if not isinstance(placement, Shard):
            return self._whole
        dim, blocks = placement.dim, placement.blocks
        runs = self._whole.view(*shape[:dim], blocks, self._tied.size, -1, *shape[dim + 1 :])
        return runs.select(dim + 1, self._tied.rank)
