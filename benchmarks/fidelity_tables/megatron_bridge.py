"""NVIDIA's Megatron Bridge (vendor's tables): Llama 3 pre-training on H100 and B200.

Only reported, nothing is fitted to it: recompute and memory are not given. Used are dense Llama
rows in bf16 and fp8 on kinds of the catalogue. Where ``fsdp`` is above 1 the plan is ZeRO-3.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.fidelity_tables.nemo import vendor_plan
from benchmarks.fidelity_tables.read import Columns, integer, lines, llama, pick
from benchmarks.fidelity_tables.types import ClusterSpec, Measured, Reading, Row, Workload

FILE = "megatron_bridge_perf.csv"

_SYSTEMS = {"DGX-H100": "H100-80", "DGX-B200": "B200"}
_PRECISIONS = {"BF16": "bf16-mixed-fp32grad", "FP8": "fp8-mixed", "MXFP8": "fp8-mixed"}


def rows(data: Path) -> Reading:
    found = Reading()
    for line, columns in lines(data / FILE):
        if why := _refusal(columns):
            found.left_out[why] += 1
        else:
            found.rows.append(_row(line, columns))
    return found


def _refusal(columns: Columns) -> str:
    """Why a row is not used; empty if it is."""
    if not columns["layers"]:
        return "not a dense Llama"
    if columns["system"] not in _SYSTEMS:
        return "not a kind of the catalogue"
    if _precision(columns) not in _PRECISIONS:
        return "4-bit"
    if "re-Train" not in columns["section"] and "re-train" not in columns["section"]:
        return "not pre-training"
    return ""


def _precision(columns: Columns) -> str:
    return columns["precision"].split("-")[0].upper()


def _row(line: int, columns: Columns) -> Row:
    tp, cp = integer(columns["tp"]), integer(columns["cp"])
    workload = Workload(
        graph=llama(columns, tp, cp),
        cluster=ClusterSpec(_SYSTEMS[columns["system"]], integer(columns["gpus"]), 8, "ib3200"),
        global_batch=integer(columns["global_batch"]),
        precision=_PRECISIONS[_precision(columns)],
        framework="megatron-core",
    )
    plan = vendor_plan(columns)
    if integer(columns["fsdp"]) > 1:
        plan["zero"] = 3
    names = ("release", "system", "model", "gpus", "precision", "tp", "pp", "cp", "vp", "fsdp")
    key = pick(columns, *names, "micro_batch", "global_batch")
    group = (columns["system"], columns["model"], columns["gpus"], columns["precision"])
    measured = Measured(float(columns["step_time_s"]))
    return Row("megatron_bridge", line, key, workload, plan, measured, group)
