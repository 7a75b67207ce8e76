"""Hugging Face's Ultra-Scale Playbook: Llama-like models on 8 to 512 H100.

bf16 weights with fp32 gradient accumulation, sequence parallelism beside tensor parallelism, no
recompute, 1F1B, flash attention; hosts of 8 with 3200 Gb/s. Nanotron cuts the pipeline by the
weights of its blocks. Rows marked ``failed`` mix causes and rows marked INCONSISTENT contradict
themselves: neither is used. Step times follow from tokens a second. Memory is in units of 1e9: with
those, rows without tensor parallelism have no bias.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.fidelity_tables.read import Columns, integer, lines, llama, number, pick, split_off
from benchmarks.fidelity_tables.types import ClusterSpec, Measured, Reading, Row, Workload

FILE = "nanotron_ultrascale.csv"
FIT_ONE_IN = 10


def rows(data: Path) -> Reading:
    found = Reading()
    for line, columns in lines(data / FILE):
        if columns["status"] != "ok":
            found.left_out["failed, for causes that are mixed"] += 1
        elif columns["note"].startswith("INCONSISTENT"):
            found.left_out["inconsistent"] += 1
        else:
            found.rows.append(_row(line, columns))
    found.rows = split_off(found.rows, FIT_ONE_IN)
    return found


def _row(line: int, columns: Columns) -> Row:
    gpus, tp, batch = (integer(columns[name]) for name in ("gpus", "tp", "global_batch"))
    tied = columns["tie_embed"] == "1"
    workload = Workload(
        graph=llama(columns, tp, tie_embeddings=tied),
        cluster=ClusterSpec("H100-80", gpus, 8, "efa3200"),
        global_batch=batch,
        precision="bf16-mixed-fp32grad",
        framework="nanotron",
    )
    zero, dp = integer(columns["zero"]), integer(columns["dp"])
    plan = {
        "pp": integer(columns["pp"]),
        "tp": tp,
        "dp_replicate": 1 if zero else dp,
        "dp_shard": dp if zero else 1,
        "micro_batch": integer(columns["micro_batch"]),
        "zero": zero,
        "sequence_parallel": tp > 1,
        "blocks": "weights",
    }
    tokens = number(columns["tokens_per_s_gpu"])
    memory = number(columns["peak_mem_gb"])
    assert tokens is not None
    measured = Measured(
        step_time=batch * integer(columns["seq_len"]) / (tokens * gpus),
        memory=None if memory is None else memory * 1e9,
        memory_kind="reserved",
        memory_of=1,
    )
    key = pick(columns, "model", "gpus", "dp", "tp", "pp", "micro_batch", "grad_accum", "zero")
    group = (columns["model"], columns["gpus"], columns["seq_len"])
    return Row("nanotron", line, key, workload, plan, measured, group)
