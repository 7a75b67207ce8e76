"""Scores candidates: the heuristic times a learnable factor, plus what the network adds.

The last layer is zero at the start, so the untrained policy *is* the heuristic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlplace.policies.convolution import segment_mean, segment_softmax_mean
from rlplace.policies.encoder import Encoding
from rlplace.policies.types import STEP_FEATURES, NetConfig, Rows, step_features


@dataclass(frozen=True)
class RowBatch:
    """`Rows` as tensors; the step as its features (B, STEP_FEATURES)."""

    features: Tensor
    spans: Tensor
    owner: Tensor
    index: Tensor
    step: Tensor
    graph: Tensor

    @property
    def states(self) -> int:
        """Number of states."""
        return len(self.step)

    @staticmethod
    def of(rows: Rows) -> RowBatch:
        """The tensors of some rows; nothing is copied."""
        return RowBatch(
            torch.from_numpy(rows.features),
            torch.from_numpy(rows.spans),
            torch.from_numpy(rows.owner),
            torch.from_numpy(rows.index),
            torch.from_numpy(step_features(rows.step)),
            torch.from_numpy(rows.graph),
        )


class Scorer(nn.Module):
    """Candidate rows to scores, states to values.

    A row sees its own features, the mean embedding of the groups and hosts that it covers, the
    context of its instance, the step, and (pooled) the other candidates of its state.
    """

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        width = config.width
        self.log_scale = nn.Parameter(torch.tensor(math.log(config.scale)))
        self.row = nn.Linear(config.candidate_features + 2 * width, width)
        self.state = nn.Linear(width + STEP_FEATURES, width)
        self.own = nn.Linear(width, width)
        self.others = nn.Linear(2 * width, width)
        self.last = nn.Linear(width, 1)
        self.critic = nn.Sequential(
            nn.Linear(3 * width + STEP_FEATURES, width), nn.Tanh(), nn.Linear(width, 1)
        )
        for parameter in (*self.last.parameters(), *self.critic[-1].parameters()):
            nn.init.zeros_(parameter)

    def forward(self, encoding: Encoding, rows: RowBatch) -> tuple[Tensor, Tensor]:
        """Scores (M,) of the rows and values (B,) of the states.

        The critic reads the trunk but does not shape it: with few, noisy returns its gradients
        would undo what imitation taught the encoder.
        """
        heuristic = self.log_scale.exp() * rows.features[:, 0]
        known = torch.cat([encoding.context[rows.graph], rows.step], dim=-1)
        covered = [
            _pooled(encoding.groups, encoding.group_start, rows, 0),
            _pooled(encoding.hosts, encoding.host_start, rows, 2),
        ]
        own = self.row(torch.cat([rows.features, *covered], dim=-1))
        own = torch.relu(own + self.state(known)[rows.owner])
        mean = segment_mean(own, rows.owner, rows.states)
        best = segment_softmax_mean(own, heuristic.detach(), rows.owner, rows.states)
        others = torch.cat([mean, best], dim=-1)
        hidden = torch.relu(self.own(own) + self.others(others)[rows.owner])
        scores = heuristic + self.last(hidden).squeeze(-1)
        values = self.critic(torch.cat([known, others], dim=-1).detach()).squeeze(-1)
        return scores, values


def _pooled(sums: Tensor, start: Tensor, rows: RowBatch, column: int) -> Tensor:
    """(M, W): mean embedding of the span in columns `column` and `column` + 1; 0 if empty."""
    first, stop = rows.spans[:, column], rows.spans[:, column + 1]
    base = start[rows.graph[rows.owner]]
    count = (stop - first).clamp(min=1).unsqueeze(-1)
    return ((sums[base + stop] - sums[base + first]) / count).float()
