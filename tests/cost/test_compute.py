"""Compute of a group by hand: shapes of matmuls, attention, the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.cost.compute import compute, matmul_efficiency, product_seconds, slower
from rlplace.graph.types import Affine, Product, Work
from rlplace.plan.frameworks import Framework
from rlplace.plan.testing import chain, cluster, round_kind
from rlplace.plan.types import Instance

_KIND = replace(round_kind(), sms=4, attention_efficiency=0.5)
_INSTANCE = Instance(chain([1.0]), cluster([[_KIND]]), 1, framework=Framework("free"))


def _product(
    rows: int, columns: int, depth: int, *, kind: str = "matmul", role: str = "forward"
) -> Product:
    flops = 2.0 * rows * columns * depth
    sizes = (Affine(1.0), Affine(float(rows)), Affine(float(columns)), Affine(float(depth)))
    return Product(kind, role, 1, *sizes, Affine(flops), Affine(0.0))  # type: ignore[arg-type]  # any literal


def test_a_result_that_fills_its_waves_reaches_the_peak() -> None:
    assert matmul_efficiency(_KIND, 1, 512, 256, 64) == 1.0
    assert matmul_efficiency(_KIND, 4, 256, 128, 64) == 1.0, "four products of a tile each"


def test_the_last_wave_counts_whole() -> None:
    # Five tiles of 256 x 128 on four multiprocessors are two waves, eight places.
    five = matmul_efficiency(_KIND, 1, 5 * 256, 128, 64)
    assert five == pytest.approx(max(5 / 8, 0.95 * 10 / 12, 0.85 * 20 / 20))


def test_an_empty_part_of_a_tile_is_computed_all_the_same() -> None:
    # One row: the best is the smallest tile, of which one row of 64 is of use.
    assert matmul_efficiency(_KIND, 1, 1, 256, 64) == pytest.approx(0.7 * 1 / 64)


def test_a_short_sum_does_not_fill_the_pipeline() -> None:
    kind = replace(_KIND, half_depth=64.0)
    assert matmul_efficiency(kind, 1, 512, 256, 64) == 0.5
    assert matmul_efficiency(kind, 1, 512, 256, 192) == 0.75


def test_a_convolution_has_a_speed_of_its_own() -> None:
    kind = replace(_KIND, conv_efficiency=0.5)
    matmul, conv = (
        product_seconds(_INSTANCE, kind, _product(512, 256, 64, kind=name), 1.0, "bf16")
        for name in ("matmul", "conv")
    )
    assert conv == pytest.approx(2 * matmul)


def test_the_shape_does_not_matter_on_a_cpu() -> None:
    assert matmul_efficiency(round_kind(), 1, 1, 1, 7) == 1.0


@given(
    st.integers(1, 8), st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000),
    st.integers(0, 140),
)  # fmt: skip
def test_no_shape_is_above_the_best(
    batch: int, rows: int, columns: int, depth: int, sms: int
) -> None:
    kind = replace(_KIND, sms=sms, half_depth=100.0, max_efficiency=0.8)
    assert 0.0 < matmul_efficiency(kind, batch, rows, columns, depth) <= 0.8
    even = matmul_efficiency(kind, batch, 64 * columns, 64 * rows, 64)
    assert even == matmul_efficiency(kind, batch, 64 * rows, 64 * columns, 64)


@pytest.mark.parametrize(("columns", "slower"), [(256, 1.0), (264, 1.3), (257, 2.0)])
def test_rows_in_memory_are_multiples_of_what_tensor_cores_read(
    columns: int, slower: float
) -> None:
    even = replace(_KIND, sms=1)
    padded = matmul_efficiency(even, 1, 1 << 20, columns, 64)
    useful = max(speed * columns / (-(-columns // w) * w) for w, speed in ((64, 0.85), (128, 1.0)))
    assert padded == pytest.approx(useful / slower, rel=0.02)


def test_a_product_takes_the_longer_of_flops_and_bytes() -> None:
    product = _product(512, 256, 64)
    flops = 2 * 512 * 256 * 64
    assert product_seconds(_INSTANCE, _KIND, product, 1.0, "bf16") == pytest.approx(flops / 1e12)
    heavy = replace(product, moved=Affine(1e9))
    assert product_seconds(_INSTANCE, _KIND, heavy, 1.0, "bf16") == pytest.approx(2e9 / 1e12)


def test_flash_attention_skips_what_is_masked_and_redoes_the_scores_backward() -> None:
    forward = _product(512, 512, 64, kind="attention")
    plain = product_seconds(_INSTANCE, _KIND, forward, 1.0, "bf16")
    assert plain == pytest.approx(2 * 512 * 512 * 64 / 0.5e12)
    causal = product_seconds(_INSTANCE, _KIND, replace(forward, causal=True), 1.0, "bf16")
    assert causal == pytest.approx(plain / 2)
    backward = product_seconds(_INSTANCE, _KIND, replace(forward, role="input"), 1.0, "bf16")
    assert backward == pytest.approx(plain * 5 / 4 / 0.7)


def test_a_math_kernel_computes_all_pairs_in_two_matmuls() -> None:
    forward = replace(_product(512, 512, 64, kind="attention"), causal=True)
    math = replace(_INSTANCE, attention="math")
    kind = replace(_KIND, half_depth=64.0)
    each = 512 * 512 * 64 / 1e12
    # One sums over 64, where half of the speed is reached, the other over 512; it makes a result
    # of 512 x 64, best in four tiles of 128 x 64, one for each multiprocessor.
    summing = each / (512 / 576) / 0.85
    found = product_seconds(math, kind, forward, 1.0, "bf16")
    assert found == pytest.approx(2 * each + summing)
    free = product_seconds(math, replace(kind, bandwidth=1e9), forward, 1.0, "bf16")
    assert free == pytest.approx(2 * 512 * 512 * 2 / 1e9), "each matmul moves the scores once"


def test_a_math_kernel_moves_the_scores() -> None:
    attention = _product(512, 512, 64, kind="attention")
    work = Work(
        score_floats=Affine(512.0**2), dropped_scores=Affine(512.0**2), products=(attention,)
    )
    math = replace(_INSTANCE, attention="math")
    plain = product_seconds(math, _KIND, attention, 1.0, "bf16")
    # Softmax reads and writes; dropout reads, writes, and writes a mask of half a float.
    soft = (2 + 2.5) * 512**2 * 2 / 1e12
    found = compute(replace(math, fused=True), work, [_KIND], 1, 1.0)
    assert found.forward == found.attention == pytest.approx(plain + soft)
    assert found.backward == pytest.approx((3 + 2.5) * 512**2 * 2 / 1e12)
    # Apart, the scale and the mask read and write them as well; backward the scale does.
    apart = compute(math, work, [_KIND], 1, 1.0)
    assert apart.forward - found.forward == pytest.approx(4 * 512**2 * 2 / 1e12)
    assert apart.backward - found.backward == pytest.approx(2 * 512**2 * 2 / 1e12)


def test_class_scores_are_in_fp32() -> None:
    work = Work(moved=Affine(1e6), logits_bytes=Affine(1.0))
    assert compute(_INSTANCE, work, [_KIND], 1, 1.0).forward == pytest.approx(4e6 / 1e12)
    own = replace(_INSTANCE, framework=Framework("own", loss_bytes=10.0))
    scores = replace(work, logits_bytes=Affine(4e6))
    found = compute(own, scores, [_KIND], 1, 1.0)
    assert found.forward == found.backward == pytest.approx(5 * 1e6 / 1e12)


def test_the_host_launches_what_the_device_runs() -> None:
    products = (_product(512, 256, 64), replace(_product(512, 256, 64), role="weight"))
    work = Work(kernels=10, moved=Affine(1e6), backward_moved=Affine(1e6), products=products)
    matmul, light = 2 * 512 * 256 * 64 / 1e12, 2e6 / 1e12
    quick = compute(_INSTANCE, work, [_KIND], 1, 1.0)
    assert quick.forward == pytest.approx(matmul + light)
    assert quick.weight == pytest.approx(matmul)
    assert quick.host_forward == 0.0
    own = replace(_INSTANCE, framework=Framework("own", launch=1e-3, backward_launch=2e-3))
    bound = compute(own, work, [_KIND], 1, 1.0)
    assert (bound.host_forward, bound.host_backward) == (10 * 1e-3, 20 * 2e-3)
    assert compute(_INSTANCE, work, [_KIND], 3, 1.0).forward == 3 * quick.forward
    assert compute(own, work, [replace(_KIND, sms=0)], 1, 1.0).host_forward == 0.0, "a CPU"


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_the_slower_of_host_and_device_decides(device: float, host: float) -> None:
    found = slower(device, host)
    assert max(device, host) <= found <= max(device, host) * 2 ** (1 / 5) + 1e-12
    assert slower(host, device) == pytest.approx(found)


def test_an_idle_host_costs_nothing() -> None:
    assert slower(0.25, 0.0) == 0.25
    assert slower(0.0, 0.25) == 0.25
    assert slower(1.0, 0.1) == pytest.approx(1.0, rel=1e-5)


def test_fp8_doubles_the_peak_and_casts_what_is_multiplied() -> None:
    kind = replace(_KIND, peak_flops={**_KIND.peak_flops, "fp8": 2e12})
    products = (_product(512, 256, 64), _product(512, 64, 256, role="input"))
    work = Work(products=products)
    fast = replace(_INSTANCE, cluster=cluster([[kind]]), precision="fp8-mixed")
    found = compute(fast, work, [kind], 1, 1.0)
    matmul = 2 * 512 * 256 * 64 / 2e12
    assert found.matmul == found.last == pytest.approx(matmul)
    assert found.forward == pytest.approx(matmul + 512 * 64 * 3 / 1e12)
    assert found.light == pytest.approx(512 * 64 * 3 / 1e12), "it is redone with the light ops"
    head = replace(work, logits_bytes=Affine(1.0))
    assert compute(fast, head, [kind], 1, 1.0) == compute(_INSTANCE, head, [kind], 1, 1.0)
