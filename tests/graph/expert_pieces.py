"""Routers and experts as one piece, with values to run them on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.integrations import moe  # noqa: F401  (registers the grouped matmul)

from rlplace.graph.layouts import borders_of
from rlplace.graph.library import spec
from rlplace.graph.program import Piece, export_program, extract

EXPERTS, TOP_K, HIDDEN, FFN, LENGTH, BATCH = 4, 2, 16, 24, 8, 3


class _Block(nn.Module):
    """The router and the experts of a layer, which return more than the hidden state."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        made: Any = self.block(x)
        out: Tensor = made[0] if isinstance(made, tuple) else made
        return out


@dataclass(frozen=True)
class Experts:
    """The group on the CPU and on the meta device, values for it, and what gets a gradient."""

    piece: Piece
    meta: Piece
    inputs: list[Any]
    grads: tuple[str, ...]

    def border(self, name: str, degree: int) -> Any:
        """How it reads and writes activations in a layout."""
        return borders_of(self.meta, self.meta.reads, degree)[name]

    def routed(self, gate: Tensor, x: Tensor) -> list[Any]:
        """The values with another weight of the router, and another input."""
        return [gate.requires_grad_(), *self.inputs[1:-1], x.requires_grad_()]


def hidden() -> Tensor:
    """An input of (samples, tokens, features)."""
    return torch.randn(BATCH, LENGTH, HIDDEN, dtype=torch.float64)


def _handed_on(piece: Piece) -> Piece:
    """The input as an activation that another group makes."""
    return replace(piece, inputs=(), reads=tuple(piece.inputs))


def _piece_of(module: nn.Module) -> Experts:
    for parameter in module.double().train().parameters():
        nn.init.normal_(parameter)
    x = hidden()
    program = export_program(module, (x,))
    names = [node.name for node in program.nodes]
    piece, meta = (_handed_on(extract(program, names, device=d)) for d in ("cpu", "meta"))
    states = dict(module.named_parameters())
    given = [states[name].detach().requires_grad_() for _, name in piece.states]
    grads = (*(place for place, _ in piece.states), *piece.reads)
    return Experts(piece, meta, [*given, x.requires_grad_()], grads)


@cache
def mixtral() -> Experts:
    """Those of a tiny Mixtral."""
    torch.manual_seed(0)
    model: Any = spec(
        "mixtral", layers=1, hidden=HIDDEN, heads=4, kv_heads=2, ffn=FFN, vocab=32,
        seq_len=LENGTH, experts=EXPERTS, top_k=TOP_K,
    ).make()  # fmt: skip
    return _piece_of(_Block(next(m for n, m in model.named_modules() if n.endswith("0.mlp"))))


Kind = Literal[
    "plain", "argsort", "descending", "unbounded", "foreign order", "moved places", "few bins",
    "summed", "not put back", "places for three",
]  # fmt: skip


class _Routed(nn.Module):
    """One grouped matmul of tokens that are sorted by expert, in ways that differ in one op."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.gate = nn.Parameter(torch.empty(EXPERTS, HIDDEN))
        self.weight = nn.Parameter(torch.empty(EXPERTS, HIDDEN, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        kind, tokens = self.kind, x.reshape(-1, HIDDEN)
        scores, chosen = torch.topk(torch.softmax(tokens @ self.gate.T, -1), TOP_K, -1)
        keys = chosen.reshape(-1)
        if kind == "unbounded":
            keys = keys * 1
        experts, order = torch.sort(keys, descending=kind == "descending")
        if kind == "argsort":
            order = torch.argsort(keys)
            experts = keys[order]
        bins = EXPERTS - 1 if kind == "few bins" else EXPERTS
        sizes = torch.histc(experts.float(), EXPERTS, 0, bins - 1)
        ends = torch.cumsum(sizes, 0, dtype=torch.int32)
        places = order + 0 if kind == "moved places" else order
        by = 3 if kind == "places for three" else TOP_K
        rows = tokens[places // by]
        made: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, self.weight, ends)
        made = made * scores.reshape(-1)[order].unsqueeze(-1)
        if kind == "summed":
            made = made.cumsum(0)
        back = torch.argsort(torch.argsort(keys) if kind == "foreign order" else order)
        made = made if kind == "not put back" else made[back]
        return x + made.view(-1, TOP_K, HIDDEN).sum(1).view(x.shape)


@cache
def routed(kind: Kind) -> Experts:
    """Experts whose tokens are sorted in some way."""
    torch.manual_seed(0)
    return _piece_of(_Routed(kind))
