"""Attention as a flash kernel does it, on tape: its shapes, its counts and what it saves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlplace.graph.products import attention_size
from rlplace.graph.tape import Tape


def flash_attention(
    tape: Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> Tensor:
    """Attention, with the arguments of `torch.nn.functional.scaled_dot_product_attention`."""
    scores = query.shape[:-1].numel() * key.shape[-2]
    tape.scores += scores
    tape.dropped_scores += scores if dropout_p > 0.0 else 0
    made = _Flash.apply(tape, query, key, value, mask, is_causal)  # type: ignore[no-untyped-call]  # torch
    out: Tensor = made
    return out


class _Flash(torch.autograd.Function):
    """The shapes, saved tensors and counts of a flash attention kernel (Dao et al., 2022)."""

    @staticmethod
    def forward(
        ctx: Any,
        tape: Tape,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
    ) -> Tensor:
        """Two matmuls: the scores, and the sum over values."""
        *lead, rows, _ = query.shape
        if value.shape[-1] == query.shape[-1]:
            out = torch.empty_like(query)  # kernels lay their output out as the query is
        else:
            out = query.new_empty(*lead[:-1], rows, *lead[-1:], value.shape[-1])
            out = out.transpose(-2, -3) if lead else out
        log_sums = query.new_empty(query.shape[:-1])
        ctx.save_for_backward(query, key, value, out, log_sums, mask)
        ctx.tape, ctx.causal = tape, causal
        pairs = 2 * log_sums.numel() * key.shape[-2]
        ctx.pairs = pairs
        flops = pairs * (query.shape[-1] + value.shape[-1])
        tape.attention_flops += flops
        read = [query, key, value] if mask is None else [query, key, value, mask]
        tape.flow(read, [out, log_sums], stays=True)
        size = attention_size(query, key, flops, causal)
        tape.record((size,), [query, key, value], [out, log_sums])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Gradients of the scores, q, k and v; computing the scores again does not count."""
        (grad,) = grads
        query, key, value, out, log_sums, mask = ctx.saved_tensors
        _, *needs, _ = ctx.needs_input_grad
        made = [
            torch.empty_like(x) if need else None
            for x, need in zip((query, key, value, mask), needs, strict=True)
        ]
        width, depth = query.shape[-1], value.shape[-1]
        inner = depth * (needs[0] or needs[1] or needs[3])
        flops = ctx.pairs * (inner + width * (needs[0] + needs[1]) + depth * needs[2])
        written = [x for x in made if x is not None]
        read = [grad, query, key, value, out, log_sums]
        ctx.tape.flow(read, written)
        size = attention_size(query, key, flops, ctx.causal)
        ctx.tape.record((size,), read, written)
        return None, *made, None
