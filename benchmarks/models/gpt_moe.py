"""Alpa's GPT-MoE (arXiv 2201.12023), every second layer with experts as in arXiv 2006.16668.

Top-2 gating; each group of tokens sends to each expert as many as fit its capacity, by products
with a one-hot tensor. Feed-forward layers are eight times as wide as the model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_FACTOR = 8


class GptMoe(nn.Module):
    """A language model that returns its cross entropy; embeddings are tied.

    `ffn` is taken from the model's factor, whatever the caller says. A group of tokens is never
    longer than a sequence.
    """

    def __init__(
        self,
        layers: int,
        hidden: int,
        heads: int,
        vocab: int,
        seq_len: int,
        experts: int,
        group: int,
        ffn: int = 0,
    ) -> None:
        super().__init__()
        self.seq_len = seq_len
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = nn.Embedding(seq_len, hidden)
        blocks = (
            _Block(hidden, heads, experts if index % 2 else 0, min(group, seq_len))
            for index in range(layers)
        )
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Loss of ids and labels, both (batch, length)."""
        x = self.tokens(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.tokens.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def example(self, batch: int) -> dict[str, Tensor]:
        """Inputs of a batch, on torch's default device."""
        ids = torch.empty(batch, self.seq_len, dtype=torch.long)
        return {"ids": ids, "labels": ids.clone()}


class _Block(nn.Module):
    def __init__(self, hidden: int, heads: int, experts: int, group: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        inner = _FACTOR * hidden
        self.mlp: nn.Module = (
            _Experts(hidden, inner, experts, group)
            if experts
            else nn.Sequential(nn.Linear(hidden, inner), nn.GELU(), nn.Linear(inner, hidden))
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class _Experts(nn.Module):
    def __init__(self, hidden: int, inner: int, experts: int, group: int) -> None:
        super().__init__()
        self.group, self.experts, self.capacity = group, experts, 2 * group // experts
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, hidden, inner))
        self.down = nn.Parameter(torch.empty(experts, inner, hidden))

    def forward(self, x: Tensor) -> Tensor:
        groups = x.reshape(-1, self.group, x.shape[-1])
        combine = self._combine(torch.softmax(self.gate(groups), dim=-1))
        sent = torch.einsum("gsec,gsm->egcm", (combine > 0).to(x.dtype), groups)
        rows = sent.flatten(1, 2)
        answers = torch.bmm(F.gelu(torch.bmm(rows, self.up)), self.down).view(sent.shape)
        return torch.einsum("gsec,egcm->gsm", combine, answers).view(x.shape)

    def _combine(self, gates: Tensor) -> Tensor:
        """Weights (group, token, expert, place): where a token goes, and what its answer counts."""
        chosen, used = gates.new_zeros(gates.shape[0], 1, self.experts), gates
        combine = gates.new_zeros(*gates.shape, self.capacity)
        for _ in range(2):
            mask = F.one_hot(used.argmax(-1), self.experts).to(gates.dtype)
            places = (mask.cumsum(1) - 1 + chosen) * mask
            fits = mask * (places < self.capacity).to(gates.dtype)
            place = F.one_hot((places * fits).sum(-1).long(), self.capacity).to(gates.dtype)
            weight = (gates * fits).unsqueeze(-1)
            combine = combine + weight * place.unsqueeze(-2)
            chosen = chosen + mask.sum(1, keepdim=True)
            used = used * (1 - mask)
        return combine
