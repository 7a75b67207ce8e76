"""A micro-batch of a stage without devices: what its ranks would send to each other on their axes.

The stage is the one that a run makes, on tensors that have a shape and no contents. So layouts,
values that are brought from one form into another, and what recompute runs again (it stops with the
last tensor that the backward pass needs) are counted by running them.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from rlplace.graph.program import Program
from rlplace.graph.sharding.axis import MetaAxis
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Plan
from rlplace.runtime.axes import Axes
from rlplace.runtime.boundary import size_of
from rlplace.runtime.ends import entering, leaving, run_backward
from rlplace.runtime.local import CountedAxis, LocalStates
from rlplace.runtime.slices import Crossing
from rlplace.runtime.split import split

_META = torch.device("meta")


def rehearsed(
    program: Program,
    graph: OpGraph,
    plan: Plan,
    index: int,
    arriving: Crossing | None,
    replica: int = 0,
) -> dict[str, int]:
    """Bytes that a rank gives to each collective of its axes, for one micro-batch.

    Args:
        program: The exported model.
        graph: Its groups.
        plan: The plan.
        index: Which stage.
        arriving: The border before the stage, forward; None before the first.
        replica: Of which replica the rank is.
    """
    stage = plan.stages[index]
    cp, tp = (
        CountedAxis(MetaAxis(size)) if size > 1 else None for size in (stage.mesh.cp, stage.mesh.tp)
    )
    counted = [axis for axis in (cp, tp) if axis is not None]
    if not counted:
        return {}
    states = LocalStates(_states(program), _META, tp)
    module = split(program, graph, plan, index, states, "meta", Axes(cp, tp))
    samples = stage.samples(plan.micro_batch)[replica]
    received, trained = {}, []
    if arriving is not None:
        rank = stage.mesh.firsts[replica]
        for at, spec in enumerate(arriving.tensors):
            shape = arriving.shape(at, rank, plan.micro_batch)
            received[spec.name] = torch.empty(shape, dtype=spec.dtype, device=_META)
        trained = [spec.name for spec in arriving.tensors if spec.grad]
    entered, _ = entering(received, trained)
    given = module(_inputs(program, samples), entered, samples)
    run_backward(leaving(given), {name: torch.empty_like(one) for name, one in given.items()})
    sent = Counter[str]()
    for axis in counted:
        sent.update(axis.traffic)
    return dict(sent)


def _states(program: Program) -> dict[str, Tensor]:
    """Parameters, buffers and constants by fully qualified name."""
    exported = program.exported
    found = {**exported.constants, **exported.state_dict}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _inputs(program: Program, samples: int) -> dict[str, Tensor]:
    """The user's tensors of so many samples."""
    found = {}
    for node in program.exported.graph.nodes:
        value = node.meta.get("val")
        if node.name in program.inputs and isinstance(value, Tensor):
            shape = [size_of(size, node.name)(samples) for size in value.shape]
            found[node.name] = torch.empty(shape, dtype=value.dtype, device=_META)
    return found
