"""Parameters of one dtype whose gradients share a flat buffer and are summed together.

Gradients are views of the buffer, so a collective needs no copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Run:
    """Elements of a parameter inside a tensor that the optimizer of this rank steps.

    Args:
        param: The parameter, or this rank's shard of it on the tp axis.
        start, stop: Which of its elements, flattened.
        stepped: What the optimizer steps.
        offset: Where the run begins in `stepped`, flattened.
    """

    param: nn.Parameter
    start: int
    stop: int
    stepped: nn.Parameter
    offset: int = 0

    def of(self, tensor: Tensor) -> Tensor:
        """The run's part of a tensor as large as `stepped`, as a flat view."""
        return tensor.view(-1)[self.offset : self.offset + self.stop - self.start]


class Bucket:
    """A bucket whose replicas all hold everything (ZeRO-0, as in DDP).

    Args:
        params: The parameters, in the order in which backward completes their gradients.
        uses: How many of the rank's stages use each of them.
        group: Process group of the replicas, None where there is one.
        multiple: The buffer is padded to a multiple of so many elements.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], uses: Sequence[int], group: Any, multiple: int = 1
    ) -> None:
        self.params = tuple(params)
        self.uses = dict(zip(map(id, params), uses, strict=True))
        self.missing = 0
        self.traffic: Counter[str] = Counter()
        self._group, self._work = group, None
        size = sum(param.numel() for param in params)
        size += -size % multiple
        self.flat = torch.zeros(size, dtype=params[0].dtype, device=params[0].device)
        for param, view in zip(self.params, self._views(self.flat), strict=True):
            param.grad = view

    @property
    def trained(self) -> tuple[nn.Parameter, ...]:
        """What the optimizer of this rank steps."""
        return self.params

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that this rank holds."""
        return _bytes(self.flat)

    @property
    def runs(self) -> list[Run]:
        """What `trained` is made of."""
        return [Run(param, 0, param.numel(), param) for param in self.params]

    def start(self) -> None:
        """Zero the gradients for a new step."""
        self.flat.zero_()
        self.missing = sum(self.uses.values())

    def launch(self) -> None:
        """Start to sum the gradients of all replicas."""
        if self._group is not None:
            self._work = dist.all_reduce(self.flat, group=self._group, async_op=True)
            self.traffic["all_reduce"] += _bytes(self.flat)

    def settle(self) -> None:
        """Wait for the sum."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def publish(self) -> None:
        """Give the other replicas what the optimizer made; here each has stepped everything."""

    def complete(self) -> None:
        """Make the gradients of all parameters whole on every rank; here they are."""

    def _views(self, flat: Tensor) -> list[Tensor]:
        """The part of a flat buffer of each parameter, in its shape."""
        sizes = [param.numel() for param in self.params]
        parts = torch.split(flat[: sum(sizes)], sizes)
        return [part.view_as(param) for part, param in zip(parts, self.params, strict=True)]


class ShardedBucket(Bucket):
    """A bucket whose optimizer states are cut over the dp_shard axis (ZeRO-1, arXiv 1910.02054).

    The weights too lie in one flat buffer. Each rank gets the sum of its run of the gradients
    (reduce-scatter), steps that run alone, and all gather the weights. The optimizer must work
    element by element, as those with a name do.

    Args:
        params: The parameters, in the order in which backward completes their gradients.
        uses: How many of the rank's stages use each of them.
        shards: Process group of the dp_shard axis.
        replicas: Process group of the dp_replicate axis, None where that has one device.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], uses: Sequence[int], shards: Any, replicas: Any
    ) -> None:
        super().__init__(params, uses, shards, dist.get_world_size(shards))
        self._replicas = replicas
        self.weights = torch.zeros_like(self.flat)
        for param, view in zip(self.params, self._views(self.weights), strict=True):
            view.copy_(param.detach())
            param.data = view
        self._rank = dist.get_rank(shards)
        self.own = nn.Parameter(self.weights.chunk(dist.get_world_size(shards))[self._rank])
        self._summed = torch.zeros_like(self.own)
        self.own.grad = self._summed

    @property
    def trained(self) -> tuple[nn.Parameter, ...]:
        """This rank's run of the weights."""
        return (self.own,)

    @property
    def runs(self) -> list[Run]:
        """What this rank's run of the weights is made of."""
        size, first = self.own.numel(), self._rank * self.own.numel()
        found, begin = [], -first
        for param in self.params:
            end = begin + param.numel()
            low, high = max(begin, 0), min(end, size)
            if low < high:
                found.append(Run(param, low - begin, high - begin, self.own, low))
            begin = end
        return found

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that this rank holds: its own sums, and the run it sums from."""
        return _bytes(self.flat) + _bytes(self._summed)

    def launch(self) -> None:
        """Start to sum the gradients of all shards."""
        self._work = dist.reduce_scatter_single(
            self._summed, self.flat, group=self._group, async_op=True
        )
        self.traffic["reduce_scatter"] += _bytes(self.flat)

    def settle(self) -> None:
        """Wait for the sum, then sum over the replicas of the shards."""
        super().settle()
        if self._replicas is not None:
            dist.all_reduce(self._summed, group=self._replicas)
            self.traffic["all_reduce"] += _bytes(self._summed)

    def publish(self) -> None:
        """Gather the weights that the other ranks stepped."""
        own = self.own.detach().clone()
        dist.all_gather_single(self.weights, own, group=self._group)
        self.traffic["all_gather"] += _bytes(own)

    def complete(self) -> None:
        """Gather the gradients, so that they can be looked at."""
        dist.all_gather_single(self.flat, self._summed, group=self._group)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
