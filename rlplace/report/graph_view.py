"""The groups of a model as rows that a test can check, and as what the command line prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table

from rlplace.errors import InputError, nearest_names
from rlplace.graph.types import Layout, OpGraph, Structure, Work
from rlplace.plan.types import PRECISIONS
from rlplace.report.folds import joint_name, runs, shown_names
from rlplace.units import format_bytes, format_count

_SHORT = {
    "all_reduce": "AR",
    "all_gather": "AG",
    "reduce_scatter": "RS",
    "all_to_all": "A2A",
}


@dataclass(frozen=True)
class LayoutRow:
    """The sharded layout with the least communication, where several degrees have the same one.

    Args:
        degrees: Degrees of the tp axis.
        forward: Collective -> how many of them a micro-batch needs, in the forward pass.
        backward: The same of the backward pass.
        layouts: How many sharded layouts there are at the first of the degrees.
    """

    degrees: tuple[int, ...]
    forward: dict[str, int]
    backward: dict[str, int]
    layouts: int


@dataclass(frozen=True)
class GroupRow:
    """One group, or equal groups of a run of layers; all figures are of one of them.

    Args:
        name: Short name, ``layers.0-31.mlp`` where there are several.
        count: How many equal groups the row stands for.
        groups: Their indices.
        ops: Ops of a group.
        params: Trainable and frozen parameter elements, buffers included.
        flops: FLOPs of the forward pass of one sample.
        backward_flops: FLOPs of its backward pass.
        saved: Bytes of one sample kept for the backward pass.
        reads: Names of the rows whose groups it reads from.
        layouts: What the tp axis can do with it.
    """

    name: str
    count: int
    groups: tuple[int, ...]
    ops: int
    params: int
    flops: float
    backward_flops: float
    saved: float
    reads: tuple[str, ...]
    layouts: tuple[LayoutRow, ...]


def group_rows(graph: OpGraph, precision: str = "bf16-mixed", fold: bool = True) -> list[GroupRow]:
    """One row a group; equal runs of layers as one row for each group of a layer.

    Raises:
        InputError: If the precision is unknown.
    """
    if precision not in PRECISIONS:
        rule = f"must be one of {', '.join(PRECISIONS)}"
        raise InputError("precision", precision, rule, nearest_names(precision, PRECISIONS))
    names = shown_names(graph)
    rows_groups = [run.members(offset) for run in runs(graph, fold) for offset in range(run.period)]
    row_of = {group: row for row, groups in enumerate(rows_groups) for group in groups}
    row_names = [joint_name([names[group] for group in groups]) for groups in rows_groups]
    sources: list[set[int]] = [set() for _ in rows_groups]
    for edge in graph.edges:
        sources[row_of[edge.dst]].add(row_of[edge.src])
    layouts = [layout_rows(structure) for structure in graph.structures]
    found = []
    for row, groups in enumerate(rows_groups):
        first = graph.groups[groups[0]]
        work = graph.structures[first.structure].work
        found.append(
            GroupRow(
                name=row_names[row],
                count=len(groups),
                groups=tuple(groups),
                ops=len(first.ops),
                params=work.params + work.frozen_params,
                flops=work.flops(1),
                backward_flops=work.backward_flops(1),
                saved=saved_bytes(work, precision),
                reads=tuple(row_names[source] for source in sorted(sources[row])),
                layouts=layouts[first.structure],
            )
        )
    return found


def saved_bytes(work: Work, precision: str) -> float:
    """Bytes of one sample that a group keeps for its backward pass, with a flash kernel."""
    return work.saved(1) * PRECISIONS[precision].activation + work.saved_bytes(1)


def layout_rows(structure: Structure) -> tuple[LayoutRow, ...]:
    """The cheapest sharded layout at each degree; equal ones of several degrees as one row."""
    rows: list[LayoutRow] = []
    for degree in sorted({layout.degree for layout in structure.layouts}):
        sharded = structure.layouts_at(degree)[1:]
        if not sharded:
            continue
        best = min(sharded, key=_traffic)
        row = LayoutRow((degree,), _kinds(best, "forward"), _kinds(best, "backward"), len(sharded))
        same = [i for i, r in enumerate(rows) if _collectives(r) == _collectives(row)]
        if same:
            older = rows[same[0]]
            rows[same[0]] = LayoutRow(
                (*older.degrees, degree), older.forward, older.backward, older.layouts
            )
        else:
            rows.append(row)
    return tuple(rows)


def graph_data(graph: OpGraph, precision: str, rows: Sequence[GroupRow]) -> dict[str, Any]:
    """What `rlplace show --json` prints."""
    return totals(graph) | {
        "precision": precision,
        "saved_bytes": sum(row.saved * row.count for row in rows),
        "rows": [asdict(row) for row in rows],
    }


def totals(graph: OpGraph) -> dict[str, Any]:
    """Figures of the whole model; FLOPs are of one sample, forward and backward."""
    return {
        "model": graph.name,
        "fingerprint": graph.fingerprint,
        "groups": len(graph.groups),
        "distinct": len({group.structure for group in graph.groups}),
        "ops": sum(len(group.ops) for group in graph.groups),
        "params": graph.params,
        "flops": graph.model_flops(1),
        "tokens_per_sample": graph.tokens_per_sample,
    }


def render_graph(graph: OpGraph, precision: str, rows: Sequence[GroupRow]) -> RenderableType:
    """Head line, table of the groups, totals, and what the short words mean."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    table.add_column("#", justify="right", style="dim")
    table.add_column("group", overflow="fold", min_width=18)
    for name in ("ops", "params", "FLOPs\nforward", "FLOPs\nbackward", "saved"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("reads\nfrom #", overflow="fold", min_width=6)
    table.add_column("tp degrees:\nforward | backward", overflow="fold", min_width=12)
    number = {row.name: index for index, row in enumerate(rows)}
    for index, row in enumerate(rows):
        table.add_row(
            str(index),
            row.name + (f" [bold]x{row.count}[/]" if row.count > 1 else ""),
            str(row.ops),
            format_count(row.params),
            format_count(row.flops),
            format_count(row.backward_flops),
            format_bytes(row.saved),
            ", ".join(str(number[name]) for name in row.reads),
            "\n".join(_layout_text(layout) for layout in row.layouts) or "-",
        )
    found = totals(graph)
    summary = (
        f"{found['groups']} groups, {found['distinct']} distinct   "
        f"{format_count(found['params'])} trainable parameters   "
        f"{format_count(found['flops'])}FLOP a sample"
    )
    if graph.tokens_per_sample > 1:
        summary += f" of {graph.tokens_per_sample} tokens"
    legend = f"[dim]{_legend(rows, precision)}[/]"
    return Lines(f"[bold]{graph.name}[/]", "", table, "", summary, legend)


def _traffic(layout: Layout) -> tuple[float, int]:
    """Elements of all collectives of one sample, and how many collectives."""
    return sum(c.floats(1) for c in layout.collectives), len(layout.collectives)


def _kinds(layout: Layout, phase: str) -> dict[str, int]:
    return dict(Counter(c.kind for c in layout.collectives if c.phase == phase))


def _collectives(row: LayoutRow) -> tuple[dict[str, int], dict[str, int]]:
    return row.forward, row.backward


def _layout_text(row: LayoutRow) -> str:
    degrees = ",".join(map(str, row.degrees))
    return f"{degrees}: {_counted(row.forward)} | {_counted(row.backward)}"


def _counted(kinds: dict[str, int]) -> str:
    return " ".join(f"{count} {_SHORT[kind]}" for kind, count in kinds.items()) or "none"


def _legend(rows: Sequence[GroupRow], precision: str) -> str:
    kinds = {
        kind for row in rows for layout in row.layouts for kind in layout.forward | layout.backward
    }
    words = [f"{short} {kind.replace('_', '-')}" for kind, short in _SHORT.items() if kind in kinds]
    text = f"figures of one group and one sample; saved for backward in {precision}"
    return text + (f"; tp degrees: collectives, {', '.join(words)}" if words else "")
