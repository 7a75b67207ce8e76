"""Every op with a rule, called on small tensors: one table for the tests of the rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations import moe as _moe  # noqa: F401  (it registers an op)

BATCH, ROW = 3, 512
aten = torch.ops.aten


@dataclass(frozen=True)
class OpCase:
    """One op in a function of a batch and of some tensors.

    Args:
        op: Name of the op whose strategies are tried.
        function: ``function(x, *tensors)`` calls it once.
        x: Shape of one sample of `x`.
        tensors: Shapes of parameters; tensors are buffers.
        least: Sharded strategies that it has at least, on two devices, with every sharding of its
            arguments to choose from.
        note: Tells the cases of an op apart.
    """

    op: str
    function: Callable[..., Any]
    x: tuple[int, ...] = ()
    tensors: Sequence[Any] = ()
    least: int = 1
    note: str = ""

    @property
    def title(self) -> str:
        """For the report."""
        return f"{self.op} {self.note}".strip()


class Cases(nn.Module):
    """All cases as one model, so that they are exported in one go."""

    def __init__(self, cases: Sequence[OpCase]) -> None:
        super().__init__()
        self.cases = cases
        draw = torch.Generator().manual_seed(0)
        for i, case in enumerate(cases):
            for j, tensor in enumerate(case.tensors):
                if isinstance(tensor, Tensor):
                    self.register_buffer(f"t{i}_{j}", tensor)
                else:
                    value = torch.randn(tensor, dtype=torch.float64, generator=draw)
                    self.register_parameter(f"t{i}_{j}", nn.Parameter(value))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """The result of each case; `x` is (batch, ROW)."""
        outputs = []
        for i, case in enumerate(self.cases):
            size = torch.Size(case.x).numel()
            own = x[:, :size].reshape(x.shape[0], *case.x)
            tensors = [getattr(self, f"t{i}_{j}") for j in range(len(case.tensors))]
            outputs.append(case.function(own, *tensors))
        return tuple(outputs)


def _ids(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(7))


def _on(method: str, *args: Any, **options: Any) -> Callable[..., Tensor]:
    """A method of x; the first of its results."""

    def call(x: Tensor, *tensors: Tensor) -> Tensor:
        out: Any = getattr(x, method)(*args, *tensors, **options)
        return out if isinstance(out, Tensor) else out[0]

    return call


def _into(name: str, *options: Any, **named: Any) -> Callable[..., Tensor]:
    """An op that writes the rows of a source into zeros of its own."""

    def call(x: Tensor, index: Tensor, source: Tensor) -> Tensor:
        into = source.new_zeros(6, *source.shape[1:])
        out: Tensor = getattr(into, name)(0, index, source, *options, **named)
        return out * 2.0

    return call


def _free(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the tensors alone."""
    return lambda x, *tensors: function(*tensors)


def _attend(**options: Any) -> Callable[..., Tensor]:
    def call(x: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        k, v = (tensor.expand(x.shape[0], -1, -1, -1) for tensor in (k, v))
        return F.scaled_dot_product_attention(x, k, v, mask, **options)

    return call


def _bag(mode: str, weighted: bool = False, **options: Any) -> Callable[..., Tensor]:
    def call(x: Tensor, table: Tensor, ids: Tensor, offsets: Tensor, *rest: Tensor) -> Tensor:
        weights = rest[0] if weighted else None
        return F.embedding_bag(
            ids, table, offsets, mode=mode, per_sample_weights=weights, **options
        )

    return call


def _reductions(*ops: str) -> list[OpCase]:
    return [OpCase(op, _on(op, 1), (8, 8)) for op in ops]


MATMULS = [
    OpCase("linear", F.linear, (8, 16), [(24, 16), (24,)], 6),
    OpCase("linear", F.linear, (8, 16), [(24, 16)], 6, "without a bias"),
    OpCase("matmul", torch.matmul, (8, 16), [(16, 8)], 6),
    OpCase("matmul", torch.matmul, (4, 8, 16), [(4, 16, 8)], 7, "in batches"),
    OpCase("matmul", torch.matmul, (8, 16), [(16,)], 4, "with a vector"),
    OpCase("mm", _free(torch.mm), (), [(8, 16), (16, 8)], 6),
    OpCase("mv", _free(torch.mv), (), [(8, 16), (16,)], 4),
    OpCase("bmm", _free(torch.bmm), (), [(4, 8, 16), (4, 16, 8)], 8),
    OpCase("addmm", _free(torch.addmm), (), [(8,), (8, 16), (16, 8)], 6),
    OpCase(
        "addmm",
        _free(lambda *a: torch.addmm(*a, alpha=0.5)),
        (),
        [(8,), (8, 16), (16, 8)],
        4,
        "scaled",
    ),
    OpCase("addmv", _free(torch.addmv), (), [(8,), (8, 16), (16,)], 4),
    OpCase("baddbmm", _free(torch.baddbmm), (), [(1, 8, 8), (4, 8, 16), (4, 16, 8)], 8),
    OpCase(
        "baddbmm",
        _free(lambda *a: torch.baddbmm(*a, beta=0.5)),
        (),
        [(4, 1, 8), (4, 8, 16), (4, 16, 8)],
        6,
        "scaled",
    ),
    OpCase("addbmm", _free(torch.addbmm), (), [(8, 8), (4, 8, 16), (4, 16, 8)], 8),
    OpCase(
        "grouped_mm_fallback",
        _free(torch.ops.transformers.grouped_mm_fallback),
        (),
        [(8, 16), (4, 16, 8), torch.tensor([2, 2, 5, 8], dtype=torch.int32)],
        4,
    ),
    *[
        OpCase("einsum", lambda x, *t, e=e: torch.einsum(e, x, *t), (8, 16), shapes, least, e)
        for e, shapes, least in (
            ("bij,jk->bik", [(16, 8)], 6),
            ("...j,hdj->h...d", [(4, 8, 16)], 7),
            ("bin,jn,j->bi", [(4, 16), (4,)], 5),
            ("bij,k->bk", [(4,)], 5),
            ("bij,bij", [(1, 8, 16)], 4),
            ("bij", [], 3),
        )
    ],
]

LOOKUPS = [
    OpCase("embedding", _free(lambda w, i: F.embedding(i, w)), (), [(16, 8), _ids(16, 4, 6)], 6),
    OpCase(
        "embedding",
        _free(lambda w, i: F.embedding(i, w, padding_idx=5)),
        (),
        [(16, 8), _ids(16, 4, 6)],
        6,
        "with padding",
    ),
    *[
        OpCase("embedding_bag", function, (), [(16, 8), _ids(16, 12), offsets, *more], least, note)
        for offsets in [torch.tensor([0, 3, 3, 9])]
        for note, function, more, least in (
            ("sum", _bag("sum"), [], 3),
            ("mean", _bag("mean"), [], 3),
            ("max", _bag("max"), [], 2),
            ("weighted", _bag("sum", weighted=True), [(12,)], 3),
            ("mean with padding", _bag("mean", padding_idx=3), [], 3),
            ("sum, the last offset given", _bag("sum", include_last_offset=True), [], 3),
        )
    ],
    OpCase("index", lambda x, i: x[:, i], (4, 8), [_ids(4, 2, 3)], 2),
    OpCase("index", lambda x, i: x[:, i, :, i], (8, 4, 8), [_ids(4, 5)], 1, "in two places"),
    OpCase("index", lambda x, i: x[:, :, i, i], (8, 4, 4), [_ids(4, 5)], 2, "side by side"),
    OpCase("index", lambda x, i: x[i % 3, :, i], (8, 4, 8), [_ids(4, 5)], 4, "apart"),
    OpCase("index", _free(lambda t, i: t[i]), (), [(8, 4), _ids(8, 3, 3)], 2, "rows"),
    OpCase("index_select", lambda x, i: x.index_select(1, i), (4, 8), [_ids(4, 6)], 2),
    OpCase("gather", lambda x, t, i: t.gather(0, i), (), [(4, 8, 8), _ids(4, 6, 8, 8)], 4),
    OpCase(
        "gather", _free(lambda t, i: t.gather(0, i)), (), [(4, 8, 8), _ids(4, 6, 8, 4)], 2, "less"
    ),
    OpCase("index_add", _into("index_add"), (), [_ids(6, 4), (4, 8)], 2),
    OpCase("index_add_", _into("index_add_"), (), [_ids(6, 4), (4, 8)], 2),
    OpCase("index_copy", _into("index_copy"), (), [torch.tensor([1, 0, 5]), (3, 8)], 2),
    OpCase("scatter", _into("scatter"), (), [torch.arange(16).reshape(2, 8) // 8, (2, 8)], 2),
    OpCase("scatter_add", _into("scatter_add"), (), [_ids(6, 4, 8), (4, 8)], 2),
    OpCase("scatter_add_", _into("scatter_add_"), (), [_ids(6, 4, 8), (4, 8)], 2),
    OpCase("scatter_reduce_", _into("scatter_reduce_", "amax"), (), [_ids(6, 4, 8), (4, 8)], 2),
    OpCase("new_zeros", _into("scatter_add_"), (), [_ids(6, 4, 8), (4, 8)], 3),
    OpCase(
        "zeros",
        _free(lambda i, s: torch.zeros(8, 8, dtype=s.dtype, device=s.device).index_add_(0, i, s)),
        (),
        [_ids(8, 4), (4, 8)],
        4,
    ),
    OpCase(
        "index_put",
        lambda x, i, v: aten.index_put.default(x, [None, i], v, True),
        (4, 8),
        [_ids(4, 6), (6, 8)],
        2,
    ),
    OpCase(
        "index_put",
        lambda x, i, v: aten.index_put.default(x, [None, None, i], v, True),
        (8, 4, 8),
        [_ids(4, 6), (6, 8)],
        4,
        "broadcast",
    ),
]


def _convolve(op: str, **options: Any) -> Callable[..., Tensor]:
    return lambda x, *weights: getattr(F, op)(x, *weights, **options)


CHANNELS = [
    *[
        OpCase(op, _convolve(op, **options), (8, *[4] * n), [weight, *bias], least, note)
        for n in (1, 2, 3)
        for kernel in [[2] * n]
        for op, weight, bias, options, least, note in (
            (f"conv{n}d", (16, 8, *kernel), [(16,)], {"padding": 1}, 4, ""),
            (f"conv{n}d", (16, 8, *kernel), [], {"padding": "same"}, 4, "same"),
            (f"conv{n}d", (24, 1, *kernel), [(24,)], {"groups": 8}, 2, "depthwise"),
            (f"conv{n}d", (16, 2, *kernel), [], {"groups": 4}, 2, "in groups"),
            (f"conv_transpose{n}d", (8, 16, *kernel), [(16,)], {"stride": 2}, 4, ""),
            (f"conv_transpose{n}d", (8, 3, *kernel), [(12,)], {"groups": 4}, 2, "in groups"),
        )
    ],
    OpCase(
        "convolution",
        lambda x, w, b: aten.convolution(x, w, b, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        (8, 4, 4),
        [(16, 8, 2, 2), (16,)],
        4,
    ),
    OpCase("group_norm", lambda x, w, b: F.group_norm(x, 4, w, b), (8, 4, 4), [(8,), (8,)], 2),
    OpCase("group_norm", lambda x: F.group_norm(x, 4), (8, 4, 4), [], 2, "without weights"),
    OpCase("instance_norm", lambda x, w: F.instance_norm(x, weight=w), (8, 4, 4), [(8,)], 2),
    OpCase(
        "batch_norm",
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        (8, 4, 4),
        [(8,), (8,)],
        2,
    ),
    OpCase(
        "batch_norm",
        _free(lambda t: F.batch_norm(t, None, None, training=True)),
        (),
        [(8, 8)],
        2,
        "of rows that are no batch",
    ),
    OpCase("max_pool1d", lambda x: F.max_pool1d(x, 2), (8, 4), [], 2),
    OpCase("avg_pool1d", lambda x: F.avg_pool1d(x, 2), (8, 4), [], 2),
    OpCase("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 2), (8, 4), [], 2),
    OpCase("max_pool2d", lambda x: F.max_pool2d(x, 2), (8, 4, 4), [], 2),
    OpCase("avg_pool2d", lambda x: F.avg_pool2d(x, 2), (8, 4, 4), [], 2),
    OpCase("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 1), (8, 4, 4), [], 2),
    OpCase("max_pool3d", lambda x: F.max_pool3d(x, 2), (8, 2, 2, 2), [], 2),
    OpCase("upsample_nearest2d", lambda x: F.interpolate(x, scale_factor=2), (8, 2, 2), [], 2),
    OpCase(
        "upsample_bilinear2d",
        lambda x: F.interpolate(x, size=(5, 3), mode="bilinear"),
        (8, 2, 2),
        [],
        2,
    ),
    OpCase("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (32, 2, 2), [], 2),
    OpCase("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), (8, 4, 4), [], 2),
    OpCase("im2col", lambda x: F.unfold(x, 2), (8, 3, 3), [], 2),
    OpCase("col2im", lambda x: F.fold(x, 3, 2), (32, 4), [], 2),
    OpCase(
        "grid_sampler",
        lambda x, g: F.grid_sample(x, g.tanh().expand(x.shape[0], -1, -1, -1), align_corners=False),
        (8, 4, 4),
        [(1, 3, 3, 2)],
        2,
    ),
    OpCase("prelu", F.prelu, (8, 4), [(8,)], 2),
    OpCase("prelu", F.prelu, (8, 4), [(1,)], 2, "one slope"),
]

ATTENTION = [
    OpCase(
        "scaled_dot_product_attention",
        _attend(**options),
        (8, 4, 4),
        [(1, heads, 6, 4), (1, heads, 6, 4), *mask],
        least,
        note,
    )
    for note, heads, mask, least, options in (
        ("plain", 8, [], 2, {}),
        ("a mask", 8, [(1, 1, 4, 6)], 2, {}),
        ("a bias of each head", 8, [(8, 4, 6)], 2, {}),
        ("grouped keys", 4, [], 2, {"enable_gqa": True}),
        ("one head of keys", 1, [], 2, {"enable_gqa": True}),
        ("causal", 8, [], 2, {"is_causal": True}),
    )
]

NORMS = [
    OpCase("layer_norm", lambda x, w, b: F.layer_norm(x, (8,), w, b), (4, 8), [(8,), (8,)], 1),
    OpCase("rms_norm", lambda x, w: F.rms_norm(x, (8,), w), (4, 8), [(8,)], 1),
    OpCase("softmax", _on("softmax", -1), (8, 4), [], 2),
    OpCase("log_softmax", _on("log_softmax", 1), (4, 8), [], 2),
    OpCase("_safe_softmax", lambda x: aten._safe_softmax(x, -1), (8, 4), [], 2),
    OpCase(
        "cross_entropy_loss",
        _free(F.cross_entropy),
        (),
        [(12, 8), _ids(8, 12)],
        1,
    ),
]

DIMS = [
    OpCase("transpose", _on("transpose", 1, 2), (4, 8), [], 3),
    OpCase("permute", _on("permute", 2, 0, 1), (4, 8), [], 3),
    OpCase("t", _free(torch.t), (), [(8, 4)], 3),
    OpCase("movedim", _on("movedim", 1, -1), (4, 8, 4), [], 4),
    OpCase("swapaxes", _on("swapaxes", 1, 2), (4, 8), [], 3),
    OpCase("mT", lambda x: x.mT, (4, 8), [], 3),
    OpCase("view", lambda x: x.view(x.shape[0], 4, 2, 8), (8, 8), [], 3),
    OpCase("reshape", lambda x: x.reshape(x.shape[0], 64), (8, 8), [], 3),
    OpCase("flatten", lambda x: x.flatten(1), (8, 8), [], 3),
    OpCase("unflatten", lambda x: x.unflatten(2, (2, 4)), (4, 8), [], 3),
    OpCase("unsqueeze", _on("unsqueeze", 1), (4, 8), [], 3),
    OpCase("squeeze", lambda x: x.squeeze(2), (4, 1, 8), [], 3),
    OpCase("view_as", _free(lambda t, u: t.view_as(u)), (), [(32, 8), (4, 8, 8)], 3),
    OpCase("reshape_as", _free(lambda t, u: t.reshape_as(u)), (), [(32, 8), (4, 8, 8)], 3),
    OpCase("expand", lambda x, t: t.expand(x.shape[0], -1, 8), (), [(1, 4, 8)], 3),
    OpCase("expand_as", lambda x, t: t.expand_as(x), (4, 8), [(4, 1)], 3),
    OpCase("repeat", lambda x, t: t.repeat(x.shape[0], 2, 3), (), [(4, 8)], 3),
    OpCase("tile", _free(lambda t: t.tile(2, 3)), (), [(4, 8)], 3),
    OpCase("repeat_interleave", _on("repeat_interleave", 3, 1), (4, 8), [], 3),
    OpCase("select", _on("select", 1, 2), (4, 8), [], 2),
    OpCase("slice", lambda x: x[:, 1:3], (4, 8), [], 2),
    OpCase("narrow", _on("narrow", 1, 1, 2), (4, 8), [], 2),
    OpCase("cat", lambda x, t: torch.cat([x, t.expand(x.shape[0], 2, 8)], 1), (4, 8), [(8,)], 2),
    OpCase("stack", lambda x: torch.stack([x, x.sin()], 2), (4, 8), [], 3),
    OpCase("split", lambda x: x.split(4, 2)[1] * 2.0, (4, 8), [], 3),
    OpCase("split_with_sizes", lambda x: x.split([2, 6], 2)[1] * 2.0, (4, 8), [], 2),
    OpCase("chunk", lambda x: x.chunk(2, 2)[0] * 2.0, (4, 8), [], 3),
    OpCase("unbind", lambda x: x.unbind(1)[1] * 2.0, (4, 8), [], 2),
    OpCase("glu", lambda x: F.glu(x, 2), (4, 16), [], 2),
    OpCase("unfold", _on("unfold", 1, 2, 1), (4, 8), [], 2),
    OpCase("pad", lambda x: F.pad(x, (1, 2)), (4, 8), [], 2),
    OpCase("pad", lambda x: F.pad(x, (1, 1), mode="reflect"), (4, 8), [], 2, "reflected"),
    OpCase("constant_pad_nd", lambda x: aten.constant_pad_nd(x, [0, 0, 1, 0]), (4, 8), [], 2),
    OpCase("roll", _on("roll", 1, 1), (4, 8), [], 2),
    OpCase("flip", _on("flip", 1), (4, 8), [], 2),
    OpCase("tril", _on("tril"), (8, 4, 4), [], 2),
    OpCase("triu", _on("triu"), (8, 4, 4), [], 2),
    OpCase("one_hot", lambda x, i: F.one_hot(i, 5) * x.sum(), (), [_ids(5, 4, 8)], 3),
]

REDUCTIONS = [
    OpCase("sum", _on("sum", 1), (4, 8), [], 3),
    OpCase("sum", _on("sum", (1, 2), keepdim=True), (4, 8), [], 3, "of two dims"),
    OpCase("sum", _on("sum"), (4, 8), [], 3, "of all"),
    *_reductions("mean", "amax", "amin", "var", "std", "prod", "any", "all", "logsumexp"),
    *_reductions("argmax", "argmin", "max", "min", "median", "count_nonzero"),
    OpCase("var_mean", lambda x: torch.var_mean(x, 1)[1], (4, 8), [], 2),
    OpCase("linalg_vector_norm", lambda x: torch.linalg.vector_norm(x, dim=1), (4, 8), [], 2),
    OpCase("norm", lambda x: aten.norm.ScalarOpt_dim(x, 2, [1]), (4, 8), [], 2),
    *_reductions("cumsum", "cumprod", "logcumsumexp", "sort", "argsort"),
    OpCase("topk", lambda x: x.topk(2, 1)[0], (4, 8), [], 2),
]

ELEMENTWISE = [
    *[OpCase(op, lambda x, o=op: getattr(torch, o)(x), (4, 8), [], 3) for op in ("sin", "abs")],
    OpCase("add", torch.add, (4, 8), [(4, 1)], 2),
    OpCase("mul", torch.mul, (4, 8), [(8,)], 3),
    OpCase("div", lambda x, y: x / y, (4, 8), [(4, 8)], 3),
    OpCase("clamp", _on("clamp", -0.5, 0.5), (4, 8), [], 3),
    OpCase("dropout", lambda x: F.dropout(x, 0.0), (4, 8), [], 3),
    OpCase("lerp", lambda x, y: torch.lerp(x, y, 0.3), (4, 8), [(8,)], 3),
    OpCase("masked_fill", lambda x, m: x.masked_fill(m > 0, 2.0), (4, 8), [(4, 8)], 3),
    OpCase("where", lambda x, m: torch.where(m > 0, x, m), (4, 8), [(4, 8)], 3),
    OpCase("addcmul", lambda x, a, b: torch.addcmul(x, a, b, value=0.5), (4, 8), [(8,), (4, 1)], 3),
    OpCase("relu_", lambda x: (x * 2.0).relu_(), (4, 8), [], 3),
    OpCase("add_", lambda x, y: (x * 2.0).add_(y), (4, 8), [(8,)], 3),
    OpCase("to", lambda x: x.to(torch.float32), (4, 8), [], 3),
]

CASES = [
    *MATMULS,
    *LOOKUPS,
    *CHANNELS,
    *ATTENTION,
    *NORMS,
    *DIMS,
    *REDUCTIONS,
    *ELEMENTWISE,
]
