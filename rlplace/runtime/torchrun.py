"""How a plan is started on nodes: the torchrun command of each, or a script for SLURM.

Pure text. A plan names ranks, so by default every node has a fixed place (``--node-rank``) and rank
``i`` is device ``i`` of the plan's cluster. Elastic jobs, which go on with fewer nodes, meet at a
c10d rendezvous instead, where places are dealt out anew.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from rlplace.errors import InputError
from rlplace.plan.types import Plan

#: What nodes are called where a person starts them one by one.
_HEAD = "NODE0"


@dataclass(frozen=True)
class Nodes:
    """Where and how the ranks are started.

    Args:
        nodes: Hosts.
        per_node: Ranks of each.
        head: Address of the first one.
        port: Where the ranks meet; free on the head.
        least: Nodes with which an elastic job goes on; None for a job of fixed ranks.
        max_restarts: How often torchrun starts the ranks again after a failure.
    """

    nodes: int = 1
    per_node: int = 8
    head: str = _HEAD
    port: int = 29500
    least: int | None = None
    max_restarts: int = 3

    def __post_init__(self) -> None:
        least = 1 if self.least is None else self.least
        for name, value, low, high in (
            ("nodes", self.nodes, 1, None),
            ("gpus", self.per_node, 1, None),
            ("least", least, 1, self.nodes),
            ("port", self.port, 1, 65535),
            ("max_restarts", self.max_restarts, 0, None),
        ):
            if value < low or (high is not None and value > high):
                rule = f"at least {low}" if high is None else f"{low} to {high}"
                near = low if value < low else high
                raise InputError(name, value, rule, near)


@dataclass(frozen=True)
class Slurm:
    """The header of a SLURM script.

    Args:
        name: Of the job.
        time: Limit, as ``HH:MM:SS``.
        partition, account: Left out where empty.
        cpus: Cores of each node's task; 0 leaves it to the cluster.
        gpus: Whether the ranks have GPUs.
    """

    name: str = "rlplace"
    time: str = "24:00:00"
    partition: str = ""
    account: str = ""
    cpus: int = 0
    gpus: bool = True


def refuse_too_few(plan: Plan, nodes: Nodes) -> None:
    """Refuse nodes that have fewer ranks than a plan uses.

    Raises:
        InputError: With the number of nodes that would do.
    """
    needed = max(plan.devices, default=0) + 1
    if needed > nodes.nodes * nodes.per_node:
        rule = f"the plan uses {needed} ranks, {nodes.per_node} a node"
        raise InputError("nodes", nodes.nodes, rule, -(-needed // nodes.per_node))


def torchrun_commands(nodes: Nodes, program: Sequence[str]) -> tuple[str, ...]:
    """The command of each node, in the order of the nodes; one for all where they are alike.

    Args:
        nodes: Where the ranks are started.
        program: What torchrun starts: its arguments behind the flags.
    """
    text = shlex.join(program)
    if nodes.nodes == 1:
        return (f"torchrun {_flags(nodes, '')} {text}",)
    if nodes.least is not None:
        return (f"torchrun {_flags(nodes, nodes.head)} {text}",)
    return tuple(
        f"torchrun {_flags(nodes, nodes.head, str(index))} {text}" for index in range(nodes.nodes)
    )


def slurm_script(nodes: Nodes, slurm: Slurm, program: Sequence[str]) -> str:
    """A script for ``sbatch``: one task a node, each of which starts that node's ranks.

    Args:
        nodes: Where the ranks are started; the head is the first host that SLURM gives.
        slurm: The header.
        program: As for `torchrun_commands`.
    """
    flags = _flags(nodes, "$MASTER_ADDR", "$SLURM_NODEID", port="$MASTER_PORT")
    inner = f"exec torchrun {flags} {shlex.join(program)}"
    lines = [
        "#!/bin/bash",
        *_header(nodes, slurm),
        "",
        "set -euo pipefail",
        'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "MASTER_ADDR=${hosts[0]}",
        "MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
        "export MASTER_ADDR MASTER_PORT",
        "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}",
        "",
        "# One task a node; its number is the node's place.",
        f"srun --kill-on-bad-exit={int(nodes.least is None)} bash -c {shlex.quote(inner)}",
    ]
    return "\n".join(lines) + "\n"


def _header(nodes: Nodes, slurm: Slurm) -> list[str]:
    options = {
        "job-name": slurm.name,
        "nodes": str(nodes.nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(nodes.per_node) if slurm.gpus else "",
        "cpus-per-task": str(slurm.cpus) if slurm.cpus else "",
        "time": slurm.time,
        "partition": slurm.partition,
        "account": slurm.account,
        "output": "%x-%j.out",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value]
    # SLURM ends a job whose node dies, unless it is told that the others go on.
    return lines + (["#SBATCH --no-kill"] if nodes.least is not None else ["#SBATCH --requeue"])


def _flags(nodes: Nodes, head: str, place: str = "0", port: str = "") -> str:
    """Flags of torchrun; `head` and `place` may be variables of the shell."""
    port = port or str(nodes.port)
    flags = [f"--nproc-per-node {nodes.per_node}", f"--max-restarts {nodes.max_restarts}"]
    if nodes.nodes == 1:
        return " ".join(["--standalone", *flags])
    if nodes.least is None:
        where = f"--node-rank {place} --master-addr {head} --master-port {port}"
        return " ".join([f"--nnodes {nodes.nodes}", where, *flags])
    job = f"--rdzv-id {'$SLURM_JOB_ID' if place.startswith('$') else 'rlplace'}"
    where = f"--rdzv-backend c10d --rdzv-endpoint {head}:{port} {job}"
    return " ".join([f"--nnodes {nodes.least}:{nodes.nodes}", where, *flags])
