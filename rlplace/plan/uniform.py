"""Uniform plans: the same degrees everywhere, as Megatron-LM and FSDP users write them."""

from __future__ import annotations

import warnings
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from rlplace.errors import InputError
from rlplace.plan.check import legal_micro_batches, nearest
from rlplace.plan.degrees import refuse_degree, refuse_unknown_degree
from rlplace.plan.tied import settle
from rlplace.plan.types import (
    GroupChoice,
    Instance,
    Mesh,
    Plan,
    Recompute,
    Stage,
    redoes_attention,
)


def uniform_plan(
    instance: Instance,
    *,
    pp: int = 1,
    tp: int = 1,
    dp_replicate: int | None = None,
    dp_shard: int = 1,
    micro_batch: int | None = None,
    micro_batches: int | None = None,
    zero: int = 0,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
    schedule: str = "1f1b",
    cuts: tuple[int, ...] | None = None,
    devices: tuple[int, ...] | None = None,
) -> Plan:
    """A plan from degrees.

    Devices are taken in the order of their ranks: tp innermost, then dp, then pp outermost, as
    Megatron-LM lays them out. Stages are balanced by FLOPs.

    Args:
        instance: The question.
        pp: Pipeline stages.
        tp: Tensor parallel degree; groups without a sharded layout stay replicated.
        dp_replicate: Replicas that hold everything; by default what the devices leave.
        dp_shard: Devices over which ZeRO shards; with `zero` above 0 and a `dp_shard` of 1, all
            replicas, for a ZeRO level without an axis to shard over would change nothing.
        micro_batch: Samples of a micro-batch on one replica (Megatron's meaning).
        micro_batches: Number of micro-batches; one of the two is enough, the default is about four
            a stage (one, without a pipeline) that divide the batch.
        zero: ZeRO level of every group.
        sequence_parallel: Whether tp ranks cut the sequence between groups. Layouts with such
            boundaries are not there yet, so True changes nothing, and warns.
        recompute: Recompute mode of every group; of those with a core attention, if that is what
            is redone.
        schedule: Name of the schedule.
        cuts: First group of each stage but the first; by default balanced.
        devices: Global ranks to use; by default all.

    Raises:
        InputError: If the degrees do not fit the devices, the groups or the batch; if `tp` does
            not divide what the groups cut (before anything is costed).
    """
    if sequence_parallel and tp > 1:
        warnings.warn(
            "sequence_parallel is ignored: the layouts have replicated boundaries", stacklevel=2
        )
    ranks = tuple(range(len(instance.cluster.devices))) if devices is None else devices
    _check_tp(instance, len(ranks), pp, tp)
    dp_replicate, dp_shard = _dp(len(ranks), pp, tp, dp_replicate, dp_shard, zero)
    dp = dp_replicate * dp_shard
    count = _micro_batches(instance.global_batch, dp, pp, micro_batch, micro_batches)
    cuts = balanced_cuts(instance, pp) if cuts is None else cuts
    bounds = (0, *cuts, len(instance.graph.groups))
    if len(cuts) != pp - 1 or any(a >= b for a, b in pairwise(bounds)):
        rule = f"{pp - 1} ascending group numbers between 0 and {bounds[-1]}, one a later stage"
        raise InputError("cuts", cuts, rule, balanced_cuts(instance, pp))
    size = tp * dp
    names = [structure.layouts_at(tp)[-1].name for structure in instance.graph.structures]
    owners = [group.structure for group in instance.graph.groups]
    modes: list[Recompute] = [
        "none" if recompute == "attention" and not redoes_attention(structure.work) else recompute
        for structure in instance.graph.structures
    ]
    stages = []
    for index in range(pp):
        members = ranks[index * size : (index + 1) * size]
        mesh = Mesh(members, dp_replicate, dp_shard, 1, tp)
        start, stop = bounds[index], bounds[index + 1]
        choices = tuple(GroupChoice(names[s], zero, modes[s]) for s in owners[start:stop])
        stages.append(Stage(start, stop, mesh, choices))
    return make_plan(instance, tuple(stages), count, schedule)


def make_plan(
    instance: Instance, stages: tuple[Stage, ...], micro_batches: int, schedule: str = "1f1b"
) -> Plan:
    """A plan for an instance, with everything that the instance fixes filled in.

    Layouts of groups that share a parameter are made to agree (`settle`).
    """
    return Plan(
        stages=tuple(settle(instance.graph, stage) for stage in stages),
        micro_batches=micro_batches,
        global_batch=instance.global_batch,
        schedule=schedule,
        graph=instance.graph.fingerprint,
        cluster=instance.cluster.fingerprint,
        precision=instance.precision,
        optimizer=instance.optimizer,
        attention=instance.attention,
        loss_chunks=instance.loss_chunks,
        fused=instance.fused,
        graph_name=instance.graph.name,
        source=instance.graph.source,
    )


def balanced_cuts(instance: Instance, pp: int) -> tuple[int, ...]:
    """First groups of stages 1 to pp - 1, so that the heaviest stage has the least `group_loads`.

    Exact, by bisection over the groups' prefix sums; a stage is never empty.

    Raises:
        InputError: If there are fewer groups than stages.
    """
    groups = len(instance.graph.groups)
    if not 1 <= pp <= groups:
        raise InputError("pp", pp, f"1 to {groups} stages: each has at least one group", groups)
    loads = group_loads(instance)
    prefix = np.concatenate([[0.0], np.cumsum(loads)])
    best: tuple[int, ...] = tuple(range(1, pp))
    low, high = float(loads.max(initial=0.0)), float(prefix[-1])
    for _ in range(60):
        middle = (low + high) / 2
        cuts = _cuts_below(prefix, pp, middle)
        if cuts is None:
            low = middle
        else:
            best, high = cuts, middle
    return best


def group_loads(instance: Instance) -> npt.NDArray[np.float64]:
    """How heavy each group is, for cuts that need no cost model: FLOPs of a sample, both passes.

    The elements that it moves are added as if each were one FLOP, so that a group without matmuls
    weighs a little.
    """
    works = [instance.graph.structure(group.index).work for group in instance.graph.groups]
    return np.array([work.flops(1) + work.backward_flops(1) + work.moved(1) for work in works])


def even_cuts(instance: Instance, segments: int) -> npt.NDArray[np.int64]:
    """Where stages may begin or end: all groups, or as many cuts as share the loads evenly."""
    groups = len(instance.graph.groups)
    if groups <= segments:
        return np.arange(groups + 1)
    loads = np.cumsum(group_loads(instance))
    wanted = np.linspace(0.0, loads[-1], segments + 1)[1:-1]
    inner = np.minimum(np.searchsorted(loads, wanted) + 1, groups - 1)
    return np.unique(np.concatenate([[0], inner, [groups]]))


def _cuts_below(prefix: np.ndarray, pp: int, limit: float) -> tuple[int, ...] | None:
    """Greedy cuts with no stage above `limit`, or None."""
    groups, start, cuts = len(prefix) - 1, 0, []
    for stage in range(pp):
        stop = int(np.searchsorted(prefix, prefix[start] + limit * (1 + 1e-12), side="right")) - 1
        stop = min(stop, groups - (pp - 1 - stage))
        if stop <= start:
            return None
        cuts.append(stop)
        start = stop
    return tuple(cuts[:-1]) if start == groups else None


def _check_tp(instance: Instance, devices: int, pp: int, tp: int) -> None:
    """Refuse an illegal tp degree, with the nearest one that these devices can be cut into."""
    fitting = [d for d in range(1, devices + 1) if devices % (max(pp, 1) * d) == 0]
    note = f"; the nearest plan on these {devices} devices has pp={pp}, tp={{nearest}}"
    refuse_degree(instance.graph, max(tp, 1), "tp", fitting, note)
    refuse_unknown_degree(instance.graph, max(tp, 1), "tp")


def _dp(
    devices: int, pp: int, tp: int, dp_replicate: int | None, dp_shard: int, zero: int
) -> tuple[int, int]:
    degrees = {"pp": pp, "tp": tp, "dp_replicate": dp_replicate, "dp_shard": dp_shard}
    for field, value in degrees.items():
        if value is not None and value < 1:
            raise InputError(field, value, "a degree is at least 1", 1)
    if dp_replicate is None:
        if devices % (pp * tp * dp_shard):
            rule = f"pp * tp * dp_shard must divide the {devices} devices"
            raise InputError("pp, tp, dp_shard", (pp, tp, dp_shard), rule)
        dp_replicate = devices // (pp * tp * dp_shard)
    if zero and dp_shard == 1:
        dp_replicate, dp_shard = 1, dp_replicate
    if pp * tp * dp_replicate * dp_shard > devices:
        need = pp * tp * dp_replicate * dp_shard
        raise InputError("pp, tp, dp", need, f"more devices than the {devices} there are", devices)
    return dp_replicate, dp_shard


def _micro_batches(
    global_batch: int, dp: int, pp: int, micro_batch: int | None, micro_batches: int | None
) -> int:
    legal = legal_micro_batches(global_batch, dp)
    if not legal:
        divisors = tuple(d for d in range(1, global_batch + 1) if global_batch % d == 0)
        rule = f"the {dp} replicas must divide the global batch of {global_batch}"
        raise InputError("dp_replicate * dp_shard", dp, rule, nearest(dp, divisors))
    if micro_batch is not None and micro_batches is not None:
        if micro_batch * micro_batches * dp != global_batch:
            rule = f"micro_batch * micro_batches * {dp} replicas is not {global_batch}; give one"
            near = nearest(micro_batches, legal)
            raise InputError("micro_batches", micro_batches, rule, near)
    if micro_batch is not None:
        if micro_batch < 1 or (global_batch // dp) % micro_batch:
            sizes = tuple(global_batch // dp // count for count in legal)
            rule = f"must divide the {global_batch // dp} samples of a replica"
            raise InputError("micro_batch", micro_batch, rule, nearest(micro_batch, sizes))
        return global_batch // dp // micro_batch
    if micro_batches is None:
        wanted = nearest(4 * pp if pp > 1 else 1, legal)
        assert wanted is not None
        return wanted
    if micro_batches not in legal:
        rule = f"must divide the {global_batch // dp} samples of a replica"
        raise InputError("micro_batches", micro_batches, rule, nearest(micro_batches, legal))
    return micro_batches
