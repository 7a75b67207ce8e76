"""The core attention of a piece: redone in the backward pass alone, or told apart from the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlplace.graph.program import Piece
from rlplace.graph.sharding.axis import apply

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


@dataclass
class Kernel:
    """An attention that is running; with the math kernel it is made of ops.

    Args:
        products: How many matmuls have run: of queries with keys, then of scores with values.
    """

    products: int = 0


_RUNNING: ContextVar[Kernel | None] = ContextVar("rlplace_attention", default=None)


def running() -> Kernel | None:
    """The attention of a `marked` piece that is running, if there is one."""
    return _RUNNING.get()


def marked(piece: Piece) -> Piece:
    """A piece that says while it runs attention (`running`)."""
    return _replaced(piece, _marked_attention)


def redoing_attention(piece: Piece) -> Piece:
    """A piece that keeps of attention the inputs only, and no score matrix."""
    return _replaced(piece, redone_attention)


def redone_attention(*args: Any, **kwargs: Any) -> Tensor:
    """Attention that is redone in the backward pass (arXiv 2205.05198, section 5)."""
    return apply(_Redone, kwargs, *args)


def _replaced(piece: Piece, function: Callable[..., Tensor]) -> Piece:
    for node in piece.module.graph.nodes:
        if node.target is _ATTENTION:
            node.target = function
    piece.module.recompile()
    return piece


def _marked_attention(*args: Any, **kwargs: Any) -> Tensor:
    with _mark():
        out: Tensor = _ATTENTION(*args, **kwargs)
    return out


@contextmanager
def _mark() -> Iterator[None]:
    token = _RUNNING.set(Kernel())
    try:
        yield
    finally:
        _RUNNING.reset(token)


class _Redone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: dict[str, Any], *args: Any) -> Tensor:
        ctx.options = options
        ctx.others = [None if isinstance(value, Tensor) else value for value in args]
        ctx.places = [i for i, value in enumerate(args) if isinstance(value, Tensor)]
        ctx.save_for_backward(*(args[i] for i in ctx.places))
        ctx.state = _state(args, options)
        out: Tensor = _ATTENTION(*args, **options)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        args = list(ctx.others)
        for place, value in zip(ctx.places, ctx.saved_tensors, strict=True):
            args[place] = value.detach().requires_grad_(ctx.needs_input_grad[place + 1])
        with torch.enable_grad(), _drawn_again(ctx.state, grads[0].device):
            out = _ATTENTION(*args, **ctx.options)
        wanted = [place for place in ctx.places if args[place].requires_grad]
        found = torch.autograd.grad(out, [args[place] for place in wanted], grads[0])
        result = dict(zip(wanted, found, strict=True))
        return None, *(result.get(place) for place in range(len(args)))


def _state(args: tuple[Any, ...], options: dict[str, Any]) -> Tensor | None:
    """The state of the generator that the kernel draws from, where it draws."""
    dropout = args[4] if len(args) > 4 else options.get("dropout_p", 0.0)
    if not dropout:
        return None
    query = args[0]
    return torch.cuda.get_rng_state(query.device) if query.is_cuda else torch.get_rng_state()


@contextmanager
def _drawn_again(state: Tensor | None, device: torch.device) -> Iterator[None]:
    if state is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
        yield
