"""Uniform plans: the same degrees everywhere, as Megatron-LM and FSDP users write them."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Literal

import numpy as np
import numpy.typing as npt

from rlplace.errors import InputError
from rlplace.graph.neighbours import sequence_layouts
from rlplace.graph.types import OpGraph
from rlplace.plan.check import legal_micro_batches, nearest_shares, refuse_shares
from rlplace.plan.degrees import nearest, refuse_degree, refuse_unknown_degree
from rlplace.plan.schedules import refuse_name
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

#: The first numbered module of a path: ``model.layers.3`` of ``model.layers.3.mlp``.
_LAYER = re.compile(r"^(?:[^.\d][^.]*\.)*\d+(?=\.|$)")


def uniform_plan(
    instance: Instance,
    *,
    pp: int = 1,
    tp: int = 1,
    cp: int = 1,
    dp_replicate: int | None = None,
    dp_shard: int = 1,
    micro_batch: int | None = None,
    micro_batches: int | None = None,
    zero: int = 0,
    sequence_parallel: bool = False,
    recompute: Recompute | Literal["layer"] = "none",
    offload: bool = False,
    slices: int = 1,
    schedule: str = "1f1b",
    virtual: int | None = None,
    balance: Literal["flops", "layers"] = "flops",
    cuts: tuple[int, ...] | None = None,
    devices: tuple[int, ...] | None = None,
    shares: tuple[int, ...] = (),
) -> Plan:
    """A plan from degrees.

    Devices are taken in the order of their ranks: tp innermost, then cp, dp and pp outermost, as
    Megatron-LM lays them out.

    Args:
        instance: The question.
        pp: Pipeline ranks.
        tp: Tensor parallel degree; groups without a sharded layout stay replicated.
        cp: Context parallel degree: devices that share the sequences of a replica. ZeRO shards over
            them too.
        dp_replicate: Replicas that hold everything; by default what the devices leave.
        dp_shard: Devices over which ZeRO shards; with `zero` above 0 and a `dp_shard` of 1, all
            replicas, for a ZeRO level without an axis to shard over would change nothing.
        micro_batch: Samples of a micro-batch on one replica (Megatron's meaning).
        micro_batches: Number of micro-batches; one of the two is enough, the default is about four
            a stage (one, without a pipeline) that divide the batch.
        zero: ZeRO level of every group.
        sequence_parallel: Whether tp ranks cut the sequence between groups (Korthikanti et al.,
            arXiv 2205.05198).
        recompute: Recompute mode of every group; of those with a core attention, if that is what
            is redone; ``layer`` redoes all groups of a layer as one, as Megatron's full
            recomputation does.
        offload: Whether every group's optimizer states are in the memory of the host.
        slices: Into how many slices weights that are gathered (ZeRO-3) are cut, in groups that
            have some which it divides.
        schedule: Name of the schedule.
        virtual: Stages of each pipeline rank; by default what the schedule asks for (one, but two
            for ``interleaved`` and ``zb-v``).
        balance: Whether stages share the FLOPs or the number of layers, as Megatron-LM does; what
            comes before the first layer and after the last belongs to the first and last stage.
        cuts: First group of each stage but the first; by default balanced.
        devices: Global ranks to use; by default all.
        shares: Samples of a micro-batch on each replica, where they are not equal.

    Raises:
        InputError: If the degrees do not fit the devices, the groups or the batch; if `tp` does
            not divide what the groups cut (before anything is costed).
    """
    ranks = tuple(range(len(instance.cluster.devices))) if devices is None else devices
    _check_tp(instance, len(ranks), pp, tp)
    dp_replicate, dp_shard = _dp(len(ranks), (pp, tp, cp), dp_replicate, dp_shard, zero)
    dp = dp_replicate * dp_shard
    if shares:
        count = _shared(instance.global_batch, dp, shares, micro_batches)
    else:
        count = _micro_batches(instance.global_batch, dp, pp, micro_batch, micro_batches)
    owner = dealt(schedule, pp, virtual)
    if cuts is None:
        cut = layer_cuts if balance == "layers" else balanced_cuts
        cuts = cut(instance, len(owner))
    bounds = (0, *cuts, len(instance.graph.groups))
    if len(cuts) != len(owner) - 1 or any(a >= b for a, b in pairwise(bounds)):
        rule = f"{len(owner) - 1} ascending group numbers between 0 and {bounds[-1]}"
        near = balanced_cuts(instance, len(owner))
        raise InputError("cuts", cuts, f"{rule}, one a later stage", near)
    choices = _choices(instance, tp, zero, sequence_parallel, recompute, offload)
    if dp_shard * cp > 1:
        choices = tuple(_sliced(instance, *own, tp, slices) for own in enumerate(choices))
    size = tp * cp * dp
    stages = []
    for index, lane in enumerate(owner):
        members = ranks[lane * size : (lane + 1) * size]
        mesh = Mesh(members, dp_replicate, dp_shard, cp, tp)
        start, stop = bounds[index], bounds[index + 1]
        stages.append(Stage(start, stop, mesh, _alone(choices[start:stop]), shares))
    return make_plan(instance, tuple(stages), count, schedule)


def dealt(schedule: str, pp: int, virtual: int | None = None) -> tuple[int, ...]:
    """The pipeline rank of each stage, as the schedule deals them out.

    Args:
        schedule: Its name.
        pp: Pipeline ranks.
        virtual: Stages of each; by default what the schedule asks for.
    """
    refuse_name(schedule)
    rounds = virtual if virtual is not None else 2 if schedule in ("interleaved", "zb-v") else 1
    if rounds < 1:
        raise InputError("virtual", virtual, "a rank has at least one stage", 1)
    if schedule == "zb-v":
        if rounds != 2:
            raise InputError("virtual", virtual, "zb-v has two stages a rank", 2)
        return (*range(pp), *reversed(range(pp)))
    return tuple(range(pp)) * (rounds if pp > 1 else 1)


def _choices(
    instance: Instance,
    tp: int,
    zero: int,
    sequence_parallel: bool,
    recompute: Recompute | Literal["layer"],
    offload: bool,
) -> tuple[GroupChoice, ...]:
    """One choice for each group."""
    graph = instance.graph
    if sequence_parallel and tp > 1:
        names = tuple(layout.name for layout in sequence_layouts(graph, tp))
    else:
        last = [structure.layouts_at(tp)[-1].name for structure in graph.structures]
        names = tuple(last[group.structure] for group in graph.groups)
    if recompute == "layer":
        modes = _redone_by_layer(instance)
    else:
        redoes = [redoes_attention(structure.work) for structure in graph.structures]
        modes = tuple(
            "none" if recompute == "attention" and not redoes[group.structure] else recompute
            for group in graph.groups
        )
    return tuple(
        GroupChoice(name, zero, mode, offload) for name, mode in zip(names, modes, strict=True)
    )


def _sliced(
    instance: Instance, group: int, choice: GroupChoice, tp: int, slices: int
) -> GroupChoice:
    """The choice with its weights in slices, if that is legal."""
    layouts = instance.graph.structure(group).layouts_with("tp", tp)
    work = next(layout.work for layout in layouts if layout.name == choice.layout)
    (able,) = instance.slice_options(work, choice.zero, choice.recompute, (slices,))
    return replace(choice, slices=able)


def _redone_by_layer(instance: Instance) -> tuple[Recompute, ...]:
    """Full recompute of layers as one; what is no layer keeps its activations."""
    keys = layer_keys(instance.graph)
    modes: list[Recompute] = []
    for before, key in zip((None, *keys), keys, strict=False):
        modes.append("none" if key is None else "joined" if key == before else "full")
    return tuple(modes)


def _alone(choices: tuple[GroupChoice, ...]) -> tuple[GroupChoice, ...]:
    """The choices of a stage; its first group has no group before it to be redone with."""
    if choices[0].recompute != "joined":
        return choices
    return (replace(choices[0], recompute="full"), *choices[1:])


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


def layer_cuts(instance: Instance, stages: int) -> tuple[int, ...]:
    """First groups of stages 1 and on, so that each has as many layers as any other, or one less.

    Raises:
        InputError: If there are fewer layers than stages.
    """
    keys = layer_keys(instance.graph)
    firsts = [
        index
        for index, (before, key) in enumerate(zip((None, *keys), keys, strict=False))
        if key is not None and key != before
    ]
    if not 1 <= stages <= len(firsts):
        rule = f"1 to {len(firsts)} stages: each has at least one layer"
        raise InputError("pp * virtual", stages, rule, max(1, len(firsts)))
    return tuple(int(part[0]) for part in np.array_split(firsts, stages)[1:])


def layer_keys(graph: OpGraph) -> tuple[str | None, ...]:
    """The layer of each group, by the first numbered module in its name; None outside of all."""
    found = (_LAYER.match(group.name) for group in graph.groups)
    return tuple(match[0] if match else None for match in found)


def group_loads(instance: Instance) -> npt.NDArray[np.float64]:
    """How heavy each group is, for cuts that need no cost model: FLOPs of a sample, both passes.

    The elements that it moves are added as if each were one FLOP, so that a group without matmuls
    weighs a little. Where nothing is known of any, as in a graph of a profile, all weigh one.
    """
    works = [instance.graph.structure(group.index).work for group in instance.graph.groups]
    loads = [work.flops(1) + work.backward_flops(1) + work.moved(1) for work in works]
    return np.array(loads if any(loads) else [1.0] * len(loads))


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
    devices: int,
    others: tuple[int, int, int],
    dp_replicate: int | None,
    dp_shard: int,
    zero: int,
) -> tuple[int, int]:
    """(dp_replicate, dp_shard) beside `others`: pp, tp and cp."""
    named = dict(zip(("pp", "tp", "cp"), others, strict=True))
    degrees = {**named, "dp_replicate": dp_replicate, "dp_shard": dp_shard}
    for field, value in degrees.items():
        if value is not None and value < 1:
            raise InputError(field, value, "a degree is at least 1", 1)
    if dp_replicate is None:
        if devices % (prod(others) * dp_shard):
            rule = f"pp * tp * cp * dp_shard must divide the {devices} devices"
            raise InputError("pp, tp, cp, dp_shard", (*others, dp_shard), rule)
        dp_replicate = devices // (prod(others) * dp_shard)
    if zero and dp_shard == 1:
        dp_replicate, dp_shard = 1, dp_replicate
    need = prod(others) * dp_replicate * dp_shard
    if need > devices:
        raise InputError(
            "pp, tp, cp, dp", need, f"more devices than the {devices} there are", devices
        )
    return dp_replicate, dp_shard


def _shared(global_batch: int, dp: int, shares: tuple[int, ...], micro_batches: int | None) -> int:
    """Micro-batches of so many samples as the shares are together."""
    total = sum(shares)
    if total < 1 or global_batch % total:
        sizes = tuple(size for size in range(dp, global_batch + 1) if global_batch % size == 0)
        near = nearest_shares(nearest(total, sizes) or dp, dp, shares)
        rule = f"the shares together divide the global batch of {global_batch}"
        raise InputError("shares", shares, rule, near)
    refuse_shares(total, dp, shares, "shares")
    count = global_batch // total
    if micro_batches not in (None, count):
        rule = f"shares of {total} samples make another number"
        raise InputError("micro_batches", micro_batches, rule, count)
    return count


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
