"""Signatures of the ops on (batch, channels, positions): the channels may be cut, positions not."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from rlplace.graph.sharding.labels import Labels, Signature, SignatureRule, names, passing
from rlplace.graph.sharding.nodes import (
    CONVOLUTIONS,
    argument,
    conv_groups,
    is_transposed,
    shape,
    tensor_args,
)


def _convolution(node: fx.Node) -> Signature | None:
    """Out channels, in channels (a sum), or whole groups of channels."""
    args = tensor_args(node)
    rank = len(shape(args[0]))
    if rank != len(shape(args[1])):
        return None
    spatial: Labels = (None,) * (rank - 2)
    biases: list[Labels] = [("o",)] * (len(args) - 2)
    output: Labels = ("b", "o", *spatial)
    groups = conv_groups(node)
    if groups > 1:
        inputs = (output, ("o", None, *spatial), *biases)
        return Signature(inputs, output, units={"o": groups})
    pair: Labels = ("c", "o") if is_transposed(node) else ("o", "c")
    inputs = (("b", "c", *spatial), (*pair, *spatial), *biases)
    return Signature(inputs, output, frozenset("c"), ("o", "c"), added=frozenset({2}))


def _channel_norm(node: fx.Node) -> Signature:
    """Batch and instance norm: statistics of each channel; the batch stays whole."""
    args = tensor_args(node)
    lead: Labels = (None, "c", *(None for _ in shape(node)[2:]))
    return Signature((lead, *[("c",)] * (len(args) - 1)), lead)


def _group_norm(node: fx.Node) -> Signature:
    """Samples, or whole groups of channels."""
    args = tensor_args(node)
    lead: Labels = ("b", "c", *(None for _ in shape(node)[2:]))
    params: list[Labels] = [("c",)] * (len(args) - 1)
    return Signature((lead, *params), lead, units={"c": int(argument(node, 1, "num_groups"))})


def _spatial(dims: int) -> SignatureRule:
    """Pools and upsampling: all dims but the last ones pass."""

    def rule(node: fx.Node) -> Signature:
        value = len(shape(node))
        return passing((*names("d", value - dims), *(None,) * dims))

    return rule


def _pixel_shuffle(node: fx.Node) -> Signature:
    """Each output channel is made of a run of input channels."""
    count = len(shape(node))
    labels: Labels = (*names("d", count - 2), None, None)
    return Signature((labels,), labels, units={f"d{count - 3}": shape(node)[-3]})


def _columns(node: fx.Node) -> Signature | None:
    """im2col and col2im: (batch, channels, height, width) and (batch, channels * k, positions)."""
    before, after = len(shape(tensor_args(node)[0])), len(shape(node))
    if {before, after} != {3, 4}:
        return None
    image, columns = ("b", "c", None, None), ("b", "c", None)
    if before == 4:
        return Signature((image,), columns)
    return Signature((columns,), image, units={"c": shape(node)[1]})


def _grid_sampler(node: fx.Node) -> Signature:
    """Positions to read at, the same for all channels."""
    spatial: Labels = (None,) * (len(shape(node)) - 2)
    image: Labels = ("b", "c", *spatial)
    return Signature((image, ("b", *spatial, None)), image)


def _resamplers(dims: int) -> dict[str, SignatureRule]:
    """Pools and upsampling over so many spatial dims."""
    pools = ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool")
    kinds = ("nearest", "linear", "bilinear", "bicubic", "trilinear")
    stems = [*pools, *(f"upsample_{kind}" for kind in kinds), "_upsample_nearest_exact"]
    stems += ["_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"] if dims == 2 else []
    ops = [stem if stem.endswith("_aa") else f"{stem}{dims}d" for stem in stems]
    ops += [f"max_pool{dims}d_with_indices"]
    return dict.fromkeys(ops, _spatial(dims))


CHANNEL_SIGNATURES: Mapping[str, SignatureRule] = {
    **_resamplers(1),
    **_resamplers(2),
    **_resamplers(3),
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    **dict.fromkeys(("batch_norm", "instance_norm"), _channel_norm),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), _pixel_shuffle),
    **dict.fromkeys(("im2col", "col2im"), _columns),
    "grid_sampler": _grid_sampler,
    "group_norm": _group_norm,
}
