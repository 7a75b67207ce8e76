from __future__ import annotations

import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check
from stable_baselines3.common.env_checker import check_env as sb3_check

import rlplace.envs
from rlplace.envs.bank import InstanceBank
from rlplace.envs.env import ILLEGAL_COST, PlaceEnv
from rlplace.envs.instances import InstanceGenerator
from rlplace.errors import InputError
from rlplace.plan.check import check
from rlplace.plan.types import Instance

_SMALL = InstanceGenerator(max_devices=4, max_groups=16)


def _instances(count: int) -> list[Instance]:
    return [_SMALL(np.random.default_rng([9, index])) for index in range(count)]


def _episode(env: PlaceEnv, seed: int, choose: np.random.Generator) -> list[Any]:
    seen: list[Any] = [env.reset(seed=seed)[0]]
    done = False
    while not done:
        action = choose.choice(np.flatnonzero(env.action_masks()))
        observation, reward, done, truncated, info = env.step(action)
        assert not truncated
        assert env.observation_space.contains(observation)
        seen.append((observation, reward, info))
    return seen


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_it_passes_both_checkers() -> None:
    assert rlplace.envs.__name__ in PlaceEnv.__module__
    env = gymnasium.make("rlplace/Place-v0").unwrapped
    gymnasium_check(env)
    sb3_check(env)


def test_an_import_of_the_room_registers_it() -> None:
    code = "import rlplace.envs, gymnasium; gymnasium.make('rlplace/Place-v0').reset(seed=0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, text=True)
    assert done.returncode == 0, done.stderr


def test_an_episode_ends_with_a_legal_plan_and_its_figures() -> None:
    env = PlaceEnv(_instances(6))
    rng = np.random.default_rng(0)
    for seed in range(6):
        *steps, last = _episode(env, seed, rng)
        assert all(reward == 0.0 and not info for _, reward, info in steps[1:])
        observation, reward, info = last
        assert env._state is not None
        check(env._state.instance, info["plan"])
        assert info["gap"] >= -1e-9
        if info["estimate"].feasible:
            assert reward == pytest.approx(np.log(info["baseline"] / info["step_time"]))
        assert not observation["mask"].any()


def test_equal_seeds_give_equal_episodes() -> None:
    env = PlaceEnv(_instances(4))
    runs = [_episode(env, 5, np.random.default_rng(1)) for _ in range(2)]
    assert len(runs[0]) == len(runs[1])
    for first, second in zip(runs[0][1:], runs[1][1:], strict=True):
        np.testing.assert_array_equal(first[0]["features"], second[0]["features"])
        assert first[1] == second[1]
    assert runs[0][-1][2]["plan"] == runs[1][-1][2]["plan"]


def test_the_mask_is_that_of_the_observation_and_padding_is_illegal() -> None:
    env = PlaceEnv(_instances(2))
    observation, _ = env.reset(seed=0)
    np.testing.assert_array_equal(env.action_masks(), observation["mask"].astype(bool))
    rows = len(env.builder.candidates(env._state).mask) if env._state else 0
    assert not observation["mask"][rows:].any()
    assert not observation["features"][rows:].any()


def test_an_illegal_action_is_replaced_and_costs() -> None:
    env = PlaceEnv(_instances(1))
    env.reset(seed=0)
    illegal = int(np.flatnonzero(~env.action_masks())[-1])
    _, reward, done, _, info = env.step(illegal)
    assert info["illegal"]
    if not done:
        assert reward == -ILLEGAL_COST


def test_the_end_of_an_episode_asks_for_a_reset() -> None:
    env = PlaceEnv(_instances(1))
    with pytest.raises(RuntimeError, match="reset"):
        env.step(0)
    _episode(env, 0, np.random.default_rng(0))
    with pytest.raises(RuntimeError, match="reset"):
        env.step(0)


def test_an_instance_can_be_asked_for_and_environments_share_a_bank() -> None:
    bank, (first, second) = InstanceBank(), _instances(2)
    left, right = PlaceEnv([first], bank=bank), PlaceEnv([second], bank=bank)
    numbers = [int(env.reset(seed=0)[0]["instance"][0]) for env in (left, right, left)]
    assert numbers == [0, 1, 0]
    again = int(right.reset(options={"instance": first})[0]["instance"][0])
    assert again == 0
    assert bank.view(0).op_features.shape[0] == len(first.graph.groups)


def test_it_renders_as_text() -> None:
    env = PlaceEnv(_instances(1), render_mode="ansi")
    assert env.render() is None
    env.reset(seed=0)
    assert "next: micro-batches" in str(env.render())
    done = False
    while not done:
        _, _, done, _, _ = env.step(int(np.flatnonzero(env.action_masks())[0]))
    text = str(env.render())
    assert "complete" in text
    assert "baseline" in text


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(InputError, match="ansi"):
        PlaceEnv(render_mode="human")
    with pytest.raises(InputError, match="at least one instance"):
        PlaceEnv([])
    with pytest.raises(InputError, match="suite"):
        PlaceEnv("everything")
