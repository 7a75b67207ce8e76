"""Rows to the devices of their experts and back (see `rlplace.graph.sharding.owned_rules`).

Each device has rows sorted by expert, and experts of its own. The numbers of rows go first, then
the rows; the owner puts those of one expert from all devices behind each other. The gradient goes
the same way back. How many rows arrive is known when the program runs alone, so their numbers are
read on the host once for each way.

On the meta device there are no such numbers: as many rows are taken to arrive as a device has of
its own, which is what balanced routing gives on average. What all devices send together does not
depend on the routing: every row goes there and back once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlplace.graph.sharding.axis import Axis, apply, current_axis


def exchange_counts(ends: Tensor) -> Tensor:
    """Rows that this device sends to, and gets from, each device for each expert.

    Args:
        ends: (experts,), where those of each expert end among the device's own rows.

    Returns:
        (2, devices, experts of one device), int64: sent for the experts of each device, and got
        from each device for the own experts.
    """
    axis = current_axis()
    counts = ends.long().diff(prepend=ends.new_zeros(1, dtype=torch.long))
    sent = counts.view(axis.size, -1)
    return torch.stack((sent, axis.all_to_all(sent, 0, 0)))


def routed_ends(counts: Tensor) -> Tensor:
    """Where each of the own experts ends among the rows that arrive, (own experts,), int32."""
    return counts[1].sum(0).cumsum(0, dtype=torch.int32)


def dispatch(rows: Tensor, counts: Tensor) -> Tensor:
    """Rows (own rows, features), sorted by expert, to those of the own experts, likewise."""
    return apply(_Route, rows, counts, current_axis(), True)


def combine(rows: Tensor, counts: Tensor) -> Tensor:
    """The inverse of `dispatch`."""
    return apply(_Route, rows, counts, current_axis(), False)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Tensor, axis: Axis, there: bool) -> Tensor:
        ctx.axis, ctx.there = axis, there
        ctx.sent, ctx.got = _lengths(len(rows), counts, axis.size)
        order = _by_expert(counts[1], len(rows))
        ctx.save_for_backward(order)
        return _route(rows, order, ctx, there)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        return _route(grads[0], order, ctx, not ctx.there), None, None, None


def _route(rows: Tensor, order: Tensor, ctx: Any, there: bool) -> Tensor:
    axis: Axis = ctx.axis
    if there:
        arrived = axis.all_to_all_rows(rows, ctx.sent, ctx.got)
        return arrived if rows.is_meta else arrived[order]
    by_device = rows if rows.is_meta else torch.empty_like(rows).index_copy(0, order, rows)
    return axis.all_to_all_rows(by_device, ctx.got, ctx.sent)


def _lengths(rows: int, counts: Tensor, size: int) -> tuple[list[int], list[int]]:
    """Rows sent to each device, and got from each."""
    if counts.is_meta:
        shares = [rows * (i + 1) // size - rows * i // size for i in range(size)]
        return shares, shares
    sent, got = counts.sum(2).tolist()
    return sent, got


def _by_expert(got: Tensor, rows: int) -> Tensor:
    """The order that puts rows, which come by device and then by expert, by expert alone."""
    if got.is_meta:
        return torch.empty(rows, dtype=torch.long, device="meta")
    experts = torch.arange(got.shape[1], device=got.device).repeat(got.shape[0])
    return experts.repeat_interleave(got.flatten()).argsort(stable=True)
