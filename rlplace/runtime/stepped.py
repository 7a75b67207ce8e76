"""What the optimizer steps: the weights themselves, or a copy in fp32 or in the host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlplace.runtime.flat import Span, size_of


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


class Stepped:
    """The optimizer's side of some weights.

    Args:
        weights: As the model uses them, or the part of them that this rank steps.
        gradients: Their summed gradients, as large.
        spans: What lies in each of the weights.
        master: Dtype of a copy that is stepped in their place.
        host: Whether that copy, and with it the optimizer's states and the step, is in the memory
            of the host (ZeRO-Offload, Ren et al., arXiv 2101.06840). On a CPU that is the same
            memory, and the result is the same everywhere.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        spans: Sequence[Sequence[Span]],
        master: torch.dtype | None = None,
        host: bool = False,
    ) -> None:
        self._weights, self._gradients = tuple(weights), tuple(gradients)
        self._copies, self.host = master is not None or host, host
        make = self._copy if self._copies else _itself
        self.params = [make(weight.detach(), master, weight) for weight in weights]
        self.runs = [
            Run(span.param, span.start, span.stop, own, span.offset)
            for own, inside in zip(self.params, spans, strict=True)
            for span in inside
        ]

    @property
    def bytes(self) -> int:
        """Bytes of copies on the device."""
        return sum(map(size_of, self.params)) if self._copies and not self.host else 0

    @property
    def gradients(self) -> tuple[Tensor, ...]:
        """The summed gradients."""
        return self._gradients

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Before the optimizer's step: hand it the gradients, as wide as what it steps."""
        for own, gradient in zip(self.params, self._gradients, strict=True):
            own.grad = gradient.to(own.device, own.dtype) if self._copies else gradient

    @torch.no_grad()
    def give_weights(self) -> None:
        """After it, or after the copies were written into: bring the weights up to date."""
        if self._copies:
            for own, weight in zip(self.params, self._weights, strict=True):
                weight.copy_(own)
                own.grad = None

    def _copy(self, values: Tensor, master: torch.dtype | None, weight: Tensor) -> nn.Parameter:
        place = torch.device("cpu") if self.host else values.device
        copy = values.to(place, master or values.dtype, copy=True)
        pinned = self.host and weight.device.type == "cuda"
        return nn.Parameter(copy.pin_memory() if pinned else copy)


def _itself(values: Tensor, master: torch.dtype | None, weight: Tensor) -> nn.Parameter:
    return weight if isinstance(weight, nn.Parameter) else nn.Parameter(values)
