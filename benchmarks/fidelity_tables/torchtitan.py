"""torchtitan (arXiv 2410.06511 and its documentation): Llama on H100, H200 and A100.

The H100 of the paper has 96 GB of HBM2e and 500 W. FSDP2 keeps fp32 shards; with a pipeline it
gathers parameters once a step. torch.compile fuses, and with fp8 it is always on; tensorwise fp8
gathers weights in fp8, and fp32 gradients are reduced. Tensor parallelism comes with sequence and
loss parallelism. A pipeline has as many micro-batches as stages, which is torchtitan's default and
what the two schedules of table 5 agree with (the bubble of 8 stages: 1.28 times between them).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.fidelity_tables.read import Columns, integer, lines, llama, number, pick, split_off
from benchmarks.fidelity_tables.types import ClusterSpec, Measured, Reading, Row, Value, Workload
from rlplace.units import GIB

FILE = "torchtitan_llama.csv"
FIT_ONE_IN = 6

#: The catalogue's names of the machines of torchtitan's tables.
_GPUS = {"H100-96-HBM2e-500W": "H100-96-500W", "H100-95-HBM2e": "H100-96-500W"}

#: Bytes an element that rowwise scaling moves: its kernels read rows and columns of their own, and
#: the matmul runs well below the speed of the tensorwise one.
_ROWWISE_CAST = 16.0

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {"recompute": "none"},
    "full": {"recompute": "layer"},
    "selective_op": {"recompute": "ops", "every": 1},
    "selective_layer": {"recompute": "layer", "every": 2},
}


#: Tables of versions that compile the loss as well, so that no class scores in fp32 are stored.
_COMPILED_LOSS = {"h200"}


def rows(data: Path) -> Reading:
    found = Reading()
    for line, columns in lines(data / FILE):
        if columns["global_batch"]:
            found.rows.append(_row(line, columns))
        else:
            found.left_out["batch not given"] += 1
    found.rows = split_off(found.rows, FIT_ONE_IN)
    return found


def _row(line: int, columns: Columns) -> Row:
    tp, pp, cp = (integer(columns[name]) for name in ("tp", "pp", "cp"))
    fp8 = columns["precision"].startswith("fp8")
    gpu = _GPUS.get(columns["gpu"], columns["gpu"])
    link = {"A100-80": "ib1600"}.get(gpu, "ib3200")
    workload = Workload(
        graph=llama(columns, tp, cp),
        cluster=ClusterSpec(gpu, integer(columns["gpus"]), 8, link),
        global_batch=integer(columns["global_batch"]),
        precision="fp8-mixed-fp32grad" if fp8 else "bf16-mixed-fp32grad",
        framework="torchtitan",
        fused=columns["compile"] == "1" or fp8,
        options=_options(columns),
    )
    plan: dict[str, Any] = {
        "pp": pp,
        "tp": tp,
        "dp_replicate": 1,
        "dp_shard": integer(columns["dp_fsdp"]),
        "zero": 3 if pp == 1 else 1,  # whole gradients until the last micro-batch
        "sequence_parallel": tp > 1,
        **_RECOMPUTE[columns["act_ckpt"]],
    }
    plan |= _pipeline(columns, pp)
    if cp > 1:
        plan["cp"] = cp
    memory = number(columns["mem_gib_peak_reserved"])
    measured = Measured(
        step_time=number(columns["step_time_s"]),
        memory=None if memory is None else memory * GIB,
        memory_kind="reserved",
        ran=columns["status"] == "ok",
    )
    names = ("table", "gpu", "model", "gpus", "seq_len", "dp_fsdp", "tp", "pp", "cp", "act_ckpt")
    key = pick(columns, *names, "compile", "async_tp", "precision", "local_batch")
    group = (columns["gpu"], columns["model"], columns["gpus"], columns["seq_len"])
    return Row("torchtitan", line, key, workload, plan, measured, group)


def _options(columns: Columns) -> tuple[tuple[str, Value], ...]:
    options: list[tuple[str, Value]] = []
    if columns["async_tp"] == "1":
        options.append(("overlap_exchange", 1.0))
    if columns["precision"] == "fp8_rowwise":
        options.append(("cast", _ROWWISE_CAST))
    elif columns["precision"].startswith("fp8"):
        options.append(("gather_bytes", 1))
    if columns["table"] in _COMPILED_LOSS:
        options.append(("score_bytes", 2))
    elif columns["tp"] != "1":
        options.append(("score_copies", 3.0))
    return tuple(options)


def _pipeline(columns: Columns, pp: int) -> dict[str, Any]:
    if pp == 1:
        return {"micro_batch": integer(columns["local_batch"])}
    plan: dict[str, Any] = {"micro_batches": pp, "schedule": "1f1b"}
    if columns["pp_schedule"].startswith("Interleaved"):
        plan |= {"schedule": "interleaved", "virtual": 2}
    return plan
