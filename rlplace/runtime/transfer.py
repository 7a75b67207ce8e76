"""Tensors between the meshes of two neighbouring stages: activations there, gradients back.

Who sends which samples to whom is worked out beforehand, from the plan alone; at run time there
is no negotiation. On gloo, messages have tags; NCCL keeps the order of a pair, and both sides
post the messages of a micro-batch in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from rlplace.errors import InputError
from rlplace.plan.types import Mesh
from rlplace.runtime.boundary import TensorSpec

#: Gradient messages that may be on their way before the sender waits for the oldest.
_WINDOW = 4


Samples = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Message:
    """Some samples of one tensor, from one rank to another.

    Args:
        number: Position among the messages of the border and direction.
        source: Rank that sends.
        target: Rank that receives.
        tensor: Index of the tensor among those of the border.
        take: Samples [start, stop) of the sender's own, or None for the whole tensor.
        put: The same samples in the receiver's count.
    """

    number: int
    source: int
    target: int
    tensor: int
    take: Samples | None
    put: Samples | None


def messages(
    tensors: Sequence[TensorSpec], sender: Mesh, receiver: Mesh, samples: int, backward: bool
) -> tuple[Message, ...]:
    """The messages of one micro-batch over one border.

    The samples are cut evenly, in order, over the replicas of each mesh. A boundary tensor is
    replicated over tp: rank t of a tp group takes it from rank ``t mod degree`` of the other
    side, so every byte arrives once, and of equal gradients one is used.

    Args:
        tensors: Tensors of the border.
        sender: Mesh that sends: of the earlier stage forward, of the later stage backward.
        receiver: Mesh that receives.
        samples: Samples of the micro-batch.
        backward: Whether these are gradients. Then a tensor without a batch dim gets the sum of
            what its readers send, forward it comes from one of its makers.
    """
    found: list[Message] = []
    for index, spec in enumerate(tensors):
        if backward and not spec.grad:
            continue
        for target in range(receiver.dp):
            for source, take, put in _sources(
                spec, sender.dp, receiver.dp, target, samples, backward
            ):
                for t in range(receiver.tp):
                    to = receiver.devices[target * receiver.tp + t]
                    of = sender.devices[source * sender.tp + t % sender.tp]
                    found.append(Message(len(found), of, to, index, take, put))
    return tuple(found)


def _sources(
    spec: TensorSpec, senders: int, receivers: int, target: int, samples: int, backward: bool
) -> list[tuple[int, Samples | None, Samples | None]]:
    """(sending replica, its samples, the receiver's samples) for one receiving replica."""
    if senders == receivers:
        return [(target, None, None)]
    if spec.batch_dim is None:
        if not backward:
            return [(target * senders // receivers, None, None)]
        readers = [s for s in range(senders) if s * receivers // senders == target]
        return [(reader, None, None) for reader in readers]
    there, here = samples // senders, samples // receivers
    found: list[tuple[int, Samples | None, Samples | None]] = []
    for source in range(senders):
        start = max(source * there, target * here)
        stop = min((source + 1) * there, (target + 1) * here)
        if start < stop:
            take = (start - source * there, stop - source * there)
            found.append((source, take, (start - target * here, stop - target * here)))
    return found


@dataclass
class Receipt:
    """Tensors that are on their way to this rank."""

    values: dict[str, torch.Tensor]
    _pending: list[tuple[Any, torch.Tensor, torch.Tensor, bool]] = field(default_factory=list)

    def expect(self, work: Any, buffer: torch.Tensor, place: torch.Tensor, add: bool) -> None:
        """Note a message that arrives in `buffer` and belongs into, or onto, `place`."""
        self._pending.append((work, buffer, place, add))

    def wait(self) -> dict[str, torch.Tensor]:
        """The tensors, once all of them are here."""
        for work, buffer, place, add in self._pending:
            work.wait()
            if add:
                place.add_(buffer)
            elif buffer is not place:
                place.copy_(buffer)
        self._pending.clear()
        return self.values


class Channel:
    """One border and direction, as one rank sees it.

    Args:
        tensors: Tensors of the border.
        sender: Mesh that sends.
        receiver: Mesh that receives.
        samples: Samples of a micro-batch.
        backward: Whether gradients flow here.
        rank: This rank.
        device: Where it computes.
        group: The process group of this direction.
        tags: (first tag, tags a micro-batch), so that no two messages of a pair share one.
        bounded: Whether waiting for old messages cannot block the rank that they wait for.
    """

    def __init__(
        self,
        tensors: Sequence[TensorSpec],
        sender: Mesh,
        receiver: Mesh,
        samples: int,
        backward: bool,
        *,
        rank: int,
        device: torch.device,
        group: Any,
        tags: tuple[int, int],
        bounded: bool,
    ) -> None:
        self.tensors = tuple(tensors)
        self._backward, self._group, self._tags = backward, group, tags
        self._device, self._bounded = device, bounded
        every = messages(tensors, sender, receiver, samples, backward)
        self._out = [message for message in every if message.source == rank]
        self._in = [message for message in every if message.target == rank]
        self._samples = samples // receiver.dp
        self._on_the_way: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        self.bytes_sent = 0

    def send(self, micro_batch: int, values: Mapping[str, torch.Tensor]) -> None:
        """Start sending this rank's part of a micro-batch."""
        if self._bounded and self._backward and len(self._on_the_way) >= _WINDOW:
            self.settle(next(iter(self._on_the_way)))
        handles = self._on_the_way.setdefault(micro_batch, [])
        for message in self._out:
            spec = self.tensors[message.tensor]
            part = _slice(values[spec.name].detach(), spec, message.take).contiguous()
            work = dist.isend(part, message.target, self._group, self._tag(message, micro_batch))
            handles.append((work, part))
            self.bytes_sent += part.numel() * part.element_size()

    def post(self, micro_batch: int) -> Receipt:
        """Start receiving this rank's part of a micro-batch."""
        receipt = Receipt({})
        for index, spec in enumerate(self.tensors):
            if self._backward and not spec.grad:
                continue
            own = [message for message in self._in if message.tensor == index]
            shape = spec.shape(self._samples)
            add = self._backward and spec.batch_dim is None
            make = torch.zeros if add else torch.empty
            whole = make(shape, dtype=spec.dtype, device=self._device)
            receipt.values[spec.name] = whole
            for message in own:
                place = _slice(whole, spec, message.put)
                direct = place.is_contiguous() and not add
                buffer = place if direct else torch.empty_like(place).contiguous()
                tag = self._tag(message, micro_batch)
                receipt.expect(
                    dist.irecv(buffer, message.source, self._group, tag), buffer, place, add
                )
        return receipt

    def settle(self, micro_batch: int | None = None) -> None:
        """Wait until the messages of a micro-batch, or all, have left; frees their tensors."""
        keys = list(self._on_the_way) if micro_batch is None else [micro_batch]
        for key in keys:
            for work, _ in self._on_the_way.pop(key, []):
                work.wait()

    def _tag(self, message: Message, micro_batch: int) -> int:
        first, each = self._tags
        return first + micro_batch * each + message.number


def _slice(tensor: torch.Tensor, spec: TensorSpec, samples: Samples | None) -> torch.Tensor:
    dim = spec.batch_dim
    if samples is None or dim is None:
        return tensor
    each = spec.sizes[dim].per_sample
    start, stop = samples
    return tensor.narrow(dim, start * each, (stop - start) * each)


def check_cuttable(tensors: Sequence[TensorSpec], border: int) -> None:
    """Refuse tensors whose samples cannot be told apart, where two meshes cut them differently.

    Raises:
        InputError: If the batch is only a part of the sum that makes a dim.
    """
    for spec in tensors:
        dim = spec.batch_dim
        if dim is not None and spec.sizes[dim].base:
            rule = (
                f"{spec.name} has a dim that mixes samples with something else, so it cannot be "
                f"cut between stages {border} and {border + 1} of different dp degree"
            )
            raise InputError("plan.stages", border, rule, "the same dp degree on both")
