"""Is a plan legal for an instance, and if not, which field breaks which rule.

Legality is about meaning (every group placed once, degrees that divide); whether a legal plan
fits in memory is for the estimate to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from rlplace.errors import InputError
from rlplace.plan.choices import check_choices
from rlplace.plan.degrees import nearest, refuse_degree
from rlplace.plan.schedules import EXPLICIT, refuse_name, refuse_schedule
from rlplace.plan.tied import conflict
from rlplace.plan.types import Instance, Mesh, Plan, Stage

#: Schedules in which a stage and the next may be on one mesh: where a V turns, or as is asked.
_TURNS = ("zb-v", EXPLICIT)


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
        _check_samples(plan, index, stage)
        check_choices(instance, index, stage)
    _check_overlap(plan)
    _check_schedule(plan)
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
        refuse_other(field, value, wanted)


def refuse_other(field: str, value: object, wanted: object) -> None:
    """Refuse a plan that was made for something else in a field.

    Raises:
        InputError: If the two differ.
    """
    if value != wanted:
        rule = f"the plan was made for another {field}; plan again for this one"
        raise InputError(f"plan.{field}", value, rule, wanted)


def legal_micro_batches(global_batch: int, dp: int) -> tuple[int, ...]:
    """Micro-batch counts that cut a global batch into equal whole samples for `dp` replicas."""
    if global_batch % dp:
        return ()
    share = global_batch // dp
    return tuple(count for count in range(1, share + 1) if share % count == 0)


def _check_settings(instance: Instance, plan: Plan) -> None:
    refuse_name(plan.schedule, "plan.schedule")
    for field in ("precision", "optimizer", "attention", "loss_chunks", "fused"):
        refuse_other(field, getattr(plan, field), getattr(instance, field))


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
    _check_cp(instance, mesh.cp, f"{field}.cp")
    refuse_degree(instance.graph, mesh.tp, f"{field}.tp")
    for group in mesh.tp_groups():
        kinds = [instance.cluster.devices[device].kind for device in group]
        if len(set(kinds)) > 1:
            rule = "a tp group has devices of one kind"
            raise InputError(f"{field}.devices", tuple(zip(group, kinds, strict=True)), rule)


def _check_cp(instance: Instance, cp: int, field: str) -> None:
    """Refuse a cp degree at which no sequence of the model is cut."""
    bordered = (lay for structure in instance.graph.structures for lay in structure.bordered)
    known = tuple(sorted({1, *(layout.degree for layout in bordered if layout.axis == "cp")}))
    if cp not in known:
        rule = f"sequences are cut over cp at the degrees {', '.join(map(str, known))}"
        raise InputError(field, cp, rule, nearest(cp, known))


def _check_samples(plan: Plan, index: int, stage: Stage) -> None:
    mesh = stage.mesh
    if stage.shares:
        refuse_shares(plan.micro_batch, mesh.dp, stage.shares, f"plan.stages[{index}].shares")
    elif plan.micro_batch % mesh.dp:
        legal = legal_micro_batches(plan.global_batch, mesh.dp)
        rule = (
            f"stage {index} has {mesh.dp} replicas, which must divide the micro-batch of "
            f"{plan.micro_batch} samples"
        )
        near = nearest(plan.micro_batches, legal)
        raise InputError("plan.micro_batches", plan.micro_batches, rule, near)


def refuse_shares(micro_batch: int, dp: int, shares: tuple[int, ...], field: str) -> None:
    """Refuse shares that do not give every replica samples, or not those of a micro-batch.

    Raises:
        InputError: With legal shares in about the same proportions.
    """
    near = nearest_shares(micro_batch, dp, shares)
    if len(shares) != dp:
        raise InputError(field, shares, f"one share for each of the {dp} replicas", near)
    if min(shares) < 1:
        rule = "a replica without samples is an idle device: leave it out of the mesh"
        raise InputError(field, shares, rule, near)
    if sum(shares) != micro_batch:
        rule = f"the shares are the {micro_batch} samples of a micro-batch together"
        raise InputError(field, shares, rule, near)


def nearest_shares(micro_batch: int, dp: int, wanted: Sequence[int]) -> tuple[int, ...] | None:
    """Legal shares in about the proportions of some numbers; None if there are too few samples.

    Args:
        micro_batch: Samples of a micro-batch.
        dp: Replicas.
        wanted: A number for each replica; missing ones count as the mean.
    """
    if micro_batch < dp:
        return None
    known = [max(value, 0) for value in wanted[:dp]]
    mean = sum(known) / len(known) if any(known) else 1.0
    weights = [*known, *[mean] * (dp - len(known))] if any(known) else [1.0] * dp
    exact = [weight / sum(weights) * micro_batch for weight in weights]
    found = [max(1, int(value)) for value in exact]
    while sum(found) != micro_batch:
        step = 1 if sum(found) < micro_batch else -1
        able = [i for i in range(dp) if found[i] + step >= 1]
        at = max(able, key=lambda i: (step * (exact[i] - found[i]), -i))
        found[at] += step
    return tuple(found)


def _check_overlap(plan: Plan) -> None:
    meshes = list(dict.fromkeys(stage.mesh for stage in plan.stages))
    for index, mesh in enumerate(meshes):
        for other in meshes[:index]:
            shared = set(mesh.devices) & set(other.devices)
            if shared:
                rule = "two stages are on the same mesh or on disjoint ones"
                raise InputError("plan.stages.mesh.devices", sorted(shared), rule)
    for before, after in pairwise(plan.stages):
        if before.mesh == after.mesh and plan.schedule not in _TURNS:
            rule = "neighbouring stages on one mesh are one stage"
            raise InputError("plan.stages", (before.stop, after.start), rule)


def _check_schedule(plan: Plan) -> None:
    legal = [
        count
        for count in legal_micro_batches(plan.global_batch, 1)
        if all(
            sum(stage.shares) == plan.global_batch // count
            if stage.shares
            else plan.global_batch // count % stage.mesh.dp == 0
            for stage in plan.stages
        )
    ]
    refuse_schedule(plan, legal)


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
