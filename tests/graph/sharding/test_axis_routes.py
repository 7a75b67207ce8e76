"""Rows to the devices of their experts and back, on threads and on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlplace.graph.sharding.axis import MetaAxis, use_axis
from rlplace.graph.sharding.axis_routes import combine, dispatch, exchange_counts, routed_ends
from tests.graph.thread_axis import on_threads

# Of each device, how many of its rows go to each of four experts.
COUNTS = {
    "mixed": [[2, 0, 1, 3], [0, 4, 0, 2]],
    "one owner": [[3, 3, 0, 0], [6, 0, 0, 0]],
    "none": [[0, 0, 0, 0], [0, 0, 0, 0]],
}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_rows_come_by_expert_and_return_to_their_places(counts: list[list[int]]) -> None:
    def run(axis: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        sizes = torch.tensor(counts[axis.rank])
        experts = torch.arange(4).repeat_interleave(sizes)
        rows = torch.stack((experts, torch.arange(len(experts)) + 100 * axis.rank), 1).double()
        rows.requires_grad_()
        with use_axis(axis):
            numbers = exchange_counts(sizes.cumsum(0, dtype=torch.int32))
            there = dispatch(rows, numbers)
            back = combine(there * 3.0, numbers)
        torch.autograd.backward([back], [rows.detach() + 1.0])
        assert rows.grad is not None
        return rows.detach(), there.detach(), routed_ends(numbers), back.detach(), rows.grad

    for rank, (rows, there, ends, back, grad) in enumerate(on_threads(2, run)):
        own = [2 * rank, 2 * rank + 1]
        arriving = [sum(device[expert] for device in counts) for expert in own]
        assert ends.tolist() == [arriving[0], sum(arriving)]
        assert there[:, 0].tolist() == [
            e for e, n in zip(own, arriving, strict=True) for _ in range(n)
        ]
        assert torch.equal(back, rows * 3.0)
        assert torch.equal(grad, (rows + 1.0) * 3.0)


def test_without_numbers_as_many_rows_arrive_as_leave() -> None:
    meta = MetaAxis(4)
    rows = torch.empty(10, 3, device="meta", requires_grad=True)
    with use_axis(meta):
        numbers = exchange_counts(torch.empty(8, dtype=torch.int32, device="meta"))
        back = combine(dispatch(rows, numbers), numbers)
    torch.autograd.backward([back], [torch.empty_like(back)])

    assert back.shape == (10, 3)
    assert routed_ends(numbers).shape == (2,)
    assert meta.calls == [("all_to_all", 4 * 8), *[("all_to_all", 4 * 30)] * 4]
