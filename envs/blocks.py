"""Synthetic groups: what an attention block, an MLP or a convolution costs, in closed form.

The counts follow the usual formulas for transformers (Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022, sections 3 and 4) and convolutions, so that a
policy trained on them meets real captures with the same proportions: FLOPs to parameters to saved
activations to collectives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlplace.graph.types import Affine, Collective, Layout, Structure, Work

#: Degrees of the tp axis at which a block is sharded, where its dims divide.
DEGREES = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Block:
    """A structure, with the elements of a sample that it hands on.

    Args:
        name: Stem of the group's name.
        structure: What it costs.
        output: Float elements of its output, a sample.
    """

    name: str
    structure: Structure
    output: float


def attention(seq: int, hidden: int, heads: int, kv_heads: int, memory_len: int = 0) -> Block:
    """Self-attention, or attention over `memory_len` encoder positions where it is positive."""
    keys = memory_len or seq
    kv_width = hidden * kv_heads // heads
    weights = 2 * hidden * hidden + 2 * hidden * kv_width
    scores = 2.0 * seq * keys * hidden * (2 if memory_len else 1)
    projected = 2.0 * seq * hidden * 2 * hidden + 2.0 * keys * hidden * 2 * kv_width
    work = Work(
        flops=Affine(0.0, projected + scores),
        backward_flops=Affine(0.0, 2.0 * projected + 2.5 * scores),
        matmuls=6,
        kernels=18,
        moved=Affine(weights, 14.0 * seq * hidden + 4.0 * keys * kv_width),
        backward_moved=Affine(2.0 * weights, 24.0 * seq * hidden + 8.0 * keys * kv_width),
        score_floats=Affine(0.0, float(heads) * seq * keys),
        saved=Affine(0.0, 4.0 * seq * hidden + 2.0 * keys * kv_width),
        transient=Affine(0.0, 3.0 * seq * hidden),
        params=weights + 2 * hidden,
    )
    split = [d for d in DEGREES if heads % d == 0 and kv_heads % d == 0]
    kept = 1.5 * seq * hidden
    return _block("attention", work, split, seq * hidden, kept, (heads, kv_heads, keys))


def mlp(seq: int, hidden: int, inner: int, gated: bool) -> Block:
    """Two linear layers with an activation between, or three where it is gated."""
    layers = 3 if gated else 2
    weights = layers * hidden * inner
    work = Work(
        flops=Affine(0.0, 2.0 * seq * weights),
        backward_flops=Affine(0.0, 4.0 * seq * weights),
        matmuls=layers,
        kernels=layers + 6,
        moved=Affine(weights, seq * (6.0 * hidden + (2 * layers) * inner)),
        backward_moved=Affine(2.0 * weights, seq * (10.0 * hidden + (4 * layers) * inner)),
        saved=Affine(0.0, seq * (2.0 * hidden + layers * inner)),
        transient=Affine(0.0, seq * (hidden + 2.0 * inner)),
        params=weights + 2 * hidden,
    )
    split = [d for d in DEGREES if inner % d == 0]
    return _block("mlp", work, split, seq * hidden, 2.0 * seq * hidden, (inner, gated))


def experts(seq: int, hidden: int, inner: int, count: int, active: int) -> Block:
    """A mixture of gated MLPs: every token visits `active` of `count` experts."""
    weights = count * 3 * hidden * inner + hidden * count
    flops = 2.0 * seq * active * 3 * hidden * inner
    work = Work(
        flops=Affine(0.0, flops),
        backward_flops=Affine(0.0, 2.0 * flops),
        matmuls=3 * count,
        kernels=8 * count + 12,
        moved=Affine(weights, seq * active * (8.0 * hidden + 6.0 * inner)),
        backward_moved=Affine(2.0 * weights, seq * active * (14.0 * hidden + 12.0 * inner)),
        saved=Affine(0.0, seq * active * (2.0 * hidden + 3.0 * inner)),
        saved_bytes=Affine(0.0, 16.0 * seq * active),
        transient=Affine(0.0, seq * active * (hidden + 2.0 * inner)),
        params=weights,
    )
    split = [d for d in DEGREES if inner % d == 0]
    return _block("experts", work, split, seq * hidden, 2.0 * seq * hidden, (count, active))


def embedding(seq: int, hidden: int, vocab: int) -> Block:
    """A table look-up; sharded over the vocabulary, it needs no collective backward."""
    work = Work(
        kernels=3,
        moved=Affine(0.0, 3.0 * seq * hidden),
        backward_moved=Affine(float(vocab * hidden), 2.0 * seq * hidden),
        saved_bytes=Affine(0.0, 8.0 * seq),
        transient=Affine(0.0, float(seq * hidden)),
        params=vocab * hidden,
    )
    split = [d for d in DEGREES if vocab % d == 0]
    return _block("embedding", work, split, seq * hidden, 0.0, (vocab,), backward=False)


def head(seq: int, hidden: int, vocab: int) -> Block:
    """Norm, projection to the vocabulary and cross-entropy; hands on one number."""
    flops = 2.0 * seq * hidden * vocab
    work = Work(
        flops=Affine(0.0, flops),
        backward_flops=Affine(0.0, 2.0 * flops),
        matmuls=1,
        kernels=8,
        moved=Affine(float(vocab * hidden), seq * (4.0 * hidden + 6.0 * vocab)),
        backward_moved=Affine(2.0 * vocab * hidden, seq * (6.0 * hidden + 4.0 * vocab)),
        saved=Affine(0.0, seq * (2.0 * hidden + 2.0 * vocab)),
        saved_bytes=Affine(0.0, 8.0 * seq),
        transient=Affine(0.0, 2.0 * seq * vocab),
        params=vocab * hidden + hidden,
    )
    split = [d for d in DEGREES if vocab % d == 0]
    block = _block("head", work, split, seq * hidden, 2.0 * seq * hidden, (vocab,))
    return replace(block, output=1.0)


def convolution(pixels: int, width: int, out_pixels: int, out_width: int, wide: bool) -> Block:
    """A bottleneck (1x1, 3x3, 1x1) or, where it is `wide`, two 3x3 convolutions."""
    inner = out_width if wide else max(1, out_width // 4)
    weights = (
        9 * (width * inner + inner * out_width)
        if wide
        else width * inner + 9 * inner * inner + inner * out_width
    )
    flops = 2.0 * out_pixels * weights
    touched = pixels * width + out_pixels * (3.0 * inner + 2.0 * out_width)
    work = Work(
        flops=Affine(0.0, flops),
        backward_flops=Affine(0.0, 2.0 * flops),
        matmuls=2 if wide else 3,
        kernels=8 if wide else 11,
        moved=Affine(weights, 3.0 * touched),
        backward_moved=Affine(2.0 * weights, 5.0 * touched),
        saved=Affine(0.0, 2.0 * touched),
        transient=Affine(0.0, touched),
        params=weights + 4 * out_width,
    )
    return _block("conv", work, [], out_pixels * out_width, 0.0, (pixels, width, wide))


def _block(
    name: str,
    work: Work,
    degrees: list[int],
    boundary: float,
    kept: float,
    key: tuple[object, ...],
    *,
    backward: bool = True,
) -> Block:
    """A block with its sharded layouts: column-row pairs, one all-reduce in each direction.

    Args:
        name: Stem of the name.
        work: Unsharded.
        degrees: Legal degrees.
        boundary: Elements a sample of the tensor that is reduced.
        kept: Saved elements a sample that stay whole on every device.
        key: What tells structures of this name apart.
        backward: Whether the gradient of the input is reduced too.
    """
    layouts = tuple(
        Layout("shard", degree, _split(work, degree, kept), _reductions(boundary, backward))
        for degree in degrees
    )
    structure = Structure(f"{name}-{work.params}-{boundary:.0f}-{key}", work, layouts)
    return Block(name, structure, float(boundary))


def _split(work: Work, degree: int, kept: float) -> Work:
    share = 1.0 / degree
    saved = Affine(work.saved.base * share, kept + (work.saved.per_sample - kept) * share)
    return replace(
        work,
        flops=work.flops * share,
        backward_flops=work.backward_flops * share,
        moved=work.moved * share,
        backward_moved=work.backward_moved * share,
        score_floats=work.score_floats * share,
        saved=saved,
        transient=work.transient * share,
        params=-(-work.params // degree),
    )


def _reductions(floats: float, backward: bool) -> tuple[Collective, ...]:
    size = Affine(0.0, float(floats))
    forward = Collective("all_reduce", "forward", size)
    return (forward, Collective("all_reduce", "backward", size)) if backward else (forward,)
