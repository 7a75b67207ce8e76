"""Gradients summed over replicas, in buckets that start while backward still runs.

A bucket starts when its last gradient is complete, always in the same order on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlplace.graph.types import Placement, Shard
from rlplace.runtime.buckets import Bucket, Run, ShardedBucket

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


@dataclass(frozen=True)
class Replicas:
    """The process groups of one rank's replicas.

    Args:
        every: All replicas, None where there is one.
        shards: The dp_shard axis, None where it has one device.
        replicate: The dp_replicate axis, None where it has one device.
    """

    every: Any = None
    shards: Any = None
    replicate: Any = None


@dataclass(frozen=True)
class Trained:
    """A parameter that this rank trains.

    Args:
        param: The parameter, or this rank's shard of it.
        uses: How many of the rank's stages use it.
        zero: ZeRO level.
    """

    param: nn.Parameter
    uses: int = 1
    zero: int = 0


class Reducer:
    """Sums the gradients of one rank's parameters over its replicas.

    Args:
        params: The parameters, in the order in which backward completes their gradients.
        groups: The replicas.
        tied: Parameters that other meshes hold too; they are among `params`.
        overlap: Start buckets during backward; otherwise all at the end.
        bucket_bytes: Size of a bucket.
    """

    def __init__(
        self,
        params: Sequence[Trained],
        groups: Replicas,
        tied: Iterable[Tied] = (),
        *,
        overlap: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._overlap, self._tied = overlap, tuple(tied)
        shared = {id(one.param) for one in self._tied}
        own = [one for one in params if id(one.param) not in shared]
        self._buckets = [_bucket(run, groups) for run in _cut(own, bucket_bytes)]
        alone = (one for one in params if id(one.param) in shared)
        self._alone = [Bucket([one.param], [one.uses], None) for one in alone]
        self._owner = {key: bucket for bucket in self._buckets for key in bucket.uses}
        self._armed = False
        self._next = 0
        for one in own:
            hook = one.param.register_post_accumulate_grad_hook
            hook(self._ready)  # type: ignore[no-untyped-call]
        self._traffic: Counter[str] = Counter()

    @property
    def trained(self) -> list[nn.Parameter]:
        """What the optimizer of this rank steps."""
        return [param for bucket in self._buckets + self._alone for param in bucket.trained]

    @property
    def runs(self) -> list[Run]:
        """What `trained` is made of."""
        return [run for bucket in self._buckets + self._alone for run in bucket.runs]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients that this rank holds."""
        return sum(bucket.gradient_bytes for bucket in self._buckets + self._alone)

    @property
    def traffic(self) -> Counter[str]:
        """Bytes given to each collective so far."""
        return sum((bucket.traffic for bucket in self._buckets), self._traffic)

    def start(self) -> None:
        """Zero the gradients for a new step."""
        for bucket in self._buckets + self._alone:
            bucket.start()
        self._next = 0

    def arm(self, last: bool) -> None:
        """Say whether the backward pass that follows is the last one of its stage."""
        self._armed = last

    def finish(self) -> None:
        """Reduce what has not been, and wait for all of it."""
        while self._next < len(self._buckets):
            self._launch()
        wholes = [self._launch_tied(one) for one in self._tied]
        for bucket in self._buckets:
            bucket.settle()
        for one, (whole, work) in zip(self._tied, wholes, strict=True):
            work.wait()
            part, grad = _aligned(whole, one)
            grad.copy_(part)

    def publish(self) -> None:
        """After the optimizer step: give the other replicas what this rank alone has stepped."""
        for bucket in self._buckets:
            bucket.publish()

    def refresh(self) -> None:
        """After `runs` were written into: make all that is made of them agree. All ranks call it.

        A parameter that several meshes hold is among the runs of each.
        """
        self.publish()

    def complete(self) -> None:
        """Make all gradients whole on every rank, so that they can be looked at."""
        for bucket in self._buckets:
            bucket.complete()

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
        self._buckets[self._next].launch()
        self._next += 1

    def _launch_tied(self, one: Tied) -> tuple[torch.Tensor, Any]:
        """Start the sum over all holders: each puts what it has into the whole."""
        grad = one.param.grad
        assert grad is not None
        whole = torch.zeros(one.shape, dtype=grad.dtype, device=grad.device)
        part, own = _aligned(whole, one)
        # A replicated gradient is the same on every tp rank, and counts once.
        part.add_(own, alpha=1.0 if isinstance(one.placement, Shard) else 1.0 / one.size)
        self._traffic["all_reduce"] += whole.numel() * whole.element_size()
        return whole, dist.all_reduce(whole, group=one.group, async_op=True)


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


def _bucket(run: Sequence[Trained], groups: Replicas) -> Bucket:
    params, uses = [one.param for one in run], [one.uses for one in run]
    if run[0].zero and groups.shards is not None:
        return ShardedBucket(params, uses, groups.shards, groups.replicate)
    return Bucket(params, uses, groups.every)


def _cut(params: Sequence[Trained], limit: int) -> list[list[Trained]]:
    """Runs of parameters of one dtype and ZeRO level, each up to about `limit` bytes."""
    runs: list[list[Trained]] = []
    size, last = 0, None
    for one in params:
        kind = (one.param.dtype, one.zero)
        if size >= limit or kind != last:
            runs.append([])
            size, last = 0, kind
        runs[-1].append(one)
        size += one.param.numel() * one.param.element_size()
    return runs
