"""Is a plan legal for an instance, and if not, which field breaks which rule.

Legality is about meaning (every group placed once, degrees that divide); whether a legal plan
fits in memory is for the estimate to say.
"""

from __future__ import annotations

import warnings
from itertools import pairwise
from math import prod

from rlplace.errors import InputError, nearest_names
from rlplace.plan.degrees import refuse_degree
from rlplace.plan.schedules import SCHEDULES
from rlplace.plan.tied import conflict
from rlplace.plan.types import (
    RECOMPUTE_MODES,
    Instance,
    Mesh,
    Plan,
    Stage,
    redoes_attention,
)


def check(instance: Instance, plan: Plan) -> None:
    """Check that a plan means something for an instance.

    Raises:
        InputError: With the field, the value, the rule and the nearest legal value.
    """
    check_fingerprints(instance, plan)
    _check_settings(instance, plan)
    _check_batch(instance, plan)
    _check_cover(instance, plan)
    for index, stage in enumerate(plan.stages):
        _check_mesh(instance, index, stage.mesh)
        _check_samples(plan, index, stage.mesh)
        _check_choices(instance, index, stage)
    _check_overlap(plan)
    _check_tied(instance, plan)


def check_fingerprints(instance: Instance, plan: Plan) -> None:
    """Refuse a plan that was made for another graph or cluster.

    Raises:
        InputError: If a fingerprint differs.
    """
    for field, value, wanted in (
        ("graph", plan.graph, instance.graph.fingerprint),
        ("cluster", plan.cluster, instance.cluster.fingerprint),
    ):
        if value != wanted:
            rule = f"the plan was made for another {field}; plan again for this one"
            raise InputError(f"plan.{field}", value, rule, wanted)


def legal_micro_batches(global_batch: int, dp: int) -> tuple[int, ...]:
    """Micro-batch counts that cut a global batch into equal whole samples for `dp` replicas."""
    if global_batch % dp:
        return ()
    share = global_batch // dp
    return tuple(count for count in range(1, share + 1) if share % count == 0)


def nearest(value: int, legal: tuple[int, ...]) -> int | None:
    """The legal value closest to `value`, the smaller one of two."""
    return min(legal, key=lambda other: (abs(other - value), other), default=None)


def _check_settings(instance: Instance, plan: Plan) -> None:
    if plan.schedule not in SCHEDULES:
        rule = f"must be one of {', '.join(SCHEDULES)}"
        near = nearest_names(plan.schedule, SCHEDULES) or "1f1b"
        raise InputError("plan.schedule", plan.schedule, rule, near)
    for field in ("precision", "optimizer", "attention", "loss_chunks", "fused"):
        value, wanted = getattr(plan, field), getattr(instance, field)
        if value != wanted:
            rule = f"the plan was made for another {field}; plan again for this one"
            raise InputError(f"plan.{field}", value, rule, wanted)


def _check_batch(instance: Instance, plan: Plan) -> None:
    if plan.global_batch != instance.global_batch:
        rule = "the plan was made for another global batch; plan again for this one"
        raise InputError("plan.global_batch", plan.global_batch, rule, instance.global_batch)
    legal = legal_micro_batches(plan.global_batch, 1)
    if plan.micro_batches not in legal:
        rule = f"must divide the global batch of {plan.global_batch}"
        near = nearest(plan.micro_batches, legal)
        raise InputError("plan.micro_batches", plan.micro_batches, rule, near)


def _check_cover(instance: Instance, plan: Plan) -> None:
    count = len(instance.graph.groups)
    if not plan.stages:
        raise InputError("plan.stages", (), f"must cover all {count} groups", f"[0, {count})")
    for index, stage in enumerate(plan.stages):
        if stage.start >= stage.stop:
            rule = "a stage has at least one group"
            near = (stage.start, stage.start + 1)
            raise InputError(f"plan.stages[{index}]", (stage.start, stage.stop), rule, near)
    bounds = [0, *(stage.stop for stage in plan.stages)]
    for index, stage in enumerate(plan.stages):
        if stage.start != bounds[index]:
            rule = "stages are contiguous: each group is placed exactly once"
            raise InputError(f"plan.stages[{index}].start", stage.start, rule, bounds[index])
    if bounds[-1] != count:
        last = len(plan.stages) - 1
        raise InputError(
            f"plan.stages[{last}].stop", bounds[-1], f"the graph has {count} groups", count
        )


def _check_mesh(instance: Instance, index: int, mesh: Mesh) -> None:
    field = f"plan.stages[{index}].mesh"
    degrees = (mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp)
    for name, degree in zip(("dp_replicate", "dp_shard", "cp", "tp"), degrees, strict=True):
        if degree < 1:
            raise InputError(f"{field}.{name}", degree, "a degree is at least 1", 1)
    product = prod(degrees)
    if product != len(mesh.devices):
        rule = f"the product of the degrees {degrees} is the number of devices"
        raise InputError(f"{field}.devices", len(mesh.devices), rule, product)
    once = tuple(dict.fromkeys(mesh.devices))
    if once != mesh.devices:
        raise InputError(f"{field}.devices", mesh.devices, "a device occurs once", once)
    size = len(instance.cluster.devices)
    for device in mesh.devices:
        if not 0 <= device < size:
            rule = f"the cluster has devices 0 to {size - 1}"
            raise InputError(f"{field}.devices", device, rule, min(max(device, 0), size - 1))
    if mesh.cp != 1:
        raise InputError(f"{field}.cp", mesh.cp, "context parallel is not supported yet", 1)
    refuse_degree(instance.graph, mesh.tp, f"{field}.tp")
    for group in mesh.tp_groups():
        kinds = [instance.cluster.devices[device].kind for device in group]
        if len(set(kinds)) > 1:
            rule = "a tp group has devices of one kind"
            raise InputError(f"{field}.devices", tuple(zip(group, kinds, strict=True)), rule)


def _check_samples(plan: Plan, index: int, mesh: Mesh) -> None:
    if plan.micro_batch % mesh.dp:
        legal = legal_micro_batches(plan.global_batch, mesh.dp)
        rule = (
            f"stage {index} has {mesh.dp} replicas, which must divide the micro-batch of "
            f"{plan.micro_batch} samples"
        )
        near = nearest(plan.micro_batches, legal)
        raise InputError("plan.micro_batches", plan.micro_batches, rule, near)


def _check_choices(instance: Instance, index: int, stage: Stage) -> None:
    field = f"plan.stages[{index}].choices"
    if len(stage.choices) != stage.stop - stage.start:
        rule = "one choice for each group of the stage"
        raise InputError(field, len(stage.choices), rule, stage.stop - stage.start)
    for group, choice in zip(range(stage.start, stage.stop), stage.choices, strict=True):
        name = instance.graph.groups[group].name
        layouts = instance.graph.structure(group).layouts_at(stage.mesh.tp)
        legal = tuple(layout.name for layout in layouts)
        if choice.layout not in legal:
            rule = f"{name} has the layouts {', '.join(legal)} at tp={stage.mesh.tp}"
            near = nearest_names(choice.layout, legal) or legal[-1]
            raise InputError(f"{field}[{group - stage.start}].layout", choice.layout, rule, near)
        if choice.zero not in (0, 1, 2, 3):
            rule = "a ZeRO level is 0, 1, 2 or 3"
            level = nearest(choice.zero, (0, 1, 2, 3))
            raise InputError(f"{field}[{group - stage.start}].zero", choice.zero, rule, level)
        _check_recompute(instance, group, choice.recompute, f"{field}[{group - stage.start}]")


def _check_recompute(instance: Instance, group: int, mode: str, field: str) -> None:
    if mode not in RECOMPUTE_MODES:
        rule = f"recompute is one of {', '.join(RECOMPUTE_MODES)}"
        near = nearest_names(mode, RECOMPUTE_MODES) or "none"
        raise InputError(f"{field}.recompute", mode, rule, near)
    if mode != "attention":
        return
    if not redoes_attention(instance.graph.structure(group).work):
        rule = f"{instance.graph.groups[group].name} has no core attention to redo"
        raise InputError(f"{field}.recompute", mode, rule, "none")
    if instance.attention == "flash":
        warnings.warn(
            "recompute=attention frees about nothing with a flash kernel, which keeps no score "
            "matrix, and costs its time; take none or full, or plan for attention=math",
            stacklevel=2,
        )


def _check_overlap(plan: Plan) -> None:
    meshes = list(dict.fromkeys(stage.mesh for stage in plan.stages))
    for index, mesh in enumerate(meshes):
        for other in meshes[:index]:
            shared = set(mesh.devices) & set(other.devices)
            if shared:
                rule = "two stages are on the same mesh or on disjoint ones"
                raise InputError("plan.stages.mesh.devices", sorted(shared), rule)
    for before, after in pairwise(plan.stages):
        if before.mesh == after.mesh:
            rule = "neighbouring stages on one mesh are one stage"
            raise InputError("plan.stages", (before.stop, after.start), rule)


def _check_tied(instance: Instance, plan: Plan) -> None:
    """All groups of a mesh that share a parameter hold it alike, also across its stages."""
    for mesh in dict.fromkeys(stage.mesh for stage in plan.stages):
        own = [stage for stage in plan.stages if stage.mesh == mesh]
        if (found := conflict(instance.graph, *own)) is not None:
            group, name = found
            index = next(i for i, s in enumerate(plan.stages) if s.start <= group < s.stop)
            stage = plan.stages[index]
            field = f"plan.stages[{index}].choices[{group - stage.start}].layout"
            layout = stage.choices[group - stage.start].layout
            rule = f"groups that share {name} hold it in the same placement"
            raise InputError(field, layout, rule, "replicate")
