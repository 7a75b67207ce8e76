"""The tp axis on a process group, and parameters between their whole and their sharded form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rlplace.errors import InputError
from rlplace.graph.sharding.shards import cut, join
from rlplace.graph.types import Placement, Replicate, Shard

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass(frozen=True)
class GroupAxis:
    """An axis whose devices are the ranks of a process group, in their order (gloo or NCCL).

    Collectives are synchronous: the next op on the device needs their result.

    Args:
        group: From `torch.distributed`; None is the default group.
    """

    group: Any = None

    @property
    def rank(self) -> int:
        """Coordinate of this rank on the axis."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        return dist.get_world_size(self.group)

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Sum or maximum over the ranks, in new memory."""
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, _REDUCE_OPS[op], self.group)
        return total

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensors of all ranks, joined along a dim."""
        whole = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        dist.all_gather_single(whole, tensor.contiguous(), self.group)
        return whole if dim == 0 else torch.cat(whole.chunk(self.size), dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's equal chunk, along a dim, of the sum over the ranks."""
        parts = torch.stack(tensor.chunk(self.size, dim))
        own = torch.empty_like(parts[0])
        dist.reduce_scatter_single(own, parts.flatten(0, 1), group=self.group)
        return own

    def all_to_all(self, tensor: Tensor, dim: int, joined: int) -> Tensor:
        """Chunk i along `dim` goes to rank i; what comes is joined along `joined`."""
        parts = torch.stack(tensor.chunk(self.size, dim))
        got = torch.empty_like(parts)
        dist.all_to_all_single(got, parts, group=self.group)
        return torch.cat(got.unbind(), joined)

    def all_to_all_rows(self, tensor: Tensor, sent: Sequence[int], got: Sequence[int]) -> Tensor:
        """`sent[i]` rows go to rank i, `got[i]` come from it."""
        arrived = tensor.new_empty((sum(got), *tensor.shape[1:]))
        dist.all_to_all_single(arrived, tensor.contiguous(), list(got), list(sent), self.group)
        return arrived


def shard_parameter(full: Tensor, placement: Placement, rank: int, size: int) -> Tensor:
    """What one device holds of a parameter or buffer: a contiguous copy, without autograd.

    Args:
        full: The whole tensor.
        placement: As in `Layout.params`.
        rank: Coordinate of the device on the axis.
        size: Size of the axis.

    Raises:
        InputError: If the dim cannot be cut into equal parts, or the placement is `Partial`.
    """
    whole = full.detach()
    if isinstance(placement, Replicate):
        return whole.clone(memory_format=torch.contiguous_format)
    if not isinstance(placement, Shard):
        raise InputError("placement", placement, "a state is replicated or sharded", Replicate())
    length = placement.run or whole.shape[placement.dim]
    if length % (size * placement.blocks):
        rule = f"dim {placement.dim} of length {length} must divide into {placement.blocks} blocks"
        raise InputError("size", size, f"{rule} of equal shards")
    return cut(whole, placement.dim, placement.blocks, rank, size, placement.run).clone()


def unshard(shards: Sequence[Tensor], placement: Placement) -> Tensor:
    """The whole tensor from what the devices of the axis hold, in the order of their ranks.

    Raises:
        InputError: If the placement is `Partial`.
    """
    if isinstance(placement, Replicate):
        return shards[0].detach().clone()
    if not isinstance(placement, Shard):
        raise InputError("placement", placement, "a state is replicated or sharded", Replicate())
    parts = [shard.detach() for shard in shards]
    return join(parts, placement.dim, placement.blocks, placement.run)
