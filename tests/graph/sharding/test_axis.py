from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlplace.graph.sharding import axis
from rlplace.graph.sharding.axis import MetaAxis, use_axis
from rlplace.graph.sharding.shards import cut
from tests.graph.thread_axis import on_threads

X = torch.randn(4, 6, 8, dtype=torch.float64)
SHAPE = X.shape


def _both(
    function: Callable[[Tensor], Tensor],
    given: Callable[[int], Tensor],
    seed: Callable[[int], Tensor],
    size: int = 2,
) -> list[tuple[Tensor, Tensor]]:
    """(output, gradient of the input) of a conversion on every device."""

    def run(device: Any) -> tuple[Tensor, Tensor]:
        x = given(device.rank).clone().requires_grad_()
        with use_axis(device):
            out = function(x)
        torch.autograd.backward(out, seed(device.rank))
        assert x.grad is not None
        return out.detach(), x.grad

    found: list[tuple[Tensor, Tensor]] = on_threads(size, run)
    return found


def _part(rank: int, dim: int, blocks: int = 1, run: int = 0, x: Tensor = X) -> Tensor:
    return cut(x, dim, blocks, rank, 2, run)


def _seeds(count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(SHAPE, generator=draw, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize(("dim", "blocks", "run"), [(1, 1, 0), (2, 2, 0), (0, 1, 2)])
def test_what_is_gathered_for_shared_work_sums_its_gradient(
    dim: int, blocks: int, run: int
) -> None:
    seeds = _seeds(2)
    found = _both(
        lambda x: axis.gather_copy(x, dim, blocks, run),
        lambda rank: _part(rank, dim, blocks, run),
        lambda rank: seeds[rank],
    )

    for rank, (out, grad) in enumerate(found):
        assert torch.equal(out, X)
        assert torch.allclose(grad, _part(rank, dim, blocks, run, seeds[0] + seeds[1]))


@pytest.mark.parametrize(("dim", "blocks", "run"), [(1, 1, 0), (2, 2, 0), (0, 1, 2)])
def test_a_scattered_sum_gathers_its_gradient(dim: int, blocks: int, run: int) -> None:
    summands, (seed,) = _seeds(2), _seeds(1)
    found = _both(
        lambda x: axis.reduce_scatter(x, dim, blocks, run),
        lambda rank: summands[rank],
        lambda rank: _part(rank, dim, blocks, run, seed),
    )

    for rank, (out, grad) in enumerate(found):
        assert torch.allclose(out, _part(rank, dim, blocks, run, summands[0] + summands[1]))
        assert torch.equal(grad, seed)


@pytest.mark.parametrize("wanted", [(2, 1, 0), (2, 2, 0), (0, 1, 2)])
def test_from_a_shard_of_one_dim_to_a_shard_of_another(wanted: tuple[int, int, int]) -> None:
    held = (1, 3, 0)
    (seed,) = _seeds(1)
    found = _both(
        lambda x: axis.exchange(x, held, wanted),
        lambda rank: _part(rank, *held),
        lambda rank: _part(rank, *wanted, seed),
    )

    for rank, (out, grad) in enumerate(found):
        assert torch.equal(out, _part(rank, *wanted))
        assert torch.equal(grad, _part(rank, *held, seed))


def test_gradients_of_states_on_cp_are_summands() -> None:
    (seed,) = _seeds(1)
    whole = _both(axis.once, lambda rank: X, lambda rank: seed)
    parts = _both(
        lambda x: axis.part(x, 1), lambda rank: X, lambda rank: _part(rank, 1, 1, 0, seed)
    )

    for found in (whole, parts):
        assert torch.allclose(sum((grad for _, grad in found), torch.zeros(())), seed)
    assert torch.equal(parts[1][0], _part(1, 1))


def test_the_meta_device_knows_the_shapes_and_what_is_sent() -> None:
    meta = MetaAxis(2)
    x = torch.empty(SHAPE, device="meta")

    assert meta.reduce_scatter(x, 1).shape == (4, 3, 8)
    assert meta.all_to_all(x, 2, 1).shape == (4, 12, 4)
    assert meta.calls == [("reduce_scatter", x.numel()), ("all_to_all", 2 * x.numel())]
