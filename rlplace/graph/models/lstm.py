"""A recurrent language model (Zaremba et al., 2014, arXiv:1409.2329)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from rlplace.graph.models.shapes import Lstm


class LstmLoss(nn.Module):
    """Embedding, LSTM layers, head, and the cross entropy of each next token."""

    def __init__(self, shape: Lstm) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.lstm = nn.LSTM(
            shape.width, shape.hidden, shape.layers, batch_first=True, dropout=shape.dropout
        )
        self.head = nn.Linear(shape.hidden, shape.vocab)
        if shape.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Loss of ids and labels, both (batch, length); the label of a place is the next one's."""
        states, _ = self.lstm(self.embedding(input_ids))
        logits = self.head(states[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
