"""Bytes of states by ZeRO level (Rajbhandari et al., arXiv 1910.02054) and of activations."""

from __future__ import annotations

from dataclasses import dataclass

from rlplace.cost.slices import whole_share
from rlplace.graph.types import Layout, Shard, Work
from rlplace.plan.types import JOINED, GroupChoice, Instance, Mesh

#: Bytes in which a graph counts the class scores.
_FP32 = 4


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
    size, shard = instance.bytes, mesh.shards
    weights = (work.params + work.frozen_params) * size.weight
    return StateBytes(
        params=weights / (shard if choice.zero == 3 else 1),
        gradients=work.params * gradient_bytes(instance) / (shard if choice.zero >= 2 else 1),
        optimizer=0.0
        if choice.offload
        else work.params * instance.optimizer_bytes / (shard if choice.zero >= 1 else 1),
    )


def gradient_bytes(instance: Instance) -> int:
    """Bytes of a gradient that is kept, or of its sum and of what the sum is made of."""
    size = instance.bytes
    sums = instance.execution.both_gradients and size.gradient > size.weight
    return size.gradient + (size.weight if sums else 0)


def saved(
    instance: Instance, layout: Layout, choice: GroupChoice, samples: float, boundary: float
) -> float:
    """Bytes kept from the forward to the backward of one micro-batch.

    Args:
        instance: The question.
        layout: How the group is sharded.
        choice: How it runs.
        samples: Of a micro-batch, on one replica.
        boundary: Bytes of the group's whole inputs; of those that are cut a device has its part.
    """
    if choice.recompute == JOINED:
        return 0.0
    cut = any(isinstance(placement, Shard) for placement in layout.reads)
    own = boundary / (layout.degree if cut else 1)
    if choice.recompute == "full":
        return own
    if choice.recompute == "ops":
        return own + _kept_by_ops(instance, layout.work, samples) * instance.bytes.activation
    scores = choice.recompute == "none"
    return _saved_by_autograd(instance, layout, samples, scores=scores)


def transient(
    instance: Instance, layout: Layout, choice: GroupChoice, mesh: Mesh, samples: float
) -> float:
    """Bytes that come and go while a group runs, on top of what `saved` keeps.

    The larger of two phases of its backward pass, the loss and all other ops with the unsharded
    gradients (ZeRO-2, 3); in both, the gathered parameters (ZeRO-3) and what a recomputed group
    has saved again (`redone`). Of parameters in slices, and of their gradients, a part is whole.
    """
    size, work = instance.bytes, layout.work
    gather = instance.execution.gather_bytes or size.weight
    weights = (work.params + work.frozen_params) * gather
    shards, share = mesh.shards > 1, whole_share(work, choice) if choice.slices > 1 else 1.0
    gathered = weights * share if choice.zero == 3 and shards else 0.0
    gradients = work.params * size.gradient * share if choice.zero >= 2 and shards else 0.0
    ops = _op_phase(instance, work, samples) + gradients
    peak = max(_loss_phase(instance, work, samples), ops)
    return peak + gathered + redone(instance, layout, choice, samples)


def step_transient(instance: Instance, work: Work, choice: GroupChoice, mesh: Mesh) -> float:
    """Bytes that the end of a step makes of a group and frees, on the device that holds it.

    The buffer in which gradients are reduced, if the framework copies them, and what the optimizer
    makes: gradients as wide as the master weights need no copies there.
    """
    size, execution = instance.bytes, instance.execution
    reduced = work.params * size.gradient if execution.flattens and choice.zero == 0 else 0.0
    if choice.offload or size.gradient >= size.master:
        return reduced
    own = work.params / (mesh.shards if choice.zero >= 1 else 1)
    return reduced + own * execution.step_bytes


def redone(instance: Instance, layout: Layout, choice: GroupChoice, samples: float) -> float:
    """The part of `transient` that autograd saves while a recomputed group is in backward.

    All of it, or the score matrices where only the core attention is redone.
    """
    if choice.recompute in ("full", JOINED, "ops"):
        return _saved_by_autograd(instance, layout, samples)
    if choice.recompute == "attention":
        return _score_floats(instance, layout.work, samples) * instance.bytes.activation
    return 0.0


def _kept_by_ops(instance: Instance, work: Work, samples: float) -> float:
    """Float elements that the mode ``ops`` keeps: what attention gives and the matmuls not redone.

    The output of attention is as large as its queries.
    """
    kernels = (p for p in work.products if (p.kind, p.role) == ("attention", "forward"))
    outputs = (p.count * p.batch(samples) * p.rows(samples) * p.depth(samples) for p in kernels)
    kept = work.kept_by_ops(samples)
    of_attention = min(sum(outputs), kept)
    return of_attention + (kept - of_attention) * (1.0 - instance.execution.redone_matmuls)


def logits(instance: Instance, work: Work, samples: float) -> float:
    """Bytes of the class scores of one micro-batch that a loss holds at a time."""
    return work.logits_bytes(samples) / _FP32 * _score_size(instance) / instance.loss_chunks


def _score_size(instance: Instance) -> int:
    """Bytes of a class score in the loss."""
    return max(instance.execution.score_bytes, instance.bytes.activation)


def _loss_phase(instance: Instance, work: Work, samples: float) -> float:
    """Bytes that the loss makes in backward beside the log-probabilities, which are kept."""
    return instance.execution.score_copies * logits(instance, work, samples)


def _op_phase(instance: Instance, work: Work, samples: float) -> float:
    """Bytes of the largest other op; the gradient of class scores has replaced what they kept."""
    size, kept = instance.bytes.activation, logits(instance, work, samples)
    largest = work.transient(samples) if kept == 0.0 else work.chunked_transient(samples)
    scores = kept / _score_size(instance)
    return max(largest * size, scores * size) - kept


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
