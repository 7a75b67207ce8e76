"""The plans that are compared, and how each is written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from benchmarks.runtime_parts import public
from benchmarks.runtime_parts.model import Shape


@dataclass(frozen=True)
class Pair:
    """A plan and its twin.

    Args:
        name: For the table.
        ranks: That both use.
        degrees: Arguments of `rlplace.uniform_plan`.
        twin: Makes the step that is written by hand.
        rival: What it is made of.
        micro_batches: Of a step.
        shares: Whether each rank of the twin gets its own samples.
    """

    name: str
    ranks: int
    degrees: dict[str, int | str | bool]
    twin: Callable[[Shape, int], public.Step]
    rival: str
    micro_batches: int = 1
    shares: bool = False
    layers: int = field(default=4)


def _pipeline(schedule: str) -> Callable[[Shape, int], public.Step]:
    return partial(public.pipeline, schedule=schedule)


def _tensor(sequence: bool) -> Callable[[Shape, int], public.Step]:
    return partial(public.tensor_parallel, sequence=sequence)


def _fsdp(reshard: bool) -> Callable[[Shape, int], public.Step]:
    return partial(public.fsdp, reshard=reshard)


PAIRS = (
    Pair("one rank", 1, {}, public.eager, "eager"),
    Pair("one rank, 4 micro-batches", 1, {}, public.eager, "eager", 4),
    Pair("dp2", 2, {}, public.ddp, "DistributedDataParallel", shares=True),
    Pair("dp2, 4 micro-batches", 2, {}, public.ddp, "DistributedDataParallel", 4, shares=True),
    Pair("dp2, ZeRO-1", 2, {"zero": 1}, public.zero1, "ZeroRedundancyOptimizer", shares=True),
    Pair("dp2, ZeRO-2", 2, {"zero": 2}, _fsdp(False), "fully_shard, kept", shares=True),
    Pair("dp2, ZeRO-3", 2, {"zero": 3}, _fsdp(True), "fully_shard", shares=True),
    Pair("pp2, gpipe", 2, {"pp": 2, "schedule": "gpipe"}, _pipeline("gpipe"), "ScheduleGPipe", 4),
    Pair("pp2, 1f1b", 2, {"pp": 2}, _pipeline("1f1b"), "Schedule1F1B", 4),
    Pair(
        "pp2, interleaved",
        2,
        {"pp": 2, "schedule": "interleaved"},
        _pipeline("interleaved"),
        "ScheduleInterleaved1F1B",
        4,
    ),
    Pair("tp2", 2, {"tp": 2}, _tensor(False), "parallelize_module"),
    Pair(
        "tp2, sequence",
        2,
        {"tp": 2, "sequence_parallel": True},
        _tensor(True),
        "parallelize_module",
    ),
)
