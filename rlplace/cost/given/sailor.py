"""The objective of Sailor: the step time of a pipeline whose stages may mix kinds of devices.

Strati et al., SOSP 2025 (arXiv 2504.17096); the rule of the simulator in eth-easl/sailor, at commit
cf2c8e3. Megatron-DeepSpeed in fp32, 1F1B, Adam. Three things that the simulator lets pass are
refused here: a (kind, micro-batch, tp) that was not profiled (there it takes no time), a replica
over several machines (there it has no compute), and stages of different replica counts (there only
the first stage counts).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from rlplace.cost.given.sailor_form import SailorInstance, SailorPlan, SailorStage
from rlplace.errors import InputError

#: Bytes of a float.
FLOAT = 4
#: Bytes of a bucket of gradients; buckets are reduced one after the other.
BUCKET = 5e8
#: Shards of a gradient beyond this tp degree do not get smaller in Sailor's rule.
_MOST_SHARDS = 4
#: Bytes of a parameter: weight, gradient, Adam's two moments, and two temporary copies.
_STATES = 24
#: Bytes that the runtime takes, at tp 1 and above.
_RESERVES = (2e9, 3e9)

Replica = tuple[str, int]


@dataclass(frozen=True, slots=True)
class SailorStep:
    """Seconds of a step, by part.

    Args:
        micro_batches: Micro-batches of a replica.
        compute: Of each stage, for one micro-batch.
        transfer: Of each stage, for one micro-batch.
        update: The optimizer step.
        reduction: The gradient reduction, which nothing hides.
    """

    micro_batches: int
    compute: tuple[float, ...]
    transfer: tuple[float, ...]
    update: float
    reduction: float

    @property
    def seconds(self) -> float:
        """The step."""
        slowest = max(a + b for a, b in zip(self.compute, self.transfer, strict=True))
        filling = sum(self.compute) + sum(self.transfer)
        return (self.micro_batches - 1) * slowest + filling + self.update + self.reduction


def sailor_seconds(instance: SailorInstance, plan: SailorPlan) -> float:
    """Step time of a plan; infinite if it does not fit into memory.

    Raises:
        InputError: See `sailor_step`.
    """
    step = sailor_step(instance, plan)
    return step.seconds if fits_memory(instance, plan) else math.inf


def sailor_step(instance: SailorInstance, plan: SailorPlan) -> SailorStep:
    """Step time of a plan by its parts, whether or not it fits into memory.

    Raises:
        InputError: If the stages do not cover the layers in order, have different numbers of
            replicas, or more devices than there are; if a replica was not profiled, or is larger
            than a node.
    """
    _check(instance, plan)
    stages = plan.stages
    replicas = len(stages[0].replicas)
    return SailorStep(
        micro_batches=math.ceil(instance.batch / (plan.micro_batch * replicas)),
        compute=tuple(_compute(instance, plan.micro_batch, stage) for stage in stages),
        transfer=_transfers(instance, plan),
        update=max(
            instance.model.updates[kind, plan.micro_batch, tp]
            for stage in stages
            for kind, tp in stage.replicas
        ),
        reduction=max(_reduction(instance, stage) for stage in stages),
    )


def fits_memory(instance: SailorInstance, plan: SailorPlan) -> bool:
    """Whether every replica fits: a stage holds as many micro-batches as stages follow, and one."""
    count = len(plan.stages)
    return all(
        replica_bytes(instance, replica, stage.start, stage.stop, plan.micro_batch * (count - at))
        <= instance.memory[replica[0]]
        for at, stage in enumerate(plan.stages)
        for replica in set(stage.replicas)
    )


def replica_bytes(
    instance: SailorInstance, replica: Replica, start: int, stop: int, samples: int
) -> float:
    """Bytes of a device of a replica of layers [start, stop) that keeps activations of `samples`.

    Args:
        instance: The problem.
        replica: Kind and tp degree.
        start: First layer.
        stop: Layer after the last.
        samples: Samples in flight.
    """
    tp = replica[1]
    params = sum(instance.model.params[tp][start:stop])
    saved = sum(instance.model.saved[tp][start:stop])
    return _STATES * params + FLOAT * samples * saved + _RESERVES[tp > 1]


def transfer_seconds(
    instance: SailorInstance, source: Replica, target: Replica, size: float
) -> float:
    """Seconds to send `size` bytes between two replicas; every device of a tp group sends."""
    (sender, out), (receiver, into) = source, target
    sizes = instance.node_sizes
    key = (sender, min(out, sizes[sender]), receiver, min(into, sizes[receiver]))
    return _seconds(instance, key, size)


def reduction_seconds(
    instance: SailorInstance, pair: tuple[str, str], replicas: int, size: float
) -> float:
    """Seconds of a ring over replicas, as fast as one pair of neighbours lets it be.

    Args:
        instance: The problem.
        pair: Kinds of the two neighbours.
        replicas: Members of the ring.
        size: Bytes of the gradients.
    """
    full, rest = divmod(size, BUCKET)
    key = (pair[0], 1, pair[1], 1)
    bucket = _seconds(instance, key, BUCKET / replicas) if full else 0.0
    return 2 * (replicas - 1) * (full * bucket + _seconds(instance, key, rest / replicas))


def gradient_bytes(instance: SailorInstance, start: int, stop: int, tp: int) -> float:
    """Bytes of gradients that a replica reduces; `tp` is the smallest of the stage."""
    return sum(instance.model.params[1][start:stop]) * FLOAT / min(tp, _MOST_SHARDS)


def _seconds(instance: SailorInstance, key: tuple[str, int, str, int], size: float) -> float:
    fit = instance.fits.get(key)
    if fit is None:
        rule = "the profile has no bandwidth for these senders and receivers"
        raise InputError("replicas", key, rule, sorted(instance.fits))
    return fit.seconds(size)


def _compute(instance: SailorInstance, micro_batch: int, stage: SailorStage) -> float:
    return max(
        sum(instance.model.times[kind, micro_batch, tp][stage.start : stage.stop])
        for kind, tp in set(stage.replicas)
    )


def _transfers(instance: SailorInstance, plan: SailorPlan) -> tuple[float, ...]:
    """Activations go to the next stage and gradients to the one before, both by the sender."""
    stages = plan.stages
    count = len(stages)
    if count == 1:
        return (0.0,)

    def message(source: SailorStage, target: SailorStage, layer: int) -> float:
        size = instance.model.outputs[layer] * FLOAT * plan.micro_batch
        pairs = set(zip(source.replicas, target.replicas, strict=True))
        return max(transfer_seconds(instance, a, b, size) for a, b in pairs)

    forward = [message(a, b, a.stop - 1) for a, b in pairwise(stages)]
    backward = [message(b, a, b.start) for a, b in pairwise(stages)]
    first = forward[0] if count <= 3 else 2 * forward[0]
    inner = [forward[at] + backward[at - 1] for at in range(1, count - 1)]
    return (first, *inner, 2 * backward[-1])


def _reduction(instance: SailorInstance, stage: SailorStage) -> float:
    size = gradient_bytes(instance, stage.start, stage.stop, min(tp for _, tp in stage.replicas))
    pairs = {(a, b) for (a, _), (b, _) in pairwise(stage.replicas)}
    count = len(stage.replicas)
    return max((reduction_seconds(instance, pair, count, size) for pair in pairs), default=0.0)


def _check(instance: SailorInstance, plan: SailorPlan) -> None:
    cuts = [(stage.start, stage.stop) for stage in plan.stages]
    layers = len(instance.model.outputs)
    stops = [0, *(stop for _, stop in cuts)]
    if stops[-1] != layers or any(
        start != before or stop <= start for (start, stop), before in zip(cuts, stops, strict=False)
    ):
        raise InputError("stages: layers", cuts, f"must cover layers 0 to {layers - 1} in order")
    counts = [len(stage.replicas) for stage in plan.stages]
    if len(set(counts)) > 1 or not counts[0]:
        rule = "stages must have equally many replicas: the rule says nothing of others"
        raise InputError("stages: replicas", counts, rule, counts[0] or 1)
    replicas = Counter(replica for stage in plan.stages for replica in stage.replicas)
    for kind, tp in replicas:
        _check_replica(instance, plan.micro_batch, kind, tp)
    _check_devices(instance, replicas)


def _check_replica(instance: SailorInstance, micro_batch: int, kind: str, tp: int) -> None:
    if kind not in instance.counts:
        raise InputError("kind", kind, "the cluster has no such device", sorted(instance.counts))
    if tp > instance.node_sizes[kind]:
        rule = f"a replica must lie on one machine; those of {kind} are smaller"
        raise InputError("tp", tp, rule, instance.node_sizes[kind])
    if (kind, micro_batch, tp) not in instance.model.times or tp not in instance.model.params:
        profiled = sorted(key for key in instance.model.times if key[0] == kind)
        rule = f"{instance.model.name} was not profiled so"
        raise InputError("replica", (kind, micro_batch, tp), rule, profiled)


def _check_devices(instance: SailorInstance, replicas: Counter[Replica]) -> None:
    """Put the replicas of each kind on its nodes, the largest first, each where it first fits."""
    free = [size for _, size in instance.nodes]
    for (kind, tp), wanted in sorted(replicas.items(), reverse=True):
        for at, (name, _) in enumerate(instance.nodes):
            if name == kind:
                here = min(wanted, free[at] // tp)
                free[at] -= here * tp
                wanted -= here
        if wanted:
            used = sum(t * n for (name, t), n in replicas.items() if name == kind)
            rule = f"the replicas do not fit on the nodes of {kind}"
            raise InputError("devices", used, rule, instance.counts[kind])
