"""The two ends of a micro-batch's graph on one stage: what it has read, and what it gives.

Neither end keeps its tensors: autograd keeps those that an op needs in backward, and all others are
free as soon as they have been used, and sent. (Megatron-LM takes the storage of an output away for
that, `deallocate_output_tensor`; here the node of the graph is kept without its tensor.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


def entering(
    received: Mapping[str, Tensor], names: Collection[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors with which a graph begins, and their gradients.

    Args:
        received: Tensors by name.
        names: Those to which a gradient flows back.

    Returns:
        The tensors, and of those in `names` the gradients: zero until a backward has made them.
    """
    gradients = {name: received[name].new_zeros(()).expand(received[name].shape) for name in names}
    if not gradients:
        return dict(received), gradients
    anchor = torch.zeros(0, requires_grad=True)
    through = _Entry.apply(  # type: ignore[no-untyped-call]  # torch has no types for it
        anchor, gradients, *(received[name] for name in gradients)
    )
    return {**received, **dict(zip(gradients, through, strict=True))}, gradients


def leaving(given: Mapping[str, Tensor]) -> dict[str, GradientEdge]:
    """Where the gradients of what a graph has given go; of what has none, nothing."""
    return {name: get_gradient_edge(one) for name, one in given.items() if one.requires_grad}


def run_backward(edges: Mapping[str, GradientEdge], gradients: Mapping[str, Tensor]) -> None:
    """Run the backward of a graph from the gradients of what it gave."""
    pairs = [(edges[name], gradients[name]) for name in gradients if name in edges]
    if pairs:
        outputs, seeds = zip(*pairs, strict=True)
        torch.autograd.backward(outputs, seeds)


class _Entry(torch.autograd.Function):
    """Hands on tensors; backward puts their gradients where they are looked for."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, gradients: dict[str, Tensor], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.gradients, ctx.names = gradients, tuple(gradients)
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *made: Tensor | None) -> tuple[None, ...]:
        found = zip(ctx.names, made, strict=True)
        ctx.gradients.update({name: own for name, own in found if own is not None})
        return (None, None, *(None for _ in made))
