"""Ops on rows that are sharded over the tp axis, beside those of `rlplace.graph.sharding.axis`."""

from __future__ import annotations

import torch
from torch import Tensor

from rlplace.graph.sharding.axis import current_axis

aten = torch.ops.aten

_SUM, _MEAN = 0, 1


def vocab_embedding_bag(
    table: Tensor,
    indices: Tensor,
    offsets: Tensor,
    mode: int = _SUM,
    weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = -1,
) -> Tensor:
    """This device's summand of bags of an embedding whose rows are sharded: (bags, features).

    Arguments as of ``aten.embedding_bag``, with the device's rows as `table`. A foreign or padded
    row weighs nothing; a mean is a sum whose weights are one over the size of the bag.
    """
    axis, rows = current_axis(), table.shape[0]
    local = indices - axis.rank * rows
    own = (local >= 0) & (local < rows)
    if padding_idx is not None and padding_idx >= 0:
        valid = indices != padding_idx
        own = own & valid
    else:
        valid = torch.ones_like(own)
    shares = own.to(table.dtype) if weights is None else own * weights
    sums = _bags(table, local.clamp(0, rows - 1), offsets, shares, include_last_offset)
    if mode == _SUM:
        return sums
    ones = table.new_ones(1, 1)
    sizes = _bags(
        ones, torch.zeros_like(indices), offsets, valid.to(table.dtype), include_last_offset
    )
    return sums / sizes.clamp(min=1)


def _bags(
    table: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor, include_last_offset: bool
) -> Tensor:
    bags: Tensor = aten.embedding_bag(
        table, indices, offsets, False, _SUM, False, weights, include_last_offset
    )[0]
    return bags


def summed_bmm(left: Tensor, right: Tensor) -> Tensor:
    """The sum of products of matrices: (batch, m, k) and (batch, k, n) to (m, n)."""
    return torch.bmm(left, right).sum(0)


def one_of_several(first: Tensor) -> tuple[Tensor, None, None, None]:
    """The first result of an op that has more; the others are not used."""
    return first, None, None, None
