"""Korthikanti et al., 2022 (arXiv 2205.05198): table 5 (times), figures 1 and 7 (activations).

The figures are the authors' closed formula. Figure 7 gives percents of the activations without
sequence parallelism and recompute, which figure 1 gives in bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.fidelity_tables.read import (
    Columns,
    gpt,
    integer,
    lines,
    number,
    padded,
    pick,
    redone,
)
from benchmarks.fidelity_tables.types import ClusterSpec, Measured, Reading, Row, Workload
from rlplace.units import GIB

FILE = "korthikanti2022_recompute.csv"


def rows(data: Path) -> Reading:
    found, table = Reading(), lines(data / FILE)
    baselines = {
        c["model"]: float(c["act_mem_gib"])
        for _, c in table
        if c["table"] == "figure1" and c["recompute"] == "none"
    }
    for line, columns in table:
        if columns["table"] == "abstract":
            found.left_out["no time and no memory"] += 1
        else:
            found.rows.append(_row(line, columns, baselines))
    return found


def _row(line: int, columns: Columns, baselines: dict[str, float]) -> Row:
    pp, tp, virtual = (integer(columns[name]) for name in ("pp", "tp", "interleave_m"))
    vocab = padded(integer(columns["vocab"]), tp)
    workload = Workload(
        graph=gpt(columns, tp, vocab=vocab, dropout=0.1),
        cluster=ClusterSpec(columns["gpu"], integer(columns["gpus"])),
        global_batch=integer(columns["global_batch"]),
        precision="fp16-mixed",
        framework="megatron",
        attention="math",
    )
    plan: dict[str, Any] = {
        "pp": pp,
        "tp": tp,
        "dp_replicate": integer(columns["dp"]),
        "micro_batch": integer(columns["micro_batch"]),
        "sequence_parallel": columns["seq_parallel"] == "1",
        "recompute": redone(columns["recompute"]),
        "balance": "layers",
    }
    if virtual > 1:
        plan |= {"virtual": virtual, "schedule": "interleaved"}
    key = pick(columns, "table", "model", "gpus", "pp", "interleave_m", "recompute", "seq_parallel")
    group = (columns["table"], columns["model"], columns["gpus"])
    return Row("korthikanti", line, key, workload, plan, _measured(columns, baselines), group)


def _measured(columns: Columns, baselines: dict[str, float]) -> Measured:
    if columns["table"] == "table5":
        return Measured(float(columns["step_time_s"]))
    share = number(columns["act_mem_pct_of_tp_baseline"])
    memory = number(columns["act_mem_gib"])
    if memory is None:
        assert share is not None
        memory = baselines[columns["model"]] * share / 100.0
    ran = {"over_80gib": False, "fits": True}.get(columns["status"])
    return Measured(memory=memory * GIB, memory_kind="activations", ran=ran)
