"""Why a step takes what it takes and a device holds what it holds, in sentences."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from math import ceil

from rlplace.plan.types import Instance, Mesh, Plan
from rlplace.report.explain_links import explain_links
from rlplace.report.explain_tensor import explain_tensor
from rlplace.simulate.types import CriticalPath, Estimate
from rlplace.units import format_bytes, format_seconds, ranges

#: Parts of a `CriticalPath`, as a reader calls them.
_PARTS = {
    "compute": "forward and backward with the collectives in them",
    "bubble": "waiting for other stages",
    "exposed_reduce": "gradient reduction that does not hide behind the backward",
    "optimizer": "the optimizer step",
}
#: Less than this share of a whole is not worth a word.
_LEAST = 0.005
#: The share of a pipeline's time that is to be work.
_WANTED = 0.9


@dataclass(frozen=True)
class Bubble:
    """What filling and draining a pipeline costs.

    Args:
        turn: Seconds of a micro-batch, forward and backward, on the busiest devices.
        fill: Seconds in which they wait.
        micro_batches: Micro-batches of a step.
    """

    turn: float
    fill: float
    micro_batches: int

    def share(self, larger: int = 1) -> float:
        """The part of the pipeline's time that is lost.

        Args:
            larger: Samples of a micro-batch, relative to now; at a fixed global batch there are
                fewer of them, and each of them fills the pipeline for longer.
        """
        fill = larger * self.fill
        return fill / (fill + self.micro_batches * self.turn)

    def needed(self, efficiency: float = _WANTED) -> int:
        """Micro-batches of this size at which so much of the time is work.

        Equal stages under 1F1B or GPipe wait for ``stages - 1`` turns, so 90 % takes nine times as
        many micro-batches (Narayanan et al., arXiv 2104.04473, section 2.2).
        """
        return max(1, ceil(efficiency / (1.0 - efficiency) * self.fill / self.turn - 1e-6))


def bubble(plan: Plan, estimate: Estimate) -> Bubble:
    """What a plan's pipeline loses; stages that share a mesh take turns on it."""
    turns: dict[Mesh, float] = defaultdict(float)
    for stage, cost in zip(plan.stages, estimate.stages, strict=True):
        turns[stage.mesh] += cost.forward + cost.backward
    turn = max(turns.values())
    spent = estimate.critical.compute + estimate.critical.bubble
    return Bubble(turn, max(0.0, spent - plan.micro_batches * turn), plan.micro_batches)


def explain(instance: Instance, plan: Plan, estimate: Estimate) -> list[str]:
    """What `rlplace plan --explain` prints.

    Args:
        instance: The question.
        plan: A legal plan.
        estimate: Its estimate.
    """
    return [
        _time(estimate.step_time, estimate.critical),
        *_pipeline(plan, estimate),
        *explain_links(instance, plan, estimate),
        *explain_tensor(instance, plan, estimate),
        _memory(instance, estimate),
    ]


def _time(step_time: float, critical: CriticalPath) -> str:
    shares = {name: seconds / step_time for name, seconds in asdict(critical).items()}
    told = [f"{share:.0%} {_PARTS[name]}" for name, share in shares.items() if share > _LEAST]
    return f"of a step of {format_seconds(step_time)}: {', '.join(told)}"


def _pipeline(plan: Plan, estimate: Estimate) -> list[str]:
    if len({stage.mesh for stage in plan.stages}) == 1:
        return []
    lost = bubble(plan, estimate)
    told = [_in_flight(plan, estimate)]
    share = lost.share()
    if share < _LEAST:
        return [*told, "no stage waits for another: there is no bubble to speak of"]
    told.append(
        f"the bubble is {share:.0%} of the pipeline's time: filling and draining it takes "
        f"{format_seconds(lost.fill)}, as long as {lost.fill / lost.turn:.1f} micro-batches of the "
        f"busiest stage; {lost.needed()} micro-batches of this size (now {lost.micro_batches}) "
        f"make it 10%, which is {_WANTED:.0%} efficiency"
    )
    if plan.micro_batches > 1:
        told.append(
            f"at a global batch of {plan.global_batch}, larger micro-batches are fewer and the "
            f"bubble grows: twice as large, it is {lost.share(2):.0%}"
        )
    return told


def _in_flight(plan: Plan, estimate: Estimate) -> str:
    """How many micro-batches each stage holds, and the law where the schedule has a simple one."""
    held: dict[int, list[int]] = defaultdict(list)
    for index, stage in enumerate(estimate.stages):
        held[stage.in_flight].append(index)
    told = ", ".join(
        f"{count} in stage{'s' if len(stages) > 1 else ''} {ranges(stages)}"
        for count, stages in held.items()
    )
    law = " = min(micro-batches, stages - stage)" if plan.schedule == "1f1b" else ""
    return f"{plan.schedule} keeps the activations of several micro-batches: {told}{law}"


def _memory(instance: Instance, estimate: Estimate) -> str:
    """The device that is nearest to its limit, when, and by what."""
    shares = [
        peak / instance.memory_limit(device) for device, peak in enumerate(estimate.peak_memory)
    ]
    fullest = shares.index(max(shares))
    parts, peak = asdict(estimate.memory[fullest]), estimate.peak_memory[fullest]
    parts.pop("cached")  # not in the peak
    told = ", ".join(
        f"{size / peak:.0%} {name}"
        for name, size in sorted(parts.items(), key=lambda item: -item[1])
        if size > _LEAST * peak
    )
    limit = instance.memory_limit(fullest)
    return (
        f"device {fullest} is the fullest, with {format_bytes(peak)} of {format_bytes(limit)} in "
        f"the {estimate.peak_phase[fullest]}: {told}"
    )
