"""DT-FM (arXiv 2206.01288): GPT-3 XL on V100-16 over 1 to 10 Gb/s, and Megatron on p3.16xlarge.

``1Gbps 50ms`` is the network of each device, with its delay. A sharded parameter server is an
all-reduce in two halves; a central one is something else and left out. The vocabulary is GPT-2's.
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
    padded,
    pick,
    redone,
    split_off,
)
from benchmarks.fidelity_tables.types import ClusterSpec, Measured, Reading, Row, Workload

FILE = "dtfm_gpt3xl_v100.csv"
FIT_ONE_IN = 8
_VOCAB = 50257
_CLASSES = 64


def rows(data: Path) -> Reading:
    found = Reading()
    for line, columns in lines(data / FILE):
        if why := _refusal(columns):
            found.left_out[why] += 1
        else:
            found.rows.append(_row(line, columns))
    found.rows = split_off(found.rows, FIT_ONE_IN)
    return found


def _refusal(columns: Columns) -> str:
    """Why a row is not used; empty if it is."""
    if columns["status"] == "hang":
        return "hang"
    if columns["dp_sync"] == "central PS":
        return "central parameter server"
    if not columns["global_batch"].isdigit():
        return "batch not certain"
    if columns["recompute"] == "?":
        return "recompute unknown"
    return ""


def _row(line: int, columns: Columns) -> Row:
    tp, pp, dp = (integer(columns[name]) for name in ("tp", "pp", "dp"))
    megatron = columns["framework"] == "megatron"
    # DT-FM classifies sentence pairs: it has no head over the vocabulary.
    vocab = padded(_VOCAB, tp) if megatron else _CLASSES
    workload = Workload(
        graph=gpt(columns, tp, vocab=vocab, dropout=0.1),
        cluster=_cluster(columns),
        global_batch=integer(columns["global_batch"]),
        precision="fp16-mixed" if columns["dtype"] == "fp16" else "fp32",
        framework="megatron" if megatron else "dtfm",
        attention="math",
    )
    fsdp = columns["dp_sync"] == "fsdp"
    plan: dict[str, Any] = {
        "pp": pp,
        "tp": tp,
        "dp_replicate": 1 if fsdp else dp,
        "dp_shard": dp if fsdp else 1,
        "zero": 3 if fsdp else 0,
        "micro_batch": integer(columns["micro_batch"]),
        "schedule": columns["schedule"],
        "recompute": redone(columns["recompute"].rstrip("?")),
        "offload": "offloaded" in columns["note"],
        "balance": "layers",
    }
    measured = Measured(
        step_time=number(columns["step_time_s"]),
        ran=columns["status"] == "ok",
    )
    names = ("table", "network", "gpus", "layers", "framework", "schedule", "tp", "pp", "dp")
    key = pick(columns, *names, "dp_sync", "micro_batch", "global_batch", "dtype", "note")
    shape = (columns["layers"], columns["hidden"], columns["seq_len"], columns["dtype"])
    group = (columns["framework"], columns["network"], columns["gpus"], *shape)
    return Row("dtfm", line, key, workload, plan, measured, group)


def _cluster(columns: Columns) -> ClusterSpec:
    gpus, per_node = integer(columns["gpus"]), integer(columns["gpus_per_node"])
    slow = re.fullmatch(r"(\d+)Gbps ([\d.]+)ms", columns["network"])
    if slow:
        return ClusterSpec(columns["gpu"], gpus, per_node, f"eth{slow[1]}", float(slow[2]) / 1e3)
    link = "eth10" if "p3.2xlarge" in columns["network"] else "eth25"
    return ClusterSpec(columns["gpu"], gpus, per_node, link)
