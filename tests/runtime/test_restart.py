"""A job that torchrun starts again, after a rank was killed or with fewer ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.dist

SCRIPT = """
import json
import os
import signal
import sys
from pathlib import Path

from torch import nn

import rlplace
from rlplace.graph.capture import capture
from rlplace.plan.types import Instance
from rlplace.plan.uniform import uniform_plan
from rlplace.runtime.checkpoint import Checkpoints
from rlplace.runtime.options import Options
from rlplace.runtime.trainer import Trainer
from tests.runtime.test_restart import Counted, batch
from tests.runtime.test_trainer import Net, halves

folder, steps, killed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
loss = nn.MSELoss()
inputs, targets = batch(0)
graph = capture(Net(), (inputs,), loss=loss, targets=targets)
cluster = rlplace.Cluster.parse("1x2xA100-80")
plan = uniform_plan(Instance(graph, cluster, 8, precision="fp32"), pp=2)
options = Options(dtype="float64", checkpoint=Checkpoints(str(folder), every=1, keep=9))


class Noted:
    losses = {}
    def begin(self, steps):
        pass
    def step(self, report):
        self.losses[report.step] = (report.loss, report.lr)
        if trainer.world.rank == 1 and report.step == killed and first:
            os.kill(os.getpid(), signal.SIGKILL)
    def end(self):
        pass


with Trainer(plan, Net, example=batch(0), loss=loss, graph=graph, options=options, timeout=20,
             scheduler=halves, callbacks=[Noted()],
             replan=rlplace.replanner(graph, cluster)) as trainer:
    data = Counted()
    trainer.fit(data, steps)
    found = {"losses": Noted.losses, "taken": data.taken, "devices": trainer.plan.devices}
if trainer.world.rank == 0:
    (folder / f"found-{steps}.json").write_text(json.dumps(found))
"""


def batch(index: int) -> tuple[Tensor, Tensor]:
    """Batch of an index."""
    draws = torch.Generator().manual_seed(index)
    return torch.randn(8, 8, generator=draws), torch.randn(8, 8, generator=draws)


class Counted:
    """Endless data that knows how far it is."""

    def __init__(self) -> None:
        self.next, self.taken = 0, 0

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        self.next += 1
        self.taken += 1
        return batch(self.next - 1)

    def state_dict(self) -> dict[str, int]:
        """Its position."""
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take a position over."""
        self.next = state["next"]


def start(folder: Path, ranks: int, steps: int, killed: int = 0) -> dict[str, Any]:
    """Run the script to the end; gives what rank 0 found."""
    folder.mkdir(exist_ok=True)
    script = folder / "train.py"
    root = Path(__file__).parents[2]
    script.write_text(f"import sys; sys.path.insert(0, {str(root)!r})\n{SCRIPT}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    command += ["--nproc-per-node", str(ranks), str(script), str(folder), str(steps), str(killed)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = json.loads((folder / f"found-{steps}.json").read_text())
    return content


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `whole` leaves a checkpoint of every step."""
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, Any]:
    """A job that nothing happens to."""
    return start(folder, 2, 8)


def test_a_job_goes_on_after_a_rank_was_killed(tmp_path: Path, whole: dict[str, Any]) -> None:
    found = start(tmp_path, 2, 8, killed=5)
    first = min(map(int, found["losses"]))
    assert 2 <= first <= 6  # behind the last checkpoint that was whole by then
    assert found["taken"] <= 8 - (first - 1) + 1
    for step, pair in found["losses"].items():
        assert pair == whole["losses"][step]
    assert len(whole["losses"]) == 8


def test_a_job_goes_on_with_fewer_ranks(
    tmp_path: Path, folder: Path, whole: dict[str, Any]
) -> None:
    assert whole["devices"] == [0, 1]
    later = [f"step-{step:08d}" for step in range(5, 9)]
    assert all((folder / name).exists() for name in later)
    shutil.copytree(folder, tmp_path, ignore=lambda *_: later, dirs_exist_ok=True)
    found = start(tmp_path, 1, 8)
    assert found["devices"] == [0]
    assert sorted(map(int, found["losses"])) == [5, 6, 7, 8]
    for step, pair in found["losses"].items():
        assert pair == pytest.approx(whole["losses"][step], rel=1e-9)
