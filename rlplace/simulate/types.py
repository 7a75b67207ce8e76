"""WHEN: what an estimate says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One bar of a timeline: what a device did from `start` to `end` (seconds).

    `kind` is ``F``, ``B``, ``reduce``, ``optimizer``, ``send`` or ``wait``.
    """

    device: int
    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Predicted or measured events of one step; both are drawn by the same writer."""

    events: tuple[Event, ...]
    title: str = ""

    @property
    def seconds(self) -> float:
        """End of the last event."""
        return max((event.end for event in self.events), default=0.0)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Peak bytes of one device, by cause.

    Args:
        params: Weights, in the precision of the instance.
        gradients: Gradients.
        optimizer: Optimizer states, master weights among them.
        activations: What autograd keeps of the micro-batches in flight, but for `logits`.
        logits: Class scores that the loss keeps (log-probabilities in fp32).
        transient: What comes and goes while an op runs.
        reserve: What the runtime and the allocator take for themselves.
    """

    params: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    transient: float = 0.0
    reserve: float = 0.0

    @property
    def held(self) -> float:
        """States and activations: what outlives an op, and what a run on the CPU can count."""
        return self.params + self.gradients + self.optimizer + self.activations + self.logits

    @property
    def total(self) -> float:
        """Sum of all causes."""
        return self.held + self.transient + self.reserve


def most_held(uses: Iterable[MemoryUse]) -> float:
    """`MemoryUse.held` of the device that holds most."""
    return max(use.held for use in uses)


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """One stage: seconds of one micro-batch, its share of the step, memory of a device.

    Args:
        forward: Seconds of the forward of one micro-batch.
        backward: Seconds of its backward, recompute included.
        reduce: Seconds of gradient reduction that do not hide behind backward.
        optimizer: Seconds of the optimizer step.
        idle: Share of the step in which the stage's devices wait.
        in_flight: Micro-batches whose activations are held at the peak.
        memory: Of the heaviest device of the stage, this stage's part.
    """

    forward: float
    backward: float
    reduce: float
    optimizer: float
    idle: float
    in_flight: int
    memory: MemoryUse


@dataclass(frozen=True)
class Estimate:
    """What a plan is predicted to cost.

    Args:
        step_time: Seconds of one optimizer step.
        peak_memory: Peak bytes by device, in the order of `Cluster.devices`; 0 where idle.
        feasible: Whether every device stays within its limit.
        reasons: What does not fit: device, bytes, limit.
        stages: Breakdown.
        memory: Breakdown by device.
        tokens_per_s: Tokens (or samples, where a sample is one item) a second, all devices.
        mfu: Model FLOPs utilisation: model FLOPs of a step over step time and total peak.
    """

    step_time: float
    peak_memory: tuple[float, ...]
    feasible: bool
    reasons: tuple[str, ...]
    stages: tuple[StageEstimate, ...]
    memory: tuple[MemoryUse, ...]
    tokens_per_s: float
    mfu: float

    @property
    def breakdown(self) -> tuple[StageEstimate, ...]:
        """The stages; the name that the README uses."""
        return self.stages
