"""Whole weights of ZeRO-3 for as long as a step of a stage needs them, forward and backward.

Forward, each step's weights are gathered while the step before runs, and given back after it.
Backward, the same the other way round: the fence around what a step gives is the first thing in
its backward, for autograd runs what was made last first; by then the backward of all later steps
is done. What redoes a step in the backward pass does so behind its fence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rlplace.runtime.flat import LentWeights


class Lender:
    """Lends the weights of one stage.

    Its gathers have one order, which does not depend on what autograd does: that of the steps
    forward, and the reverse backward.

    Args:
        needs: What each step of the stage is lent.
    """

    def __init__(self, needs: Sequence[Sequence[LentWeights]]) -> None:
        self._needs = [tuple(own) for own in needs]
        self._lending = [index for index, own in enumerate(needs) if own]
        self._following = dict(pairwise([*self._lending, None]))
        self._left: list[int] = []
        self._there: list[LentWeights] = []
        self.current = 0
        self.peak = 0

    def before(self, step: int) -> None:
        """Have the weights of a step, and start to gather those of the next one."""
        if self._needs[step]:
            self._have(step, self._following[step])

    def after(self, step: int, values: dict[str, Any], names: Sequence[str]) -> None:
        """Give the weights of a step back.

        Args:
            step: Index of the step.
            values: Tensors by name; those of `names` may be replaced.
            names: What the step gives.
        """
        if not self._needs[step]:
            return
        given = {n: values[n] for n in names if isinstance(values[n], Tensor)}
        for name, tensor in given.items():
            if any(own.holds(tensor) for own in self._needs[step]):
                given[name] = tensor.clone()  # it was a view of what is given back
        fenced = [name for name, tensor in given.items() if tensor.requires_grad]
        if fenced and torch.is_grad_enabled():
            through = _Fence.apply(  # type: ignore[no-untyped-call]  # torch has no types for it
                self, step, *(given[name] for name in fenced)
            )
            given |= dict(zip(fenced, through, strict=True))
        values.update(given)
        self._give_back(self._following[step])

    def begin_backward(self) -> None:
        """The backward of a micro-batch begins."""
        self._left = list(self._lending)

    def back(self, step: int) -> None:
        """The backward of a step begins: have its weights, and start to gather those before."""
        while self._left and self._left[-1] >= step:
            now = self._left.pop()
            self._give_back(now)
            self._have(now, self._left[-1] if self._left else None)

    def end_backward(self) -> None:
        """The backward of a micro-batch is over. Steps that no gradient reached are gathered too.

        So the gathers are the same on every rank, also on one that has no samples.
        """
        self.back(0)
        self._give_back(None)

    def idle(self) -> None:
        """The gathers of a forward without samples."""
        for step in self._lending:
            self.before(step)
            self.after(step, {}, ())

    def _have(self, step: int, following: int | None) -> None:
        for own in (*self._needs[step], *(self._needs[following] if following is not None else ())):
            if own.start():
                self._there.append(own)
                self.current += own.whole_bytes
                self.peak = max(self.peak, self.current)
        for own in self._needs[step]:
            own.wait()

    def _give_back(self, keeps: int | None) -> None:
        """Give all back but what a step needs."""
        kept = self._needs[keeps] if keeps is not None else ()
        for own in [own for own in self._there if own not in kept]:
            self._there.remove(own)
            own.release()
            self.current -= own.whole_bytes


class _Fence(torch.autograd.Function):
    """Hands on tensors; in backward it asks for the weights of the step that made them."""

    @staticmethod
    def forward(ctx: Any, lender: Lender, step: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.lender, ctx.step = lender, step
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.lender.back(ctx.step)
        return (None, None, *gradients)
