"""A recommendation model after DLRM (Naumov et al., 2019, arXiv:1906.00091)."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from rlplace.graph.models.shapes import Dlrm, numbers


class DlrmLoss(nn.Module):
    """Embedding bags and a bottom MLP, all pairs of dot products, a top MLP, binary loss."""

    pairs: Tensor

    def __init__(self, shape: Dlrm) -> None:
        super().__init__()
        self.bottom = _mlp([shape.dense, *numbers(shape.bottom), shape.width])
        bags = (nn.EmbeddingBag(shape.rows, shape.width, mode="sum") for _ in range(shape.tables))
        self.tables = nn.ModuleList(bags)
        vectors = shape.tables + 1
        pairs = vectors * (vectors - 1) // 2
        self.top = _mlp([shape.width + pairs, *numbers(shape.top), 1], last_activation=False)
        first, second = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("pairs", first * vectors + second, persistent=False)

    def forward(self, dense: Tensor, indices: Tensor, labels: Tensor) -> Tensor:
        """Loss of dense features (batch, dense), indices (batch, tables, bag), labels (batch,)."""
        base = self.bottom(dense)
        looked_up = [table(indices[:, i]) for i, table in enumerate(self.tables)]
        vectors = torch.stack([base, *looked_up], dim=1)
        products = (vectors @ vectors.transpose(1, 2)).flatten(1)
        chosen = products[:, self.pairs]
        logits = self.top(torch.cat([base, chosen], dim=1)).squeeze(1)
        return binary_cross_entropy_with_logits(logits, labels)


def _mlp(sizes: list[int], last_activation: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*(layers if last_activation else layers[:-1]))
