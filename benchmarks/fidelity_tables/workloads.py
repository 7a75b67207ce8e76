"""From a row to its estimate. Graphs, clusters and estimators are made once and shared."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np

from benchmarks.fidelity_tables.types import (
    ClusterSpec,
    GraphSpec,
    MemoryKind,
    Result,
    Row,
    Workload,
)
from rlplace.cluster.types import Cluster
from rlplace.errors import InputError
from rlplace.graph import library
from rlplace.graph.models.shapes import FAMILIES
from rlplace.graph.types import OpGraph
from rlplace.plan.frameworks import framework, frameworks
from rlplace.plan.types import Instance, Plan
from rlplace.plan.uniform import layer_keys, uniform_plan
from rlplace.simulate.estimate import Estimator
from rlplace.simulate.types import Estimate

#: What a row's plan may say beside the arguments of `uniform_plan`: ``blocks`` names a rule for the
#: cuts (`CUTS`), ``every`` redoes one layer in so many and nothing outside of layers, ``joined``
#: redoes each stage as one.
EXTRAS = frozenset({"blocks", "every", "joined"})


def estimate_row(row: Row) -> Result:
    """The estimate of a row; what cannot be asked or built yet is a problem, not an error."""
    plan = dict(row.plan)
    if unknown := sorted(plan.keys() - _plan_arguments()):
        return Result(row, problem=f"uniform_plan has no {', '.join(unknown)}")
    try:
        estimator = estimator_of(row.workload)
        if not row.tries:
            return _judge(row, estimator, plan)
        return _best_of(row, estimator)
    except InputError as error:
        return Result(row, problem=str(error).split("\n")[0])


def plan_of(row: Row) -> tuple[Instance, Plan]:
    """A row's instance and its plan.

    Raises:
        InputError: If there is no such plan.
    """
    instance = estimator_of(row.workload).instance
    return instance, make_plan(instance, dict(row.plan))


def _best_of(row: Row, estimator: Estimator) -> Result:
    """The quickest of a row's tries that fits (the quickest of all, if none does)."""
    found = []
    for size in row.tries:
        try:
            found.append(_judge(row, estimator, row.plan | {"micro_batch": size}))
        except InputError:  # does not divide the batch
            continue
    if not found:
        return Result(row, problem="no micro-batch divides the batch")
    return min(found, key=lambda result: (not result.feasible, result.step_time))


def _judge(row: Row, estimator: Estimator, plan: dict[str, Any]) -> Result:
    estimate = estimator.estimate(make_plan(estimator.instance, plan))
    return result_of(row, estimate, estimator.instance)


def result_of(row: Row, estimate: Estimate, instance: Instance) -> Result:
    """What a row's table measured, as the estimate has it."""
    heaviest = max(estimate.stages, key=lambda stage: stage.forward + stage.backward)
    use = max(estimate.memory, key=lambda use: use.total)
    seconds = ("forward", "backward", "reduce", "optimizer", "idle", "in_flight")
    details = {name: float(getattr(heaviest, name)) for name in seconds}
    details |= {f"memory_{f.name}": getattr(use, f.name) for f in fields(use)}
    return Result(
        row=row,
        step_time=estimate.step_time,
        memory=memory_of(estimate, row.measured.memory_kind, instance, row.measured.memory_of),
        feasible=estimate.feasible,
        details=details,
    )


def memory_of(
    estimate: Estimate, kind: MemoryKind, instance: Instance, first: int | None = None
) -> float:
    """Bytes of the device that uses most, of what a figure of this kind counts.

    Only the `first` devices are looked at, or all for None. All tables are of clusters of one kind
    of device. What the allocator caches ends where the device does.
    """
    device = instance.cluster.kinds[0]
    context = device.reserve + instance.execution.reserve
    uses = estimate.memory[:first]
    if kind == "activations":
        return max(use.activations for use in uses)
    if kind == "allocated":
        return max(use.held + use.transient for use in uses)
    seen = max(max(use.total, min(use.total + use.cached, device.memory)) for use in uses)
    return seen if kind == "driver" else seen - context


@cache
def graph_of(spec: GraphSpec) -> OpGraph:
    """The op graph; from the cache on disk if it was captured before."""
    shape: dict[str, Any] = dict(spec.shape)
    if spec.family in FAMILIES:
        return library.build(spec.family, degrees=spec.degrees, **shape)
    from benchmarks.models import capture_model

    return capture_model(spec.family, shape, spec.degrees)


@cache
def cluster_of(spec: ClusterSpec) -> Cluster:
    """The cluster."""
    per_node = min(spec.gpus, spec.per_node)
    link = f":{spec.link}" if spec.link else ""
    cluster = Cluster.parse(f"{spec.gpus // per_node}x{per_node}x{spec.gpu}{link}")
    if spec.latency is not None:
        nodes = tuple(
            replace(node, nic=node.nic and replace(node.nic, latency=spec.latency))
            for node in cluster.nodes
        )
        cluster = replace(cluster, nodes=nodes)
    if spec.inside != 1.0:
        nodes = tuple(
            replace(
                node,
                intra=replace(node.intra, efficiency=node.intra.efficiency * spec.inside),
            )
            for node in cluster.nodes
        )
        cluster = replace(cluster, nodes=nodes)
    return cluster


@cache
def estimator_of(workload: Workload) -> Estimator:
    """An estimator of the instance; no memory is kept free, for the question is what ran."""
    known = workload.framework if workload.framework in frameworks() else "torch"
    options: dict[str, Any] = dict(workload.options)
    return Estimator(
        Instance(
            graph=graph_of(workload.graph),
            cluster=cluster_of(workload.cluster),
            global_batch=workload.global_batch,
            precision=workload.precision,
            optimizer=workload.optimizer,
            attention=workload.attention,
            framework=replace(framework(known), **options) if options else known,
            fused=workload.fused,
            memory_margin=0.0,
        )
    )


def make_plan(instance: Instance, arguments: dict[str, Any]) -> Plan:
    """`uniform_plan`, with what it does not know on its own (`EXTRAS`)."""
    given = {name: value for name, value in arguments.items() if name not in EXTRAS}
    if "blocks" in arguments and given["pp"] > 1:
        given["cuts"] = CUTS[arguments["blocks"]](instance.graph, given["pp"])
    plan = uniform_plan(instance, **given)
    if "every" in arguments:
        plan = _recompute_every(plan, instance.graph, arguments["every"])
    return _joined(plan) if arguments.get("joined") else plan


def layers_of(graph: OpGraph) -> list[int]:
    """The layer of each group: -1 before the first, one more than the last behind it."""
    keys = layer_keys(graph)
    number = {key: index for index, key in enumerate(dict.fromkeys(filter(None, keys)))}
    found: list[int] = []
    for key in keys:
        outside = len(number) if found and found[-1] >= 0 else -1
        found.append(outside if key is None else number[key])
    return found


def weighed_blocks(graph: OpGraph, stages: int) -> tuple[int, ...]:
    """Nanotron's cuts: a stage ends with the layer that passes its share of the weights.

    Counted are the weights of matmuls; embedding and head are blocks as layers are. Every stage has
    a block (in Nanotron the loss alone may be one).

    Raises:
        InputError: If there are fewer blocks than stages.
    """
    owners, weights = layers_of(graph), dict.fromkeys(layers_of(graph), 0.0)
    if len(weights) < stages:
        raise InputError("pp", stages, f"more stages than the {len(weights)} blocks", len(weights))
    for group, owner in zip(graph.groups, owners, strict=True):
        work = graph.structure(group.index).work
        weights[owner] += work.params if work.flops(1) else 0.0
    total, done = sum(weights.values()), 0.0
    cuts: list[int] = []
    for index, (owner, weight) in enumerate(weights.items()):
        done += weight
        behind, blocks_left = stages - 1 - len(cuts), len(weights) - 1 - index
        if behind and (done > total * (len(cuts) + 1) / stages or blocks_left == behind):
            cuts.append(owners.index(owner + 1))
    return tuple(cuts)


def counted_ends(graph: OpGraph, stages: int) -> tuple[int, ...]:
    """DeepSpeed's cuts where the embedding and the head count as a layer each."""
    owners = layers_of(graph)
    blocks = range(-1, max(owners) + 1)
    return tuple(owners.index(int(part[0])) for part in np.array_split(blocks, stages)[1:])


CUTS: dict[str, Callable[[OpGraph, int], tuple[int, ...]]] = {
    "weights": weighed_blocks,
    "ends": counted_ends,
}


def _joined(plan: Plan) -> Plan:
    """A plan that redoes each stage as one, where it redoes anything."""
    stages = []
    for stage in plan.stages:
        first, *rest = stage.choices
        if first.recompute == "full":
            rest = [replace(choice, recompute="joined") for choice in rest]
        stages.append(replace(stage, choices=(first, *rest)))
    return replace(plan, stages=tuple(stages))


def _recompute_every(plan: Plan, graph: OpGraph, every: int) -> Plan:
    """A plan that recomputes the layers whose number `every` divides, and nothing else."""
    keys, owners = layer_keys(graph), layers_of(graph)
    stages = []
    for stage in plan.stages:
        numbers = range(stage.start, stage.stop)
        choices = tuple(
            choice
            if keys[number] and owners[number] % every == 0
            else replace(choice, recompute="none")
            for number, choice in zip(numbers, stage.choices, strict=True)
        )
        stages.append(replace(stage, choices=choices))
    return replace(plan, stages=tuple(stages))


@cache
def _plan_arguments() -> frozenset[str]:
    return frozenset(inspect.signature(uniform_plan).parameters) | EXTRAS
