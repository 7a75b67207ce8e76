"""Sizes and stand-ins of exported values, whose shapes are expressions of the batch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import sympy  # type: ignore[import-untyped]  # has no stubs
import torch
from torch import Tensor

from rlplace.graph.types import Affine

#: Two batch sizes give the line; not 0 or 1, which PyTorch treats in its own way.
BATCHES = (2, 3)


def at_batch(value: Any, batch: int) -> int:
    """A size of an exported program for a batch size: every symbol in it is the batch."""
    return value if isinstance(value, int) else _evaluate(value.node.expr, batch)


@lru_cache(maxsize=4096)
def _evaluate(expression: sympy.Expr, batch: int) -> int:
    return int(expression.subs({symbol: batch for symbol in expression.free_symbols}))


def describe(value: Any) -> str:
    """Shape, strides and dtype of an exported value; the batch is written ``B``."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(describe, value))}]"
    if isinstance(value, torch.SymInt):
        return _text(value.node.expr)
    if not isinstance(value, Tensor):
        return str(value)
    shape, stride = (",".join(map(describe, dims)) for dims in (value.shape, value.stride()))
    return f"{value.dtype}({shape})({stride})"


@lru_cache(maxsize=4096)
def _text(expression: sympy.Expr) -> str:
    batch = sympy.Symbol("B")
    return str(expression.subs({symbol: batch for symbol in expression.free_symbols}))


def size_of(value: Tensor, batch: int) -> int:
    """Elements of an exported tensor for a batch size."""
    size = 1
    for dim in value.shape:
        size *= at_batch(dim, batch)
    return size


def is_straight(value: Tensor) -> bool:
    """Whether the elements of an exported tensor are a line over the batch."""
    if sum(isinstance(dim, torch.SymInt) for dim in value.shape) == 0:
        return True
    far = 2 * BATCHES[1]
    return elements(value)(far) == size_of(value, far)


def elements(value: Tensor) -> Affine:
    """Elements of an exported tensor as a line over the batch."""
    low, high = (float(size_of(value, batch)) for batch in BATCHES)
    return Affine.through(BATCHES[0], low, BATCHES[1], high)


def stand_in(value: Any, batch: int, requires_grad: bool = False) -> Any:
    """A tensor on the meta device with the shape and strides of an exported one, or its number."""
    if not isinstance(value, Tensor):
        return at_batch(value, batch) if isinstance(value, torch.SymInt) else value
    shape = [at_batch(dim, batch) for dim in value.shape]
    stride = [at_batch(step, batch) for step in value.stride()]
    made = torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
    return made.requires_grad_(requires_grad)
