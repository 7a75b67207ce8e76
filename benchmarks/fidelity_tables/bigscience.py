"""BigScience's logbooks: Megatron-DeepSpeed on A100-80 and V100 of Jean Zay (Omni-Path).

Hosts of 8 A100 or 4 V100 with four ports of 100 Gb/s; all-reduces inside a host of V100 measure as
everywhere, but fall by half in long runs (their note), which is taken for all hosts. Math attention
with a fused softmax, dropout, Megatron's padded vocabulary. Pipelines are cut by layers; where only
two more than these can be shared evenly, embedding and head count as one each. Memory is the driver
tool's.

What the table lacks is filled from itself: layers from rows of the same label and width, or the
one multiple of the stages that gives the label's parameters; heads are the most usual ones at the
width. A ZeRO level of ``0?`` is taken as 1: the states of its rows with eight replicas would be
larger than all that was measured. SUSPECT rows and those that blocked every launch are left out.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

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
from rlplace.units import GIB

FILE = "bigscience_megatron_deepspeed.csv"
FIT_ONE_IN = 8
#: Share of the usual bandwidth of NVLink in long runs.
_NVLINK = 0.5

#: Devices whose memory was noted: the first host's of the trials on V100 (the class scores of the
#: last stage do not show in them).
_LOOKED_AT = {"V100-16": 4, "V100-32": 4}


def rows(data: Path) -> Reading:
    found, table = Reading(), [(line, dict(columns)) for line, columns in lines(data / FILE)]
    for line, columns in table:
        if not columns["heads"]:
            columns["heads"] = _usual_heads(columns, table)
        if not columns["layers"]:
            columns["layers"] = _layers(columns, table)
        if why := _refusal(columns):
            found.left_out[why] += 1
        else:
            found.rows.append(_row(line, columns))
    found.rows = split_off(found.rows, FIT_ONE_IN)
    return found


def _refusal(columns: Columns) -> str:
    """Why a row is not used; empty if it is."""
    if "SUSPECT" in columns["note"]:
        return "suspect"
    if columns["status"] not in ("ok", "oom"):
        return columns["status"]
    if "launch_blocking=1" in columns["note"]:
        return "every launch blocks"
    if columns["offload"] not in ("none", "opt") or "Full Offload" in columns["section"]:
        return "parameters are offloaded, or it is not said what"
    if not columns["global_batch"]:
        return "batch not given"
    if not columns["layers"] or not columns["heads"]:
        return "layers or heads unknown"
    return ""


def _usual_heads(columns: Columns, table: list[tuple[int, dict[str, str]]]) -> str:
    seen = Counter(c["heads"] for _, c in table if c["hidden"] == columns["hidden"] and c["heads"])
    return seen.most_common(1)[0][0] if columns["hidden"] and seen else ""


def _layers(columns: Columns, table: list[tuple[int, dict[str, str]]]) -> str:
    """Layers of rows of the same label and width, or those that give the label's parameters."""
    if not columns["hidden"]:
        return ""
    pp, hidden = integer(columns["pp"]), integer(columns["hidden"])
    same = {
        c["layers"]
        for _, c in table
        if (c["model"], c["hidden"]) == (columns["model"], columns["hidden"]) and c["layers"]
    }
    if not same:
        embedding = integer(columns["vocab"]) * hidden
        size = float(columns["model"].rstrip("B"))
        same = {
            str(count)
            for count in range(pp, 200, pp)
            if round((12 * count * hidden**2 + embedding) / 1e9) == size
        }
    fitting = [count for count in same if integer(count) % pp == 0]
    return fitting[0] if len(fitting) == 1 else ""


def _row(line: int, columns: Columns) -> Row:
    gpus, tp, pp, dp = (integer(columns[name]) for name in ("gpus", "tp", "pp", "dp"))
    zero = 1 if columns["zero"] == "0?" else integer(columns["zero"])
    bf16 = columns["dtype"].startswith("bf16")
    workload = Workload(
        graph=gpt(columns, tp, vocab=padded(integer(columns["vocab"]), tp), dropout=0.1),
        cluster=ClusterSpec(
            columns["gpu"], gpus, integer(columns["gpus_per_node"]), "opa400", inside=_NVLINK
        ),
        global_batch=integer(columns["global_batch"]),
        precision="bf16-mixed-fp32grad" if bf16 else "fp16-mixed",
        framework="megatron-deepspeed",
        attention="math",
        optimizer="adamw-8bit" if "8-bit" in columns["note"] else "adamw",
    )
    plan = {
        "pp": pp,
        "tp": tp,
        "dp_replicate": 1 if zero else dp,
        "dp_shard": dp if zero else 1,
        "micro_batch": integer(columns["micro_batch"]),
        "zero": zero,
        "offload": columns["offload"] == "opt",
        "recompute": redone(columns["recompute"]),
        "balance": "layers",
    }
    layers = integer(columns["layers"])
    if layers % pp and (layers + 2) % pp == 0:
        plan["blocks"] = "ends"
    memory = number(columns["mem_gb_smi"])
    measured = Measured(
        step_time=number(columns["step_time_s"]),
        memory=None if memory is None else memory * GIB,
        memory_kind="driver",
        memory_of=_LOOKED_AT.get(columns["gpu"]),
        ran=columns["status"] == "ok",
    )
    names = ("gpu", "model", "gpus", "layers", "hidden", "heads", "tp", "pp", "dp", "micro_batch")
    group = (columns["gpu"], columns["model"], columns["gpus"], columns["seq_len"])
    key = pick(columns, *names, "global_batch", "zero", "dtype", "note")
    return Row("bigscience", line, key, workload, plan, measured, group)
