"""torchgpipe (arXiv 2004.09910): AmoebaNet-D, U-Net and ResNet-101 on up to 8 P40 of one host.

fp32, SGD. Speeds are of micro-batches through a GPipe pipeline with checkpointing: each partition
is redone as one (of all micro-batches here, there of all but the last); a row with 0 partitions
is one GPU without both. Where the file does not give micro-batches and batch, they are those of
the authors' benchmark scripts. Rows of the GPipe paper are of TPUs; rows of memory give sums over
all GPUs and no batch: both are left out.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.fidelity_tables.read import Columns, integer, lines, number, pick, shape
from benchmarks.fidelity_tables.types import (
    ClusterSpec,
    GraphSpec,
    Measured,
    Reading,
    Row,
    Workload,
)

FILE = "torchgpipe_p40.csv"

#: (batch, micro-batches) by partitions, of the authors' scripts (benchmarks/*-speed/main.py). For
#: two partitions of ResNet-101 they cut 25,000 samples into 1,667 parts: of 15, the last of 10.
_UNET = {0: (40, 1), 1: (80, 2), 2: (512, 32), 4: (512, 16), 8: (640, 40)}
_RESNET = {0: (118, 1), 1: (220, 2), 2: (25005, 1667), 4: (5632, 256), 8: (5400, 150)}
#: Batch by (partitions, micro-batches), likewise.
_AMOEBANET = {
    (2, 1): 96, (2, 4): 256, (2, 32): 1280,
    (4, 1): 160, (4, 4): 360, (4, 32): 1152,
    (8, 1): 196, (8, 4): 480, (8, 32): 1280,
}  # fmt: skip


def rows(data: Path) -> Reading:
    found = Reading()
    for line, columns in lines(data / FILE):
        if columns["gpu"] != "P40":
            found.left_out["TPU"] += 1
        elif not columns["table"].endswith("_speed"):
            found.left_out["memory summed over GPUs, batch not given"] += 1
        else:
            found.rows.append(_row(line, columns))
    return found


def _row(line: int, columns: Columns) -> Row:
    gpus = integer(columns["gpus"])
    batch, micro = _batch(columns)
    workload = Workload(
        graph=_graph(columns),
        cluster=ClusterSpec("P40-24", gpus),
        global_batch=batch,
        precision="fp32",
        framework="torchgpipe",
        optimizer="sgd",
    )
    plan = {
        "pp": gpus,
        "micro_batches": micro,
        "schedule": "gpipe",
        "recompute": "full" if columns["checkpointing"] == "1" else "none",
        "joined": True,
    }
    throughput = number(columns["throughput_samples_s"])
    assert throughput is not None
    key = pick(columns, "table", "model", "config", "partitions", "micro_batches", "checkpointing")
    measured = Measured(batch / throughput)
    return Row("torchgpipe", line, key, workload, plan, measured, (columns["model"],))


def _batch(columns: Columns) -> tuple[int, int]:
    partitions = integer(columns["partitions"])
    if columns["model"] == "U-Net":
        return _UNET[partitions]
    if columns["model"] == "ResNet-101":
        return _RESNET[partitions]
    micro = integer(columns["micro_batches"])
    return _AMOEBANET[partitions, micro], micro


def _graph(columns: Columns) -> GraphSpec:
    if columns["model"] == "ResNet-101":
        image = integer(columns["config"])
        return GraphSpec("resnet", shape(depths="3,4,23,3", image=image))
    match = re.fullmatch(r"\((\d+),(\d+)\)", columns["config"])
    assert match is not None, columns["config"]
    depth, width = int(match[1]), int(match[2])
    if columns["model"] == "U-Net":
        return GraphSpec("torchgpipe-unet", shape(depth=5, convolutions=depth, channels=width))
    return GraphSpec("amoebanet", shape(cells=depth, filters=width))
