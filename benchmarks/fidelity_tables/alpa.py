"""Alpa (OSDI 2022, arXiv 2201.12023): GPT, MoE and Wide-ResNet on V100 of p3.16xlarge.

Used are the rows whose layout is known: data parallel, ZeRO-2 and ZeRO-3, and Megatron's plans.
What a search or the integer program chose is not recorded. Memory is what XLA allocated; that of
rows out of memory is a compiler's guess and not used. Hosts of 8, 25 Gb/s between them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks.fidelity_tables.read import (
    Columns,
    gpt,
    integer,
    lines,
    number,
    pick,
    redone,
    shape,
    split_off,
)
from benchmarks.fidelity_tables.types import (
    ClusterSpec,
    GraphSpec,
    Measured,
    Reading,
    Row,
    Workload,
)
from rlplace.units import GIB

FILE = "alpa_v100.csv"
FIT_ONE_IN = 8

_ZERO = {"data_parallel": 0, "megatron": 0, "zero_2": 2, "zero_3": 3}
_FAMILIES = {"w-resnet": "wide-resnet", "wresnet": "wide-resnet", "moe": "gpt-moe", "gpt": "gpt"}


def rows(data: Path) -> Reading:
    found = Reading()
    for line, columns in lines(data / FILE):
        if columns["method"] not in _ZERO or not columns["mesh_tp"].isdigit():
            found.left_out["the layout is not recorded"] += 1
        elif columns["recompute"] == "unknown" and columns["model_family"] == "gpt":
            found.left_out["recompute unknown"] += 1
        else:
            found.rows.append(_row(line, columns))
    found.rows = split_off(found.rows, FIT_ONE_IN)
    return found


def _row(line: int, columns: Columns) -> Row:
    tp, dp = integer(columns["mesh_tp"]), integer(columns["mesh_dp"])
    zero = _ZERO[columns["method"]]
    workload = Workload(
        graph=_graph(columns, tp),
        cluster=ClusterSpec(columns["gpu"], integer(columns["gpus"]), 8, "eth25"),
        global_batch=integer(columns["global_batch"]),
        precision="fp16-mixed" if columns["dtype"] == "fp16" else "fp32",
        framework="megatron" if columns["method"] == "megatron" else "alpa",
        attention="math",
        fused=True,  # XLA
    )
    plan: dict[str, Any] = {
        "pp": integer(columns["pp"]),
        "tp": tp,
        "dp_replicate": 1 if zero else dp,
        "dp_shard": dp if zero else 1,
        "zero": zero,
        "micro_batches": integer(columns["grad_accum"], 1),
        # What is unknown for Wide-ResNet is taken as in the suite of 2021: none.
        "recompute": redone(columns["recompute"].replace("unknown", "none")),
    }
    if columns["model_family"] == "gpt":
        plan["balance"] = "layers"
    ran = columns["status"] == "ok"
    memory = number(columns["peak_mem_gib"]) if ran else None
    measured = Measured(
        step_time=number(columns["step_time_s"]),
        memory=None if memory is None else memory * GIB,
        memory_kind="allocated",
        ran={"ok": True, "oom": False}.get(columns["status"]),
    )
    names = ("source", "gpu", "model_family", "method", "arch", "gpus", "hidden", "mesh_dp")
    key = pick(columns, *names, "mesh_tp", "pp", "recompute")
    group = (columns["source"], columns["arch"], columns["hidden"], columns["gpus"])
    return Row("alpa", line, key, workload, plan, measured, group)


def _graph(columns: Columns, tp: int) -> GraphSpec:
    family = _FAMILIES[columns["model_family"]]
    if family == "gpt":
        return gpt(columns, tp)
    if family == "gpt-moe":
        sizes = dict(gpt(columns, tp).shape)
        experts = integer(columns["experts"])
        group = integer(columns["expert_group"])
        return GraphSpec(family, shape(**(sizes | {"experts": experts, "group": group})))
    match = re.search(r"base_ch (\d+) width (\d+) img (\d+)", columns["arch"])
    assert match is not None, columns["arch"]
    base, width, image = map(int, match.groups())
    return GraphSpec(family, shape(channels=base, width=width, image=image))
