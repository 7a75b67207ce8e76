from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from math import log
from typing import Any

import gymnasium
import pytest
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from rlplace.cluster.load import load_cluster
from rlplace.envs.bank import InstanceBank
from rlplace.envs.registration import ENV_ID
from rlplace.envs.reward import MeasuredReward
from rlplace.graph import library
from rlplace.plan.types import Instance
from rlplace.policies.policy import PlacePolicy
from rlplace.policies.ppo import GroupedBuffer, PlacePPO
from rlplace.policies.types import NetConfig
from rlplace.resources import resource


@pytest.fixture
def reward() -> Iterator[MeasuredReward]:
    with closing(MeasuredReward(steps=3, warmup=1)) as made:
        yield made


@pytest.mark.dist
@pytest.mark.timeout(400)
def test_a_policy_is_fine_tuned_on_steps_that_ran_on_this_machine(reward: MeasuredReward) -> None:
    """Two updates of a few episodes each, every distinct plan run on two gloo ranks."""
    graph = library.build("gpt2-tiny")
    cluster = load_cluster(resource("configs/cluster/cpu-2.yaml"))
    instance = Instance(graph, cluster, 8, "fp32", zero_levels=(0,))
    bank = InstanceBank()
    seen: list[dict[str, Any]] = []

    class Ended(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            result = super().step(action)
            if result[2]:
                seen.append({"reward": result[1], **result[4]})
            return result

    def environment() -> Any:
        made = gymnasium.make(ENV_ID, instances=[instance], reward=reward, bank=bank, permute=False)
        return Monitor(Ended(made))

    model = PlacePPO(
        PlacePolicy,
        DummyVecEnv([environment]),
        n_steps=8,
        batch_size=8,
        n_epochs=2,
        gamma=1.0,
        learning_rate=1e-2,
        normalize_advantage=False,
        rollout_buffer_class=GroupedBuffer,
        policy_kwargs={"bank": bank, "config": NetConfig(width=16, rounds=1, heads=2)},
        seed=0,
        device="cpu",
    )
    policy: Any = model.policy
    before = {name: value.clone() for name, value in policy.net.state_dict().items()}
    model.learn(16)
    assert len(seen) >= 4
    for info in seen:
        assert info["step_time"] > 0.0
        if not info.get("illegal"):
            assert info["reward"] == pytest.approx(log(info["baseline"] / info["step_time"]))
    distinct = {info["step_time"] for info in seen}
    assert len(distinct) > 1
    assert distinct <= set(reward._measured.values())
    after = policy.net.state_dict()
    assert any(not before[name].equal(after[name]) for name in before)
