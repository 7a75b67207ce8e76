"""The axes of a mesh that cut activations: what runs on tp, and what on a cp axis beside it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rlplace.graph.sharding import axis as conjugate
from rlplace.graph.sharding.axis import Axis, current_axis, use_axis
from rlplace.graph.types import Shard
from rlplace.runtime.boundary import Form

_OUTER: ContextVar[Axis | None] = ContextVar("rlplace_outer_axis", default=None)
_MEAN, _SUM = 1, 2


@dataclass(frozen=True)
class Axes:
    """The axes of a mesh that cut activations, as one rank sees them.

    Args:
        cp, tp: None where they have one device.
    """

    cp: Axis | None = None
    tp: Axis | None = None

    @contextmanager
    def used(self) -> Iterator[None]:
        """Run lowered pieces on them."""
        inner = self.tp or self.cp
        if inner is None:
            yield
            return
        token = _OUTER.set(self.cp)
        try:
            with use_axis(inner):
                yield
        finally:
            _OUTER.reset(token)


#: No axis that cuts activations.
ALONE = Axes()


def outer_axis() -> Axis:
    """The cp axis beside a tp axis; the only axis where there is one."""
    return _OUTER.get() or current_axis()


def converted(value: Tensor, held: Form, wanted: Form) -> Tensor:
    """A value in another form; a gradient goes the same way back."""
    degree = outer_axis().size if isinstance(held.cp, Shard) else 1
    if isinstance(held.tp, Shard) and held != wanted:
        value = conjugate.gather(value, *parts_of(held.tp, held.cp, degree))
    if held.cp != wanted.cp:
        if isinstance(held.cp, Shard):
            value = over_cp(conjugate.gather)(value, *parts_of(held.cp, None, 1))
        if isinstance(wanted.cp, Shard):
            value = over_cp(conjugate.split)(value, *parts_of(wanted.cp, None, 1))
    degree = outer_axis().size if isinstance(wanted.cp, Shard) else 1
    if isinstance(wanted.tp, Shard) and held != wanted:
        value = conjugate.split(value, *parts_of(wanted.tp, wanted.cp, degree))
    return value


def parts_of(shard: Shard, cut_by_cp: object, degree: int) -> tuple[int, int, int]:
    """Dim, blocks and run of a shard, of what cp has left of the dim."""
    inside = isinstance(cut_by_cp, Shard) and cut_by_cp.dim == shard.dim
    return shard.dim, shard.blocks, shard.run // (degree if inside else 1)


@functools.cache
def over_cp(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `sharding.axis` on the cp axis."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with use_axis(outer_axis()):
            return function(*args, **kwargs)

    call.__name__ = f"{function.__name__}_over_cp"
    return call


def on_its_axis(target: Any) -> Any:
    """The function of `sharding.axis` that a node calls, on whichever axis."""
    return getattr(target, "__wrapped__", target)


def cut_cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    *,
    classes: bool = False,
    rows: bool = False,
) -> Tensor:
    """Cross entropy of logits (rows, classes) whose rows are cut over cp.

    Args:
        logits: Class scores.
        target: What the classes should be, (rows,).
        weight: Of the classes; there is none.
        reduction: As in ATen: 1 mean, 2 sum.
        ignore_index: Target of rows that do not count.
        classes: Whether tp cuts the classes.
        rows: Whether tp cuts the rows of a rank of cp.
    """
    if classes:
        total = conjugate.vocab_cross_entropy(logits, target, None, _SUM, ignore_index)
    else:
        total = F.cross_entropy(logits, target, reduction="sum", ignore_index=ignore_index)
    wide = total.float() if total.element_size() < 4 else total
    both = torch.stack((wide, (target != ignore_index).sum().to(wide.dtype)))
    summed: Tensor = over_cp(conjugate.reduce)(conjugate.reduce(both) if rows else both)
    total, count = summed.unbind()
    return (total / count if reduction == _MEAN else total).to(logits.dtype)
