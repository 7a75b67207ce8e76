from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from stable_baselines3.common.vec_env import DummyVecEnv

from rlplace.envs.builders.stagewise import StagewiseBuilder
from rlplace.planners.types import Budget
from rlplace.policies.config import PPOConfig, TrainConfig
from rlplace.policies.network import untrained
from rlplace.policies.planner import RolloutConfig, policy_planner
from rlplace.policies.store import load_numpy_policy
from rlplace.policies.task import PlaceTask
from rlplace.policies.teacher import TeacherConfig
from rlplace.policies.train import train
from rlplace.policies.types import ImitationConfig, NetConfig, Records

NET = NetConfig(width=16, rounds=1, heads=2)


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return TrainConfig(
        folder=str(tmp_path),
        instances=3,
        pool=4,
        judged=2,
        min_devices=2,
        max_devices=4,
        max_groups=16,
        quiet=True,
        network=NET,
        teacher=TeacherConfig(evaluations=12),
        imitation=ImitationConfig(epochs=2),
        ppo=PPOConfig(updates=2, environments=2, steps=8, instances=2, judge_every=1),
    )


def test_instances_follow_the_config(config: TrainConfig) -> None:
    task = PlaceTask(replace(config, min_devices=3))
    for index in range(6):
        instance = task.instance(1, index)
        assert 3 <= len(instance.cluster.devices) <= 4
        assert len(instance.graph.groups) <= 16
    assert task.instance(1, 0) == task.instance(1, 0)
    assert task.instance(1, 0) != task.instance(2, 0)


def test_searched_plans_are_kept(config: TrainConfig, tmp_path: Path) -> None:
    task, counts = PlaceTask(config), []
    first = task.records(tmp_path / "records", lambda count, note: counts.append(count))
    again = task.records(tmp_path / "records", lambda count, note: counts.append(count))
    assert counts == [0, 1, 2, 3, 3]
    np.testing.assert_array_equal(first.features, again.features)
    assert isinstance(first, Records)
    assert len(first.views) == 3


@pytest.mark.slow
def test_processes_find_what_one_process_finds(config: TrainConfig, tmp_path: Path) -> None:
    one = PlaceTask(config).records(tmp_path / "one", lambda count, note: None)
    two = PlaceTask(replace(config, workers=2)).records(tmp_path / "two", lambda c, n: None)
    np.testing.assert_array_equal(one.features, two.features)
    np.testing.assert_array_equal(one.target, two.target)


def test_rollouts_draw_from_the_turn(config: TrainConfig) -> None:
    task = PlaceTask(config)
    envs = DummyVecEnv([task.environment, task.environment])
    seen = []
    for _ in range(2):
        task.turn(7)
        envs.seed(3)
        numbers = set()
        envs.reset()
        for _ in range(12):
            observation, *_ = envs.step(np.array([int(m.argmax()) for m in masks(envs)]))
            assert isinstance(observation, dict)
            numbers |= set(observation["instance"].reshape(-1).tolist())
        seen.append(numbers)
    assert seen[0] == seen[1]
    assert len(seen[0]) <= 2


def masks(envs: DummyVecEnv) -> list[np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    return envs.env_method("action_masks")


@pytest.mark.slow
def test_placement_is_trained_and_plans(config: TrainConfig) -> None:
    """The whole way: search, imitation, PPO on rlplace/Place-v0, a plan without torch."""
    folder = train(config)
    net = load_numpy_policy(folder)
    instance = PlaceTask(config).instance(3, 0)
    planner = policy_planner(net, StagewiseBuilder(), RolloutConfig(samples=4))
    result = planner(instance, Budget(), np.random.default_rng(0))
    assert result.plan is not None
    assert result.estimate is not None
    assert result.estimate.feasible
    again = planner(instance, Budget(), np.random.default_rng(0))
    assert again.plan == result.plan
    hurried = planner(instance, Budget(seconds=0.0), np.random.default_rng(0))
    assert hurried.evaluations == 1
    assert hurried.stopped == "seconds"


def test_untrained_gap_is_what_search_gains(config: TrainConfig) -> None:
    figures = PlaceTask(config).judge(untrained(NET))
    assert 0.0 <= figures["eval/gap"] <= figures["eval/worst"]
