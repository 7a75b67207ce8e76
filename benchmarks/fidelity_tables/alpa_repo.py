"""ZeRO trials of Alpa's authors in 2021: DeepSpeed's Megatron example on 8 A100-40 of one host.

Sequence length and recompute are not certain (marked with ``?`` in the file) and taken as marked.
The trials on TITAN X lack a vocabulary and more, and are left out; so are rows without a batch.
Memory is the driver tool's.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.fidelity_tables.read import (
    Columns,
    gpt,
    integer,
    lines,
    number,
    padded,
    pick,
    split_off,
)
from benchmarks.fidelity_tables.types import ClusterSpec, Measured, Reading, Row, Workload
from rlplace.units import MIB

FILE = "alpa_repo_deepspeed_2021.csv"
FIT_ONE_IN = 8
#: GPT-2's, which the example uses.
_VOCAB = 50257


def rows(data: Path) -> Reading:
    found = Reading()
    for line, columns in lines(data / FILE):
        if not columns["gpu"].startswith("A100"):
            found.left_out["recompute and vocabulary unknown"] += 1
        elif not columns["global_batch"]:
            found.left_out["batch not given"] += 1
        else:
            found.rows.append(_row(line, columns))
    found.rows = split_off(found.rows, FIT_ONE_IN)
    return found


def _row(line: int, columns: Columns) -> Row:
    tp, dp, zero = (integer(columns[name]) for name in ("tp", "dp", "zero"))
    workload = Workload(
        graph=gpt(columns, tp, vocab=padded(_VOCAB, tp), dropout=0.1),
        cluster=ClusterSpec(columns["gpu"], integer(columns["gpus"])),
        global_batch=integer(columns["global_batch"]),
        precision="fp16-mixed",
        framework="megatron-deepspeed",
        attention="math",
    )
    plan = {
        "tp": tp,
        "dp_replicate": 1 if zero else dp,
        "dp_shard": dp if zero else 1,
        "zero": zero,
        "micro_batches": 1,
        "recompute": "layer",
        "offload": columns["offload"] == "cpu",
    }
    memory = number(columns["mem_mib_max"])
    measured = Measured(
        step_time=number(columns["step_time_s"]),
        memory=None if memory is None else memory * MIB,
        memory_kind="driver",
        ran=columns["status"] == "ok",
    )
    key = pick(columns, "model", "gpus", "dp", "tp", "zero", "offload", "global_batch")
    group = (columns["model"], columns["gpus"])
    return Row("alpa_repo", line, key, workload, plan, measured, group)
