"""Megatron-LM: Narayanan et al., 2021 (arXiv 2104.04473) table 1, and the tables of its README.

Step times follow from the FLOP/s that are reported, by the authors' own formula, but for those of
September 2020, which were measured. Table 1 gives no micro-batch: where the file has none either,
the one of 1, 2, 4 and 8 with the shortest estimate that fits is taken; rows of January 2021 take
that of the same model in table 1. `vp_layers_per_stage` are layers of a virtual stage.
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
    llama,
    padded,
    pick,
    redone,
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

FILE = "megatron_gpt_scaling.csv"
FIT_ONE_IN = 6
_MICRO_BATCHES = (1, 2, 4, 8)
#: The Llama rows of the README; the file has no column for KV heads.
_KV_HEADS = 8


def table1(data: Path) -> Reading:
    """Table 1 of the paper."""
    return _read(data, "megatron_table1", {"table1_apr2021"})


def readme(data: Path) -> Reading:
    """The tables of the README."""
    named = {"jan2021", "sep2020_mp", "sep2020_dp", "weak_jul2024", "gpt3_175b_text", "fp8_h100"}
    return _read(data, "megatron_readme", named)


def _read(data: Path, name: str, tables: set[str]) -> Reading:
    found, table = Reading(), lines(data / FILE)
    published = {c["model"]: c["micro_batch"] for _, c in table if c["table"] == "table1_apr2021"}
    for line, columns in table:
        if columns["table"] in tables:
            given = columns["micro_batch"] or published.get(columns["model"], "")
            old = columns["table"] == "jan2021"
            micro = given if old else columns["micro_batch"]
            found.rows.append(_row(name, line, {**columns, "micro_batch": micro}))
        elif columns["table"] == "strong_jul2024" and name == "megatron_readme":
            found.left_out["degrees not given"] += 1
    found.rows = split_off(found.rows, FIT_ONE_IN)
    return found


def _row(name: str, line: int, columns: Columns) -> Row:
    gpus, tp, pp = (integer(columns[field]) for field in ("gpus", "tp", "pp"))
    dp, cp = _replicas(columns["dp"])
    modern = columns["gpu"].startswith("H100")
    workload = Workload(
        graph=_graph(columns, tp, cp),
        cluster=ClusterSpec(columns["gpu"], gpus, integer(columns["gpus_per_node"])),
        global_batch=integer(columns["global_batch"]),
        precision={"fp16": "fp16-mixed", "bf16": "bf16-mixed-fp32grad", "fp8": "fp8-mixed"}[
            columns["dtype"]
        ],
        framework="megatron-core" if modern else "megatron",
        attention="flash" if modern else "math",
    )
    micro = integer(columns["micro_batch"])
    plan: dict[str, Any] = {"pp": pp, "tp": tp, "balance": "layers"}
    plan |= {"recompute": redone(columns["recompute"])}
    if modern:  # the distributed optimizer and sequence parallelism
        plan |= {"dp_replicate": 1, "dp_shard": dp, "zero": 1, "sequence_parallel": tp > 1}
    else:
        plan |= {"dp_replicate": dp}
    if cp > 1:
        plan["cp"] = cp
    if (virtual := _virtual(columns, pp)) > 1:
        plan |= {"virtual": virtual, "schedule": "interleaved"}
    if micro:
        plan["micro_batch"] = micro
    key = pick(columns, "table", "gpu", "model", "gpus", "tp", "pp", "dp", "micro_batch", "dtype")
    group = (columns["table"], columns["gpu"], columns["model"], columns["gpus"])
    measured = Measured(float(columns["step_time_s"]))
    tries = () if micro else _MICRO_BATCHES
    return Row(name, line, key, workload, plan, measured, group, tries=tries)


def _graph(columns: Columns, tp: int, cp: int) -> GraphSpec:
    if columns["model"].startswith("llama"):
        return llama(columns | {"kv_heads": str(_KV_HEADS)}, tp, cp)  # type: ignore[operator]  # a dict
    vocab = padded(integer(columns["vocab"]), tp)
    dropout = 0.0 if columns["gpu"].startswith("H100") else 0.1
    return gpt(columns, tp, ffn=integer(columns["ffn"]), vocab=vocab, dropout=dropout)


def _replicas(text: str) -> tuple[int, int]:
    """Data and context parallel degrees of ``8`` or ``4xcp2``."""
    match = re.fullmatch(r"(\d+)(?:xcp(\d+))?", text)
    assert match is not None, text
    return int(match[1]), int(match[2] or 1)


def _virtual(columns: Columns, pp: int) -> int:
    """Virtual stages of a pipeline stage, from layers of one or from ``vp5``."""
    text = columns["vp_layers_per_stage"]
    if text.startswith("vp"):
        return int(text[2:])
    return integer(columns["layers"]) // (pp * int(text)) if text else 1
