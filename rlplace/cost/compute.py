"""Seconds of compute of a group: a roofline over kernels, beside the host that launches them.

A matmul takes the longer of its FLOPs over the speed that its shape reaches and its bytes over
the memory bandwidth; ops of other kinds take their bytes; each kernel costs a fixed time on the
device. The host runs ahead of the device, so a phase takes the longer of the two.

The speed of a matmul follows how GPU libraries cut it (NVIDIA, "Matrix Multiplication Background
User's Guide", tile and wave quantization): its result is cut into tiles, the last of which are
partly empty, and the tiles are dealt to the multiprocessors in waves, the last of which is partly
empty; a short sum over the depth does not fill the pipeline of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from math import ceil

from rlplace.cluster.types import DeviceKind
from rlplace.graph.types import Affine, Product, Work
from rlplace.plan.types import Instance

#: Passes over the score matrix of a math attention kernel, forward and backward: of its matmuls,
#: of its softmax, and of its dropout (a mask of one byte beside two floats).
_MATMUL_PASSES = {"forward": 2, "input": 4}
_SOFTMAX_PASSES = (2, 3)
#: Of the scale and the mask, where they are kernels of their own.
_SCALE_PASSES = (4, 2)
_DROPOUT_PASSES = (2.5, 2.5)
#: Classes and their scores are fp32 in a loss at every precision: bytes of an element.
_LOSS_BYTES = 4
#: Tensor cores read rows in blocks: what a matmul costs whose columns or depth are no multiple.
_ALIGNMENT = ((8, 2.0), (64, 1.3))
#: How sharply the slower of host and device decides: the norm of a vector of the two. Layers and
#: micro-batches are not alike, so where they are close both are felt.
_SHARPNESS = 5.0
#: Tiles (rows, columns) that matmul kernels come in, with the share of the speed of the largest
#: that each reaches: a smaller tile reads its operands more often.
_TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.95),
    (128, 64, 0.85),
    (64, 128, 0.85),
    (64, 64, 0.7),
)
#: A flash kernel's backward does five matmuls where two are counted forward and four backward: it
#: computes the scores again; and it does them at a lower speed than the forward (Dao, arXiv
#: 2307.08691, figures 4 to 6).
_FLASH_BACKWARD = 5 / 4 / 0.7


@dataclass(frozen=True, slots=True)
class Compute:
    """Seconds of one micro-batch of a group on one device, collectives not counted.

    Args:
        forward: The forward pass on the device.
        backward: The backward pass on the device.
        weight: The part of `backward` that makes gradients of parameters.
        attention: The forward of the core attention alone.
        attention_back: Its backward.
        light: The forward of all ops that are neither matmul-like nor attention.
        matmul: The forward of all matmuls but those of attention.
        last: The forward of the last matmul: what recompute that stops early leaves out.
        host_forward: What the host takes to launch the forward pass.
        host_backward: The same of the backward pass.
    """

    forward: float
    backward: float
    weight: float
    attention: float
    attention_back: float
    light: float
    matmul: float
    last: float
    host_forward: float
    host_backward: float


def compute(
    instance: Instance, work: Work, kinds: list[DeviceKind], turns: int, samples: float
) -> Compute:
    """What a micro-batch of `samples` takes on the slowest of `kinds`, `turns` of them in turn."""
    each = [_on(instance, work, kind, samples) for kind in kinds]
    return Compute(
        *(turns * max(getattr(found, field.name) for found in each) for field in fields(Compute))
    )


def _on(instance: Instance, work: Work, kind: DeviceKind, samples: float) -> Compute:
    run = instance.execution
    kernels, forward_moved, backward_moved = instance.traffic(work)
    matmuls = {"forward": 0.0, "input": 0.0, "weight": 0.0}
    moved, cast, dtype = dict(matmuls), dict(matmuls), matmul_dtype(instance, work)
    last = core_back = 0.0
    for product in work.products:
        taken = product_seconds(instance, kind, product, samples, dtype)
        matmuls[product.role] += taken
        moved[product.role] += product.moved(samples)
        if dtype == "fp8" and product.kind != "attention":
            cast[product.role] += product.count * _operand(product, samples) * run.cast
        if product.kind == "attention" and product.role == "input":
            core_back += taken
        if product.role == "forward":
            last = taken / product.count
    if not work.products:
        flops = work.backward_flops(samples)
        matmuls["forward"] = matmul_seconds(kind, dtype, work.flops(samples), work.matmuls)
        matmuls["input"] = matmul_seconds(kind, dtype, flops, 2 * work.matmuls)
    bandwidth = kind.bandwidth * kind.memory_efficiency
    light, light_back = _light_bytes(
        instance,
        work,
        samples,
        forward_moved(samples) - moved["forward"],
        backward_moved(samples) - moved["input"] - moved["weight"],
    )
    light, light_back = (
        (light + cast["forward"]) / bandwidth,
        (light_back + cast["input"]) / bandwidth,
    )
    soft, soft_back = (
        instance.bytes.activation * passes / bandwidth
        for passes in _score_passes(instance, work, samples)
    )
    gaps = kernels * kind.launch_overhead
    host = kernels if kind.sms else 0.0  # a CPU is its own host
    core = _attention(instance, kind, work, samples)
    attention = soft + core
    device = matmuls["forward"] + light + soft + gaps
    device_back = matmuls["input"] + matmuls["weight"] + light_back + soft_back + 2 * gaps
    return Compute(
        forward=device,
        backward=device_back,
        weight=matmuls["weight"],
        attention=attention + kind.launch_overhead if attention else 0.0,
        attention_back=soft_back + core_back,
        light=light + gaps,
        matmul=max(0.0, matmuls["forward"] - core),
        last=last,
        host_forward=host * run.launch,
        host_backward=2 * host * run.backward_launch,
    )


def _light_bytes(
    instance: Instance, work: Work, samples: float, forward: float, backward: float
) -> tuple[float, float]:
    """Bytes that all but matmuls move, forward and backward, from the elements.

    Class scores are in fp32 in a loss at every precision; what a framework's own loss moves of
    them, if it is said, goes before what was counted.
    """
    size = instance.bytes.activation
    if work.logits_bytes != Affine():
        size = _LOSS_BYTES
        if said := instance.execution.loss_bytes:
            each = said * work.logits_bytes(samples) / _LOSS_BYTES / 2
            return each, each
    return size * max(0.0, forward), size * max(0.0, backward)


def slower(device: float, host: float) -> float:
    """Seconds of a phase in which the host runs ahead of the device."""
    longer, shorter = max(device, host), min(device, host)
    if shorter == 0.0:
        return longer
    factor: float = (1.0 + (shorter / longer) ** _SHARPNESS) ** (1.0 / _SHARPNESS)
    return longer * factor


def beside(compute: float, traffic: float, overlap: float) -> float:
    """Seconds of compute with traffic that runs ahead of it: the longer, and what they disturb.

    Of the time in which both are under way, a share of ``1 - overlap`` is lost, for they share
    the memory and the multiprocessors.
    """
    return max(compute, traffic) + (1.0 - overlap) * min(compute, traffic)


def _score_passes(instance: Instance, work: Work, samples: float) -> tuple[float, float]:
    """Elements of the score matrices that softmax and dropout move, forward and backward.

    A flash kernel has no score matrix. The passes of the matmuls are in `product_seconds`, but
    for a group of which no products are known.
    """
    if instance.attention == "flash":
        return 0.0, 0.0
    scores, dropped = work.score_floats(samples), work.dropped_scores(samples)
    unfused = 1.0 - instance.fusion
    softmax, softmax_back = (
        fused + unfused * apart for fused, apart in zip(_SOFTMAX_PASSES, _SCALE_PASSES, strict=True)
    )
    if not work.products:
        softmax, softmax_back = (
            softmax + _MATMUL_PASSES["forward"],
            softmax_back + _MATMUL_PASSES["input"],
        )
    dropout, dropout_back = _DROPOUT_PASSES
    return softmax * scores + dropout * dropped, softmax_back * scores + dropout_back * dropped


def _attention(instance: Instance, kind: DeviceKind, work: Work, samples: float) -> float:
    """Seconds of the forward attention kernels of a group."""
    if not work.products:
        flops = work.attention_flops(samples)
        return matmul_seconds(kind, instance.bytes.compute, flops, 1)
    return sum(
        product_seconds(instance, kind, product, samples, instance.bytes.compute)
        for product in work.products
        if product.kind == "attention" and product.role == "forward"
    )


def matmul_dtype(instance: Instance, work: Work) -> str:
    """What the matmuls of a group are in: those that make class scores are never in fp8."""
    dtype = instance.bytes.compute
    return "bf16" if dtype == "fp8" and work.logits_bytes != Affine() else dtype


def _operand(product: Product, samples: float) -> int:
    """Elements of what the forward pass multiplies by weights, of whose gradient the backward."""
    batch, rows, _, depth = _shape(product, samples)
    return batch * rows * depth


def product_seconds(
    instance: Instance, kind: DeviceKind, product: Product, samples: float, dtype: str
) -> float:
    """Seconds of all kernels of a product on one device: the longer of FLOPs and bytes.

    Attention is never in fp8.
    """
    flops = product.flops(samples)
    if flops <= 0.0:
        return 0.0
    if product.kind == "attention" and instance.attention == "math":
        return _math_attention(instance, kind, product, samples, dtype)
    batch, rows, columns, depth = _shape(product, samples)
    moved = product.moved(samples)
    if product.kind == "attention":
        dtype = "bf16" if dtype == "fp8" else dtype
        speed = kind.peak_flops[dtype] * kind.attention_efficiency * instance.execution.attention
        flops *= 0.5 if product.causal else 1.0
        flops *= _FLASH_BACKWARD if product.role == "input" else 1.0
    else:
        each = flops / product.count
        speed = kind.peak_flops[dtype] * each / (each + kind.half_flops)
        speed *= matmul_efficiency(kind, batch, rows, columns, depth)
        speed *= kind.conv_efficiency if product.kind == "conv" else 1.0
    bandwidth = kind.bandwidth * kind.memory_efficiency
    return max(flops / speed, moved * instance.bytes.activation / bandwidth)


def _math_attention(
    instance: Instance, kind: DeviceKind, product: Product, samples: float, dtype: str
) -> float:
    """Seconds of the matmuls of a math kernel, all pairs computed.

    Forward, the scores and the sum over values; backward, the gradients of the scores, values,
    queries and keys. One of each sums over the width of a head and fills the score matrix, the
    others sum along it; each of them writes or reads the matrix once.
    """
    batch, rows, columns, depth = _shape(product, samples)
    passes = _MATMUL_PASSES[product.role]
    flops = product.flops(samples) / passes
    scores = product.count * batch * rows * columns
    moved = (product.moved(samples) / passes + scores) * instance.bytes.activation
    least = moved / (kind.bandwidth * kind.memory_efficiency)
    peak = kind.peak_flops[dtype]
    filling = flops / (peak * matmul_efficiency(kind, batch, rows, columns, depth))
    summing = flops / (peak * matmul_efficiency(kind, batch, rows, depth, columns))
    return max(filling, least) + (passes - 1) * max(summing, least)


def _shape(product: Product, samples: float) -> tuple[int, int, int, int]:
    sizes: tuple[Affine, ...] = (product.batch, product.rows, product.columns, product.depth)
    batch, rows, columns, depth = (max(1, round(size(samples))) for size in sizes)
    return batch, rows, columns, depth


def matmul_efficiency(kind: DeviceKind, batch: int, rows: int, columns: int, depth: int) -> float:
    """Share of the peak that `batch` products (rows x depth) (depth x columns) reach.

    On a kind without multiprocessors (a CPU) only the depth matters.
    """
    share = kind.max_efficiency * depth / (depth + kind.half_depth)
    if not kind.sms:
        return share
    slower = next((slow for step, slow in _ALIGNMENT if columns % step or depth % step), 1.0)
    return share * _filled(kind.sms, batch, rows, columns) / slower


@lru_cache(maxsize=1 << 16)
def _filled(sms: int, batch: int, rows: int, columns: int) -> float:
    """Useful share of the tiles and waves, with the best of the tile sizes."""
    best = 0.0
    for height, width, speed in _TILES:
        tiles = batch * ceil(rows / height) * ceil(columns / width)
        waves = ceil(tiles / sms)
        useful = batch * rows * columns / (waves * sms * height * width)
        best = max(best, speed * useful)
    return best


def matmul_seconds(kind: DeviceKind, dtype: str, flops: float, kernels: int) -> float:
    """Seconds of `flops` in `kernels` equal matmuls of no known shape.

    The efficiency is ``max * x / (x + half)`` of the FLOPs of one.
    """
    if flops <= 0.0:
        return 0.0
    each = flops / max(kernels, 1)
    efficiency = kind.max_efficiency * each / (each + kind.half_flops)
    return flops / (kind.peak_flops[dtype] * efficiency)
