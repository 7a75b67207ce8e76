"""Training: search, imitate what was found, then MaskablePPO; resumable at any moment.

Everything that a run makes lies in its folder: ``records/`` (searched plans, an instance a file),
``checkpoints/``, ``logs/`` (CSV and TensorBoard), ``policy/`` (the best network so far). The same
command goes on where a run was stopped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from stable_baselines3.common.logger import KVWriter, Logger, make_output_format
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from rlplace.errors import InputError
from rlplace.policies.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
)
from rlplace.policies.config import TrainConfig
from rlplace.policies.convolution_pyg import GraphConv
from rlplace.policies.imitate import Fit, ImitationState, imitate
from rlplace.policies.network import PlaceNet
from rlplace.policies.policy import PlacePolicy
from rlplace.policies.ppo import GroupedBuffer, PlacePPO
from rlplace.policies.store import save_policy
from rlplace.policies.task import PlaceTask, Task
from rlplace.policies.types import Records

#: Judged during training; smaller is better. Every task's `judge` gives it.
GAP = "eval/gap"


@dataclass
class Standing:
    """Where a run stands; JSON but for the weights.

    Args:
        phase: ``imitate``, ``ppo`` or ``done``.
        saves: Checkpoints written.
        imitation: Of the first phase.
        update: PPO updates done.
        best_gap: The smallest gap that a judged network had.
        history: The judged figures: (phase, number, figures).
    """

    phase: str = "imitate"
    saves: int = 0
    imitation: ImitationState = field(default_factory=ImitationState)
    update: int = 0
    best_gap: float = float("inf")
    history: list[tuple[str, int, dict[str, float]]] = field(default_factory=list)


def train(config: TrainConfig, task: Task | None = None) -> Path:
    """Train a policy, or go on training it. Returns the folder of the best one.

    Args:
        config: All choices.
        task: What is learned; by default placement, as the config says.

    Raises:
        InputError: If the run's folder belongs to another configuration.
    """
    torch.set_num_threads(config.threads)
    _claim(config)
    run = _Run(config, task or PlaceTask(config))
    try:
        if run.standing.phase == "imitate":
            run.imitate()
        if run.standing.phase == "ppo":
            run.reinforce()
    finally:
        run.close()
    return run.folder / "policy"


class _Run:
    """One run: its network, optimizer and standing, restored from the last whole checkpoint."""

    def __init__(self, config: TrainConfig, task: Task) -> None:
        self.config, self.task, self.folder = config, task, Path(config.folder)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.net = PlaceNet(config.network, GraphConv)
        self.standing = Standing()
        self._saved_optimizer: dict[str, torch.Tensor] = {}
        self._restore()
        self.tracker = self._track()
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            disable=config.quiet,
        )
        self.progress.start()

    def imitate(self) -> None:
        """Phase one."""
        records = self._records()
        optimizer = torch.optim.Adam(self.net.parameters(), lr=self.config.imitation.learning_rate)
        restore_optimizer(self.net, optimizer, self._saved_optimizer)
        logger = self._logger("imitate", self.standing.imitation.epoch)
        bar = self._bar("imitate", self.config.imitation.epochs, self.standing.imitation.epoch)

        def after_epoch(state: ImitationState, loss: float, fit: Fit) -> None:
            logger.record("imitate/train_loss", loss)
            logger.record("imitate/held_out_loss", fit.loss)
            logger.record("imitate/held_out_accuracy", fit.accuracy)
            logger.dump(state.epoch)
            self.progress.update(bar, completed=state.epoch, note=f"held out {fit.loss:.3f}")
            if state.epoch % self.config.save_every == 0:
                self._save(optimizer)

        if not self.standing.history:
            self._judge("untrained", 0)
        imitate(
            self.net,
            optimizer,
            records,
            self.config.imitation,
            self.config.seed,
            self.standing.imitation,
            after_epoch,
        )
        logger.close()
        self._judge("imitate", self.standing.imitation.epoch)
        self.standing.phase = "ppo"
        # The weights of the best epoch are in the network now.
        self.standing.imitation.best = {}
        self._save(None)

    def reinforce(self) -> None:
        """Phase two."""
        options = self.config.ppo
        model = self._learner()
        logger = self._logger("ppo", self.standing.update)
        model.set_logger(logger)
        bar = self._bar("ppo", options.updates, self.standing.update)

        def after_update(update: int) -> None:
            self.standing.update = update
            self.progress.update(bar, completed=update, note=_reward(model))
            if update % options.judge_every == 0 or update == options.updates:
                for key, value in self._judge("ppo", update).items():
                    logger.record(key, value)
            if update == options.updates:
                self.standing.phase = "done"
            if update % self.config.save_every == 0 or update == options.updates:
                self._save(model.policy.optimizer)

        model.before_rollout = self.task.turn
        model.after_update = after_update
        left = options.updates - self.standing.update
        if left > 0:
            model.learn(left * options.steps * options.environments)
        self.standing.phase = "done"
        logger.close()

    def close(self) -> None:
        """End progress and tracking; the table and the policy go to W&B if the run is done."""
        self.progress.stop()
        if self.tracker is None:
            return
        if self.standing.phase == "done":
            figures = sorted({key for _, _, found in self.standing.history for key in found})
            rows = [
                [phase, number, *(found.get(key, float("nan")) for key in figures)]
                for phase, number, found in self.standing.history
            ]
            self.tracker.table("evaluation", ["phase", "number", *figures], rows)
            self.tracker.policy(self.folder / "policy")
        self.tracker.finish()

    def _learner(self) -> PlacePPO:
        options = self.config.ppo
        model = PlacePPO(
            PlacePolicy,
            DummyVecEnv([lambda: Monitor(self.task.environment())] * options.environments),
            learning_rate=options.learning_rate,
            n_steps=options.steps,
            batch_size=options.batch,
            n_epochs=options.epochs,
            gamma=1.0,
            gae_lambda=options.gae_lambda,
            clip_range=options.clip,
            target_kl=options.target_kl,
            ent_coef=options.entropy,
            vf_coef=options.value,
            normalize_advantage=False,
            rollout_buffer_class=GroupedBuffer,
            rollout_buffer_kwargs={"graphs_per_batch": options.graphs_per_batch},
            policy_kwargs={"bank": self.task.bank, "config": self.config.network},
            seed=self.config.seed,
            device="cpu",
            update=self.standing.update,
        )
        policy: Any = model.policy
        policy.net.load_state_dict(self.net.state_dict())
        self.net = policy.net
        if self.standing.update:
            restore_optimizer(self.net, policy.optimizer, self._saved_optimizer)
        return model

    def _records(self) -> Records:
        """Searched plans; those already on disk are not searched again."""
        bar = self._bar("search", self.config.instances, 0)

        def found(count: int, note: str) -> None:
            self.progress.update(bar, completed=count, note=note)

        return self.task.records(self.folder / "records", found)

    def _judge(self, phase: str, number: int) -> dict[str, float]:
        """Judge the network; the best one so far becomes the run's policy."""
        figures = self.task.judge(self.net)
        self.standing.history.append((phase, number, figures))
        if figures[GAP] < self.standing.best_gap:
            self.standing.best_gap = figures[GAP]
            save_policy(self.net, self.folder / "policy", self._card(phase, number))
        return figures

    def _card(self, phase: str, number: int) -> str:
        rows = [
            f"| {name} {count} | " + ", ".join(f"{k} {v:.4f}" for k, v in found.items()) + " |"
            for name, count, found in self.standing.history
        ]
        return "\n".join(
            [
                f"# {self.config.name}",
                "",
                f"{self.task.summary} These are the weights after {phase} {number}.",
                "",
                "| after | judged on instances that training does not see |",
                "| --- | --- |",
                *rows,
                "",
                "```json",
                json.dumps(asdict(self.config), indent=2),
                "```",
                "",
            ]
        )

    def _save(self, optimizer: torch.optim.Optimizer | None) -> None:
        standing = self.standing
        standing.saves += 1
        tensors = {f"net.{name}": value for name, value in self.net.state_dict().items()}
        tensors |= {f"best.{name}": value for name, value in standing.imitation.best.items()}
        if optimizer is not None:
            states = optimizer_tensors(self.net, optimizer)
            tensors |= {f"optimizer.{name}": value for name, value in states.items()}
        imitation = standing.imitation
        meta = {
            "phase": standing.phase,
            "epoch": imitation.epoch,
            "best_loss": imitation.best_loss,
            "best_epoch": imitation.best_epoch,
            "update": standing.update,
            "best_gap": standing.best_gap,
            "history": standing.history,
        }
        save_checkpoint(self.folder / "checkpoints", Checkpoint(standing.saves, tensors, meta))

    def _restore(self) -> None:
        found = latest_checkpoint(self.folder / "checkpoints")
        if found is None:
            return
        meta = found.meta
        self.net.load_state_dict(found.part("net"))
        self._saved_optimizer = found.part("optimizer")
        self.standing = Standing(
            phase=meta["phase"],
            saves=found.number,
            imitation=ImitationState(
                meta["epoch"], meta["best_loss"], meta["best_epoch"], found.part("best")
            ),
            update=meta["update"],
            best_gap=meta["best_gap"],
            history=[(phase, number, figures) for phase, number, figures in meta["history"]],
        )

    def _logger(self, phase: str, done: int) -> Logger:
        """SB3's logger to CSV and TensorBoard, and W&B if asked for; a resumed run adds files."""
        folder = str(self.folder / "logs" / phase)
        suffix = f"-from-{done}" if done else ""
        outputs: list[KVWriter] = [
            make_output_format(kind, folder, suffix) for kind in ("csv", "tensorboard")
        ]
        if self.tracker is not None:
            outputs.append(self.tracker.writer(phase))
        return Logger(folder, outputs)

    def _track(self) -> Any:
        if not self.config.track:
            return None
        from rlplace.policies.tracking import Tracker

        return Tracker(self.folder, self.config.name, asdict(self.config))

    def _bar(self, name: str, total: int, done: int) -> Any:
        return self.progress.add_task(f"{name:8}", total=total, completed=done, note="")


def _claim(config: TrainConfig) -> None:
    """Make the run's folder, or check that it is this run's."""
    folder = Path(config.folder)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.json"
    mine = _lasting(asdict(config))
    if not file.exists():
        file.write_text(json.dumps(mine, indent=2) + "\n")
        return
    theirs: Mapping[str, Any] = json.loads(file.read_text())
    odd = sorted(key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key))
    if odd:
        rule = f"the folder holds a run with another {', '.join(odd)}"
        raise InputError("folder", config.folder, rule, "another folder, or the same config")


def _lasting(config: dict[str, Any]) -> dict[str, Any]:
    """What must not change when a run goes on, as JSON gives it back."""
    kept = {k: v for k, v in config.items() if k not in ("folder", "track", "threads", "quiet")}
    result: dict[str, Any] = json.loads(json.dumps(kept))
    return result


def _reward(model: PlacePPO) -> str:
    rewards = [episode["r"] for episode in model.ep_info_buffer or ()]
    return f"reward {np.mean(rewards):.3f}" if rewards else ""
