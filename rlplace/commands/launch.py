"""``rlplace launch``: how to start a plan on nodes."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path

import tyro

from rlplace.errors import InputError


def show_launch(
    plan: tyro.conf.Positional[Path],
    module: tyro.conf.Positional[str] = "",
    *,
    nodes: int = 1,
    gpus: int = 8,
    head: str = "NODE0",
    port: int = 29500,
    least: int | None = None,
    max_restarts: int = 3,
    device: str = "cuda",
    timeout: float = 600.0,
    steps: int = 20,
    checkpoint: Path | None = None,
    cluster: str = "",
    slurm: bool = False,
    time: str = "24:00:00",
    partition: str = "",
    account: str = "",
    cpus: int = 0,
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Print the torchrun command of each node, or a SLURM script, that runs a plan.

    Args:
        plan: A plan file that `rlplace plan --out` wrote.
        module: Your own function as train.py:make; empty for a library model.
        nodes: Hosts; node i of the plan's cluster is host i, unless --least is given.
        gpus: Ranks of each node.
        head: Address of the first node.
        port: Free port of the first node.
        least: Go on with so few nodes if others fail; then places are dealt out anew.
        max_restarts: How often torchrun starts the ranks again.
        device: cuda or cpu.
        timeout: Seconds after which a rank gives up waiting for another.
        steps: Steps to train.
        checkpoint: Folder of the checkpoints, seen by all nodes; a restart goes on from there.
        cluster: The plan's cluster, as for `rlplace plan`; with --least, the nodes that are left go
            on with another plan for its first devices.
        slurm: Print a script for sbatch instead.
        time: SLURM's limit, HH:MM:SS.
        partition: Of SLURM.
        account: Of SLURM.
        cpus: Cores of each node's task, for SLURM.
        out: Write it here instead of printing it.
        json: Print one JSON object: ``commands``, one a node, or ``script``.
    """
    from rlplace.plan.types import Plan
    from rlplace.runtime.torchrun import (
        Nodes,
        Slurm,
        refuse_too_few,
        slurm_script,
        torchrun_commands,
    )

    where = Nodes(nodes, gpus, head, port, least, max_restarts)
    refuse_too_few(Plan.load(plan), where)
    program = ["-m", "rlplace.cli", "run", str(plan), *([module] if module else [])]
    program += ["--device", device, "--timeout", f"{timeout:g}", "--steps", str(steps)]
    if checkpoint is not None:
        program += ["--checkpoint", str(checkpoint), "--resume"]
    if least is not None:
        if not cluster:
            rule = "is needed to plan again for the nodes that are left"
            raise InputError("cluster", cluster, rule, "2x8xH100-80")
        program += ["--replan", cluster]
    if slurm:
        header = Slurm(plan.stem, time, partition, account, cpus, device == "cuda")
        script = slurm_script(where, header, program)
        text, data = script, dict[str, object](script=script)
    else:
        commands = torchrun_commands(where, program)
        text, data = "\n".join(commands) + "\n", dict[str, object](commands=commands)
    if json:
        text = jsonlib.dumps(data, indent=1) + "\n"
    if out is None:
        print(text, end="")
    else:
        out.write_text(text)
    return 0
