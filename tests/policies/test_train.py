from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import wandb

from rlplace.errors import InputError
from rlplace.policies.checkpoint import latest_checkpoint
from rlplace.policies.config import PPOConfig, TrainConfig
from rlplace.policies.improve import improve
from rlplace.policies.network import PlaceNet, untrained
from rlplace.policies.planner import Rollouts
from rlplace.policies.store import load_policy
from rlplace.policies.teacher import TeacherConfig, records_of, search
from rlplace.policies.train import train
from rlplace.policies.types import ImitationConfig, NetConfig, Records
from rlplace.resources import resource

NET = NetConfig(width=16, rounds=1, heads=2, scale=4.0)


def greedy_value(toy: SimpleNamespace, net: PlaceNet, instance: Any) -> float:
    runs = Rollouts(net, toy.builder, instance, np.random.default_rng(0))
    return float(np.log(toy.time(runs.state(runs.greedy()))))


@dataclass
class ToyTask:
    """The toy process as something to train on; `interrupt` may raise at a judgement."""

    toy: SimpleNamespace
    interrupt: Callable[[int], None] = lambda count: None
    judged: int = 0
    summary: str = "A toy."

    @property
    def bank(self) -> Any:
        return self.toy.bank

    def turn(self, seed: int) -> None:
        """The toy draws from all instances in every rollout."""

    def environment(self) -> Any:
        return self.toy.env(self.toy.instances)

    def records(self, folder: Path, found: Callable[[int, str], None]) -> Records:
        parts = []
        for number, instance in enumerate(self.toy.instances[:6]):
            runs = Rollouts(untrained(NET), self.toy.builder, instance, np.random.default_rng(0))
            config = TeacherConfig(evaluations=40)
            tree = search(runs, lambda state: float(np.log(self.toy.time(state))), config)
            parts.append(records_of(runs, tree, config))
            found(number + 1, "")
        return Records.join(parts)

    def judge(self, net: PlaceNet) -> dict[str, float]:
        self.judged += 1
        self.interrupt(self.judged)
        gaps = [greedy_value(self.toy, net, instance) for instance in self.toy.instances]
        return {"eval/gap": float(np.mean(gaps)), "eval/worst": max(gaps)}


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return TrainConfig(
        name="toy",
        folder=str(tmp_path / "run"),
        instances=6,
        save_every=1,
        quiet=True,
        network=NET,
        imitation=ImitationConfig(epochs=12, learning_rate=1e-2, graphs_per_batch=1),
        ppo=PPOConfig(updates=3, environments=4, steps=32, judge_every=1, learning_rate=1e-3),
    )


def weights(config: TrainConfig) -> dict[str, torch.Tensor]:
    found = latest_checkpoint(Path(config.folder) / "checkpoints")
    assert found is not None
    return found.part("net")


def test_run_learns_logs_and_leaves_a_policy(toy: SimpleNamespace, config: TrainConfig) -> None:
    folder = train(config, ToyTask(toy))
    untrained_gap = ToyTask(toy).judge(untrained(NET))["eval/gap"]
    net = load_policy(folder)
    assert ToyTask(toy).judge(net)["eval/gap"] < untrained_gap - 0.1
    assert '"name": "toy"' in (folder / "CARD.md").read_text()
    logs = folder.parent / "logs"
    with (logs / "imitate" / "progress.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]["imitate/train_loss"]) < float(rows[0]["imitate/train_loss"])
    with (logs / "ppo" / "progress.csv").open() as file:
        assert "train/approx_kl" in next(csv.reader(file))
    assert list((logs / "ppo").glob("events.out.tfevents*"))


@pytest.mark.parametrize("judgement", [2, 4])
def test_resumed_run_equals_an_uninterrupted_one(
    toy: SimpleNamespace, config: TrainConfig, judgement: int, tmp_path: Path
) -> None:
    """Stopped at the end of imitation, or in the middle of PPO."""

    def stop(count: int) -> None:
        if count == judgement:
            raise KeyboardInterrupt

    train(config, ToyTask(toy))
    broken = replace(config, folder=str(tmp_path / "broken"))
    with pytest.raises(KeyboardInterrupt):
        train(broken, ToyTask(toy, stop))
    train(broken, ToyTask(toy))
    for name, value in weights(config).items():
        assert torch.equal(value, weights(broken)[name]), name


def test_damaged_checkpoint_costs_one_interval(
    toy: SimpleNamespace, config: TrainConfig, tmp_path: Path
) -> None:
    def stop(count: int) -> None:
        if count == 5:
            raise KeyboardInterrupt

    train(config, ToyTask(toy))
    broken = replace(config, folder=str(tmp_path / "broken"))
    with pytest.raises(KeyboardInterrupt):
        train(broken, ToyTask(toy, stop))
    newest = max((tmp_path / "broken" / "checkpoints").iterdir())
    file = newest / "state.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.warns(UserWarning, match="is damaged"):
        train(broken, ToyTask(toy))
    for name, value in weights(config).items():
        assert torch.equal(value, weights(broken)[name]), name


@pytest.mark.slow
def test_tracked_run_leaves_curves_table_and_policy(
    toy: SimpleNamespace, config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    train(replace(config, track=True), ToyTask(toy))
    wandb.teardown()  # its service writes on its own time; this waits until it has ended
    (run,) = (Path(config.folder) / "wandb").glob("offline-run-*")
    written = b"".join(path.read_bytes() for path in run.rglob("*.wandb"))
    for name in (b"imitate/held_out_loss", b"train/approx_kl", b"policy.safetensors", b"clip"):
        assert name in written
    assert list(run.rglob("evaluation*.table.json"))


def test_finished_run_does_nothing_more(toy: SimpleNamespace, config: TrainConfig) -> None:
    train(config, ToyTask(toy))
    before = weights(config)
    again = ToyTask(toy)
    train(config, again)
    assert again.judged == 0
    assert all(torch.equal(before[name], value) for name, value in weights(config).items())


def test_folder_of_another_run_is_refused(toy: SimpleNamespace, config: TrainConfig) -> None:
    train(replace(config, ppo=replace(config.ppo, updates=1)), ToyTask(toy))
    with pytest.raises(InputError, match="run with another ppo"):
        train(config, ToyTask(toy))


def test_expert_iteration_improves(toy: SimpleNamespace) -> None:
    net = untrained(NET)
    before = np.mean([greedy_value(toy, net, instance) for instance in toy.instances])
    improve(
        net,
        toy.builder,
        toy.instances,
        lambda instance, state: float(np.log(toy.time(state))),
        TeacherConfig(evaluations=60),
        ImitationConfig(epochs=30, learning_rate=3e-3, held_out=0.0),
        seed=0,
    )
    after = np.mean([greedy_value(toy, net, instance) for instance in toy.instances])
    assert after < before - 0.2


def test_shipped_config_is_read() -> None:
    config = TrainConfig.load(resource("configs/train/small.yaml"))
    assert config.name == "small"
    assert config.ppo.updates > 0


@pytest.mark.parametrize(
    ("text", "match", "nearest"),
    [
        ("sed: 1", "no such field", "seed"),
        ("ppo: {update: 1}", "no such field", "updates"),
        ("ppo: 3", "mapping", None),
        ("seed: one", "valid integer", None),
        ("a: [", "YAML", None),
    ],
)
def test_bad_config_is_refused(tmp_path: Path, text: str, match: str, nearest: str | None) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match=match) as error:
        TrainConfig.load(file)
    if nearest is not None:
        assert nearest in str(error.value.nearest)


def test_missing_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be a YAML file"):
        TrainConfig.load(tmp_path / "nothing.yaml")
