"""A script that ends without closing its trainers ends well, and loses nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlplace.runtime.manifest import latest_good

pytestmark = pytest.mark.dist

SCRIPT = """
import sys
import time

from torch import nn

from rlplace.graph.capture import capture
from rlplace.plan.types import Instance
from rlplace.plan.uniform import uniform_plan
from rlplace.runtime import heartbeat
from rlplace.runtime.checkpoint import Checkpoints
from rlplace.runtime.options import Options
from rlplace.runtime.trainer import Trainer
from rlplace.runtime.validate import stand_in_cluster
from rlplace.runtime.world import join
from tests.runtime.test_trainer import DATA, Net

heartbeat.PERIOD = 0.001  # some sign is under way when the interpreter ends
graph = capture(Net(), (DATA[0][0],), loss=nn.MSELoss(), targets=DATA[0][1])
plan = uniform_plan(Instance(graph, stand_in_cluster(2), 8, precision="fp32"), pp=2)
world = join("cpu", 30)


def slowly(phase):
    if phase.startswith("checkpoint"):
        time.sleep(1)


for folder in sys.argv[1:]:
    options = Options(steps=2, warmup=0, checkpoint=Checkpoints(folder, every=2))
    trainer = Trainer(
        plan, Net, loss=nn.MSELoss(), graph=graph, options=options, world=world, on_phase=slowly
    )
    trainer.fit(DATA[:2])
"""


def test_checkpoints_are_written_to_their_end(tmp_path: Path) -> None:
    script, folders = tmp_path / "train.py", [tmp_path / "one", tmp_path / "two"]
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n{SCRIPT}"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(script), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = [latest_good(folder) for folder in folders]
    assert [one and one.name for one in found] == ["step-00000002"] * 2
