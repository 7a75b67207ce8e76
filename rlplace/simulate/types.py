"""WHEN: what an estimate says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Event:
    """One bar of a timeline: what a device did from `start` to `end` (seconds).

    `kind` is ``F``, ``B``, ``W`` (as of an `rlplace.plan.types.Action`), ``reduce``, ``optimizer``,
    ``send`` or ``wait``; in a measured one also ``checkpoint``, for the part of its writing that
    went on beside the step.
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
        cached: What the allocator keeps where there is room, and could do without, large buffers
            of the optimizer step among them: the driver's tool shows it, but it is not in `total`.
    """

    params: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    transient: float = 0.0
    reserve: float = 0.0
    cached: float = 0.0

    @property
    def held(self) -> float:
        """States and activations: what outlives an op, and what a run on the CPU can count."""
        return self.params + self.gradients + self.optimizer + self.activations + self.logits

    @property
    def total(self) -> float:
        """Sum of all causes."""
        return self.held + self.transient + self.reserve

    def within(self, reserve: float, fragmentation: float, cached: float) -> MemoryUse:
        """The same with what is taken on top: `reserve` bytes, and shares of all the rest."""
        own = self.held + self.transient
        return replace(
            self, reserve=reserve + fragmentation * own, cached=self.cached + cached * own
        )


def most_held(uses: Iterable[MemoryUse]) -> float:
    """`MemoryUse.held` of the device that holds most."""
    return max(use.held for use in uses)


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """One stage: seconds of one micro-batch, its share of the step, memory of a device.

    Args:
        forward: Seconds of the forward of one micro-batch.
        backward: Seconds of its backward, recompute included.
        reduce: Seconds of gradient reduction of all stages of its mesh that do not hide behind
            backward.
        optimizer: Seconds of the optimizer step.
        idle: Share of the step in which the stage's devices wait.
        in_flight: Micro-batches whose activations the stage holds at its own peak.
        memory: Of the heaviest device of the stage, this stage's part at its own peak.
        weight_backward: Seconds of `backward` that make gradients of parameters only.
    """

    forward: float
    backward: float
    reduce: float
    optimizer: float
    idle: float
    in_flight: int
    memory: MemoryUse
    weight_backward: float = 0.0


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """Where the step goes on the devices that are done last, in seconds; together the step time.

    Args:
        compute: Forward and backward of all their micro-batches, with the collectives in them.
        bubble: Waiting for other stages, before and between.
        exposed_reduce: Gradient reduction that does not hide behind backward, and the wait for it.
        optimizer: The optimizer step, parameter gathers after it included.
    """

    compute: float = 0.0
    bubble: float = 0.0
    exposed_reduce: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        """The step time."""
        return self.compute + self.bubble + self.exposed_reduce + self.optimizer


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
        band: Step times (s) between which eight of ten measurements lie, by the residuals of the
            framework's calibration; a quarter either way where it has none.
        tokens_per_s: Tokens (or samples, where a sample is one item) a second, all devices.
        mfu: Model FLOPs utilisation: model FLOPs of a step over step time and total peak.
        peak_phase: What each device does when it holds most, ``backward of micro-batch 0 (stage
            1)`` or ``optimizer``; empty where idle.
        critical: Where the step time goes.
    """

    step_time: float
    peak_memory: tuple[float, ...]
    feasible: bool
    reasons: tuple[str, ...]
    stages: tuple[StageEstimate, ...]
    memory: tuple[MemoryUse, ...]
    tokens_per_s: float
    mfu: float
    peak_phase: tuple[str, ...] = ()
    critical: CriticalPath = CriticalPath()
    band: tuple[float, float] = (0.0, 0.0)

    @property
    def breakdown(self) -> tuple[StageEstimate, ...]:
        """The stages; the name that the README uses."""
        return self.stages
