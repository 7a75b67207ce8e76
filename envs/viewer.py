"""A state of the stage-wise builder as text."""

from __future__ import annotations

from io import StringIO

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from rlplace.envs.builders.stagewise import StagewiseState
from rlplace.envs.types import Candidates
from rlplace.units import format_seconds

_SHOWN = 5


def render_text(state: StagewiseState, candidates: Candidates | None, width: int = 100) -> str:
    """The stages so far, what remains, and the best candidates.

    Args:
        state: The state.
        candidates: Its candidates, None where it is done.
        width: Columns.
    """
    console = Console(file=StringIO(), width=width, force_terminal=False)
    parts: list[Text | Table] = [headline(state), stage_table(state)]
    if candidates is not None:
        parts.append(candidate_table(candidates))
    with console.capture() as capture:
        console.print(Group(*parts))
    return capture.get()


def headline(state: StagewiseState) -> Text:
    """One line: the question, and what remains of it."""
    instance = state.instance
    graph = instance.graph
    asked = f"{graph.name}: {len(graph.groups)} groups on {len(instance.cluster.devices)} devices"
    if state.outlook is None:
        return Text(f"{asked}; next: micro-batches and device order")
    left = int(state.outlook.cuts[state.progress.stop])
    remains = f"{left} groups and {state.progress.free} devices remain" if left else "complete"
    return Text(f"{asked}; {state.outlook.micro_batches} micro-batches; {remains}")


def stage_table(state: StagewiseState) -> Table:
    """The stages that have been decided, in pipeline order."""
    table = Table("groups", "devices", "dp", "tp", title=None)
    for placed in reversed(state.progress.stages):
        mesh = placed.mesh
        ranks = sorted(state.relabel[device] for device in mesh.devices)
        dp = f"{mesh.dp_replicate}x{mesh.dp_shard}"
        shown = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}..{ranks[-1]} ({len(ranks)})"
        table.add_row(f"{placed.start}-{placed.stop - 1}", shown, dp, str(mesh.tp))
    return table


def candidate_table(candidates: Candidates) -> Table:
    """The candidates with the best heuristic scores."""
    order = (-candidates.features[:, 0]).argsort(kind="stable")[:_SHOWN]
    table = Table("candidate", "score", "groups", "hosts", "legal")
    for index in order:
        first, last, host, end = (int(value) for value in candidates.spans[index])
        score = f"{candidates.features[index, 0]:.3f}"
        legal = "yes" if candidates.mask[index] else "no"
        table.add_row(str(index), score, f"{first}-{last - 1}", f"{host}-{end - 1}", legal)
    return table


def render_outcome(step_time: float, baseline: float) -> str:
    """The last line of an episode."""
    return f"step {format_seconds(step_time)}, baseline {format_seconds(baseline)}"
