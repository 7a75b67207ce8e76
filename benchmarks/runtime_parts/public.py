"""The same plans written by hand with torch's public APIs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.parallel import DistributedDataParallel

from benchmarks.runtime_parts.model import Model, Part, Shape, loss_of

Step = Callable[[Mapping[str, Tensor]], None]
LR = 1e-3
#: Schedules of one stage a rank, and of several, by our names for them.
_SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MULTI = {"interleaved": ScheduleInterleaved1F1B, "zb-h1": ScheduleInterleavedZeroBubble}


def eager(shape: Shape, micro_batches: int) -> Step:
    """One process, gradients accumulated over micro-batches."""
    model = Model(shape)
    return _accumulated(model, micro_batches, _adamw(model))


def ddp(shape: Shape, micro_batches: int) -> Step:
    """`DistributedDataParallel`; gradients are reduced behind the last micro-batch."""
    model = DistributedDataParallel(Model(shape), gradient_as_bucket_view=True)
    return _accumulated(model, micro_batches, _adamw(model), model.no_sync)


def zero1(shape: Shape, micro_batches: int) -> Step:
    """`DistributedDataParallel` with `ZeroRedundancyOptimizer`."""
    model = DistributedDataParallel(Model(shape), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=LR, fused=True, parameters_as_bucket_view=True
    )
    return _accumulated(model, micro_batches, optimizer, model.no_sync)


def fsdp(shape: Shape, micro_batches: int, reshard: bool) -> Step:
    """`fully_shard` of every block and of the rest."""
    model = Model(shape)
    for block in model.part.blocks.values():
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    return _accumulated(model, micro_batches, _adamw(model))


def tensor_parallel(shape: Shape, micro_batches: int, sequence: bool) -> Step:
    """`parallelize_module`: Megatron's column and row cuts, with or without cut sequences."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Model(shape)
    for block in model.part.blocks.values():
        parallelize_module(block, mesh, _block_plan(sequence))
    if sequence:
        outer = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
    else:
        outer = {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
    parallelize_module(model.part, mesh, outer)
    return _accumulated(model, micro_batches, _adamw(model))


def pipeline(shape: Shape, micro_batches: int, schedule: str) -> Step:
    """`PipelineStage` with one of torch's schedules, over all ranks."""
    parts, run = passes(shape, micro_batches, schedule)
    optimizer = _adamw(nn.ModuleList(parts))

    def step(batch: Mapping[str, Tensor]) -> None:
        optimizer.zero_grad()
        run(batch)
        optimizer.step()

    return step


def passes(
    shape: Shape, micro_batches: int, schedule: str
) -> tuple[list[Part], Callable[[Mapping[str, Tensor]], list[Tensor]]]:
    """The parts of the model on this rank, and what runs all micro-batches through the pipeline.

    That gives the loss of each micro-batch on the last rank, and nothing on the others.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rounds = 2 if schedule == "interleaved" else 1
    count = ranks * rounds
    each = shape.layers // count
    own = [rank + ranks * turn for turn in range(rounds)]
    parts = [Part(shape, index * each, (index + 1) * each) for index in own]
    stages = [
        PipelineStage(part, index, count, torch.device("cpu"))
        for part, index in zip(parts, own, strict=True)
    ]
    if schedule in _SINGLE:
        runner = _SINGLE[schedule](stages[0], micro_batches, loss_fn=loss_of)
    else:
        runner = _MULTI[schedule](stages, micro_batches, loss_fn=loss_of)

    def run(batch: Mapping[str, Tensor]) -> list[Tensor]:
        losses: list[Tensor] = []
        given = (batch["ids"],) if rank == 0 else ()
        if rank == ranks - 1:
            runner.step(*given, target=batch["labels"], losses=losses)
        else:
            runner.step(*given)
        return losses

    return parts, run


def _accumulated(
    model: nn.Module,
    micro_batches: int,
    optimizer: torch.optim.Optimizer,
    quiet: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Step:
    """A step of as many passes as there are micro-batches; all but the last inside `quiet`."""

    def step(batch: Mapping[str, Tensor]) -> None:
        optimizer.zero_grad()
        parts = zip(*(batch[name].chunk(micro_batches) for name in ("ids", "labels")), strict=True)
        for index, (ids, labels) in enumerate(parts):
            with quiet() if index + 1 < micro_batches else contextlib.nullcontext():
                (model(ids, labels) / micro_batches).backward()
        optimizer.step()

    return step


def _block_plan(sequence: bool) -> dict[str, ParallelStyle]:
    """As torchtitan has it for a dense block."""
    columns = ("attention.q", "attention.k", "attention.v", "mlp.up")
    rows = ("attention.o", "mlp.down")
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    if not sequence:
        return plan | {name: RowwiseParallel() for name in rows}
    plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in rows}
    plan |= {name: SequenceParallel() for name in ("norm1", "norm2")}
    gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    return plan | {name: PrepareModuleInput(**gathered) for name in ("attention", "mlp")}


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    """One group of plain parameters and one of distributed ones, which a fused step cannot mix."""
    groups: dict[bool, list[nn.Parameter]] = {}
    for param in model.parameters():
        groups.setdefault(isinstance(param, DTensor), []).append(param)
    return torch.optim.AdamW([{"params": own} for own in groups.values()], lr=LR, fused=True)
