from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rlplace.cli import main
from rlplace.plan.types import Mesh, Plan, Stage
from tests.runtime.small import plan as library_plan


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    stage = Stage(0, 1, Mesh(tuple(range(4)), dp_shard=4), ())
    path = tmp_path / "plan.json"
    Plan((stage,), 1, 4).save(path)
    return path


def test_a_command_for_each_node(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["launch", str(plan), "train.py:make", "--nodes", "2", "--gpus", "2"]
    with pytest.raises(SystemExit, match=r"^0$"):
        main([*arguments, "--checkpoint", "saved"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for index, line in enumerate(lines):
        assert line.startswith(f"torchrun --nnodes 2 --node-rank {index} ")
        assert f"-m rlplace.cli run {plan} train.py:make --device cuda" in line
        assert line.endswith("--checkpoint saved --resume")


def test_a_script_for_slurm(plan: Path, tmp_path: Path) -> None:
    target = tmp_path / "job.sh"
    arguments = ["launch", str(plan), "--gpus", "4", "--slurm", "--out", str(target)]
    with pytest.raises(SystemExit, match=r"^0$"):
        main([*arguments, "--partition", "long"])
    text = target.read_text()
    assert text.startswith("#!/bin/bash\n#SBATCH --job-name=plan\n")
    assert "#SBATCH --partition=long" in text
    assert "torchrun --standalone --nproc-per-node 4" in text


def test_too_few_ranks(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^1$"):
        main(["launch", str(plan), "--gpus", "2"])
    assert "the plan uses 4 ranks, 2 a node" in capsys.readouterr().err


def test_an_elastic_job_plans_again(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["launch", str(plan), "--nodes", "2", "--gpus", "2", "--least", "1"]
    with pytest.raises(SystemExit, match=r"^1$"):
        main(arguments)
    assert "cluster" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"^0$"):
        main([*arguments, "--cluster", "2x2xH100-80"])
    assert "--replan 2x2xH100-80" in capsys.readouterr().out


@pytest.mark.parametrize(("flags", "key"), [([], "commands"), (["--slurm"], "script")])
def test_json(flags: list[str], key: str, plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["launch", str(plan), "--nodes", "2", "--gpus", "2", "--json", *flags]
    with pytest.raises(SystemExit, match=r"^0$"):
        main(arguments)
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [key]
    assert "torchrun" in str(found[key])


@pytest.mark.dist
def test_the_commands_of_two_nodes_run_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    library_plan().save(path)
    arguments = ["launch", str(path), "--nodes", "2", "--gpus", "1", "--head", "127.0.0.1"]
    arguments += ["--port", str(free_port()), "--device", "cpu", "--steps", "2", "--json"]
    with pytest.raises(SystemExit, match=r"^0$"):
        main(arguments)
    commands = json.loads(capsys.readouterr().out)["commands"]
    nodes = []
    for command in commands:
        words = shlex.split(command)
        assert words[0] == "torchrun"
        starter = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
        nodes.append(subprocess.Popen(starter, stdout=subprocess.PIPE, text=True))
    try:
        said = [node.communicate(timeout=240)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0]
    assert "loss" in said[0]
    assert "loss" not in said[1]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
