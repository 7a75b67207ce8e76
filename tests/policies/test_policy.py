from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from sb3_contrib import MaskablePPO
from stable_baselines3.common.env_checker import check_env
from stable_baselines3.common.vec_env import DummyVecEnv

from rlplace.policies.policy import PlacePolicy
from rlplace.policies.ppo import GroupedBuffer, PlacePPO, relative
from rlplace.policies.types import NetConfig

SMALL = NetConfig(width=32, rounds=1, scale=4.0)


def learner(toy: SimpleNamespace, **options: Any) -> Any:
    """Typed loosely: SB3's own types do not know a policy's parts."""
    envs = DummyVecEnv([lambda: toy.env(toy.instances) for _ in range(8)])
    return PlacePPO(
        PlacePolicy,
        envs,
        n_steps=64,
        batch_size=256,
        n_epochs=4,
        gamma=1.0,
        gae_lambda=1.0,
        learning_rate=3e-3,
        ent_coef=0.0,
        normalize_advantage=False,
        rollout_buffer_class=GroupedBuffer,
        rollout_buffer_kwargs={"graphs_per_batch": 12},
        policy_kwargs={"bank": toy.bank, "config": SMALL},
        seed=0,
        device="cpu",
        **options,
    )


def greedy_reward(toy: SimpleNamespace, model: MaskablePPO) -> float:
    rewards = []
    env = toy.env(toy.instances)
    for episode in range(24):
        observation, _ = env.reset(seed=episode)
        done = False
        while not done:
            action, _ = model.predict(
                observation, deterministic=True, action_masks=env.action_masks()
            )
            observation, reward, done, _, _ = env.step(int(action))
        rewards.append(reward)
    return float(np.mean(rewards))


def test_toy_environment_passes_the_checks_of_sb3(toy: SimpleNamespace) -> None:
    class Legal(gymnasium.ActionWrapper[Any, Any, Any]):
        """The checker samples actions without looking at masks."""

        def action(self, action: Any) -> int:
            return int(np.flatnonzero(self.get_wrapper_attr("action_masks")())[0])

    check_env(Legal(toy.env(toy.instances)), warn=False)


def test_untrained_policy_takes_the_heuristic_best(toy: SimpleNamespace) -> None:
    model, env = learner(toy), toy.env(toy.instances)
    observation, _ = env.reset(seed=4)
    for _ in range(4):
        action, _ = model.predict(observation, deterministic=True)
        legal = np.where(observation["mask"] == 1, observation["features"][:, 0], -np.inf)
        assert legal[int(action)] == legal.max()
        observation, *_ = env.step(int(action))


def test_kept_and_fresh_encodings_give_equal_log_probs(toy: SimpleNamespace) -> None:
    model = learner(toy)
    policy = model.policy
    torch.nn.init.normal_(policy.net.scorer.last.weight)
    obs, _ = policy.obs_to_tensor(model.env.reset())
    actions = torch.as_tensor(obs["mask"]).float().argmax(dim=1)
    with torch.no_grad():
        policy(obs)
        kept = policy._encodings.copy()
        _, cached, _ = policy.evaluate_actions(obs, actions)
        assert all(policy._encodings[number] is kept[number] for number in kept)
    _, fresh, _ = policy.evaluate_actions(obs, actions)
    torch.testing.assert_close(cached, fresh.detach(), atol=1e-5, rtol=0)


def test_encodings_are_dropped_when_weights_change(toy: SimpleNamespace) -> None:
    model = learner(toy)
    policy = model.policy
    torch.nn.init.normal_(policy.net.scorer.last.weight)
    obs, _ = policy.obs_to_tensor(model.env.reset())
    actions = torch.as_tensor(obs["mask"]).float().argmax(dim=1)
    with torch.no_grad():
        _, before, _ = policy.evaluate_actions(obs, actions)
        policy.net.encoder.context.weight.mul_(-1.0)
        _, after, _ = policy.evaluate_actions(obs, actions)
    assert not torch.equal(before, after)
    _, fresh, _ = policy.evaluate_actions(obs, actions)
    torch.testing.assert_close(after, fresh.detach(), atol=1e-5, rtol=0)


def test_illegal_candidates_have_probability_zero(toy: SimpleNamespace) -> None:
    model = learner(toy)
    obs, _ = model.policy.obs_to_tensor(model.env.reset())
    distribution = model.policy.get_distribution(obs).distribution
    assert (distribution.probs[obs["mask"] == 0] == 0.0).all()
    torch.testing.assert_close(distribution.probs.sum(dim=1), torch.ones(8))


def test_ppo_learns_what_the_heuristic_does_not_know(toy: SimpleNamespace) -> None:
    model = learner(toy)
    before = greedy_reward(toy, model)
    model.learn(6_000)
    assert greedy_reward(toy, model) > before + 0.2


def test_advantages_are_relative_to_their_instance() -> None:
    advantages = np.array([[1.0, 10.0], [3.0, 30.0], [5.0, 5.0]])
    ids = np.array([[0, 1], [0, 1], [2, 2]])
    expected = np.array([[-1.0, -1.0], [1.0, 1.0], [0.0, 0.0]])
    np.testing.assert_allclose(relative(advantages, ids), expected)


@pytest.mark.parametrize("graphs", [1, 5])
def test_minibatches_hold_few_instances_and_everything(toy: SimpleNamespace, graphs: int) -> None:
    model = learner(toy)
    model.rollout_buffer.graphs_per_batch = graphs
    model.learn(1)
    seen = 0
    for batch in model.rollout_buffer.get(100):
        ids = batch.observations["instance"]
        assert len(np.unique(ids)) <= graphs
        assert len(ids) <= 100
        seen += len(ids)
    assert seen == 64 * 8


def test_updates_depend_on_seed_and_weights_alone(toy: SimpleNamespace) -> None:
    whole, first = learner(toy), learner(toy)
    whole.learn(2 * 512)
    first.learn(512)
    second = learner(toy, update=first.update)
    second.policy.load_state_dict(first.policy.state_dict())
    second.policy.optimizer.load_state_dict(first.policy.optimizer.state_dict())
    second.learn(512)
    for name, value in whole.policy.state_dict().items():
        assert torch.equal(value, second.policy.state_dict()[name]), name
