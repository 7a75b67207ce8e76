from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from rlplace.graph.products import Measured, Size, merge, sizes_of
from rlplace.graph.types import Affine


class Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch: untyped
    """Keeps the sizes of all products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch: untyped
        self.found: list[Size] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found += sizes_of(func, args, kwargs or {}, out)
        return out


def run(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> list[Size]:
    """Sizes of a function's forward and backward pass, which torch's counter agrees with."""
    inputs = [torch.empty(shape, device="meta", requires_grad=True) for shape in shapes]
    counter = FlopCounterMode(display=False)
    with counter, Sizes() as sizes:
        out = function(*inputs)
        torch.autograd.grad(out, inputs, torch.empty_like(out))
    assert sum(size.flops for size in sizes.found) == counter.get_total_flops()
    found: list[Size] = sizes.found
    return found


def dims(sizes: list[Size]) -> list[tuple[str, float, float, float, float]]:
    return [(size.kind, *size.dims) for size in sizes]


def test_matmuls() -> None:
    forward, *backward = run(F.linear, (3, 5, 16), (32, 16))
    assert dims([forward]) == [("matmul", 1, 15, 32, 16)]
    assert sorted(size.dims for size in backward) == [(1, 15, 16, 32), (1, 32, 16, 15)]
    assert dims(run(torch.bmm, (3, 4, 5), (3, 5, 6)))[0] == ("matmul", 3, 4, 6, 5)
    assert dims(run(torch.addmm, (6,), (4, 5), (5, 6)))[0] == ("matmul", 1, 4, 6, 5)
    assert dims(run(torch.baddbmm, (3, 4, 6), (3, 4, 5), (3, 5, 6)))[0] == ("matmul", 3, 4, 6, 5)


def test_convolutions_are_implicit_matmuls() -> None:
    """2 samples of 3 channels and 8 x 8 positions to 5 channels and 6 x 6."""
    sizes = run(F.conv2d, (2, 3, 8, 8), (5, 3, 3, 3))
    assert dims(sizes) == [
        ("conv", 1, 2 * 36, 5, 27),
        ("conv", 1, 2 * 36, 27, 5),
        ("conv", 1, 5, 27, 2 * 36),
    ]
    assert [size.role for size in sizes] == [None, "input", "weight"]


def test_transposed_convolutions_have_a_row_for_each_input() -> None:
    sizes = run(F.conv_transpose2d, (2, 3, 8, 8), (3, 5, 3, 3))
    assert dims(sizes) == [
        ("conv", 1, 2 * 64, 45, 3),
        ("conv", 1, 2 * 64, 3, 45),
        ("conv", 1, 45, 3, 2 * 64),
    ]


def test_groups_of_channels_are_products_of_their_own() -> None:
    """torch's counter takes the gradient of the weight of all groups for a whole one."""
    x, weight = (torch.empty(s, device="meta") for s in ((2, 8, 6, 6), (4, 2, 3, 3)))
    with Sizes() as sizes:
        F.conv2d(x, weight, groups=4)
    (size,) = sizes.found
    assert size.dims == (4, 2 * 16, 1, 18)
    assert size.flops == 2 * 4 * (2 * 16) * 18


@pytest.mark.parametrize(("rows", "experts"), [(12, 4), (10, 4)])
def test_grouped_matmuls_share_their_rows(rows: int, experts: int) -> None:
    """torch's counter does not see them; each row meets the matrix of one expert."""
    a = torch.empty(rows, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    b = torch.empty(experts, 16, 32, device="meta", dtype=torch.bfloat16, requires_grad=True)
    ends = torch.empty(experts, device="meta", dtype=torch.int32)
    with Sizes() as sizes:
        out = torch._grouped_mm(a, b, ends)
        torch.autograd.grad(out, (a, b), torch.empty_like(out))
    assert sorted(size.dims for size in sizes.found) == sorted(
        [
            (experts, rows / experts, 32, 16),
            (experts, rows / experts, 16, 32),
            (experts, 16, 32, rows / experts),
        ]
    )
    assert {size.kind for size in sizes.found} == {"grouped"}
    assert all(size.flops == 2 * rows * 16 * 32 for size in sizes.found)


def test_an_op_that_torch_alone_knows_is_one_product() -> None:
    q = torch.empty(2, 4, 6, 8, device="meta")
    with Sizes() as sizes:
        torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, False)
    (size,) = sizes.found
    assert size.kind == "attention"
    assert size.flops == 2 * 2 * (2 * 4) * 6 * 6 * 8
    batch, rows, columns, depth = size.dims
    assert 2 * batch * rows * columns * depth == size.flops


def test_equal_kernels_are_merged() -> None:
    def size(rows: int, columns: int) -> Size:
        return Size("matmul", 1, rows, columns, 4, 2 * rows * columns * 4)

    kernels = [
        Measured("forward", size(2 * 10, 8), size(3 * 10, 8), (5.0, 6.0)),
        Measured("input", size(2 * 10, 8), size(3 * 10, 8), (5.0, 6.0)),
        Measured("forward", size(2 * 10, 8), size(3 * 10, 8), (5.0, 6.0)),
        Measured("forward", size(20, 8), size(20, 8), (5.0, 5.0)),
    ]
    products = merge(kernels)
    assert [(p.role, p.count) for p in products] == [("forward", 2), ("input", 1), ("forward", 1)]
    assert products[0].rows == Affine(0.0, 10.0)
    assert products[0].flops == Affine(0.0, 2 * 2 * 10 * 8 * 4)
    assert products[0].moved == Affine(2 * 3.0, 2 * 1.0)
    assert products[2].rows == Affine(20.0)
