"""The network as a Stable-Baselines3 policy for `sb3_contrib.MaskablePPO`.

An observation names its instance by an id; the policy looks the instance up in a bank and
encodes each distinct one of a minibatch once. While experience is collected (no gradients) the
encodings are kept until the weights change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.distributions import MaskableDistribution
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import Schedule
from torch import Tensor

from rlplace.policies.convolution_pyg import GraphConv
from rlplace.policies.encoder import Encoding, ViewBatch
from rlplace.policies.network import PlaceNet
from rlplace.policies.scorer import RowBatch
from rlplace.policies.types import NetConfig, Rows, ViewBank, distinct

Observation = Mapping[str, Tensor]


class NoExtractor(BaseFeaturesExtractor):
    """Nothing is extracted: `PlaceNet` reads the observation itself."""

    def __init__(self, observation_space: spaces.Space[Any]) -> None:
        super().__init__(observation_space, features_dim=1)


class PlacePolicy(MaskableActorCriticPolicy):
    """`PlaceNet` behind the interface of sb3-contrib.

    Args:
        observation_space: A Dict with ``instance``, ``step``, ``features``, ``spans``, ``mask``.
        action_space: Discrete, one action a candidate row.
        lr_schedule: Learning rate.
        bank: Where the instances of the observations are found.
        config: Shape of the network.
        kwargs: Of `MaskableActorCriticPolicy`.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        lr_schedule: Schedule,
        *,
        bank: ViewBank,
        config: NetConfig,
        **kwargs: Any,
    ) -> None:
        self.bank = bank
        self.config = config
        self._encodings: dict[int, Encoding] = {}
        self._weights: int | None = None
        super().__init__(
            observation_space,
            action_space,
            lr_schedule,
            net_arch=[],
            features_extractor_class=NoExtractor,
            **kwargs,
        )

    def _build(self, lr_schedule: Schedule) -> None:
        self.net = PlaceNet(self.config, GraphConv)
        rate = lr_schedule(1.0)
        optimizer = cast(Any, self.optimizer_class)
        self.optimizer = optimizer(self.net.parameters(), lr=rate, **self.optimizer_kwargs)

    def forward(
        self, obs: Any, deterministic: bool = False, action_masks: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Actions (B,), values (B, 1) and log-probabilities (B,)."""
        distribution, values = self._run(obs, action_masks)
        actions = distribution.get_actions(deterministic=deterministic)
        return actions, values, distribution.log_prob(actions)

    def evaluate_actions(
        self, obs: Any, actions: Tensor, action_masks: Any = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Values (B, 1), log-probabilities (B,) of `actions` and entropies (B,)."""
        distribution, values = self._run(obs, action_masks)
        return values, distribution.log_prob(actions), distribution.entropy()

    def get_distribution(self, obs: Any, action_masks: Any = None) -> MaskableDistribution:
        """The distribution over candidates; the observation's own mask always holds."""
        return self._run(obs, action_masks)[0]

    def predict_values(self, obs: Any) -> Tensor:
        """(B, 1) values."""
        return self._run(obs, None)[1]

    def _run(self, obs: Observation, extra_mask: Any) -> tuple[MaskableDistribution, Tensor]:
        mask = obs["mask"].bool()
        ids, graph = distinct(obs["instance"].numpy())
        owner, index = mask.nonzero(as_tuple=True)
        step = obs["step"].numpy().reshape(-1)
        features, spans = obs["features"][owner, index], obs["spans"][owner, index]
        rows = Rows(features.numpy(), spans.numpy(), owner.numpy(), index.numpy(), step, graph)
        log_probs, values = self.net(self._encode(ids.tolist()), RowBatch.of(rows))
        logits = torch.full(mask.shape, -1e8).index_put((owner, index), log_probs)
        distribution = self.action_dist.proba_distribution(action_logits=logits)
        if extra_mask is not None:
            mask = mask & torch.as_tensor(extra_mask).bool().reshape(mask.shape)
        distribution.apply_masking(cast(Any, mask))
        return distribution, values.unsqueeze(-1)

    def _encode(self, ids: list[int]) -> Encoding:
        """Encodings of distinct instances, in order; kept where no gradient is wanted."""
        if torch.is_grad_enabled():
            return cast(Encoding, self.net.encoder(ViewBatch.join([*map(self.bank.view, ids)])))
        # Every in-place change of a parameter, by an optimizer or by loading, raises its version.
        weights = sum(parameter._version for parameter in self.net.parameters())
        if weights != self._weights:
            self._encodings.clear()
            self._weights = weights
        missing = [number for number in ids if number not in self._encodings]
        if missing:
            joint = self.net.encoder(ViewBatch.join([self.bank.view(number) for number in missing]))
            self._encodings |= {number: joint.part(k) for k, number in enumerate(missing)}
        return Encoding.join([self._encodings[number] for number in ids])
