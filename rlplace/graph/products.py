"""Sizes of matmul-like kernels: what their FLOPs are made of, and what their efficiency follows.

A product of (rows, depth) with (depth, columns) matrices takes ``2 * rows * columns * depth``
FLOPs, a kernel of many the sum. A convolution is the product that an implicit matmul computes, and
each of its gradients likewise. What torch counts besides (`torch.utils.flop_counter`) is taken as
one product with as many FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from rlplace.graph.shapes import BATCHES
from rlplace.graph.types import Affine, Product

Kind = Literal["matmul", "attention", "conv", "grouped"]
ProductRole = Literal["forward", "input", "weight"]


@dataclass(frozen=True, slots=True)
class Size:
    """One kernel at one batch size, as `Product` has it; `role` where the op itself tells it."""

    kind: Kind
    batch: float
    rows: float
    columns: float
    depth: float
    flops: int
    role: ProductRole | None = None
    causal: bool = False

    @property
    def dims(self) -> tuple[float, float, float, float]:
        """The four sizes."""
        return self.batch, self.rows, self.columns, self.depth


@dataclass(frozen=True, slots=True)
class Measured:
    """A kernel at both batch sizes, and the float elements that it moves at each."""

    role: ProductRole
    low: Size
    high: Size
    moved: tuple[float, float]


def merge(kernels: Iterable[Measured]) -> tuple[Product, ...]:
    """Equal kernels together, in the order of the first of each."""
    equal: dict[Any, list[Measured]] = {}
    for kernel in kernels:
        key = (kernel.role, kernel.low.kind, kernel.low.causal, kernel.low.dims, kernel.high.dims)
        equal.setdefault(key, []).append(kernel)
    return tuple(map(_product, equal.values()))


def _product(kernels: Sequence[Measured]) -> Product:
    first = kernels[0]
    pairs = zip(first.low.dims, first.high.dims, strict=True)
    batch, rows, columns, depth = (_line(low, high) for low, high in pairs)
    return Product(
        first.low.kind,
        first.role,
        len(kernels),
        batch,
        rows,
        columns,
        depth,
        flops=_line(sum(k.low.flops for k in kernels), sum(k.high.flops for k in kernels)),
        moved=_line(sum(k.moved[0] for k in kernels), sum(k.moved[1] for k in kernels)),
        causal=first.low.causal,
    )


def _line(low: float, high: float) -> Affine:
    return Affine.through(BATCHES[0], low, BATCHES[1], high)


def sizes_of(func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> tuple[Size, ...]:
    """The products of an ATen op; none for ops that are not matmul-like.

    Args:
        func: The op.
        args: What it is called with.
        kwargs: Likewise.
        out: What it returned.
    """
    own = _SIZES.get(func._schema.name)
    if own is not None:
        return own(args, out)
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return ()
    flops = int(formula(*args, **kwargs, out_val=out))
    first = out if isinstance(out, Tensor) else out[0]
    columns = first.shape[-1]
    rows = first.numel() / columns
    depth = flops / (2 * rows * columns)
    kind: Kind = "attention" if "attention" in func._schema.name else "matmul"
    return (Size(kind, 1, rows, columns, depth, flops),)


def attention_size(query: Tensor, key: Tensor, flops: int, causal: bool) -> Size:
    """An attention kernel, forward or backward.

    Args:
        query: (..., queries, width of a head).
        key: (..., keys, width of a head).
        flops: Of all its products.
        causal: Whether a query sees no later key.
    """
    *lead, rows, width = query.shape
    heads = query.numel() // (rows * width) if lead else 1
    return Size("attention", heads, rows, key.shape[-2], width, flops, causal=causal)


def _equal(
    kind: Kind, batch: int, rows: int, columns: int, depth: int, role: ProductRole | None = None
) -> Size:
    return Size(kind, batch, rows, columns, depth, 2 * batch * rows * columns * depth, role)


def _matmul(a: Tensor, b: Tensor) -> tuple[Size, ...]:
    batch = a.shape[0] if a.ndim == 3 else 1
    return (_equal("matmul", batch, a.shape[-2], b.shape[-1], a.shape[-1]),)


def _grouped(args: Any, out: Any) -> tuple[Size, ...]:
    """Each row meets one expert's matrix, so the expected rows count, not all pairs."""
    a, b = args[:2]
    if a.ndim == b.ndim == 2:  # the gradient of the matrices: sums over the rows of each expert
        return (_experts(out.shape[0], a.shape[0], b.shape[1], a.shape[1], "depth"),)
    if b.ndim == 2:
        return (_experts(a.shape[0], a.shape[1], b.shape[1], a.shape[2], "columns"),)
    if a.ndim == 2:
        return (_experts(b.shape[0], a.shape[0], b.shape[2], a.shape[1], "rows"),)
    return _matmul(a, b)


def _grouped_backward(args: Any, _: Any) -> tuple[Size, ...]:
    """Both gradients of rows (rows, depth) and matrices (experts, depth, columns)."""
    rows = len(args[0])
    experts, depth, columns = args[1].shape
    return (
        _experts(experts, rows, depth, columns, "rows", "input"),
        _experts(experts, depth, columns, rows, "depth", "weight"),
    )


def _experts(
    experts: int,
    rows: int,
    columns: int,
    depth: int,
    shared: Literal["rows", "columns", "depth"],
    role: ProductRole | None = None,
) -> Size:
    """A kernel that has one product an expert, each with its share of one of the sizes."""
    flops = 2 * rows * columns * depth
    whole = {"rows": rows, "columns": columns, "depth": depth}
    own = {name: size / experts if name == shared else size for name, size in whole.items()}
    dims = (own["rows"], own["columns"], own["depth"])
    return Size("grouped", experts, *dims, flops=flops, role=role)


def _conv(args: Any, out: Any) -> tuple[Size, ...]:
    x, weight, *_ = args
    transposed, _, groups = args[6:9]
    return (_equal("conv", groups, *_conv_dims(x if transposed else out, weight, args[6:9])),)


def _conv_dims(made: Tensor, weight: Tensor, how: Sequence[Any]) -> tuple[int, int, int]:
    """(rows, columns, depth) of a convolution; a transposed one has a row for each input."""
    transposed, _, groups = how
    rows = made.numel() // made.shape[1]
    channels, window = weight.shape[0] // groups, weight[0].numel()
    return (rows, window, channels) if transposed else (rows, channels, window)


def _conv_backward(args: Any, _: Any) -> tuple[Size, ...]:
    """As much as forward for each gradient; torch's own formula is too high with `groups`."""
    grad, x, weight = args[:3]
    groups, mask = args[9:11]
    rows, columns, depth = _conv_dims(x if args[7] else grad, weight, args[7:10])
    made = (
        _equal("conv", groups, rows, depth, columns, "input"),
        _equal("conv", groups, columns, depth, rows, "weight"),
    )
    return tuple(size for size, needed in zip(made, mask, strict=False) if needed)


_SIZES: dict[str, Callable[[Any, Any], tuple[Size, ...]]] = {
    "aten::mm": lambda args, _: _matmul(args[0], args[1]),
    "aten::bmm": lambda args, _: _matmul(args[0], args[1]),
    "aten::addmm": lambda args, _: _matmul(args[1], args[2]),
    "aten::baddbmm": lambda args, _: _matmul(args[1], args[2]),
    "aten::convolution": _conv,
    "aten::convolution_backward": _conv_backward,
    "aten::_grouped_mm": _grouped,
    "transformers::grouped_mm_fallback": _grouped,
    "transformers::grouped_mm_fallback_backward": _grouped_backward,
}
