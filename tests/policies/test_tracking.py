from __future__ import annotations

from pathlib import Path

import pytest
import wandb
from stable_baselines3.common.logger import Logger

from rlplace.policies.tracking import Tracker, _mode


@pytest.mark.slow
def test_offline_run_writes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "CARD.md").write_text("# A card")
    tracker = Tracker(tmp_path, "test", {"seed": 1, "net": {"width": 8}})
    logger = Logger(None, [tracker.writer("imitate")])
    for step in range(3):
        logger.record("imitate/loss", 1.0 / (step + 1))
        logger.dump(step)
    tracker.table("evaluation", ["planner", "gap"], [["policy", 0.1], ["grid", 0.4]])
    tracker.policy(policy)
    folder = tracker.folder
    tracker.finish()
    wandb.teardown()  # its service writes on its own time; this waits until it has ended
    assert folder.is_relative_to(tmp_path / "wandb")
    assert folder.name.startswith("offline-run-")
    written = b"".join(path.read_bytes() for path in folder.rglob("*.wandb"))
    assert b"imitate/loss" in written
    assert b"width" in written
    assert list(folder.rglob("evaluation*.table.json"))


@pytest.mark.parametrize(
    ("environment", "mode"),
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": "x"}, "online"),
        ({"WANDB_API_KEY": "x", "WANDB_MODE": "offline"}, "offline"),
        ({"WANDB_MODE": "online"}, "online"),
    ],
)
def test_offline_is_the_default(
    environment: dict[str, str], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert _mode() == mode
