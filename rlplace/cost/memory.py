"""Bytes of states by ZeRO level (Rajbhandari et al., arXiv 1910.02054) and of activations."""

from __future__ import annotations

from dataclasses import dataclass

from rlplace.graph.types import Layout, Work
from rlplace.plan.types import GroupChoice, Instance, Mesh


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of one group's states on one device."""

    params: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All states."""
        return self.params + self.gradients + self.optimizer


def states(instance: Instance, work: Work, choice: GroupChoice, mesh: Mesh) -> StateBytes:
    """States of a group: optimizer sharded from ZeRO-1, gradients from 2, parameters from 3.

    Offloaded optimizer states are not on the device.
    """
    size, shard = instance.bytes, mesh.dp_shard
    weights = (work.params + work.frozen_params) * size.weight
    return StateBytes(
        params=weights / (shard if choice.zero == 3 else 1),
        gradients=work.params * size.gradient / (shard if choice.zero >= 2 else 1),
        optimizer=0.0
        if choice.offload
        else work.params * instance.optimizer_bytes / (shard if choice.zero >= 1 else 1),
    )


def saved(
    instance: Instance, layout: Layout, choice: GroupChoice, samples: float, boundary: float
) -> float:
    """Bytes kept from the forward to the backward of one micro-batch."""
    if choice.recompute == "joined":
        return 0.0
    if choice.recompute == "full":
        return boundary
    if choice.recompute == "ops":
        return boundary + layout.work.kept_by_ops(samples) * instance.bytes.activation
    scores = choice.recompute == "none"
    return _saved_by_autograd(instance, layout, samples, scores=scores)


def transient(
    instance: Instance, layout: Layout, choice: GroupChoice, mesh: Mesh, samples: float
) -> float:
    """Bytes that come and go while a group runs.

    The working set of its largest op; the gathered parameters (ZeRO-3) and unsharded gradients
    (ZeRO-2, 3) of the group; what autograd saves while a recomputed group is in backward, or the
    score matrices where only the core attention is redone.
    """
    size, work = instance.bytes, layout.work
    peak = _working_set(instance, work, samples) * size.activation
    if choice.zero >= 2 and mesh.dp_shard > 1:
        peak += work.params * size.gradient
    if choice.zero == 3 and mesh.dp_shard > 1:
        peak += (work.params + work.frozen_params) * size.weight
    if choice.recompute in ("full", "joined", "ops"):
        peak += _saved_by_autograd(instance, layout, samples)
    elif choice.recompute == "attention":
        peak += _score_floats(instance, work, samples) * size.activation
    return peak


def logits(instance: Instance, work: Work, samples: float) -> float:
    """Bytes of the class scores of one micro-batch that a loss holds at a time."""
    return work.logits_bytes(samples) / instance.loss_chunks


def _working_set(instance: Instance, work: Work, samples: float) -> float:
    """Float elements of the largest op; a loss in chunks works on the scores of one chunk."""
    largest = work.transient(samples)
    if instance.loss_chunks == 1 or work.logits_bytes(samples) == 0.0:
        return largest
    return max(largest / instance.loss_chunks, work.chunked_transient(samples))


def _saved_by_autograd(
    instance: Instance, layout: Layout, samples: float, *, scores: bool = True
) -> float:
    """What autograd keeps; where the backward pass gathers again, shards instead of whole copies.

    A math kernel keeps the softmax of the scores and, where there is dropout, its output and its
    mask.
    """
    work, size = layout.work, instance.bytes.activation
    floats = work.saved(samples)
    if instance.execution.regather:
        floats -= layout.gathered(samples)
    others = work.saved_bytes(samples)
    if scores and instance.attention == "math":
        floats += work.score_floats(samples) + work.dropped_scores(samples)
        others += work.dropped_scores(samples)
    whole = floats * size + others
    return whole - (work.logits_bytes(samples) - logits(instance, work, samples))


def _score_floats(instance: Instance, work: Work, samples: float) -> float:
    """Elements of the score matrices in memory; a flash kernel has none."""
    return work.score_floats(samples) if instance.attention == "math" else 0.0
