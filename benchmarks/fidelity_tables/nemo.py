"""NeMo 24.07 on DGX H100 (vendor's table): fp8 pre-training of Llama and GPT.

The distributed optimizer (ZeRO-1) and sequence parallelism are NeMo's defaults in these recipes;
recompute is not said and taken as none. LoRA and rows without a shape are left out; so is
supervised tuning, whose packed sequences are not described.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.fidelity_tables.read import Columns, gpt, integer, lines, llama, padded, pick
from benchmarks.fidelity_tables.types import ClusterSpec, Measured, Reading, Row, Workload

FILE = "nemo_2407_h100.csv"


def rows(data: Path) -> Reading:
    found = Reading()
    for line, columns in lines(data / FILE):
        if columns["task"] != "pretrain":
            found.left_out["not pre-training"] += 1
        elif not columns["layers"]:
            found.left_out["shape not given"] += 1
        else:
            found.rows.append(_row(line, columns))
    return found


def vendor_plan(columns: Columns) -> dict[str, Any]:
    """The plan of NVIDIA's recipes, from the columns gpus, tp, pp, cp, vp and micro_batch."""
    tp, pp, cp = (integer(columns[name]) for name in ("tp", "pp", "cp"))
    plan: dict[str, Any] = {
        "pp": pp,
        "tp": tp,
        "dp_replicate": 1,
        "dp_shard": integer(columns["gpus"]) // (tp * pp * cp),
        "zero": 1,
        "micro_batch": integer(columns["micro_batch"]),
        "sequence_parallel": tp > 1,
        "balance": "layers",
    }
    if cp > 1:
        plan["cp"] = cp
    if pp > 1 and columns["vp"].isdigit() and int(columns["vp"]) > 1:
        plan |= {"virtual": int(columns["vp"]), "schedule": "interleaved"}
    return plan


def _row(line: int, columns: Columns) -> Row:
    tp, cp = integer(columns["tp"]), integer(columns["cp"])
    if columns["model"].startswith("GPT3"):
        graph = gpt(columns, tp, vocab=padded(integer(columns["vocab"]), tp))
    else:
        graph = llama(columns, tp, cp)
    workload = Workload(
        graph=graph,
        cluster=ClusterSpec("H100-80", integer(columns["gpus"]), 8, "ib3200"),
        global_batch=integer(columns["global_batch"]),
        precision="fp8-mixed",
        framework="megatron-core",
    )
    key = pick(columns, "model", "gpus", "tp", "pp", "cp", "vp", "micro_batch", "global_batch")
    group = (columns["model"], columns["gpus"], columns["seq_len"])
    measured = Measured(float(columns["step_time_s"]))
    return Row("nemo", line, key, workload, vendor_plan(columns), measured, group)
