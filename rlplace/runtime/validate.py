"""What is looked at on every rank before the first collective."""

from __future__ import annotations

from dataclasses import replace

import torch

from rlplace.cluster.types import Cluster, Device, DeviceKind, Link, Node
from rlplace.errors import InputError
from rlplace.graph.program import Program, extract
from rlplace.graph.types import OpGraph
from rlplace.plan.check import check
from rlplace.plan.types import Instance, Plan
from rlplace.runtime.boundary import AXES, layouts_of, needs_gradient
from rlplace.runtime.connections import crossings
from rlplace.runtime.local import localized
from rlplace.runtime.loss_chunks import chunked, losses
from rlplace.runtime.precision import PRECISIONS
from rlplace.runtime.split import match


def validate(plan: Plan, graph: OpGraph, program: Program, world_size: int) -> None:
    """Refuse a plan that these ranks cannot run on this model.

    Raises:
        InputError: With the field, the value, the rule and the nearest legal value.
    """
    needed = max(plan.devices, default=0) + 1
    if needed > world_size:
        rule = f"torchrun started {world_size} ranks, the plan uses {needed}"
        raise InputError("world size", world_size, rule, f"--nproc-per-node {needed}")
    instance = Instance(
        graph,
        stand_in_cluster(world_size),
        plan.global_batch,
        precision=plan.precision,
        optimizer=plan.optimizer,
        attention=plan.attention,
        loss_chunks=plan.loss_chunks,
        fused=plan.fused,
    )
    check(instance, replace(plan, cluster=instance.cluster.fingerprint))
    match(program, graph)
    check_supported(plan)
    crossings(program, graph, plan)
    _check_loss(program)
    _check_pieces(plan, graph, program)


def check_supported(plan: Plan) -> None:
    """Refuse what a plan may say and the runtime does not execute.

    Raises:
        InputError: With the field, the value, the rule and the nearest legal value.
    """
    if plan.fused:
        raise InputError("plan.fused", plan.fused, "the runtime runs op by op", False)
    if plan.precision not in PRECISIONS:
        rule = f"the runtime executes {', '.join(PRECISIONS)}"
        raise InputError("plan.precision", plan.precision, rule, "fp32")


def _check_pieces(plan: Plan, graph: OpGraph, program: Program) -> None:
    """Refuse groups that the plan's ranks cannot cut on two axes, or whose loss not in chunks."""
    grads, found = needs_gradient(program), plan.loss_chunks == 1
    for stage in plan.stages:
        both = min(stage.mesh.cp, stage.mesh.tp) > 1
        if not both and plan.loss_chunks == 1:
            continue
        by_cp, by_tp = (layouts_of(graph, stage, axis) for axis in AXES)
        for group in by_tp:
            piece = extract(program, graph.groups[group].ops)
            chunks = plan.loss_chunks > 1 and bool(losses(piece))
            if not both and not chunks:
                continue
            local = localized(piece, by_cp[group], by_tp[group], grads, program.prologue)
            if chunks:
                found = True
                chunked(local.piece, plan.loss_chunks)
    if not found:
        rule = "the model has no cross entropy whose tokens could go in chunks"
        raise InputError("plan.loss_chunks", plan.loss_chunks, rule, 1)


def _check_loss(program: Program) -> None:
    node = next(n for n in program.exported.graph.nodes if n.name == program.outputs[0])
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or value.ndim or not value.dtype.is_floating_point:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        rule = "the first output of forward must be the mean loss, a scalar float tensor"
        raise InputError("model", shape, rule)


def stand_in_cluster(count: int) -> Cluster:
    """A stand-in for a cluster: as many equal devices as there are ranks."""
    peak = dict.fromkeys(("fp32", "tf32", "bf16", "fp16", "fp8"), 1.0)
    kind = DeviceKind("rank", 1, peak, 1.0, host_bandwidth=1.0)
    node = Node(0, Link(1.0, 0.0))
    return Cluster(tuple(Device(i, "rank", 0) for i in range(count)), (node,), (kind,))
