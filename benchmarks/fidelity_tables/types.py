"""What a row of a published table asks of the estimate, and what was measured. Plain data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

Value = str | int | float | bool | None

#: What a memory figure counts: tensors only (``allocated``), tensors and the allocator's cache
#: (``reserved``), all that the driver sees (``driver``), or activations alone.
MemoryKind = Literal["allocated", "reserved", "driver", "activations"]


@dataclass(frozen=True)
class GraphSpec:
    """A model: a family of the library or of `benchmarks.models`, its shape, and tp degrees."""

    family: str
    shape: tuple[tuple[str, Value], ...]
    degrees: tuple[int, ...] = ()


@dataclass(frozen=True)
class ClusterSpec:
    """Equal hosts.

    Args:
        gpu: A kind of the catalogue.
        gpus: Devices in all.
        per_node: Devices of a host; a smaller `gpus` is a part of one host.
        link: Name of the network, as ``ib3200``; empty for the kind's usual one.
        latency: Seconds a message takes between hosts, where the table says.
        inside: Share of what the links inside a host usually reach, where the source says less.
    """

    gpu: str
    gpus: int
    per_node: int = 8
    link: str = ""
    latency: float | None = None
    inside: float = 1.0


@dataclass(frozen=True)
class Workload:
    """An instance: equal workloads share one.

    Args:
        graph: The model.
        cluster: The devices.
        global_batch: Samples of a step.
        precision, framework, attention, optimizer, fused: As in `rlplace.plan.types.Instance`.
        options: Constants of the framework that the row's settings change, by name.
    """

    graph: GraphSpec
    cluster: ClusterSpec
    global_batch: int
    precision: str
    framework: str
    attention: str = "flash"
    optimizer: str = "adamw"
    fused: bool = False
    options: tuple[tuple[str, Value], ...] = ()


@dataclass(frozen=True)
class Measured:
    """What the table says.

    Args:
        step_time: Seconds of a step, None where it is not said.
        memory: Bytes of the device that uses most, likewise.
        memory_kind: What they count.
        memory_of: How many devices were looked at, from the first one on; None for all.
        ran: False for a row that ran out of memory, None where it is not said.
    """

    step_time: float | None = None
    memory: float | None = None
    memory_kind: MemoryKind = "allocated"
    memory_of: int | None = None
    ran: bool | None = True


@dataclass(frozen=True)
class Row:
    """One row.

    Args:
        table: Name of its table.
        line: Its number in the file, from 1.
        key: Columns that tell it apart, for people.
        workload: The question.
        plan: Arguments of `uniform_plan`, and of `workloads.EXTRAS`.
        measured: What the table says.
        group: Rows with the same may be compared: model, devices and sequence.
        fit: Whether constants may be fitted to it.
        tries: Micro-batches to choose from by the estimate, where the table does not say.
    """

    table: str
    line: int
    key: dict[str, str]
    workload: Workload
    plan: dict[str, Any]
    measured: Measured
    group: tuple[str, ...]
    fit: bool = False
    tries: tuple[int, ...] = ()


@dataclass
class Reading:
    """The rows of a table, and how many were left out for which reason."""

    rows: list[Row] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Result:
    """The estimate of a row, or why there is none.

    Args:
        row: The row.
        step_time: Seconds.
        memory: Bytes, of what the row's figure counts.
        feasible: Whether it is said to fit.
        problem: Why it could not be estimated; empty if it was.
        details: The breakdown of the heaviest stage, for study.
    """

    row: Row
    step_time: float = 0.0
    memory: float = 0.0
    feasible: bool = True
    problem: str = ""
    details: dict[str, float] = field(default_factory=dict)
