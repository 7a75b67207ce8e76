"""The network, without any training library: encoder and scorer, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from rlplace.envs.types import Candidates, FloatArray, InstanceView
from rlplace.errors import InputError
from rlplace.policies.convolution import PlainConv, segment_log_softmax
from rlplace.policies.encoder import ConvFactory, Encoder, Encoding, ViewBatch
from rlplace.policies.scorer import RowBatch, Scorer
from rlplace.policies.types import NetConfig, Rows


class PlaceNet(nn.Module):
    """Encoder and scorer; a `rlplace.policies.types.ScoreNetwork`.

    Args:
        config: Widths.
        conv: The message-passing layer: plain, or PyG's for training. Weights are exchangeable.
    """

    def __init__(self, config: NetConfig, conv: ConvFactory = PlainConv) -> None:
        super().__init__()
        if config.width % config.heads:
            rule = f"must divide the width {config.width}"
            raise InputError("heads", config.heads, rule, np.gcd(config.heads, config.width))
        self.config = config
        self.encoder = Encoder(config, conv)
        self.scorer = Scorer(config)

    def forward(self, encoding: Encoding, rows: RowBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities (M,) of the rows within their states, and values (B,)."""
        scores, values = self.scorer(encoding, rows)
        return segment_log_softmax(scores, rows.owner, rows.states), values

    @torch.no_grad()
    def encode(self, view: InstanceView) -> Encoding:
        """The encoding of one instance."""
        encoding: Encoding = self.encoder(ViewBatch.join([view]))
        return encoding

    @torch.no_grad()
    def score(
        self, encoding: Encoding, candidates: Sequence[Candidates], step: int
    ) -> list[FloatArray]:
        """Log-probabilities of the candidates of several states; see `ScoreNetwork.score`."""
        steps = np.full(len(candidates), step)
        rows = Rows.gather(candidates, steps, np.zeros_like(steps))
        log_probs, _ = self(encoding, RowBatch.of(rows))
        return scatter_rows(log_probs.numpy(), rows, [len(state.mask) for state in candidates])


def scatter_rows(log_probs: FloatArray, rows: Rows, sizes: Sequence[int]) -> list[FloatArray]:
    """Values of legal rows, put back among all `sizes` candidates of each state (-inf)."""
    full = [np.full(size, -np.inf, dtype=np.float32) for size in sizes]
    for state, values in enumerate(full):
        own = rows.owner == state
        values[rows.index[own]] = log_probs[own]
    return full


def untrained(config: NetConfig | None = None, seed: int = 0) -> PlaceNet:
    """A network that has learned nothing: its choices are the heuristic's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return PlaceNet(config or NetConfig()).eval()
