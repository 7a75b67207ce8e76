"""The objective of Piper: the largest load of a pipeline stage.

Tarnawski et al., "Piper: Multidimensional Planner for DNN Parallelization", NeurIPS 2021.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlplace.cost.given.common import costs_of
from rlplace.errors import InputError
from rlplace.graph.formats.types import GivenInstance, PiperCosts, Variant


@dataclass(frozen=True)
class PiperStage:
    """A stage of a Piper plan.

    Args:
        groups: The groups that it runs.
        data_parallel: Copies, each with its share of the micro-batches.
        tensor_parallel: Devices of a copy.
        variants: Name of the variant of each group, in the order of `groups`.
    """

    groups: tuple[int, ...]
    data_parallel: int
    tensor_parallel: int
    variants: tuple[str, ...]


def stage_load(instance: GivenInstance, stage: PiperStage) -> float:
    """Time of a micro-batch on a stage, shared over its copies.

    Compute over d, plus the bytes over the bandwidth: for each edge that crosses the border
    2 (c + s) / d, where s is what tensor parallelism adds (forward and backward), and for the
    data-parallel exchange of the parameters 4 (d - 1) w / d / micro-batches (Piper, section 3, and
    `getTPSForResult` in algo.cpp of msr-fiddle/piper).

    Args:
        instance: A Piper instance.
        stage: The stage.

    Raises:
        InputError: If the instance is of another form, or a group has no such variant.
    """
    costs = costs_of(instance, PiperCosts)
    chosen = _chosen(instance, stage)
    copies = stage.data_parallel
    crossing = 0.0
    for edge, size in zip(instance.graph.edges, costs.edge_bytes, strict=True):
        inside, outside = edge.dst in chosen, edge.src in chosen
        if inside and not outside:
            crossing += 2.0 * (size + dict(chosen[edge.dst].sync_in)[edge.src])
        if outside and not inside:
            crossing += 2.0 * (size + dict(chosen[edge.src].sync_out)[edge.dst])
    params = sum(variant.params for variant in chosen.values())
    exchange = 4.0 * (copies - 1) * params / copies / costs.micro_batches
    compute = sum(variant.time for variant in chosen.values())
    return compute / copies + (crossing / copies + exchange) / costs.bandwidth


def stage_memory(instance: GivenInstance, stage: PiperStage, later_copies: int) -> float:
    """Bytes of a device of a stage: for each group a y + b, y micro-batches in flight.

    y is the sum of the data-parallel degrees of this and all later stages over its own, rounded up.

    Args:
        instance: A Piper instance.
        stage: The stage.
        later_copies: Sum of the data-parallel degrees of the stages after it.
    """
    in_flight = math.ceil((stage.data_parallel + later_copies) / stage.data_parallel)
    chosen = _chosen(instance, stage).values()
    return sum(variant.memory_each * in_flight + variant.memory_fixed for variant in chosen)


def piper_load(instance: GivenInstance, stages: Sequence[PiperStage]) -> float:
    """The objective of Piper: the largest stage load, the time of a micro-batch of the pipeline.

    Args:
        instance: A Piper instance.
        stages: In pipeline order.

    Returns:
        The load; infinity if a stage does not fit into memory.

    Raises:
        InputError: If the stages do not cover every group once, an edge runs backward, a degree
            does not divide the micro-batches, there are too many devices or copies, or a group has
            no such variant.
    """
    _check_stages(instance, stages)
    costs = costs_of(instance, PiperCosts)
    later = 0
    for stage in reversed(stages):
        if stage_memory(instance, stage, later) > costs.memory_cap:
            return math.inf
        later += stage.data_parallel
    return max(stage_load(instance, stage) for stage in stages)


def piper_bound(instance: GivenInstance) -> float:
    """No Piper plan has a smaller largest load: device-seconds without exchanges, shared evenly.

    A stage of d copies with t devices each has at least the load sum(time) / d, which is the sum of
    time x t over its d t devices; so the largest load is no less than the mean of that over all.

    Args:
        instance: A Piper instance.

    Raises:
        InputError: If the instance is of another form.
    """
    costs = costs_of(instance, PiperCosts)
    work = sum(min(v.time * v.degree for v in variants) for variants in costs.variants)
    return work / costs.devices


def _chosen(instance: GivenInstance, stage: PiperStage) -> dict[int, Variant]:
    """The variant of each group of a stage."""
    costs = costs_of(instance, PiperCosts)
    chosen = {}
    for group, name in zip(stage.groups, stage.variants, strict=True):
        offered = {v.name: v for v in costs.variants[group] if v.degree == stage.tensor_parallel}
        if name not in offered:
            at = f"{instance.graph.groups[group].name} at degree {stage.tensor_parallel}"
            near = sorted({(v.degree, v.name) for v in costs.variants[group]})
            raise InputError(f"variant of {at}", name, "the file has no such variant", near)
        chosen[group] = offered[name]
    return chosen


def _check_stages(instance: GivenInstance, stages: Sequence[PiperStage]) -> None:
    costs = costs_of(instance, PiperCosts)
    stage_of = {group: index for index, stage in enumerate(stages) for group in stage.groups}
    listed = sorted(group for stage in stages for group in stage.groups)
    if listed != list(range(len(instance.graph.groups))):
        raise InputError("stages: groups", listed, "every group must be in exactly one stage")
    for edge in instance.graph.edges:
        if stage_of[edge.src] > stage_of[edge.dst]:
            pair = f"{edge.tensor} -> {instance.graph.groups[edge.dst].name}"
            raise InputError("stages", pair, "this edge runs backward along the pipeline")
    for stage in stages:
        copies = stage.data_parallel
        if min(copies, stage.tensor_parallel) < 1 or costs.micro_batches % copies:
            rule = f"must be at least 1 and divide the {costs.micro_batches} micro-batches"
            raise InputError("stages: data_parallel", copies, rule)
    used = sum(stage.data_parallel * stage.tensor_parallel for stage in stages)
    if used > costs.devices:
        raise InputError("stages: devices", used, "more devices than there are", costs.devices)
    copies = sum(stage.data_parallel for stage in stages)
    if copies > costs.micro_batches:
        rule = "more copies than micro-batches"
        raise InputError("stages: data_parallel", copies, rule, costs.micro_batches)
