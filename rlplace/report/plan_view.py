"""A plan and its estimate as rows that a test can check, and as what the command line prints."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, fields
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlplace.plan.degrees import unsharded
from rlplace.plan.types import Instance, Mesh, Plan, Stage
from rlplace.planners.types import PlannerResult
from rlplace.simulate.types import Estimate, MemoryUse
from rlplace.units import GIB, format_seconds, ranges


@dataclass(frozen=True)
class StageRow:
    """What is shown of one stage; `memory` in bytes, `busy` in seconds of one micro-batch.

    `memory` is that of the stage's fullest device, `memory_parts` the same by cause (the fields of
    `MemoryUse`).
    """

    stage: int
    groups: str
    devices: str
    mesh: str
    layout: str
    memory: float
    memory_share: float
    memory_parts: dict[str, float]
    busy: float
    idle: float


def stage_rows(instance: Instance, plan: Plan, estimate: Estimate) -> list[StageRow]:
    """One row a stage."""
    rows = []
    for index, (stage, cost) in enumerate(zip(plan.stages, estimate.stages, strict=True)):
        fullest = max(
            stage.mesh.devices,
            key=lambda device: estimate.peak_memory[device] / instance.cluster.kind(device).memory,
        )
        peak = estimate.peak_memory[fullest]
        rows.append(
            StageRow(
                stage=index,
                groups=_groups(instance, stage),
                devices=f"{ranges(stage.mesh.devices)} {_kinds(instance, stage.mesh)}",
                mesh=mesh_name(stage.mesh),
                layout=_layout(stage),
                memory=peak,
                memory_share=peak / instance.cluster.kind(fullest).memory,
                memory_parts=asdict(estimate.memory[fullest]),
                busy=cost.forward + cost.backward,
                idle=cost.idle,
            )
        )
    return rows


def plan_data(
    instance: Instance,
    plan: Plan,
    estimate: Estimate,
    *,
    bound: float,
    planner: str,
    plan_seconds: float,
    alternatives: dict[str, PlannerResult],
) -> dict[str, Any]:
    """What `rlplace plan --json` prints where a plan fits."""
    return _question(instance) | {
        "feasible": True,
        "step_time": estimate.step_time,
        "peak_memory": max(estimate.peak_memory),
        "tokens_per_s": estimate.tokens_per_s,
        "mfu": estimate.mfu,
        "bound": bound,
        "gap": estimate.step_time / bound - 1.0,
        "planner": planner,
        "plan_seconds": plan_seconds,
        "reasons": [],
        "notes": notes(instance, plan),
        "micro_batches": plan.micro_batches,
        "schedule": plan.schedule,
        "stages": [asdict(row) for row in stage_rows(instance, plan, estimate)],
        "alternatives": {
            name: {
                "step_time": found.estimate.step_time if found.plan and found.estimate else None,
                "seconds": found.seconds,
                "stopped": found.stopped,
            }
            for name, found in alternatives.items()
        },
    }


def infeasible_data(instance: Instance, reasons: str) -> dict[str, Any]:
    """What `rlplace plan --json` prints where nothing fits; the same names, without values."""
    unknown = ("step_time", "peak_memory", "tokens_per_s", "mfu", "bound", "gap", "planner")
    empty = dict.fromkeys((*unknown, "plan_seconds", "micro_batches", "schedule"))
    told: dict[str, Any] = {"feasible": False, "reasons": reasons.splitlines(), "stages": []}
    told["notes"] = []
    return _question(instance) | told | empty | {"alternatives": {}}


def _question(instance: Instance) -> dict[str, Any]:
    return {
        "model": instance.graph.name,
        "cluster": instance.cluster.name,
        "global_batch": instance.global_batch,
        "precision": instance.precision,
    }


def notes(instance: Instance, plan: Plan) -> list[str]:
    """What a reader would not expect: groups that every device of a tp axis runs whole."""
    found = []
    for tp in sorted({stage.mesh.tp for stage in plan.stages}):
        whole = ", ".join(short_names(list(unsharded(instance.graph, tp))))
        if whole:
            found.append(f"at tp={tp} every device runs all of {whole}: no layout shards it")
    return found


def verdict(instance: Instance, plan: Plan, estimate: Estimate, bound: float) -> Text:
    """The one-line answer."""
    gap = estimate.step_time / bound - 1.0
    idle = len(instance.cluster.devices) - len(plan.devices)
    text = Text("fits ", style="bold green")
    text.append(
        f"{instance.graph.name} on {instance.cluster.name or 'the cluster'}: "
        f"{len(plan.stages)} stage{'s' if len(plan.stages) > 1 else ''}, "
        f"{plan.micro_batches} micro-batch{'es' if plan.micro_batches > 1 else ''}, "
        f"{format_seconds(estimate.step_time)} a step, "
        f"within {gap:.1%} of the bound",
        style="bold",
    )
    if idle:
        text.append(f"; {idle} device{'s' if idle > 1 else ''} left idle", style="bold yellow")
    return text


def render_plan(instance: Instance, plan: Plan, estimate: Estimate, bound: float) -> RenderableType:
    """Verdict, stage table, totals, memory by cause, and notes."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    table.add_column("stage", justify="right")
    table.add_column("groups", overflow="fold", min_width=14)
    for name in ("devices", "mesh", "layout"):
        table.add_column(name, no_wrap=True)
    for name in ("GiB", "%", "fwd+\nbwd ms", "idle\n%"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in stage_rows(instance, plan, estimate):
        table.add_row(
            str(row.stage),
            row.groups,
            row.devices,
            row.mesh,
            row.layout,
            f"{row.memory / GIB:.1f}",
            f"{row.memory_share:.0%}".rstrip("%"),
            f"{row.busy * 1e3:.1f}",
            f"{row.idle * 100:.0f}",
        )
    unit = "tokens" if instance.graph.tokens_per_sample > 1 else "samples"
    rate = estimate.tokens_per_s / len(instance.cluster.devices)
    totals = (
        f"step {format_seconds(estimate.step_time)}   {rate:,.0f} {unit}/s/device   "
        f"MFU {estimate.mfu:.1%}   bound {format_seconds(bound)}   "
        f"gap {estimate.step_time / bound - 1.0:.1%}"
    )
    verdict_line = verdict(instance, plan, estimate, bound)
    memory = _memory_table(instance, plan, estimate)
    return Group(verdict_line, "", table, "", totals, "", memory, *notes(instance, plan))


def _memory_table(instance: Instance, plan: Plan, estimate: Estimate) -> Table:
    """GiB of the fullest device of each stage, by cause; all causes fit into 80 columns."""
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    names = [field.name for field in fields(MemoryUse)]
    table.add_column("GiB of")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in stage_rows(instance, plan, estimate):
        parts = (f"{row.memory_parts[name] / GIB:.2f}" for name in names)
        table.add_row(f"stage {row.stage}", *parts)
    return table


def render_alternatives(planner: str, alternatives: dict[str, PlannerResult]) -> RenderableType:
    """Which planner found the answer, and what the others got."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("planner", "step", "seconds"):
        table.add_column(name, justify="left" if name == "planner" else "right")
    for name, found in alternatives.items():
        if found.plan is not None and found.estimate is not None:
            step = format_seconds(found.estimate.step_time)
        else:
            step = "nothing fits" if found.stopped == "done" else "none in its time"
        mark = " <- this plan" if name == planner else ""
        table.add_row(name + mark, step, f"{found.seconds:.3f}")
    return table


def _groups(instance: Instance, stage: Stage) -> str:
    names = short_names([group.name for group in instance.graph.groups])
    first, last = names[stage.start], names[stage.stop - 1]
    span = first if first == last else f"{first} to {last}"
    return f"{stage.stop - stage.start}: {span}"


def short_names(names: list[str]) -> list[str]:
    """Names without the first part of their path, where most of them have the same one."""
    heads = Counter(name.split(".")[0] for name in names if "." in name)
    head, count = heads.most_common(1)[0] if heads else ("", 0)
    short = [name.removeprefix(f"{head}.") for name in names]
    clear = len(set(short)) == len(set(names)) and not any(name[0].isdigit() for name in short)
    return short if 2 * count > len(names) and clear else names


def _kinds(instance: Instance, mesh: Mesh) -> str:
    return "+".join(dict.fromkeys(instance.cluster.devices[d].kind for d in mesh.devices))


def mesh_name(mesh: Mesh) -> str:
    """``dp16 tp2``; ``dp2x8`` has 2 replicas of 8 shards (HSDP)."""
    both = mesh.dp_replicate > 1 and mesh.dp_shard > 1
    dp = f"dp{mesh.dp_replicate}x{mesh.dp_shard}" if both else f"dp{mesh.dp}"
    parts = [dp] if mesh.dp > 1 else []
    parts += [f"{name}{size}" for name, size in (("cp", mesh.cp), ("tp", mesh.tp)) if size > 1]
    return " ".join(parts) or "one"


def _layout(stage: Stage) -> str:
    """The most frequent choice, and how many groups differ from it."""
    counted = Counter(stage.choices).most_common()
    choice, count = counted[0]
    parts = [choice.layout] if stage.mesh.tp > 1 else []
    if stage.mesh.dp > 1:
        parts.append("DDP" if choice.zero == 0 else f"ZeRO-{choice.zero}")
    if choice.recompute != "none":
        parts.append("recompute" if choice.recompute == "full" else "recompute attention")
    if choice.slices > 1:
        parts.append(f"{choice.slices} slices")
    text = ", ".join(parts) or "plain"
    return text if len(counted) == 1 else f"{text} (+{len(stage.choices) - count})"
