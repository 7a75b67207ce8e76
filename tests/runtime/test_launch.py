"""What happens when something is wrong: the cause is named, in time, and no process is left."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlplace.errors import InputError, RankFailedError
from rlplace.runtime.jobs import Fault, Job
from rlplace.runtime.launch import launch, launch_many
from rlplace.runtime.options import Options
from tests.runtime.small import graph, plan, workers


@pytest.mark.dist
def test_progress_and_result() -> None:
    seen: list[tuple[int, int]] = []
    result = launch(
        plan(),
        graph=graph(),
        options=Options(steps=3, warmup=1),
        limit=120,
        progress=lambda job, step, seconds: seen.append((job, step)),
    )
    assert seen == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert len(result.step_times) == 3
    assert len(result.losses) == 4
    assert result.losses[-1] < result.losses[0]
    assert result.traffic["p2p"] > 0
    assert min(result.peak_memory) > 0
    kinds = {(event.device, event.kind) for event in result.timeline.events}
    assert {(0, "F"), (0, "B"), (1, "F"), (1, "B"), (0, "optimizer")} <= kinds
    assert all(0 <= event.start <= event.end for event in result.timeline.events)
    assert not workers()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("kill", "rank 1 was ended by SIGKILL"),
        ("raise", "rank 1 failed: RuntimeError: rank 1 fails on purpose after step 1"),
        ("stop", r"rank 1 was ended by SIGKILL \(rank 0: rank 1 failed: no sign of life"),
    ],
)
def test_a_rank_that_fails_stops_the_others(kind: str, cause: str) -> None:
    fault = Fault(1, 1, kind)  # type: ignore[arg-type]
    job = Job(plan(), graph(), options=Options(steps=500), fault=fault)
    with pytest.raises(RankFailedError, match=cause):
        launch_many([job], timeout=6, limit=100)
    assert not workers()


@pytest.mark.dist
def test_the_limit_ends_the_ranks() -> None:
    with pytest.raises(RankFailedError, match="did not end within 1 s"):
        launch(plan(), graph=graph(), limit=1)
    assert not workers()


def test_a_plan_for_another_graph_is_refused_before_a_start() -> None:
    with pytest.raises(InputError, match="made for another graph"):
        launch(replace(plan(), graph="0" * 16), graph=graph())


def test_too_few_ranks_are_refused_before_a_start() -> None:
    with pytest.raises(InputError, match=r"ranks=1: the plan uses 2 ranks"):
        launch_many([Job(plan(), graph())], ranks=1)


SCRIPT = """
import sys
import torch
from torch import nn
import rlplace.graph.capture
from rlplace.plan.types import Instance
from rlplace.plan.uniform import uniform_plan
from rlplace.runtime.options import Options
from rlplace.runtime.run import run
from rlplace.runtime.validate import stand_in_cluster


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x):
        return self.layers(x).square().mean()


example = {"x": torch.ones(4, 8)}
graph = rlplace.graph.capture.capture(Net(), (), example)
plan = uniform_plan(Instance(graph, stand_in_cluster(2), 8, precision="fp32"), pp=2)
result = run(plan, Net, example=example, options=Options(steps=2), timeout=20)
sys.stdout.write(f"losses {len(result.losses)} {result.losses[-1] < result.losses[0]}\\n")
"""


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_module_of_ones_own_under_torchrun(tmp_path: Path, ranks: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if ranks == 2:
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("losses 5 True") == 2
    else:
        assert done.returncode != 0
        assert "torchrun started 1 ranks, the plan uses 2" in done.stderr
