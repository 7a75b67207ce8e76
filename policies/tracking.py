"""Weights & Biases, for those who ask for it; the only module that imports wandb, and late.

Without ``WANDB_API_KEY`` and ``WANDB_MODE`` a run is kept offline, in the run's own folder
(`wandb sync` uploads it later); after `wandb login`, set ``WANDB_MODE=online``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stable_baselines3.common.logger import KVWriter

from rlplace.runtime.reports import StepReport

Cell = str | float | int


class Tracker:
    """One run on W&B.

    Args:
        folder: Where wandb writes; it makes a folder ``wandb`` in it.
        name: Name of the run.
        config: The configuration, nested as it is.
    """

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._wandb = wandb
        self._run = wandb.init(
            project="rlplace",
            name=name,
            config=dict(config),
            dir=str(folder),
            mode=_mode(),
            settings=wandb.Settings(silent=True, console="off"),
        )

    @property
    def folder(self) -> Path:
        """Where the files of this run are."""
        return Path(self._run.dir).parent

    def writer(self, phase: str) -> KVWriter:
        """An output of SB3's logger; the phases of a run have an axis of their own each."""
        axis = f"{phase}/step"
        self._run.define_metric(axis)
        self._run.define_metric(f"{phase}/*", step_metric=axis)
        return _Writer(self._run, phase)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """A table, such as the evaluation."""
        data = [list(row) for row in rows]
        self._run.log({name: self._wandb.Table(columns=list(columns), data=data)})

    def policy(self, folder: Path) -> None:
        """A policy folder as an artifact."""
        artifact = self._wandb.Artifact("policy", type="model")
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact)

    def finish(self) -> None:
        """Write what is left."""
        self._run.finish()


class StepTracker:
    """Logs the steps of a training by a plan (a `rlplace.runtime.reports.Callback`).

    Args:
        folder: As for `Tracker`, like all the rest.
        name: Name of the run.
        config: The configuration.
    """

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        self._tracker = Tracker(folder, name, config)
        self._writer = self._tracker.writer("train")

    @property
    def folder(self) -> Path:
        """Where the files of this run are."""
        return self._tracker.folder

    def begin(self, steps: int | None) -> None:
        """Nothing to log yet."""

    def step(self, report: StepReport) -> None:
        """Send the numbers of a step; what is not known is left out."""
        numbers = {
            "loss": report.loss,
            "lr": report.lr,
            "grad_norm": report.grad_norm,
            "step_time": report.seconds,
            "tokens_per_s": report.tokens_per_s,
            "memory": report.memory,
        }
        known = {name: value for name, value in numbers.items() if value is not None}
        self._writer.write(known, {}, report.step)

    def end(self) -> None:
        """Nothing to end: another `fit` may follow."""

    def finish(self) -> None:
        """Write what is left."""
        self._tracker.finish()


class _Writer(KVWriter):
    def __init__(self, run: Any, phase: str) -> None:
        self._run, self._phase = run, phase

    def write(
        self,
        key_values: dict[str, Any],
        key_excluded: dict[str, tuple[str, ...]],
        step: int = 0,
    ) -> None:
        """Send the numbers of one step."""
        numbers = {
            f"{self._phase}/{key.removeprefix(f'{self._phase}/')}": value
            for key, value in key_values.items()
            if "wandb" not in (key_excluded.get(key) or ()) and not isinstance(value, str)
        }
        self._run.log(numbers | {f"{self._phase}/step": step})

    def close(self) -> None:
        """Nothing to close: `Tracker.finish` does."""


def _mode() -> Any:
    """What the user has said, else offline."""
    chosen = os.environ.get("WANDB_MODE")
    return chosen or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
