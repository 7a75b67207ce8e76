"""Ops over rows that are cut over the devices of an axis: causal attention and cross entropy."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from rlplace.graph.sharding.axis import current_axis, reduce


def causal_mask(query: Tensor, key: Tensor) -> Tensor:
    """Which keys the queries of this device see: (own rows, all keys), True where they do.

    Device r has rows ``r * own`` and on of as many rows as there are keys.
    """
    own, keys = query.shape[-2], key.shape[-2]
    if query.is_meta:
        return torch.empty(own, keys, dtype=torch.bool, device="meta")
    rows = torch.arange(own, device=query.device) + current_axis().rank * own
    return rows.unsqueeze(1) >= torch.arange(keys, device=query.device)


def row_cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: None = None,
    reduction: int = 1,
    ignore_index: int = -100,
) -> Tensor:
    """Cross entropy of logits (rows, classes) whose rows are cut: sum and count are all-reduced.

    `reduction` counts as in ATen: 1 mean, 2 sum.
    """
    total = F.cross_entropy(logits, target, reduction="sum", ignore_index=ignore_index)
    count = (target != ignore_index).sum()
    wide = total.float() if total.element_size() < 4 else total
    total, count = reduce(torch.stack((wide, count.to(wide.dtype)))).unbind()
    return (total / count if reduction == 1 else total).to(logits.dtype)
