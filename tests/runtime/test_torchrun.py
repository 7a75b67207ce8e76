from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlplace.errors import InputError
from rlplace.plan.types import Mesh, Plan, Stage
from rlplace.runtime.torchrun import (
    Nodes,
    Slurm,
    refuse_too_few,
    slurm_script,
    torchrun_commands,
)

PROGRAM = ("-m", "rlplace.cli", "run", "my plan.json")


def test_one_node_stands_alone() -> None:
    (command,) = torchrun_commands(Nodes(1, 2, max_restarts=1), PROGRAM)
    assert command == (
        "torchrun --standalone --nproc-per-node 2 --max-restarts 1 "
        "-m rlplace.cli run 'my plan.json'"
    )


def test_every_node_has_its_place() -> None:
    commands = torchrun_commands(Nodes(3, 8, "host0", 1234), PROGRAM)
    assert len(commands) == 3
    for index, command in enumerate(commands):
        assert f"--node-rank {index} --master-addr host0 --master-port 1234" in command
        assert "--nnodes 3 " in command


def test_an_elastic_job_meets_at_a_rendezvous() -> None:
    (command,) = torchrun_commands(Nodes(4, 8, "host0", least=2), PROGRAM)
    assert "--nnodes 2:4" in command
    assert "--rdzv-backend c10d --rdzv-endpoint host0:29500" in command
    assert "--node-rank" not in command


@pytest.mark.parametrize(
    ("changes", "field", "near"),
    [
        ({"nodes": 0}, "nodes", "1"),
        ({"per_node": 0}, "gpus", "1"),
        ({"nodes": 2, "least": 3}, "least", "2"),
        ({"port": 70000}, "port", "65535"),
        ({"max_restarts": -1}, "max_restarts", "0"),
    ],
)
def test_refusals(changes: dict[str, int], field: str, near: str) -> None:
    with pytest.raises(InputError, match=rf"^{field}=.*nearest legal: {near}\)"):
        Nodes(**changes)  # type: ignore[arg-type]  # one dict for fields of several types


def test_too_few_ranks_for_a_plan() -> None:
    plan = Plan((Stage(0, 1, Mesh(tuple(range(12)), dp_shard=12), ()),), 1, 12)
    refuse_too_few(plan, Nodes(3, 4))
    with pytest.raises(InputError, match=r"12 ranks, 4 a node .*nearest legal: 3"):
        refuse_too_few(plan, Nodes(2, 4))


@pytest.mark.parametrize("least", [None, 1])
def test_the_script_says_what_slurm_needs(least: int | None, tmp_path: Path) -> None:
    nodes = Nodes(4, 8, least=least)
    text = slurm_script(nodes, Slurm("job", "01:00:00", "gpu", "me", 96), PROGRAM)
    header = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    for wanted in (
        "--job-name=job",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--cpus-per-task=96",
        "--time=01:00:00",
        "--partition=gpu",
        "--account=me",
        "--requeue" if least is None else "--no-kill",
    ):
        assert f"#SBATCH {wanted}" in header
    script = tmp_path / "job.sh"
    script.write_text(text)
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)


_WORKER = """
import os
import torch
import torch.distributed as dist
from rlplace.runtime.world import join
world = join("cpu", 60)
total = torch.tensor([float(world.rank + 1)])
dist.all_reduce(total)
with open(f"{os.environ['OUT']}/{world.rank}", "w") as stream:
    stream.write(f"{world.size} {total.item()} {os.environ['GROUP_RANK']}")
world.close()
"""

#: SLURM's two commands for a job of two nodes that are both this machine.
_SRUN = """#!/bin/bash
shift
for node in 0 1; do SLURM_NODEID=$node "$@" & jobs+=($!); done
status=0
for job in "${jobs[@]}"; do wait "$job" || status=$?; done
exit $status
"""
_SCONTROL = "#!/bin/bash\necho 127.0.0.1\necho other\n"


@pytest.mark.dist
@pytest.mark.parametrize("least", [None, 2])
def test_the_script_starts_two_nodes(least: int | None, tmp_path: Path) -> None:
    """The script itself runs, with SLURM's commands replaced by ones that stay on this machine."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, content in (("srun", _SRUN), ("scontrol", _SCONTROL)):
        (programs / name).write_text(content)
        (programs / name).chmod(0o755)
    worker, script = tmp_path / "worker.py", tmp_path / "job.sh"
    worker.write_text(_WORKER)
    script.write_text(slurm_script(Nodes(2, 1, least=least), Slurm(gpus=False), (str(worker),)))
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    assert torchrun is not None
    environment = {
        **os.environ,
        "PATH": f"{programs}:{Path(torchrun).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "SLURM_JOB_NODELIST": "here,there",
        "SLURM_JOB_ID": str(os.getpid()),
        "OUT": str(tmp_path),
    }
    done = subprocess.run(
        ["bash", str(script)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = [(tmp_path / str(rank)).read_text().split() for rank in range(2)]
    assert [words[:2] for words in said] == [["2", "3.0"]] * 2
    if least is None:
        assert [words[2] for words in said] == ["0", "1"], "rank i is on node i"
