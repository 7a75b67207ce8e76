from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rlplace.cli import main
from rlplace.commands.run import rank_arguments
from rlplace.commands.user_training import captured, library_training, user_training
from rlplace.errors import InputError
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Instance, Plan
from rlplace.plan.uniform import uniform_plan
from rlplace.runtime.launch import launch
from rlplace.runtime.measure import Measurement
from rlplace.runtime.options import Options
from rlplace.runtime.validate import stand_in_cluster
from tests.runtime.small import plan as library_plan

FILE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x):
        return self.layers(x)


def make():
    options = {"loss": nn.functional.mse_loss, "targets": torch.zeros(4, 8)}
    return Net(), (torch.ones(4, 8),), options


def data():
    draws = torch.Generator().manual_seed(3)
    for _ in range(8):
        yield torch.randn(8, 8, generator=draws), torch.randn(8, 8, generator=draws)


def optimizer(params):
    return torch.optim.SGD(params, lr=0.5, momentum=0.5)


def scheduler(made):
    return torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
"""


class Net(nn.Module):
    """The module of the file."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layers(x)
        return made


def stub_plan(graph: OpGraph) -> Plan:
    return uniform_plan(Instance(graph, stand_in_cluster(2), 8, precision="fp32"), pp=2)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLPLACE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "own_net.py"
    path.write_text(FILE)
    return path


@pytest.fixture
def plan(script: Path) -> Plan:
    return stub_plan(captured(f"{script}:make", library_plan()))


def reference() -> list[float]:
    """Losses of three accumulated, clipped steps of one process."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    draws = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(3):
        pairs = [
            (torch.randn(8, 8, generator=draws), torch.randn(8, 8, generator=draws))
            for _ in range(2)
        ]
        optimizer.zero_grad()
        loss = torch.stack([nn.functional.mse_loss(net(x), y) for x, y in pairs]).mean()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(net.parameters(), 0.2)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.mark.dist
def test_a_file_of_ones_own_is_trained_tracked_saved_and_gone_on_with(
    script: Path, plan: Plan, tmp_path: Path
) -> None:
    plan.save(tmp_path / "plan.json")
    command = [sys.executable, "-m", "rlplace.cli", "run", str(tmp_path / "plan.json")]
    command += [str(script), "--warmup", "1", "--accumulate", "2", "--clip", "0.2", "--json"]
    losses = []
    for steps, more in (("1", ["--track"]), ("2", ["--resume", "--out", "measured.json"])):
        command_now = [*command, "--steps", steps, "--checkpoint", "saved", *more]
        done = subprocess.run(
            command_now,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "WANDB_MODE": "offline"},
        )
        assert done.returncode == 0, done.stderr
        losses += json.loads(done.stdout)["losses"]
    assert losses == pytest.approx(reference(), rel=1e-5)
    assert Measurement.load(tmp_path / "measured.json").losses == tuple(losses[2:])
    (written,) = (tmp_path / "runs" / "wandb").glob("offline-run-*/*.wandb")
    logged = written.read_bytes()
    for name in ("loss", "lr", "grad_norm", "step_time", "tokens_per_s", "memory"):
        assert f"train/{name}".encode() in logged


@pytest.mark.dist
def test_ctrl_c_finishes_the_step_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    library_plan().save(tmp_path / "plan.json")
    command = [sys.executable, "-m", "rlplace.cli", "run", "plan.json", "--steps", "1000000"]
    command += ["--checkpoint", "saved", "--every", "5", "--keep", "1", "--json"]
    # Ctrl-C goes to a group of processes: here to that of this command and its torchrun.
    # What a shell starts in the background ignores Ctrl-C, and so would all that the tests start.
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("saved/step-*")) and time.monotonic() < deadline:
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    steps = len(json.loads(out)["losses"])
    (saved,) = tmp_path.glob("saved/step-*")
    assert int(saved.name.removeprefix("step-")) >= steps >= 5


@pytest.mark.dist
def test_fewer_ranks_go_on_with_another_plan(tmp_path: Path) -> None:
    library_plan().save(tmp_path / "plan.json")
    losses = []
    for ranks in (2, 1):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "-m", "rlplace.cli", "run", "plan.json"]
        command += ["--steps", str(4 - ranks), "--warmup", "1", "--json", "--checkpoint", "saved"]
        command += ["--resume", "--replan", "2xA100-80"]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        losses += json.loads(done.stdout)["losses"]
    whole = launch(library_plan(), options=Options(steps=3, warmup=1))
    assert losses == pytest.approx(whole.losses, rel=1e-5)


def test_a_plan_for_another_module_is_refused_before_a_start(
    script: Path, plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan.save(tmp_path / "plan.json")
    script.write_text(FILE.replace("range(4)", "range(5)"))
    with pytest.raises(SystemExit) as ended:
        main(["run", str(tmp_path / "plan.json"), str(script)])
    assert ended.value.code == 1
    assert "made for another graph" in " ".join(capsys.readouterr().err.split())


def test_what_a_file_says(script: Path, plan: Plan) -> None:
    found = user_training(str(script), plan)
    assert found.graph.fingerprint == plan.graph
    assert isinstance(found.make(), nn.Module)
    assert found.example[1].shape == (4, 8)
    assert found.data is not None
    assert len(list(found.data)) == 8
    assert found.groups is None
    assert found.scheduler(torch.optim.SGD([nn.Parameter(torch.ones(1))])).gamma == 0.5


def test_a_batch_elsewhere_than_in_dim_0_is_refused(script: Path, plan: Plan) -> None:
    script.write_text(FILE.replace('options = {"', 'options = {"batch_dim": 0, "'))
    with pytest.raises(InputError, match="along dim 0"):
        user_training(str(script), plan)


def test_a_library_model_has_random_data() -> None:
    found = library_training(library_plan(), 5)
    first, second = (batch for batch, _ in zip(found.data or (), range(2), strict=False))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], found.example[name]) for name in first)
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_a_plan_of_a_module_needs_its_name(plan: Plan) -> None:
    with pytest.raises(InputError, match="name the function, as train"):
        library_training(plan, 0)


def test_ranks_get_the_flags_that_were_given() -> None:
    flags: dict[str, object] = {"steps": 3, "clip": None, "track": True, "json": False}
    found = rank_arguments(Path("plan.json"), "train.py", flags)
    assert found == ["run", "plan.json", "train.py", "--steps", "3", "--track"]
    assert rank_arguments(Path("plan.json"), "", {}) == ["run", "plan.json"]
