"""An independent reproduction of Alpa on V100-32: GPT of 6.7B cut to 4 to 16 layers, 4 or 8 GPUs.

Hosts of 16. Rows of table 2.1 do not say whether they recompute: their FLOP/s are reported by the
formula that counts it, so they are taken to. Memory is what XLA allocated.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.fidelity_tables.read import Columns, gpt, integer, lines, number, pick, split_off
from benchmarks.fidelity_tables.types import ClusterSpec, Measured, Reading, Row, Workload

FILE = "alpa_repro_v100_32.csv"
FIT_ONE_IN = 7


def rows(data: Path) -> Reading:
    found = Reading()
    for line, columns in lines(data / FILE):
        if columns["mesh_tp"] == "auto":
            found.left_out["the layout is not recorded"] += 1
        else:
            found.rows.append(_row(line, columns))
    found.rows = split_off(found.rows, FIT_ONE_IN)
    return found


def _row(line: int, columns: Columns) -> Row:
    tp, dp = integer(columns["mesh_tp"]), integer(columns["mesh_dp"])
    workload = Workload(
        graph=gpt(columns, tp),
        cluster=ClusterSpec(columns["gpu"], integer(columns["gpus"]), 16),
        global_batch=integer(columns["global_batch"]),
        precision="fp16-mixed" if columns["dtype"] == "fp16" else "fp32",
        framework="alpa",
        attention="math",
        fused=True,  # XLA
    )
    scatters = columns["reduce_scatter"] == "1"
    plan = {
        "tp": tp,
        "dp_replicate": 1 if scatters else dp,
        "dp_shard": dp if scatters else 1,
        "zero": 2 if scatters else 0,
        "micro_batches": integer(columns["grad_accum"], 1),
        "recompute": "none" if columns["recompute"] == "none" else "layer",
    }
    memory = number(columns["peak_mem_gb"])
    measured = Measured(
        step_time=float(columns["step_time_s"]),
        memory=None if memory is None else memory * 1e9,
        memory_kind="allocated",
    )
    key = pick(columns, "table", "gpus", "layers", "dtype", "recompute", "mesh_dp", "mesh_tp")
    group = (columns["layers"], columns["gpus"], columns["dtype"], columns["recompute"])
    return Row("alpa_repro", line, key, workload, plan, measured, group)
