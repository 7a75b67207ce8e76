"""What a device holds when it holds most, and what it does then."""

from __future__ import annotations

from collections.abc import Sequence

from rlplace.plan.orders import Peak
from rlplace.simulate.stages import StageCost
from rlplace.simulate.types import MemoryUse

_NAMES = {"F": "forward", "B": "backward", "W": "backward of the parameters"}

#: The phases after the last backward, which hold no activations.
REDUCE, OPTIMIZER = "reduce", "optimizer"


def lane_use(
    parts: Sequence[MemoryUse], peaks: Sequence[Peak], costs: Sequence[StageCost]
) -> tuple[MemoryUse, str]:
    """Peak of a device of a lane, and its phase.

    Activations of the stages of a lane do not all peak at once: each moment counts what all of
    them hold and what comes and goes in the one that runs. The optimizer step holds no activations
    but has something that comes and goes of its own, which is in large buffers: the allocator keeps
    them where there is room.

    Args:
        parts: Of each stage of the lane; states add up.
        peaks: The moments that may be the peak.
        costs: Of all stages of the plan.
    """
    sizes = [_size(peak, costs) for peak in peaks]
    best = max(range(len(peaks)), key=sizes.__getitem__)
    stepping = sum(costs[stage].optimizer_transient for stage, _ in peaks[best].held)
    if stepping > sizes[best]:
        return _use(parts, 0.0, 0.0, stepping, cached=sizes[best]), OPTIMIZER
    peak = peaks[best]
    action, running = peak.action, costs[peak.action.stage]
    use = _use(
        parts,
        sum(count * (costs[s].saved - costs[s].saved_logits) for s, count in peak.held),
        sum(count * costs[s].saved_logits for s, count in peak.held) + running.transient_logits,
        running.transient - running.transient_logits,
        cached=stepping,
    )
    return use, phase_name(action.kind, action.stage, action.micro_batch)


def phase_name(kind: str, stage: int, micro_batch: int) -> str:
    """What a device does, in words: of an `Action`, or of an event that belongs to none."""
    if kind not in _NAMES:
        return kind
    return f"{kind_name(kind)} of micro-batch {micro_batch} (stage {stage})"


def kind_name(kind: str) -> str:
    """The kind of an action or event as a word."""
    return _NAMES.get(kind, kind)


def _size(peak: Peak, costs: Sequence[StageCost]) -> float:
    kept = sum(count * costs[stage].saved for stage, count in peak.held)
    return kept + costs[peak.action.stage].transient


def _use(
    parts: Sequence[MemoryUse],
    activations: float,
    logits: float,
    transient: float,
    cached: float = 0.0,
) -> MemoryUse:
    return MemoryUse(
        params=sum(part.params for part in parts),
        gradients=sum(part.gradients for part in parts),
        optimizer=sum(part.optimizer for part in parts),
        activations=activations,
        logits=logits,
        transient=transient,
        reserve=parts[0].reserve,
        cached=cached,
    )
