"""The signature of each op on the allow-list; see `rlplace.graph.sharding.labels`.

Families of ops have files of their own: `channel_rules` (convolutions, norms, pools, upsampling),
`index_rules` (indexing, scatter, embedding bags), `dim_rules` (what moves dims, or works along
some of them) and `einsum`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from rlplace.graph.sharding.channel_rules import CHANNEL_SIGNATURES
from rlplace.graph.sharding.dim_rules import DIM_SIGNATURES
from rlplace.graph.sharding.einsum import einsum_signature
from rlplace.graph.sharding.index_rules import INDEX_SIGNATURES
from rlplace.graph.sharding.labels import Labels, Signature, SignatureRule, aligned, names
from rlplace.graph.sharding.nodes import argument, op_name, shape, tensor_args


def _broadcast(node: fx.Node) -> Signature:
    """Elementwise, with broadcasting."""
    out = shape(node)
    labels = names("d", len(out))
    inputs = (aligned(shape(arg), labels, out) for arg in tensor_args(node))
    return Signature(tuple(inputs), labels)


def _prelu(node: fx.Node) -> Signature:
    """One slope, or one for each channel (dim 1)."""
    labels = names("d", len(shape(node)))
    slope = (labels[1] if len(labels) > 1 and shape(tensor_args(node)[1]) != (1,) else None,)
    return Signature((labels, slope), labels)


def _linear(node: fx.Node) -> Signature | None:
    rank = len(shape(tensor_args(node)[0]))
    if len(shape(tensor_args(node)[1])) != 2:
        return None
    lead = names("r", rank - 1)
    inputs: tuple[Labels, ...] = ((*lead, "k"), ("n", "k"), ("n",))
    inputs = inputs[: len(tensor_args(node))]
    output = (*lead, "n")
    return Signature(inputs, output, frozenset("k"), ("n", "k"), added=frozenset({2}))


def _added_matmul(node: fx.Node) -> Signature | None:
    """addmm, baddbmm, addbmm and addmv: what is added is broadcast."""
    args, out, name = tensor_args(node), shape(node), op_name(node)
    kept = "m" if len(out) == 1 else "n"
    output: Labels = ("m",) if len(out) == 1 else ("m", "n")
    left: Labels = ("m", "k")
    right: Labels = ("k", "n")[: len(out)]
    summed = frozenset("k")
    if name.rstrip("_") in ("baddbmm", "addbmm"):
        left, right = ("b", *left), ("b", *right)
        output = ("b", *output) if "baddbmm" in name else output
        summed |= frozenset() if "baddbmm" in name else frozenset("b")
    if node.kwargs or name.endswith("_"):
        summed = frozenset()  # a scaled sum, or one that is written into what is added to
    inputs = (aligned(shape(args[0]), output, out), left, right)
    origins = (kept, "k") if summed else (kept,)
    return Signature(inputs, output, summed, origins, added=frozenset({0}))


def _matmul(node: fx.Node) -> Signature | None:
    """mm, bmm, mv and matmul, with batch dims broadcast and aligned on the right."""
    left, right = (shape(arg) for arg in tensor_args(node))
    if len(left) < 2 or not right:
        return None
    columns: tuple[str, ...] = ("n",) if len(right) > 1 else ()
    out = shape(node)
    rank = len(out) - 1 - len(columns)
    batch: Labels = names("b", rank)

    def lead(own: tuple[int, ...]) -> Labels:
        return aligned(own, batch, out[:rank])

    inputs = ((*lead(left[:-2]), "m", "k"), (*lead(right[:-2]), "k", *columns))
    return Signature(inputs, (*batch, "m", *columns), frozenset("k"), (*columns, "k"))


def _grouped_mm(node: fx.Node) -> Signature | None:
    """Rows, sorted by group, times the matrix of their group."""
    args = tensor_args(node)
    if [len(shape(arg)) for arg in args] != [2, 3, 1]:
        return None
    inputs: tuple[Labels, ...] = ((None, "k"), (None, "k", "n"), (None,))
    return Signature(inputs, (None, "n"), frozenset("k"), ("n", "k"))


_ODD_EMBEDDINGS = ("scale_grad_by_freq", "sparse")


def _embedding(node: fx.Node) -> Signature | None:
    """Rows may be cut too: each device looks up its own, and the rest is zero."""
    scaled_or_sparse = any(argument(node, 3 + i, n) for i, n in enumerate(_ODD_EMBEDDINGS))
    lead = names("i", len(shape(node)) - 1)
    origins = ("f",) if scaled_or_sparse else ("v", "f")
    contracted: frozenset[str] = frozenset() if scaled_or_sparse else frozenset("v")
    return Signature((("v", "f"), lead), (*lead, "f"), contracted, origins, solid=frozenset("v"))


def _attention(node: fx.Node) -> Signature | None:
    """Batch dims, of which the heads are one; grouped keys are cut with the queries they serve."""
    args = tensor_args(node)
    rank = len(shape(args[0]))
    if rank < 3 or any(len(shape(arg)) != rank for arg in args[:3]):
        return None
    batch = names("b", rank - 2)
    labels: Labels = (*batch, None, None)

    def broadcast(arg: fx.Node) -> Labels:
        own = shape(arg)
        pairs = zip(own, labels[rank - len(own) :], strict=True)
        return tuple(label if size != 1 else None for size, label in pairs)

    return Signature((labels, *map(broadcast, args[1:])), labels)


def _layer_norm(node: fx.Node) -> Signature | None:
    """The normalized dims stay whole."""
    normalized = node.args[1]
    assert isinstance(normalized, list | tuple), "normalized_shape is a list"
    lead = names("d", len(shape(node)) - len(normalized))
    whole = (None,) * len(normalized)
    params: list[Labels] = [whole] * (len(tensor_args(node)) - 1)
    return Signature(((*lead, *whole), *params), (*lead, *whole))


ELEMENTWISE = """
    abs absolute acos acosh add addcdiv addcmul alias asin asinh atan atan2 atanh bitwise_and
    bitwise_not bitwise_or bitwise_xor ceil celu clamp clamp_max clamp_min clip clone contiguous
    copysign cos cosh detach div divide dropout elu eq erf erfc erfinv exp exp2 expand expand_as
    expm1 fix float_power floor floor_divide fmax fmin fmod frac full_like ge gelu greater
    greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot isfinite isinf isnan
    le leaky_relu lerp less less_equal lgamma lift_fresh_copy log log10 log1p log2 log_sigmoid
    logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt masked_fill
    maximum minimum mish mul multiply nan_to_num ne neg negative not_equal ones_like positive pow
    reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign silu sin sinc sinh
    softplus softshrink sqrt square sub subtract tan tanh threshold to true_divide trunc type_as
    where xlogy zeros_like __and__ __or__ __xor__ _to_copy
""".split()

SIGNATURES: Mapping[str, SignatureRule] = {
    **CHANNEL_SIGNATURES,
    **DIM_SIGNATURES,
    **INDEX_SIGNATURES,
    **dict.fromkeys(ELEMENTWISE, _broadcast),
    **dict.fromkeys(("mm", "bmm", "matmul", "mv"), _matmul),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv"), _added_matmul),
    **dict.fromkeys(("_grouped_mm", "grouped_mm", "grouped_mm_fallback"), _grouped_mm),
    **dict.fromkeys(("layer_norm", "rms_norm"), _layer_norm),
    "einsum": einsum_signature,
    "embedding": _embedding,
    "linear": _linear,
    "prelu": _prelu,
    "scaled_dot_product_attention": _attention,
}
