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

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from rlplace.cluster.types import DeviceKind
from rlplace.graph.types import Affine, Product, Work
from rlplace.plan.types import Instance

#: Passes over the score matrix that a math attention kernel makes forward (write, read, write the
#: softmax, read it) and backward (the same twice).
SCORE_PASSES = (4, 8)
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
#: computes the scores again (Dao, arXiv 2307.08691).
_FLASH_BACKWARD = 5 / 4


@dataclass(frozen=True, slots=True)
class Compute:
    """Seconds of one micro-batch of a group on one device, collectives not counted.

    Args:
        forward: The forward pass.
        backward: The backward pass.
        weight: The part of `backward` that makes gradients of parameters.
        attention: The forward of the core attention alone.
        light: The forward of all ops that are neither matmul-like nor attention.
    """

    forward: float
    backward: float
    weight: float
    attention: float
    light: float


def compute(
    instance: Instance, work: Work, kinds: list[DeviceKind], turns: int, samples: float
) -> Compute:
    """What a micro-batch of `samples` takes on the slowest of `kinds`, `turns` of them in turn."""
    each = [_on(instance, work, kind, samples) for kind in kinds]
    return Compute(
        *(
            turns * max(getattr(found, name) for found in each)
            for name in ("forward", "backward", "weight", "attention", "light")
        )
    )


def _on(instance: Instance, work: Work, kind: DeviceKind, samples: float) -> Compute:
    size, run = instance.bytes.activation, instance.execution
    kernels, forward_moved, backward_moved = instance.traffic(work)
    roles = {"forward": 0.0, "input": 0.0, "weight": 0.0}
    moved = {"forward": 0.0, "input": 0.0, "weight": 0.0}
    for product in work.products:
        roles[product.role] += product_seconds(instance, kind, product, samples)
        moved[product.role] += product.moved(samples)
    if not work.products:
        dtype = instance.bytes.compute
        roles["forward"] = matmul_seconds(kind, dtype, work.flops(samples), work.matmuls)
        roles["input"] = matmul_seconds(kind, dtype, work.backward_flops(samples), 2 * work.matmuls)
    scores = work.score_floats(samples) if instance.attention == "math" else 0.0
    bandwidth = kind.bandwidth * kind.memory_efficiency / size
    light = (max(0.0, forward_moved(samples) - moved["forward"])) / bandwidth
    light_back = max(0.0, backward_moved(samples) - moved["input"] - moved["weight"]) / bandwidth
    soft, soft_back = (passes * scores / bandwidth for passes in SCORE_PASSES)
    gaps = kernels * kind.launch_overhead
    attention = soft + _attention(instance, kind, work, samples)
    device = roles["forward"] + light + soft + gaps
    device_back = roles["input"] + roles["weight"] + light_back + soft_back + 2 * gaps
    return Compute(
        forward=max(device, kernels * run.launch),
        backward=max(device_back, 2 * kernels * run.backward_launch),
        weight=roles["weight"],
        attention=attention + kind.launch_overhead if attention else 0.0,
        light=max(light + gaps, kernels * run.launch),
    )


def _attention(instance: Instance, kind: DeviceKind, work: Work, samples: float) -> float:
    """Seconds of the forward attention kernels of a group."""
    if not work.products:
        flops = work.attention_flops(samples)
        return matmul_seconds(kind, instance.bytes.compute, flops, 1)
    return sum(
        product_seconds(instance, kind, product, samples)
        for product in work.products
        if product.kind == "attention" and product.role == "forward"
    )


def product_seconds(
    instance: Instance, kind: DeviceKind, product: Product, samples: float
) -> float:
    """Seconds of all kernels of a product on one device: the longer of FLOPs and bytes."""
    flops = product.flops(samples)
    if flops <= 0.0:
        return 0.0
    flash = product.kind == "attention" and instance.attention == "flash"
    if flash:
        dtype = "bf16" if instance.bytes.compute == "fp8" else instance.bytes.compute
        speed = kind.peak_flops[dtype] * kind.attention_efficiency
        flops *= (0.5 if product.causal else 1.0) * (
            _FLASH_BACKWARD if product.role == "input" else 1.0
        )
    else:
        speed = kind.peak_flops[instance.bytes.compute] * matmul_efficiency(
            kind, *_shape(product, samples)
        )
        each = product.flops(samples) / product.count
        speed *= each / (each + kind.half_flops)
    bandwidth = kind.bandwidth * kind.memory_efficiency
    return max(flops / speed, product.moved(samples) * instance.bytes.activation / bandwidth)


def _shape(product: Product, samples: float) -> tuple[int, int, int, int]:
    sizes: tuple[Affine, ...] = (product.batch, product.rows, product.columns, product.depth)
    batch, rows, columns, depth = (max(1, round(size(samples))) for size in sizes)
    return batch, rows, columns, depth


def matmul_efficiency(kind: DeviceKind, batch: int, rows: int, columns: int, depth: int) -> float:
    """Share of the peak that `batch` products (rows x depth) (depth x columns) reach.

    On a kind without multiprocessors (a CPU) the shape does not matter.
    """
    filled = _filled(kind.sms, batch, rows, columns) if kind.sms else 1.0
    return kind.max_efficiency * filled * depth / (depth + kind.half_depth)


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
