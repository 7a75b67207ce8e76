from __future__ import annotations

import pytest
import torch
from torch import nn

from rlplace.runtime.clip import clip


@pytest.mark.parametrize("largest", [0.1, 1000.0])
def test_as_torch_clips(largest: float) -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (3, 50)]
    gradients = [torch.randn_like(param) for param in params]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient.clone()
    wanted = float(nn.utils.clip_grad_norm_(params, largest))

    found = clip(gradients, gradients, largest, None)

    assert found == pytest.approx(wanted, rel=1e-12)
    for param, gradient in zip(params, gradients, strict=True):
        torch.testing.assert_close(param.grad, gradient)


@pytest.mark.parametrize("worst", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_clipped_as_torch_does(worst: float) -> None:
    params = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    gradients = [torch.tensor([1.0, worst, -2.0]), torch.ones(3)]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient.clone()
    wanted = float(nn.utils.clip_grad_norm_(params, 0.5))

    found = clip(gradients, gradients, 0.5, None)

    assert found == pytest.approx(wanted, nan_ok=True)
    for param, gradient in zip(params, gradients, strict=True):
        torch.testing.assert_close(gradient, param.grad, equal_nan=True)


def test_what_another_rank_counts_is_scaled_too() -> None:
    counted, other = torch.tensor([3.0, 4.0]), torch.ones(2)
    assert clip([counted], [counted, other], 2.5, None) == pytest.approx(5.0)
    torch.testing.assert_close(other, torch.full((2,), 0.5))


def test_a_rank_without_gradients_has_none() -> None:
    assert clip([], [], 1.0, None) == 0.0
