from __future__ import annotations

import random

import pytest

from rlplace.graph.fusion import Kernel, Launch, fuse, traffic

N, ROWS = 64, 8


def launch(reads: dict[int, int], writes: dict[int, int], flops: int = 0) -> Launch:
    return Launch(flops, reads, writes)


def members(kernels: list[Kernel]) -> list[list[int]]:
    return [kernel.launches for kernel in kernels]


def test_chain_of_pointwise_ops_is_one_kernel() -> None:
    ops = [launch({0: N}, {1: N}), launch({1: N}, {2: N}), launch({2: N, 0: N}, {3: N})]
    kernels = fuse(ops)
    assert members(kernels) == [[0, 1, 2]]
    assert traffic(ops, kernels, kept={3}) == [2 * N]
    assert traffic(ops, kernels, kept={3, 1}) == [3 * N]  # saved for the backward pass


def test_matmul_stays_alone_and_parts_what_is_around_it() -> None:
    ops = [
        launch({0: N}, {1: N}),
        launch({1: N}, {2: N}, flops=10),
        launch({2: N}, {3: N}),
        launch({3: N}, {4: N}),
    ]
    kernels = fuse(ops)
    assert members(kernels) == [[0], [1], [2, 3]]
    assert traffic(ops, kernels, kept={4}) == [2 * N, 2 * N, 2 * N]


def test_no_cycle_through_a_matmul() -> None:
    """x -> a; a -> matmul -> b; a + b must not join the kernel of a."""
    ops = [launch({0: N}, {1: N}), launch({1: N}, {2: N}, flops=1), launch({1: N, 2: N}, {3: N})]
    kernels = fuse(ops)
    assert members(kernels) == [[0], [1], [2]]


def test_norm_is_one_kernel_and_a_column_sum_another() -> None:
    """Square, row mean, rsqrt, scale; then a sum over rows."""
    ops = [
        launch({0: N}, {1: N}),
        launch({1: N}, {2: ROWS}),
        launch({2: ROWS}, {3: ROWS}),
        launch({0: N, 3: ROWS}, {4: N}),
        launch({4: N}, {5: N // ROWS + 1}),
    ]
    kernels = fuse(ops)
    assert members(kernels) == [[0, 1, 2, 3], [4]]
    assert traffic(ops, kernels, kept={5}) == [2 * N, N + N // ROWS + 1]


@pytest.mark.parametrize("seed", range(20))
def test_laws_on_random_graphs(seed: int) -> None:
    """Each op once; kernels without a cycle; fusing never moves more than not fusing."""
    rng = random.Random(seed)
    ops = []
    for index in range(40):
        sources = rng.sample(range(index + 3), rng.randint(1, 3))
        size = rng.choice((N, N, ROWS))
        reads = {source: N for source in sources}
        ops.append(launch(reads, {index + 3: size}, flops=rng.choice((0, 0, 0, 5))))
    kernels = fuse(ops)
    assert sorted(i for kernel in kernels for i in kernel.launches) == list(range(len(ops)))
    home = {i: number for number, kernel in enumerate(kernels) for i in kernel.launches}
    maker = {storage: i for i, op in enumerate(ops) for storage in op.writes}
    needs: dict[int, set[int]] = {number: set() for number in range(len(kernels))}
    for i, op in enumerate(ops):
        needs[home[i]] |= {home[maker[s]] for s in op.reads if s in maker} - {home[i]}
    done: set[int] = set()
    while len(done) < len(kernels):
        ready = {k for k in needs if k not in done and needs[k] <= done}
        assert ready, "the kernels wait for each other"
        done |= ready
    alone = sum(sum(op.reads.values()) + sum(op.writes.values()) for op in ops)
    assert sum(traffic(ops, kernels, kept=set(maker))) <= alone
