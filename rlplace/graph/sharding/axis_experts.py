"""Grouped matmuls of a device's own experts (see `rlplace.graph.sharding.expert_rules`).

Rows are sorted by expert and `ends` says where those of each expert end, of all experts and on
every device. On the meta device there is no such number: each device is taken to have its equal
share of the rows, which is what balanced routing gives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rlplace.graph.sharding.axis import current_axis


def own_rows(rows: Tensor, experts: int, ends: Tensor) -> Tensor:
    """Of all rows those of the device's own experts, a view.

    Args:
        rows: (all rows, features).
        experts: How many experts a device has.
        ends: (all experts,).
    """
    first, last = _run(len(rows), experts, ends)
    return rows[first:last]


def put_rows(own: Tensor, experts: int, ends: Tensor, count: int) -> Tensor:
    """The device's own rows at their places among `count` rows, the others zero: a summand."""
    first, _ = _run(count, experts, ends)
    return F.pad(own, (0, 0, first, count - first - len(own)))


def grouped(op: Any, rows: Tensor, matrices: Tensor, ends: Tensor, take: bool, put: bool) -> Tensor:
    """A grouped matmul of the device's own experts.

    Args:
        op: The grouped matmul.
        rows: All rows if `take`, else the device's own.
        matrices: Of the device's own experts.
        ends: Of all experts.
        take: Whether to take the device's rows out of all of them.
        put: Whether to put the result at its place among zeros.
    """
    experts = len(matrices)
    own = own_rows(rows, experts, ends) if take else rows
    out: Tensor = op(own, matrices, _own_ends(ends, experts))
    if not put:
        return out
    share = len(own) * current_axis().size
    return put_rows(out, experts, ends, share if ends.is_meta else int(ends[-1]))


def _own_ends(ends: Tensor, experts: int) -> Tensor:
    """Where the device's own experts end among its own rows."""
    first = current_axis().rank * experts
    start = ends[first - 1] if first else torch.zeros_like(ends[0])
    return ends[first : first + experts] - start


def _run(count: int, experts: int, ends: Tensor) -> tuple[int, int]:
    """First and last (exclusive) of the device's own rows."""
    axis = current_axis()
    if ends.is_meta:
        share = count // axis.size
        return axis.rank * share, (axis.rank + 1) * share
    first = axis.rank * experts
    return int(ends[first - 1]) if first else 0, int(ends[first + experts - 1])
