"""`rlplace.run`: a plan and a module, on the ranks that torchrun started."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlplace.errors import InputError
from rlplace.graph.program import Program
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Plan
from rlplace.runtime.assemble import Assembly, OptimizerFactory, assemble, optimizer_factory
from rlplace.runtime.cuts import BUCKET_BYTES
from rlplace.runtime.gather import Notes, full_tensors, measurement, memory_use, traffic_of
from rlplace.runtime.measure import Measurement
from rlplace.runtime.memory import ActivationTracker, LiveTracker, resident_peak
from rlplace.runtime.model import Batch, Model, batches, cast, load_model, peek, user_inputs
from rlplace.runtime.precision import PRECISIONS
from rlplace.runtime.validate import validate
from rlplace.runtime.world import World, join
from rlplace.simulate.types import MemoryUse


@dataclass(frozen=True)
class Options:
    """How a run goes.

    Args:
        steps: Measured steps.
        warmup: Steps before them; in the very first step activations are counted.
        lr: Learning rate of the named optimizers.
        seed: Seed of the parameters and of dropout.
        overlap: Reduce gradients while backward runs.
        bucket_bytes: Gradients that are reduced together.
        collect: Gather full gradients, weights and buffers to rank 0 after the last step.
        dtype: Replaces the dtype of the plan's precision (``float64`` in tests).
    """

    steps: int = 20
    warmup: int = 3
    lr: float = 1e-3
    seed: int = 0
    overlap: bool = True
    bucket_bytes: int = BUCKET_BYTES
    collect: bool = False
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name, value, least in (("steps", self.steps, 1), ("warmup", self.warmup, 0)):
            if value < least:
                raise InputError(name, value, f"must be at least {least}", least)
        if self.dtype not in (None, "float64", "float32", "bfloat16"):
            raise InputError("dtype", self.dtype, "must be float64, float32 or bfloat16")

    def dtype_for(self, plan: Plan) -> torch.dtype:
        """The dtype of float parameters and inputs."""
        if self.dtype is not None:
            found = getattr(torch, self.dtype)
            assert isinstance(found, torch.dtype)
            return found
        known = PRECISIONS.get(plan.precision)
        return known.weight if known is not None else torch.float32


def run(
    plan: Plan,
    model_fn: Callable[[], nn.Module],
    data: Iterable[Batch] | None = None,
    *,
    example: Batch | None = None,
    options: Options | None = None,
    optimizer: str | OptimizerFactory | None = None,
    graph: OpGraph | None = None,
    program: Program | None = None,
    device: str = "cpu",
    timeout: float = 600.0,
    world: World | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> Measurement:
    """Train a module by a plan and measure the steps. Every rank calls this.

    Start it under torchrun, with at least as many ranks as the plan uses. Every rank makes the
    whole module with the same seed and keeps its own part of it. Batch norm takes its statistics
    from each micro-batch of each replica, as plain data parallel training does.

    Args:
        plan: Made for the graph of this module.
        model_fn: Makes the module; the first thing that `forward` returns is the mean loss. The
            mean must be over as many items in every sample (no ignored labels).
        data: Batches of the plan's global batch, the same on every rank: dicts of keyword tensors
            or tuples of positional ones; by default the example, repeated to the global batch.
        example: A batch of at least 2 samples; by default the first one of `data`, or what the
            library gives for `plan.source`.
        options: Steps, seed, learning rate.
        optimizer: ``adamw``, ``sgd``, ``sgd-momentum`` or a function from a list of parameters to
            an optimizer; by default the plan's.
        graph: The graph of the plan, if it is at hand; otherwise the module is captured.
        program: The exported module, if it is at hand.
        device: ``cpu`` (gloo, every rank pinned to a core) or ``cuda`` (NCCL).
        timeout: Seconds after which a rank gives up waiting for another.
        world: Ranks that were joined before; by default `join(device, timeout)`.
        on_step: Called on every rank after each step, with its index and its seconds here.

    Returns:
        The same on every rank, but for `tensors`, which rank 0 alone has.

    Raises:
        InputError: If the plan is for another graph, more ranks, or a batch of another size;
            before any collective.
        RankFailedError: If a rank failed; names it and the cause.
    """
    options = options or Options()
    world = world or join(device, timeout)
    dtype = options.dtype_for(plan)

    def prepare() -> tuple[Model, Iterator[dict[str, Any]], OptimizerFactory]:
        make = optimizer_factory(optimizer or plan.optimizer, options.lr)
        first, stream = peek(data) if data is not None else (None, None)
        sample = cast(example or first or _library_example(plan, options.seed), dtype)
        model = load_model(
            plan,
            model_fn,
            sample,
            dtype=dtype,
            seed=options.seed,
            graph=graph,
            program=program,
        )
        validate(plan, model.graph, model.program, world.size)
        flow = _on_device(
            model.program, batches(stream, sample, plan.global_batch), plan, dtype, world
        )
        return model, flow, make

    try:
        model, flow, make = world.together(prepare)
        try:
            assembly = assemble(
                world, plan, model, make, options.overlap, options.bucket_bytes, options.seed
            )
            del model  # the ranks' own parts are all that is left of it
            return _train(world, plan, assembly, flow, options, on_step)
        except Exception as error:
            raise world.fail(error) from error
    finally:
        world.close()


def _train(
    world: World,
    plan: Plan,
    assembly: Assembly,
    flow: Iterator[dict[str, Any]],
    options: Options,
    on_step: Callable[[int, float], None] | None,
) -> Measurement:
    before = resident_peak()
    tracker = ActivationTracker([*assembly.params().values(), *assembly.buffers().values()])
    live = LiveTracker()
    notes = Notes([], [], [], [], MemoryUse(), 0, {})
    assembly.recorder.active = True
    for index in range(options.warmup + options.steps):
        if assembly.interpreter is not None:
            assembly.interpreter.track(*((None, None) if index else (tracker, live)))
        if index == 1 and world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(world.device)
        loss = _timed_step(world, plan, assembly, next(flow), notes)
        if loss is not None and world.rank in plan.stages[-1].mesh.firsts:
            notes.losses.append(float(loss))
        if on_step is not None:
            on_step(index, notes.ends[-1] - notes.starts[-1])
    notes.memory = memory_use(assembly, tracker.peak, live.peak, world.device)
    notes.resident = resident_peak() - before
    notes.traffic = traffic_of(assembly)
    result = measurement(world, plan, notes, options.warmup)
    if options.collect:
        result.tensors.update(full_tensors(world, assembly))
    return result


def _timed_step(
    world: World, plan: Plan, assembly: Assembly, batch: dict[str, Any], notes: Notes
) -> torch.Tensor | None:
    """One step, from a barrier to the end of this rank's work."""
    kernel = sdpa_kernel(SDPBackend.MATH) if plan.attention == "math" else contextlib.nullcontext()
    assembly.recorder.events = []
    dist.barrier()
    notes.starts.append(time.perf_counter())
    with kernel:
        loss = assembly.interpreter.step(batch) if assembly.interpreter is not None else None
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    notes.ends.append(time.perf_counter())
    notes.events.append(assembly.recorder.events)
    return loss


def _on_device(
    program: Program, stream: Iterator[Batch], plan: Plan, dtype: torch.dtype, world: World
) -> Iterator[dict[str, Any]]:
    """The batches as user inputs on this rank's device."""
    for batch in stream:
        values = user_inputs(program, cast(batch, dtype), plan.global_batch)
        yield {
            name: value.to(world.device) if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }


def _library_example(plan: Plan, seed: int) -> Batch:
    """What the library gives for the model of a plan.

    Raises:
        InputError: If the plan does not say which library model it is for.
    """
    if not plan.source:
        raise InputError("example", None, "give data or an example batch for your own module")
    from rlplace.graph.library import spec

    return spec(**plan.source).example(plan.global_batch, seed)  # type: ignore[arg-type]
