"""Why a plan splits no layer and no sequence: what doing so would take, in a sentence."""

from __future__ import annotations

from collections.abc import Iterator

from rlplace.plan.check import legal_micro_batches
from rlplace.plan.types import Instance, Mesh, Plan
from rlplace.plan.uniform import uniform_plan
from rlplace.planners.meshes import whole
from rlplace.simulate.estimate import Estimator
from rlplace.simulate.types import Estimate
from rlplace.units import format_bytes, format_seconds

#: Micro-batch counts that are tried, the smallest first.
_COUNTS = 3


def explain_tensor(instance: Instance, plan: Plan, estimate: Estimate) -> list[str]:
    """What tensor and context parallelism would take, beside a plan of replicas alone.

    Of each degree the best uniform plan at the plan's highest ZeRO level. Silent of plans that
    split something or have a pipeline, and where nothing can be split.
    """
    mesh = plan.stages[0].mesh
    if len(plan.stages) > 1 or mesh.tp * mesh.cp > 1 or plan.stages[0].shares:
        return []
    estimator = Estimator(instance)
    told = []
    for axis, degree in _degrees(instance, mesh):
        found = map(estimator.estimate, _plans(instance, plan, axis, degree))
        fits = [one for one in found if one.feasible]
        told.append(f"{axis}={degree} {_words(fits, estimate.step_time)}")
    if not told:
        return []
    held = format_bytes(max(estimate.peak_memory))
    return [f"it fits with whole layers and sequences, {held} of a device; {', '.join(told)}"]


def _degrees(instance: Instance, mesh: Mesh) -> Iterator[tuple[str, int]]:
    """Degrees of tp, and of cp where the model's sequences can be cut, inside nodes of one kind."""
    layouts = [one for own in instance.graph.structures for one in own.bordered]
    known = {"tp": {*instance.offered_tp}, "cp": {o.degree for o in layouts if o.axis == "cp"}}
    for axis, degrees in known.items():
        for degree in sorted(degrees - {1}):
            if mesh.dp % degree == 0 and whole(instance, mesh.devices, degree):
                yield axis, degree


def _plans(instance: Instance, plan: Plan, axis: str, degree: int) -> Iterator[Plan]:
    mesh = plan.stages[0].mesh
    dp = mesh.dp // degree
    zero = max(choice.zero for choice in plan.stages[0].choices)
    counts = [n for n in legal_micro_batches(instance.global_batch, dp) if n >= plan.micro_batches]
    for recompute in instance.offered_recompute:
        for count in counts[:_COUNTS]:
            yield uniform_plan(
                instance,
                devices=mesh.devices,
                tp=degree if axis == "tp" else 1,
                cp=degree if axis == "cp" else 1,
                sequence_parallel=axis == "tp",
                micro_batches=count,
                zero=zero if dp > 1 or axis == "cp" else 0,
                recompute=recompute,  # type: ignore[arg-type]  # a mode
            )


def _words(fits: list[Estimate], now: float) -> str:
    if not fits:
        return "does not fit"
    best = min(fits, key=lambda one: one.step_time)
    seconds, held = format_seconds(best.step_time), format_bytes(max(best.peak_memory))
    return f"takes {seconds} ({best.step_time / now - 1.0:+.0%}) and {held}"
