"""Tensors between two neighbouring stages: activations there, gradients back.

What goes from whom to whom is worked out beforehand (`rlplace.runtime.slices`). On gloo, messages
have tags. NCCL keeps the order of a pair: each pair has a process group for each sense, and both
ends handle its messages in one order (`rlplace.runtime.deliveries`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlplace.runtime.slices import Box, Crossing, Message, elements
from rlplace.runtime.world import World


@dataclass
class _Part:
    """A message that is on its way: what it fills, and where its payload arrives."""

    message: Message
    work: Any = None
    buffer: Tensor | None = None


@dataclass
class Receipt:
    """Tensors of a micro-batch that are on their way to this rank.

    Args:
        shapes: Shape of each tensor, by its index.
        parts: What comes of each.
    """

    channel: Channel
    micro_batch: int
    shapes: Mapping[int, tuple[int, ...]]
    parts: dict[int, list[_Part]] = field(default_factory=dict)

    def wait(self) -> dict[str, Tensor]:
        """The tensors by name, once all of them are here."""
        return {
            self.channel.crossing.tensors[index].name: self._tensor(index) for index in self.shapes
        }

    def _tensor(self, index: int) -> Tensor:
        spec, shape = self.channel.crossing.tensors[index], self.shapes[index]
        parts = self.parts.pop(index, [])
        if len(parts) == 1 and _fills(parts[0].message.put, shape):
            return self._payload(parts[0], shape)
        sums = self.channel.crossing.backward and spec.batch_dim is None
        make = torch.zeros if sums else torch.empty
        whole = make(shape, dtype=spec.dtype, device=self.channel.device)
        for part in parts:
            flat = self._payload(part, shape).flatten()
            for box, run in zip(part.message.put, _runs(flat, part.message.put), strict=True):
                place = _narrowed(whole, box)
                place.add_(run.view_as(place)) if sums else place.copy_(run.view_as(place))
        return whole

    def _payload(self, part: _Part, shape: Sequence[int]) -> Tensor:
        """What a message has brought, or what this rank itself has."""
        if part.work is not None:
            assert part.buffer is not None
            part.work.wait()
            whole = _fills(part.message.put, shape)
            return part.buffer.view(tuple(shape)) if whole else part.buffer
        own = self.channel.own(self.micro_batch, part.message.tensor)
        return own if _fills(part.message.take, own.shape) else _packed(own, part.message.take)


@dataclass(frozen=True)
class _Job:
    """What one rank sends and gets of a micro-batch, and the shapes of what it then holds."""

    sends: tuple[Message, ...]
    gets: tuple[Message, ...]
    shapes: Mapping[int, tuple[int, ...]]


class Channel:
    """One border and direction, as one rank sees it.

    Args:
        crossing: What crosses it.
        world: The ranks; messages of each sense have a group of their own.
        tags: (first tag, tags a micro-batch): no two messages of a pair share one in a step.
    """

    def __init__(self, crossing: Crossing, world: World, tags: tuple[int, int]) -> None:
        self.crossing, self.device = crossing, world.device
        self._world, self._tags = world, tags
        self._jobs: dict[int, _Job] = {}
        self._on_the_way: dict[int, list[tuple[Any, Tensor]]] = {}
        self._own: dict[tuple[int, int], Tensor] = {}
        self.bytes_sent = 0

    def send(self, micro_batch: int, rows: int, values: Mapping[str, Tensor]) -> None:
        """Start sending this rank's part of a micro-batch.

        Args:
            micro_batch: Which.
            rows: Rows that it has, over all replicas.
            values: What this rank holds, by name.
        """
        handles: list[tuple[Any, Tensor]] = []
        for message in self._job(rows).sends:
            value = values[self.crossing.tensors[message.tensor].name].detach()
            if message.target == self._world.rank:
                self._own[micro_batch, message.tensor] = value
                continue
            part = _packed(value, message.take)
            group = self._world.direction(down=message.target < message.source)
            tag = self._tag(micro_batch, message)
            handles.append((dist.isend(part, message.target, group, tag), part))
            self.bytes_sent += part.numel() * part.element_size()
        if handles:
            self._on_the_way[micro_batch] = handles

    def post(self, micro_batch: int, rows: int) -> Receipt:
        """Start receiving this rank's part of a micro-batch; see `send`."""
        job = self._job(rows)
        receipt = Receipt(self, micro_batch, job.shapes)
        for message in job.gets:
            part = _Part(message)
            if message.source != self._world.rank:
                dtype = self.crossing.tensors[message.tensor].dtype
                part.buffer = torch.empty(message.elements, dtype=dtype, device=self.device)
                group = self._world.direction(down=message.target < message.source)
                tag = self._tag(micro_batch, message)
                part.work = dist.irecv(part.buffer, message.source, group, tag)
            receipt.parts.setdefault(message.tensor, []).append(part)
        return receipt

    def own(self, micro_batch: int, tensor: int) -> Tensor:
        """What this rank has sent to itself."""
        return self._own.pop((micro_batch, tensor))

    def settle(self, micro_batch: int | None = None) -> None:
        """Wait until the messages of a micro-batch, or all, have left; frees their tensors."""
        keys = list(self._on_the_way) if micro_batch is None else [micro_batch]
        for key in keys:
            for work, _ in self._on_the_way.pop(key, []):
                work.wait()

    def _job(self, rows: int) -> _Job:
        """What this rank has to do, worked out once for each number of rows."""
        if rows not in self._jobs:
            crossing, rank = self.crossing, self._world.rank
            every = crossing.messages(rows)
            receives = rank in crossing.receiver.stage.mesh.devices
            self._jobs[rows] = _Job(
                tuple(one for one in every if one.source == rank),
                tuple(one for one in every if one.target == rank),
                {
                    index: crossing.shape(index, rank, rows)
                    for index, spec in enumerate(crossing.tensors)
                    if receives and (spec.grad or not crossing.backward)
                },
            )
        return self._jobs[rows]

    def _tag(self, micro_batch: int, message: Message) -> int:
        first, each = self._tags
        return first + micro_batch * each + message.tensor


def _fills(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether boxes are one, of a whole tensor."""
    return len(boxes) == 1 and tuple(length for _, length in boxes[0]) == tuple(shape)


def _packed(tensor: Tensor, boxes: Sequence[Box]) -> Tensor:
    """The elements of some boxes, box after box."""
    if len(boxes) == 1:
        return _narrowed(tensor, boxes[0]).contiguous()
    return torch.cat([_narrowed(tensor, box).flatten() for box in boxes])


def _runs(flat: Tensor, boxes: Sequence[Box]) -> Sequence[Tensor]:
    """A packed tensor, box for box."""
    return torch.split(flat, [elements(box) for box in boxes])


def _narrowed(tensor: Tensor, box: Box) -> Tensor:
    for dim, (start, length) in enumerate(box):
        tensor = tensor.narrow(dim, start, length)
    return tensor
