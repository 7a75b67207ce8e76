"""Does a lowered piece compute what the piece computes? Outputs, gradients and states compared.

`deviation` runs on any axis. `check_ranks` starts gloo ranks for it, one launch for many cases; the
ranks get the local programs as source text, so that they need no model, no export and no search.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._library.custom_ops import OPDEFS
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from rlplace.errors import RankFailedError
from rlplace.graph.program import Piece
from rlplace.graph.sharding.axis import Axis, use_axis
from rlplace.graph.sharding.lower import Assignment, lower
from rlplace.graph.sharding.rules import REPLICATE
from rlplace.graph.types import Placement, Shard
from rlplace.runtime.shard import GroupAxis, shard_parameter, unshard


@dataclass(frozen=True)
class Case:
    """A piece, how to shard it and what to run it on.

    Args:
        name: For the report.
        piece: Extracted for the device of `inputs`.
        assignment: How it is sharded.
        inputs: Whole values for ``piece.module``, in order; gradients are compared where they
            require one.
    """

    name: str
    piece: Piece
    assignment: Assignment
    inputs: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far a lowered piece is from the piece: ``max |a - b| / max |b|``, tensor by tensor.

    Args:
        outputs: Largest error of an output.
        gradients: Of a gradient. Some gradients are zero but for rounding (that of the bias of
            attention keys), so ``max |b|`` is at least a hundredth of the largest gradient.
        states: Of an input after the run; ops may write into buffers.
        sent: (kind, elements of the whole tensor) of each collective, in order.
        given: Bytes that the device gave to each of them.
        forward: How many of them ran in the forward pass.
    """

    outputs: float
    gradients: float
    states: float
    sent: tuple[tuple[str, int], ...]
    given: tuple[int, ...] = ()
    forward: int = 0


@dataclass
class _Recorder:
    """An axis that writes down what goes over it."""

    axis: Axis
    sent: list[tuple[str, int]] = field(default_factory=list)
    given: list[int] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.axis.rank

    @property
    def size(self) -> int:
        return self.axis.size

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        self._note("all_reduce", tensor, 1)
        return self.axis.all_reduce(tensor, op)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        self._note("all_gather", tensor, self.size)
        return self.axis.all_gather(tensor, dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        self._note("reduce_scatter", tensor, 1)
        return self.axis.reduce_scatter(tensor, dim)

    def all_to_all(self, tensor: Tensor, dim: int, joined: int) -> Tensor:
        self._note("all_to_all", tensor, self.size)
        return self.axis.all_to_all(tensor, dim, joined)

    def all_to_all_rows(self, tensor: Tensor, sent: Sequence[int], got: Sequence[int]) -> Tensor:
        self._note("all_to_all", tensor, self.size)
        return self.axis.all_to_all_rows(tensor, sent, got)

    def _note(self, kind: str, tensor: Tensor, devices: int) -> None:
        self.sent.append((kind, tensor.numel() * devices))
        self.given.append(tensor.numel() * tensor.element_size())


@dataclass(frozen=True)
class Local:
    """What one device needs to run a case and to judge the result.

    Args:
        name: Of the case.
        degree: Size of the axis.
        source: Python text of the local program.
        names: Global names in it: objects, or ``module:NAME``.
        modules: Modules that register the custom ops in it.
        inputs: Whole values.
        placements: Of the inputs.
        summands: Whether the gradient of an input is left as a summand.
        left: Placements of the outputs.
        outputs: What the piece gives.
        gradients: Of the inputs, None where there is none.
        states: The inputs after the run.
    """

    name: str
    degree: int
    source: str
    names: dict[str, Any]
    modules: list[str]
    inputs: list[Any]
    placements: list[Placement]
    summands: list[bool]
    left: list[Placement]
    outputs: list[Tensor]
    gradients: list[Tensor | None]
    states: list[Any]


def deviation(case: Case, axis: Axis) -> Deviation:
    """Run a piece whole, and as one device of an axis; every device of the axis must call this."""
    return run_local(prepare(case), axis)


def check_ranks(
    cases: Iterable[Case], ranks: int, timeout: float = 120.0
) -> dict[str, list[Deviation]]:
    """Run cases on gloo ranks of this machine.

    Args:
        cases: Each runs on ``ranks / degree`` axes at once; its degree divides `ranks`.
        ranks: Number of ranks to start.
        timeout: Seconds for all of it.

    Returns:
        Deviation on each rank, by the name of the case.

    Raises:
        RankFailedError: If a rank fails or time runs out; all ranks have ended by then.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.save([prepare(case) for case in cases], f"{folder}/cases.pt")
        started = spawn(_run_rank, (ranks, folder, timeout), ranks, join=False)  # type: ignore[no-untyped-call]
        deadline = time.monotonic() + timeout
        try:
            # join returns when one more rank has ended.
            while not (done := started.join(1.0)) and time.monotonic() < deadline:
                pass
        except (ProcessExitedException, ProcessRaisedException) as error:
            raise RankFailedError(str(error)) from error
        finally:
            for process in started.processes:
                process.kill()
        if not done:
            raise RankFailedError(f"{ranks} ranks did not finish in {timeout:.0f} s")
        reports = [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(ranks)]
    return {name: [report[name] for report in reports] for name in reports[0]}


def _run_rank(rank: int, ranks: int, folder: str, timeout: float) -> None:
    """What `check_ranks` starts."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout),
    )
    try:
        cases: list[Local] = torch.load(f"{folder}/cases.pt", weights_only=False)
        axes = {
            degree: axis_among(degree, rank, ranks) for degree in sorted({c.degree for c in cases})
        }
        torch.save({c.name: run_local(c, axes[c.degree]) for c in cases}, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def axis_among(degree: int, rank: int, ranks: int) -> GroupAxis:
    """The axis of neighbouring ranks that this rank is on; all ranks make all groups."""
    starts = range(0, ranks, degree)
    groups = [dist.new_group(list(range(start, start + degree))) for start in starts]
    return GroupAxis(groups[rank // degree])


def prepare(case: Case) -> Local:
    """Lower a case, and run the piece whole."""
    module = lower(case.piece, case.assignment)
    code = module.graph.python_code("self")
    names = {
        name: f"module:{value.__name__}" if isinstance(value, ModuleType) else value
        for name, value in code.globals.items()
    }
    places = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    placements = [case.assignment.held(place) for place in places]
    summands = [place in case.assignment.summands for place in places]
    whole = [_leaf(value, REPLICATE, 0, 1) for value in case.inputs]
    outputs = case.piece.module(*whole)
    left: list[Placement] = [REPLICATE] * len(outputs)
    _backward(outputs, outputs, left, None)
    return Local(
        case.name,
        case.assignment.degree,
        code.src,
        names,
        _op_modules(module),
        list(case.inputs),
        placements,
        summands,
        list(case.assignment.writes or left),
        [out.detach() for out in outputs],
        [x.grad if isinstance(x, Tensor) else None for x in whole],
        [x.detach() if isinstance(x, Tensor) else x for x in whole],
    )


def _op_modules(module: fx.GraphModule) -> list[str]:
    """Where the custom ops of a graph are registered: a rank must import it."""
    leaves = torch.utils._pytree.tree_leaves([(n.target, n.args) for n in module.graph.nodes])
    ops = {leaf._schema.name for leaf in leaves if isinstance(leaf, torch._ops.OpOverload)}
    known = [OPDEFS[op] for op in sorted(ops) if op in OPDEFS]
    return [definition._init_fn.__module__ for definition in known]


def run_local(case: Local, axis: Axis) -> Deviation:
    """Run the local program, and compare."""
    for name in case.modules:
        importlib.import_module(name)
    scope: dict[str, Any] = {
        name: sys.modules[value[7:]] if isinstance(value, str) else value
        for name, value in case.names.items()
    }
    exec(case.source, scope)
    inputs = zip(case.inputs, case.placements, strict=True)
    local = [_leaf(value, placement, axis.rank, axis.size) for value, placement in inputs]
    recorder = _Recorder(axis)
    with use_axis(recorder):
        got = scope["forward"](None, *local)
    forward = len(recorder.sent)
    _backward(got, case.outputs, case.left, axis)
    known = [grad for grad in case.gradients if grad is not None]
    floor = 0.01 * max((float(grad.abs().max()) for grad in known), default=0.0)
    together = [_full(out, left, axis) for out, left in zip(got, case.left, strict=True)]
    outputs = [_error(a, b) for a, b in zip(case.outputs, together, strict=True)]
    gradients, states = [], []
    ways = zip(case.placements, case.summands, strict=True)
    rows = zip(local, ways, case.gradients, case.states, strict=True)
    for part, (placement, summand), gradient, state in rows:
        if isinstance(part, Tensor):
            states.append(_error(state, _full(part, placement, axis)))
        if gradient is not None:
            own = axis.all_reduce(_given(part.grad)) if summand else part.grad
            gradients.append(_error(gradient, _full(own, placement, axis), floor))
    return Deviation(
        max(outputs, default=0.0),
        max(gradients, default=0.0),
        max(states, default=0.0),
        tuple(recorder.sent),
        tuple(recorder.given),
        forward,
    )


def _leaf(value: Any, placement: Placement, rank: int, size: int) -> Any:
    """A device's part of an input, as a leaf of autograd."""
    if not isinstance(value, Tensor):
        return value
    part = shard_parameter(value, placement, rank, size)
    return part.requires_grad_(value.requires_grad)


def _backward(
    results: Sequence[Tensor], whole: Sequence[Tensor], left: Sequence[Placement], axis: Axis | None
) -> None:
    """From fixed random gradients of the outputs, the same on every device, or its part of them."""
    draw = torch.Generator().manual_seed(0)
    seeds = []
    for result, full, placement in zip(results, whole, left, strict=True):
        if result.requires_grad:
            seed = torch.randn(full.shape, generator=draw, dtype=full.dtype)
            if axis is not None:
                seed = shard_parameter(seed, placement, axis.rank, axis.size)
            seeds.append(seed)
    torch.autograd.backward([result for result in results if result.requires_grad], seeds)


def _given(part: Tensor | None) -> Tensor:
    assert part is not None, "a gradient is missing"
    return part


def _full(part: Tensor | None, placement: Placement, axis: Axis) -> Tensor:
    own = _given(part)
    if not isinstance(placement, Shard):
        return own
    gathered = axis.all_gather(own.detach(), placement.dim)
    return unshard(gathered.chunk(axis.size, placement.dim), placement)


def _error(expected: Tensor, got: Tensor, floor: float = 1e-12) -> float:
    assert expected.shape == got.shape, f"{expected.shape} became {got.shape}"
    right, found = expected.detach().double(), got.detach().double()
    if torch.equal(right, found):
        return 0.0
    if not (right.isfinite().all() and found.isfinite().all()):
        return math.inf  # a maximum would pass over what is not a number
    return float((right - found).abs().max()) / max(float(right.abs().max()), floor, 1e-12)
