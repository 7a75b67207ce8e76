"""Parameters whose gradients share a flat buffer and are summed together, by ZeRO level."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlplace.runtime.flat import FlatLayout, LentWeights, WholeWeights, size_of
from rlplace.runtime.stepped import Stepped


@dataclass(frozen=True)
class Replicas:
    """The process groups of one rank's replicas.

    Args:
        every: All replicas, None where there is one.
        shards: Those over which ZeRO shards states (dp_shard and cp), None where it has one device.
        replicate: The dp_replicate axis, None where it has one device.
        gathers, scatters: The ranks of `shards` once more, for what goes on during a step; needed
            from ZeRO-2 on.
    """

    every: Any = None
    shards: Any = None
    replicate: Any = None
    gathers: Any = None
    scatters: Any = None


@dataclass(frozen=True)
class Holding:
    """How the states of a bucket are held.

    Args:
        gradient: Dtype in which gradients are summed; None for that of the weights.
        master: Dtype of the copy that the optimizer steps, if there is one.
        host: Whether the optimizer's states are in the memory of the host.
    """

    gradient: torch.dtype | None = None
    master: torch.dtype | None = None
    host: bool = False


class Bucket:
    """A bucket whose replicas all hold everything (ZeRO-0, as in DDP).

    Gradients of the dtype in which they are summed are views of the buffer, so that neither a sum
    nor a collective needs a copy.

    Args:
        params: The parameters, in the order in which backward completes their gradients.
        group: Process group of the replicas, None where there is one.
        holding: How the states are held.
        parts: The buffer is padded so that it can be cut into so many equal parts.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        group: Any,
        holding: Holding = Holding(),
        parts: int = 1,
    ) -> None:
        self.params, self.traffic = tuple(params), Counter[str]()
        self.layout = FlatLayout(params, parts)
        self._group, self._work = group, None
        dtype = holding.gradient or params[0].dtype
        self.flat = torch.zeros(self.layout.size, dtype=dtype, device=params[0].device)
        self._views = dict(zip(map(id, params), self.layout.views(self.flat), strict=True))
        self._direct = dtype == params[0].dtype
        self._attach()
        self.stepped = self._make_stepped(holding)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that this rank holds."""
        return size_of(self.flat)

    @property
    def summands(self) -> tuple[Tensor, int]:
        """What this rank has of the gradients before it is launched, and where that begins."""
        return self.flat, 0

    @property
    def sums(self) -> tuple[Tensor, int]:
        """Where this rank wants the sums, and where they begin."""
        return self.flat, 0

    def start(self) -> None:
        """Zero the gradients for a new step."""
        self.flat.zero_()
        self._attach()

    def take(self, param: Tensor) -> None:
        """A gradient has been made."""
        if not self._direct and param.grad is not None:
            self._views[id(param)].add_(param.grad)
            param.grad = None

    def launch(self) -> None:
        """Start to sum the gradients of all replicas."""
        if self._group is not None:
            self._work = dist.all_reduce(self.flat, group=self._group, async_op=True)
            self.traffic["all_reduce"] += size_of(self.flat)

    def settle(self) -> None:
        """Wait for the sum."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def publish(self) -> None:
        """After the step: bring the weights up to date; here each rank has stepped everything."""
        self.stepped.give_weights()

    def complete(self) -> None:
        """Make weights and gradients of all parameters whole on every rank, to be looked at."""
        for param in self.params:
            param.grad = self._views[id(param)].to(param.dtype)

    def _attach(self) -> None:
        for param in self.params:
            param.grad = self._views[id(param)] if self._direct else None

    def _make_stepped(self, holding: Holding) -> Stepped:
        spans = [FlatLayout([param]).spans(0, param.numel()) for param in self.params]
        gradients = [self._views[id(param)] for param in self.params]
        return Stepped(self.params, gradients, spans, holding.master, holding.host)


class ShardedBucket(Bucket):
    """A bucket whose optimizer states are cut over the shards (ZeRO-1, arXiv 1910.02054).

    Each rank gets the sum of its run of the gradients (reduce-scatter), steps that run alone, and
    all gather the weights. The optimizer must work element by element.

    Args:
        params: The parameters, in the order in which backward completes their gradients.
        groups: The replicas.
        holding: How the states are held.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], groups: Replicas, holding: Holding = Holding()
    ) -> None:
        self.weights = WholeWeights(params, groups.shards)
        self._replicate = groups.replicate
        super().__init__(params, groups.shards, holding, self.weights.parts)
        self._summed = self.stepped.gradients[0]

    @property
    def sums(self) -> tuple[Tensor, int]:
        """This rank's run."""
        return self._summed, self.weights.rank * self._summed.numel()

    def launch(self) -> None:
        """Start to sum the gradients of all shards."""
        self._work = dist.reduce_scatter_single(
            self._summed, self.flat, group=self._group, async_op=True
        )
        self.traffic["reduce_scatter"] += size_of(self.flat)

    def settle(self) -> None:
        """Wait for the sum, then sum over the replicas of the shards."""
        if self._work is None:
            return
        super().settle()
        _sum_over(self._replicate, self._summed, self.traffic)

    def publish(self) -> None:
        """Gather the weights that the other ranks stepped."""
        super().publish()
        self.weights.publish()

    def complete(self) -> None:
        """Gather the gradients, so that they can be looked at."""
        dist.all_gather_single(self.flat, self._summed.clone(), group=self._group)
        super().complete()

    def _make_stepped(self, holding: Holding) -> Stepped:
        # The sums take the place of this rank's summands.
        summed = self.flat.chunk(self.weights.parts)[self.weights.rank]
        spans = [self.weights.spans]
        return Stepped([self.weights.own], [summed], spans, holding.master, holding.host)


class ScatteredBucket:
    """A bucket whose gradients are cut over the shards after every backward (ZeRO-2, 3).

    The gradients of one backward are whole for as long as it takes to add them up and to scatter
    them. At ZeRO-3 the weights are lent too.

    Args:
        weights: The weights, whole or lent.
        groups: The replicas.
        holding: How the states are held.
    """

    def __init__(
        self,
        weights: WholeWeights | LentWeights,
        groups: Replicas,
        holding: Holding = Holding(),
    ) -> None:
        self.weights, self._groups = weights, groups
        self.params, self.traffic = weights.layout.params, Counter[str]()
        own = weights.own
        self._summed = torch.zeros(
            own.numel(), dtype=holding.gradient or own.dtype, device=own.device
        )
        self.stepped = Stepped([own], [self._summed], [weights.spans], holding.master, holding.host)
        self._whole: Tensor | None = None
        self._views: dict[int, Tensor] = {}
        self._work: Any = None
        self._got: Tensor | None = None

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that this rank holds between backwards."""
        return size_of(self._summed)

    @property
    def summands(self) -> tuple[Tensor, int]:
        """This rank's run, summed over the shards."""
        return self.sums

    @property
    def sums(self) -> tuple[Tensor, int]:
        """This rank's run."""
        return self._summed, self.weights.rank * self._summed.numel()

    def start(self) -> None:
        """Zero the gradients for a new step."""
        self._summed.zero_()
        for param in self.params:
            param.grad = None
        if isinstance(self.weights, LentWeights):
            self.weights.release()

    def take(self, param: Tensor) -> None:
        """A gradient has been made."""
        if param.grad is not None:
            self._gradients()
            self._views[id(param)].add_(param.grad)
            param.grad = None

    def scatter(self) -> None:
        """Start to sum over the shards what has been added; zeros, where nothing has."""
        whole = self._gradients()
        self._got = torch.empty_like(self._summed)
        self._work = dist.reduce_scatter_single(
            self._got, whole, group=self._groups.scatters, async_op=True
        )
        self.traffic["reduce_scatter"] += size_of(whole)

    def collect(self) -> None:
        """Wait for the scatter and add this rank's run to its sums."""
        if self._work is None:
            return
        self._work.wait()
        assert self._got is not None
        self._summed.add_(self._got)
        self._work = self._got = self._whole = None
        self._views = {}

    def launch(self) -> None:
        """At the end of a step: start to sum over the replicas of the shards."""
        if self._groups.replicate is not None:
            self._work = dist.all_reduce(self._summed, group=self._groups.replicate, async_op=True)
            self.traffic["all_reduce"] += size_of(self._summed)

    def settle(self) -> None:
        """Wait for that."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def publish(self) -> None:
        """After the step: bring the weights up to date."""
        self.stepped.give_weights()
        self.weights.publish()

    def complete(self) -> None:
        """Make weights and gradients of all parameters whole on every rank, to be looked at."""
        self.weights.complete()
        whole = self._gradients()
        dist.all_gather_single(whole, self._summed, group=self._groups.shards)
        for param in self.params:
            param.grad = self._views[id(param)].to(param.dtype)
        self._whole, self._views = None, {}

    def _gradients(self) -> Tensor:
        """The buffer of the gradients of this backward."""
        if self._work is not None:
            self.collect()
        if self._whole is None:
            layout = self.weights.layout
            self._whole = self._summed.new_zeros(layout.size)
            views = layout.views(self._whole)
            self._views = dict(zip(map(id, self.params), views, strict=True))
        return self._whole


def _sum_over(group: Any, tensor: Tensor, traffic: Counter[str]) -> None:
    if group is not None:
        dist.all_reduce(tensor, group=group)
        traffic["all_reduce"] += size_of(tensor)
