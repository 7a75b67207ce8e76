from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlplace.graph.capture import capture
from rlplace.graph.types import OpGraph


class _Attention(nn.Module):
    """Attention with grouped keys, and a residual."""

    def __init__(self, heads: int, kv_heads: int, width: int, features: int = 8) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.features = heads, kv_heads, features
        self.q_proj = nn.Linear(width, heads * features)
        self.k_proj = nn.Linear(width, kv_heads * features)
        self.v_proj = nn.Linear(width, kv_heads * features)
        self.o_proj = nn.Linear(heads * features, width)

    def forward(self, x: Tensor) -> Tensor:
        query = self._heads(self.q_proj(x), self.heads)
        key, value = (self._heads(y, self.kv_heads) for y in (self.k_proj(x), self.v_proj(x)))
        served = self.heads // self.kv_heads
        key, value = (y.repeat_interleave(served, 1) for y in (key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return x + mixed

    def _heads(self, x: Tensor, count: int) -> Tensor:
        return x.view(-1, x.shape[1], count, self.features).transpose(1, 2)


class _Layers(nn.Module):
    def __init__(self, heads: int, kv_heads: int, width: int, vocab: int, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(_Attention(heads, kv_heads, width) for _ in range(layers))
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def _graph(heads: int, kv_heads: int, width: int, vocab: int = 64) -> OpGraph:
    ids = torch.zeros(2, 64, dtype=torch.long)
    with torch.device("meta"):
        model = _Layers(heads, kv_heads, width, vocab)
    return capture(model, (ids,), degrees=(2, 4, 8))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "legal"),
    [(28, 4, (1, 2, 4)), (40, 10, (1, 2, 5, 10)), (25, 25, (1, 5)), (16, 16, (1, 2, 4, 8, 16))],
)
def test_legal_degrees_divide_the_heads_of_queries_and_keys(
    heads: int, kv_heads: int, legal: tuple[int, ...]
) -> None:
    graph = _graph(heads, kv_heads, heads * 8)

    assert graph.tp_degrees(16) == legal
    named = ({cut.what for cut in s.cuts} for s in graph.structures)
    attention = next(s for s, n in zip(graph.structures, named, strict=True) if "k_proj" in n)
    cuts = {cut.what: cut.size for cut in attention.cuts}
    assert (cuts["q_proj"], cuts["k_proj"], cuts["v_proj"]) == (heads, kv_heads, kv_heads)
    assert [lay.degree for lay in attention.layouts] == [d for d in legal if d in (2, 4, 8)]


def test_a_refused_degree_names_the_sizes() -> None:
    reason = _graph(28, 4, 224).tp_refusal(8)

    assert reason is not None
    assert "tp=8 does not divide q_proj 28, k_proj 4, v_proj 4 of layers.0" in reason


def test_an_odd_vocabulary_does_not_forbid_to_shard_the_layers() -> None:
    assert _graph(4, 4, 32, vocab=51).tp_degrees(4) == (1, 2, 4)
