from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from rlplace.graph.sharding.axis import use_axis
from rlplace.graph.sharding.axis_rows import causal_mask, row_cross_entropy
from tests.graph.thread_axis import on_threads


@pytest.mark.parametrize("size", [2, 4])
def test_causal_attention_of_some_rows_sees_the_keys_before_them(size: int) -> None:
    query, key, value = (torch.randn(2, 3, 8, 4, dtype=torch.float64) for _ in range(3))

    def run(axis: Any) -> Tensor:
        own = query.chunk(size, 2)[axis.rank]
        with use_axis(axis):
            mask = causal_mask(own, key)
        return F.scaled_dot_product_attention(own, key, value, mask)

    whole = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.allclose(torch.cat(on_threads(size, run), 2), whole)


@pytest.mark.parametrize("reduction", [1, 2])
@pytest.mark.parametrize("size", [2, 4])
def test_cross_entropy_of_some_rows_is_that_of_all(reduction: int, size: int) -> None:
    logits = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, -100, -100, 3, 4, 1, -100, 2])

    def run(axis: Any) -> tuple[Tensor, Tensor]:
        own = logits.detach().chunk(size)[axis.rank].requires_grad_()
        with use_axis(axis):
            loss = row_cross_entropy(own, target.chunk(size)[axis.rank], None, reduction)
        torch.autograd.backward(loss)
        assert own.grad is not None
        return loss.detach(), own.grad

    found = on_threads(size, run)
    whole = F.cross_entropy(logits, target, reduction="mean" if reduction == 1 else "sum")
    torch.autograd.backward(whole)
    assert logits.grad is not None
    assert all(torch.allclose(loss, whole) for loss, _ in found)
    assert torch.allclose(torch.cat([grad for _, grad in found]), logits.grad)
