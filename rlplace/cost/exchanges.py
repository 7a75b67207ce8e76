"""What states and gradients are exchanged over by ZeRO level, and what crosses a border.

Rajbhandari et al., arXiv 1910.02054, sections 5 and 7: one place for the seconds of an estimate
and for the bytes that a run sends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rlplace.cluster.types import CollectiveKind
from rlplace.graph.types import Work
from rlplace.plan.types import GroupChoice, Instance, Mesh, Stage

#: Before each forward and each backward; after each backward; after the last one; after the step.
When = Literal["pass", "micro-batch", "step", "publish"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective on the states of a group.

    Args:
        kind: Of the collective.
        axis: Which ranks take part: those that ZeRO shards over, the replicas of the shards, or
            all that hold the same parameters.
        size: Bytes of the whole tensor.
        when: How often.
        ranks: How many take part.
        count: Into how many equal collectives it is cut.
    """

    kind: CollectiveKind
    axis: Literal["shard", "replicate", "dp"]
    size: float
    when: When
    ranks: int
    count: int = 1

    @property
    def given(self) -> float:
        """Bytes that one rank gives."""
        return self.size / (self.ranks if self.kind == "all_gather" else 1)


def state_exchanges(
    instance: Instance, work: Work, choice: GroupChoice, mesh: Mesh
) -> tuple[Exchange, ...]:
    """What the states of a group bring with them.

    ZeRO-0 all-reduces gradients; ZeRO-1 reduce-scatters them and gathers the updated weights;
    ZeRO-2 reduce-scatters after every micro-batch; ZeRO-3 also gathers before every pass, frozen
    parameters too; what is cut into slices goes slice by slice, in both.
    """
    run, size, zero = instance.execution, instance.bytes, choice.zero
    shards, copies = mesh.shards, mesh.dp_replicate
    gradients, weights = float(work.params * size.gradient), float(work.params * size.weight)
    whole = Exchange("all_reduce", "dp", gradients, "step", shards * copies)
    publish = Exchange("all_gather", "shard", weights, "publish", shards)
    if zero == 0 or shards == 1:
        return (whole,)
    if zero == 1 and not run.scatters:
        return (whole, publish)
    scattered: When = "step" if zero == 1 else "micro-batch"
    scatter = Exchange("reduce_scatter", "shard", gradients, scattered, shards)
    across = Exchange("all_reduce", "replicate", gradients / shards, "step", copies)
    if zero < 3:
        return (scatter, across, publish)
    whole_weights = weights + float(work.frozen_params * size.weight)
    if run.gather_bytes:
        whole_weights *= run.gather_bytes / size.weight
    gather = Exchange("all_gather", "shard", whole_weights, "pass", shards)
    if choice.slices == 1:
        return (scatter, across, gather)
    return (*_in_slices(scatter, work, choice), across, *_in_slices(gather, work, choice))


def _in_slices(whole: Exchange, work: Work, choice: GroupChoice) -> tuple[Exchange, ...]:
    """An exchange of all parameters as one for each weight in slices, and one for the rest."""
    every = work.params + work.frozen_params
    sizes = [whole.size * one.elements / every for one in work.weights if choice.cuts(one)]
    rest = replace(whole, size=max(0.0, whole.size - sum(sizes)))
    return (rest, *(replace(whole, size=size, count=choice.slices) for size in sizes))


def crossing_samples(before: Stage, after: Stage, micro_batch: int) -> float:
    """Samples that would take as long over a border, were they the same for all replicas.

    Replicas send and get at once, so the one with the most samples, on either side, is the last.
    With equal samples that is the whole micro-batch.

    Args:
        before: The stage that sends.
        after: The stage that receives.
        micro_batch: Samples of a whole micro-batch.
    """
    if not (before.shares or after.shares):
        return micro_batch
    most = max(*before.samples(micro_batch), *after.samples(micro_batch))
    return most * min(before.mesh.dp, after.mesh.dp)
