"""MosaicML's llm-foundry: MPT of 125M to 70B under FSDP on A100 and H100.

Flash attention, tied embeddings, no dropout. FULL_SHARD is ZeRO-3 and SHARD_GRAD_OP ZeRO-2;
activation checkpointing redoes whole blocks. FSDP keeps fp32 shards (16 bytes a parameter), and
reduces gradients in fp32 with the mixed precision DEFAULT, in bf16 with PURE. The PURE rows are the
older ones, of a checkpoint that redoes a block to its end.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.fidelity_tables.read import Columns, gpt, integer, lines, pick, split_off
from benchmarks.fidelity_tables.types import ClusterSpec, Measured, Reading, Row, Workload

FILE = "llmfoundry_mpt_fsdp.csv"
FIT_ONE_IN = 8

_GPUS = {
    "a100_40gb": ("A100-40", "ib1600"),
    "a100_80gb": ("A100-80", "ib1600"),
    "h100_80gb": ("H100-80", "ib3200"),
}


def rows(data: Path) -> Reading:
    made = [_row(line, columns) for line, columns in lines(data / FILE)]
    return Reading(split_off(made, FIT_ONE_IN))


def _row(line: int, columns: Columns) -> Row:
    kind, link = _GPUS[columns["gpu"]]
    gpus = integer(columns["gpus"])
    pure = columns["fsdp_mixed_precision"] == "PURE"
    compute = "fp8-mixed" if columns["precision"] == "amp_fp8" else "bf16-mixed"
    workload = Workload(
        graph=gpt(columns, ffn=integer(columns["ffn"])),
        cluster=ClusterSpec(kind, gpus, 8, link),
        global_batch=integer(columns["global_batch"]),
        precision=compute if pure else f"{compute}-fp32grad",
        framework="llm-foundry",
        options=(("early_stop", False),) if pure else (),
    )
    plan = {
        "dp_replicate": 1,
        "dp_shard": gpus,
        "micro_batch": integer(columns["micro_batch"]),
        "zero": 3 if columns["sharding"] == "FULL_SHARD" else 2,
        "recompute": "layer" if columns["act_ckpt"] == "1" else "none",
    }
    tokens = float(columns["tokens_per_s"])
    seconds = workload.global_batch * integer(columns["seq_len"]) / tokens
    names = ("gpu", "model", "gpus", "seq_len", "sharding", "act_ckpt", "micro_batch", "grad_accum")
    group = (columns["gpu"], columns["model"], columns["gpus"], columns["seq_len"])
    key = pick(columns, *names, "precision")
    return Row("llmfoundry", line, key, workload, plan, Measured(seconds), group)
