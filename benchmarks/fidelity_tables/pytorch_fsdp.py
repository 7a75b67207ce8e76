"""PyTorch's posts on FSDP (2024): Llama 2 on A100 and H100.

``HSDP`` shards within a host and replicates across. Where a post says FSDP/HSDP, the README of the
same authors' repository says which: HSDP for 7B and 13B, FSDP above. ``selective`` means every
other block here. Rows with MFU alone are left out, for their formula is not given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.fidelity_tables.read import Columns, integer, lines, llama, pick
from benchmarks.fidelity_tables.types import ClusterSpec, Measured, Reading, Row, Workload

FILE = "pytorch_fsdp_llama2.csv"

_LINKS = {"400 Gb/s": "ib400", "400 Gb/s?": "ib400", "800 Gb/s": "ib800", "3.2 Tb/s": "ib3200"}


def rows(data: Path) -> Reading:
    found = Reading()
    for line, columns in lines(data / FILE):
        if columns["step_time_s"]:
            found.rows.append(_row(line, columns))
        else:
            found.left_out["MFU only"] += 1
    return found


def _row(line: int, columns: Columns) -> Row:
    gpus, per_node = integer(columns["gpus"]), integer(columns["gpus_per_node"])
    local = integer(columns["local_batch"])
    hybrid = columns["sharding"] == "HSDP" or (
        columns["sharding"] == "FSDP/HSDP" and columns["model"] in ("7B", "13B")
    )
    shards = per_node if hybrid else gpus
    workload = Workload(
        graph=llama(columns),
        cluster=ClusterSpec(columns["gpu"], gpus, per_node, _LINKS[columns["inter_node"]]),
        global_batch=local * gpus,
        precision="bf16-mixed",
        framework="torch-fsdp",
        fused=columns["compile"] == "1",
    )
    plan: dict[str, Any] = {
        "dp_replicate": gpus // shards,
        "dp_shard": shards,
        "zero": 3,
        "micro_batch": local,
        "recompute": "none" if columns["act_ckpt"] == "none" else "layer",
    }
    if columns["act_ckpt"].startswith("selective"):
        plan["every"] = 2
    key = pick(columns, "source", "gpu", "gpus", "model", "sharding", "act_ckpt", "local_batch")
    group = (columns["gpu"], columns["model"], columns["gpus"])
    measured = Measured(float(columns["step_time_s"]))
    return Row("pytorch_fsdp", line, key, workload, plan, measured, group)
