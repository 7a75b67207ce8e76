"""Bytes of states by ZeRO level (Rajbhandari et al., arXiv 1910.02054) and of activations."""

from __future__ import annotations

from dataclasses import dataclass

from rlplace.graph.types import Work
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
    """States of a group: optimizer sharded from ZeRO-1, gradients from 2, parameters from 3."""
    size, shard = instance.bytes, mesh.dp_shard
    weights = (work.params + work.frozen_params) * size.weight
    return StateBytes(
        params=weights / (shard if choice.zero == 3 else 1),
        gradients=work.params * size.gradient / (shard if choice.zero >= 2 else 1),
        optimizer=work.params * instance.optimizer_bytes / (shard if choice.zero >= 1 else 1),
    )


def saved(
    instance: Instance, work: Work, choice: GroupChoice, samples: float, boundary: float
) -> float:
    """Bytes kept from the forward to the backward of one micro-batch."""
    return boundary if choice.recompute == "full" else _saved_by_autograd(instance, work, samples)


def transient(
    instance: Instance, work: Work, choice: GroupChoice, mesh: Mesh, samples: float
) -> float:
    """Bytes that come and go while a group runs.

    The working set of its largest op; the gathered parameters (ZeRO-3) and unsharded gradients
    (ZeRO-2, 3) of the group; what autograd saves while a recomputed group is in backward.
    """
    size = instance.bytes
    peak = work.transient(samples) * size.activation
    if choice.zero >= 2 and mesh.dp_shard > 1:
        peak += work.params * size.gradient
    if choice.zero == 3 and mesh.dp_shard > 1:
        peak += (work.params + work.frozen_params) * size.weight
    if choice.recompute == "full":
        peak += _saved_by_autograd(instance, work, samples)
    return peak


def _saved_by_autograd(instance: Instance, work: Work, samples: float) -> float:
    floats = work.saved(samples)
    if instance.attention == "math":
        floats += work.score_floats(samples)
    return floats * instance.bytes.activation + work.saved_bytes(samples)
