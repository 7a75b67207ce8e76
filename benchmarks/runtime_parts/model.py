"""A GPT whose blocks can be cut by hand, so that both sides run the same ops."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of a batch."""

    layers: int = 4
    hidden: int = 512
    heads: int = 8
    vocab: int = 1024
    seq_len: int = 128
    batch: int = 8


class Attention(nn.Module):
    """Causal attention; the number of heads follows from the projections, cut or whole."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.hidden
        self.head_dim = width // shape.heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden) to the same."""
        q, k, v = (self._heads(linear(x)) for linear in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.head_dim)).transpose(1, 2)


class Mlp(nn.Module):
    """Two linears, four times as wide in between."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, 4 * shape.hidden)
        self.down = nn.Linear(4 * shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden) to the same."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP with norms before them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
        self.attention, self.mlp = Attention(shape), Mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden) to the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Part(nn.Module):
    """Blocks `start` to `stop`, with the embedding before the first and the head after the last."""

    def __init__(self, shape: Shape, start: int = 0, stop: int | None = None) -> None:
        super().__init__()
        stop = shape.layers if stop is None else stop
        self.embed = nn.Embedding(shape.vocab, shape.hidden) if start == 0 else None
        self.blocks = nn.ModuleDict({str(i): Block(shape) for i in range(start, stop)})
        last = stop == shape.layers
        self.norm = nn.LayerNorm(shape.hidden) if last else None
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Ids or hidden states to hidden states or class scores."""
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


class Model(nn.Module):
    """The whole model with its loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.part = Part(shape)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of (batch, tokens) ids."""
        return loss_of(self.part(ids), labels)


def loss_of(scores: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of (batch, tokens, vocab) scores."""
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def batch_of(shape: Shape, seed: int = 0) -> dict[str, Tensor]:
    """Random ids and labels."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape.batch, shape.seq_len)
    draw = (torch.randint(0, shape.vocab, size, generator=generator) for _ in range(2))
    return dict(zip(("ids", "labels"), draw, strict=True))
