"""A plan that takes a moment, and the processes that running it has started."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from rlplace.graph.library import build
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Instance, Plan
from rlplace.plan.uniform import uniform_plan
from rlplace.runtime.validate import stand_in_cluster

_ARGS = {"layers": 1, "hidden": 16, "heads": 2, "ffn": 16, "vocab": 32, "seq_len": 8}


@functools.cache
def graph() -> OpGraph:
    return build("gpt", **_ARGS)  # type: ignore[arg-type]  # a dict has one type of values


def plan(pp: int = 2, **degrees: int) -> Plan:
    ranks = pp * degrees.get("dp_replicate", 1)
    instance = Instance(graph(), stand_in_cluster(ranks), 4, precision="fp32")
    return uniform_plan(instance, pp=pp, micro_batches=2, **degrees)  # type: ignore[arg-type]  # ditto


def workers() -> set[str]:
    """Running workers that belong to this test process's launches."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_text()
            except OSError:
                continue
            if "rlplace.runtime.worker" in command and f"rlplace-run-{os.getpid()}-" in command:
                found.add(entry.name)
    return found
