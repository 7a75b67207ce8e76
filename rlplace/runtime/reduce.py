"""Gradients summed over replicas, in buckets that start while backward still runs.

The gradients of a bucket are views of one flat buffer, so a collective needs no copy. A bucket
starts when its last gradient is complete, always in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlplace.graph.types import Placement, Shard

BUCKET_BYTES = 25_000_000


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


class Bucket:
    """Parameters whose gradients share a flat buffer."""

    def __init__(self, params: Sequence[nn.Parameter], uses: Sequence[int]) -> None:
        self.uses = dict(zip(map(id, params), uses, strict=True))
        first = params[0]
        total = sum(param.numel() for param in params)
        self.flat = torch.zeros(total, dtype=first.dtype, device=first.device)
        self.missing = 0
        offset = 0
        for param in params:
            param.grad = self.flat[offset : offset + param.numel()].view_as(param)
            offset += param.numel()


class Reducer:
    """Sums the gradients of one rank's parameters over its dp group.

    Args:
        params: The parameters, in the order in which backward completes their gradients.
        uses: How many of the rank's stages use each of them.
        group: Process group of the replicas, None for one replica.
        tied: Parameters that other meshes hold too; they are among `params`.
        overlap: Start buckets during backward; otherwise all at the end.
        bucket_bytes: Size of a bucket.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        uses: Sequence[int],
        group: Any,
        tied: Iterable[Tied] = (),
        *,
        overlap: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._group, self._overlap = group, overlap
        self._tied = tuple(tied)
        shared = {id(one.param) for one in self._tied}
        counts = list(zip(params, uses, strict=True))
        own = [(param, count) for param, count in counts if id(param) not in shared]
        self._buckets = [Bucket(*zip(*part, strict=True)) for part in _cut(own, bucket_bytes)]
        self._alone = [Bucket([param], [count]) for param, count in counts if id(param) in shared]
        self._owner = {key: bucket for bucket in self._buckets for key in bucket.uses}
        self._armed = False
        self._next = 0
        self._works: list[Any] = []
        for param, _ in own:
            param.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
        self.bytes_reduced = 0

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients that this rank holds."""
        return sum(b.flat.numel() * b.flat.element_size() for b in self._buckets + self._alone)

    def start(self) -> None:
        """Zero the gradients for a new step."""
        for bucket in self._buckets + self._alone:
            bucket.flat.zero_()
            bucket.missing = sum(bucket.uses.values())
        self._next = 0

    def arm(self, last: bool) -> None:
        """Say whether the backward pass that follows is the last one of its stage."""
        self._armed = last

    def finish(self) -> None:
        """Reduce what has not been, and wait for all of it."""
        while self._next < len(self._buckets):
            self._launch()
        wholes = [self._launch_tied(one) for one in self._tied]
        for work in self._works:
            work.wait()
        self._works.clear()
        for one, whole in zip(self._tied, wholes, strict=True):
            part, grad = _aligned(whole, one)
            grad.copy_(part)

    def _ready(self, param: torch.Tensor) -> None:
        if not self._armed:
            return
        self._owner[id(param)].missing -= 1
        while (
            self._overlap
            and self._next < len(self._buckets)
            and self._buckets[self._next].missing == 0
        ):
            self._launch()

    def _launch(self) -> None:
        flat = self._buckets[self._next].flat
        self._next += 1
        if self._group is not None:
            self._works.append(dist.all_reduce(flat, group=self._group, async_op=True))
            self.bytes_reduced += flat.numel() * flat.element_size()

    def _launch_tied(self, one: Tied) -> torch.Tensor:
        """Start the sum over all holders: each puts what it has into the whole."""
        grad = one.param.grad
        assert grad is not None
        whole = torch.zeros(one.shape, dtype=grad.dtype, device=grad.device)
        part, own = _aligned(whole, one)
        # A replicated gradient is the same on every tp rank, and counts once.
        part.add_(own, alpha=1.0 if isinstance(one.placement, Shard) else 1.0 / one.size)
        self._works.append(dist.all_reduce(whole, group=one.group, async_op=True))
        self.bytes_reduced += whole.numel() * whole.element_size()
        return whole


def _aligned(whole: torch.Tensor, one: Tied) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the whole as a view, and its gradient in the same shape."""
    grad = one.param.grad
    assert grad is not None
    if not isinstance(one.placement, Shard):
        return whole, grad
    dim, blocks = one.placement.dim, one.placement.blocks
    before, after = one.shape[:dim], one.shape[dim + 1 :]
    runs = whole.view(*before, blocks, one.size, -1, *after)
    return runs.select(dim + 1, one.rank), grad.view(*before, blocks, -1, *after)


def _cut(
    params: Sequence[tuple[nn.Parameter, int]], limit: int
) -> list[list[tuple[nn.Parameter, int]]]:
    """Runs of parameters of one dtype, each up to about `limit` bytes."""
    parts: list[list[tuple[nn.Parameter, int]]] = []
    size = 0
    for param, count in params:
        if not parts or size >= limit or parts[-1][0][0].dtype != param.dtype:
            parts.append([])
            size = 0
        parts[-1].append((param, count))
        size += param.numel() * param.element_size()
    return parts
