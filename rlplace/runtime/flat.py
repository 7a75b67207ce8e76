"""Parameters laid out one behind the other in a flat buffer, and the weights that are cut there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Span:
    """Elements `start` to `stop` (exclusive) of a parameter, at `offset` in some flat tensor."""

    param: nn.Parameter
    start: int
    stop: int
    offset: int = 0

    def of(self, flat: Tensor) -> Tensor:
        """Its part of the flat tensor."""
        return flat[self.offset : self.offset + self.stop - self.start]


class FlatLayout:
    """Where parameters of one dtype lie in a flat buffer.

    Args:
        params: The parameters.
        parts: The buffer is padded so that it can be cut into so many equal parts.
    """

    def __init__(self, params: Sequence[nn.Parameter], parts: int = 1) -> None:
        self.params = tuple(params)
        self.used = sum(param.numel() for param in params)
        self.size = self.used + -self.used % parts

    def views(self, flat: Tensor) -> list[Tensor]:
        """The part of a flat buffer of each parameter, in its shape."""
        sizes = [param.numel() for param in self.params]
        parts = torch.split(flat[: self.used], sizes)
        return [part.view(param.shape) for part, param in zip(parts, self.params, strict=True)]

    def spans(self, start: int, stop: int) -> list[Span]:
        """What lies in a part of the buffer; offsets are in the part."""
        found, begin = [], 0
        for param in self.params:
            end = begin + param.numel()
            low, high = max(begin, start), min(end, stop)
            if low < high:
                found.append(Span(param, low - begin, high - begin, low - start))
            begin = end
        return found


class CutWeights:
    """Weights in one flat buffer, of which this rank steps a part.

    Args:
        params: The parameters; they become views of the buffer.
        group: Process group of the ranks that step the other parts.
    """

    def __init__(self, params: Sequence[nn.Parameter], group: Any) -> None:
        self.traffic: Counter[str] = Counter()
        self.parts, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.layout = FlatLayout(params, self.parts)
        self.whole = _laid_out(self.layout)
        for param, view in zip(params, self.layout.views(self.whole), strict=True):
            param.data = view
        self.own = self.whole.chunk(self.parts)[self.rank]

    @property
    def spans(self) -> list[Span]:
        """What lies in the part that this rank steps."""
        size = self.own.numel()
        return self.layout.spans(self.rank * size, (self.rank + 1) * size)


class WholeWeights(CutWeights):
    """Weights of which this rank holds all (ZeRO-1, 2)."""

    def __init__(self, params: Sequence[nn.Parameter], group: Any) -> None:
        super().__init__(params, group)
        self._group = group

    def publish(self) -> None:
        """Gather what the other ranks stepped."""
        own = self.own.clone()
        dist.all_gather_single(self.whole, own, group=self._group)
        self.traffic["all_gather"] += size_of(own)

    def complete(self) -> None:
        """Make the weights whole on every rank; here they are."""


class LentWeights(CutWeights):
    """Weights of which this rank keeps its part, and gathers the rest while they are used (ZeRO-3).

    The memory of the buffer is given back in between (as in FSDP, Zhao et al., arXiv 2304.11277):
    what autograd has saved of the parameters sees the weights again once they are gathered again,
    for they do not change within a step.

    Args:
        params: The parameters.
        group: Process group of the ranks that keep the other parts.
        gathers: The same ranks, for gathers alone: their order is the same on every rank whatever
            else these ranks do.
    """

    def __init__(self, params: Sequence[nn.Parameter], group: Any, gathers: Any) -> None:
        super().__init__(params, group)
        self._gathers, self._work = gathers, None
        self.own = self.own.clone()
        self._there = True
        self.release()

    @property
    def whole_bytes(self) -> int:
        """Bytes of the gathered weights while they are there."""
        return size_of(self.whole)

    def start(self) -> bool:
        """Start to gather, unless that has been done; whether it was started."""
        if self._there:
            return False
        self._there = True
        self.whole.untyped_storage().resize_(size_of(self.whole))
        self._work = dist.all_gather_single(
            self.whole, self.own, group=self._gathers, async_op=True
        )
        self.traffic["all_gather"] += size_of(self.own)
        return True

    def wait(self) -> None:
        """Wait until the weights are there."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def release(self) -> bool:
        """Give the memory of the gathered weights back; whether there was any."""
        if not self._there:
            return False
        self.wait()
        self._there = False
        self.whole.untyped_storage().resize_(0)
        return True

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of the gathered weights."""
        mine: int = self.whole.untyped_storage()._cdata
        return bool(tensor.untyped_storage()._cdata == mine)

    def keep(self) -> None:
        """Take over what was written into the gathered weights."""
        self.wait()
        self.own.copy_(self.whole.chunk(self.parts)[self.rank])

    def publish(self) -> None:
        """Give the other ranks what this one stepped: they gather it when they need it."""

    def complete(self) -> None:
        """Make the weights whole on every rank, until the next step."""
        self.start()
        self.wait()


def _laid_out(layout: FlatLayout) -> Tensor:
    """The weights in a new flat buffer."""
    first = layout.params[0]
    flat = torch.zeros(layout.size, dtype=first.dtype, device=first.device)
    for param, view in zip(layout.params, layout.views(flat), strict=True):
        view.copy_(param.detach())
    return flat


def size_of(tensor: Tensor) -> int:
    """Bytes of a tensor."""
    return tensor.numel() * tensor.element_size()
