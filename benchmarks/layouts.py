"""What layouts the models of the library have, and whether they are right.

For every distinct structure of a model all layouts at each degree: what is left on one device, what
it sends, and how parameters and boundaries are held. Each layout of one group of each structure is
then run on gloo ranks in fp64: outputs, gradients and buffers have to equal those of the whole
group, and the bytes that wrapped collectives count those that the layout says. Run it from the
top folder; by default it takes the tiny model of every family.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from rlplace.errors import RlplaceError
from rlplace.graph import library
from rlplace.graph.models.named import MODELS
from rlplace.graph.types import Affine, Layout, OpGraph, Placement, Shard
from rlplace.runtime.layout_cases import Subject, case_of, subjects_of
from rlplace.runtime.layout_check import bytes_of, judge, run_cases
from rlplace.runtime.shard_check import Case

#: Samples of a case: odd, so that a cut of the batch would fail.
BATCH = 3
_SHORT = {
    "all_reduce": "AR",
    "all_gather": "AG",
    "reduce_scatter": "RS",
    "all_to_all": "A2A",
}


@dataclass
class Row:
    """A layout of a structure.

    Shares are those of one device, elements those of the whole tensor at a batch of 3, errors
    relative to the largest element, bytes in fp64.
    """

    model: str
    group: str
    repeats: int
    layout: str
    axis: str
    degree: int
    flops_share: float | None
    params_share: float | None
    forward: dict[str, list[int]]
    backward: dict[str, list[int]]
    params: dict[str, str]
    reads: list[str]
    writes: list[str]
    expected_bytes: dict[str, float]
    sent_bytes: dict[str, float]
    error: float | None = None
    problem: str = ""


@dataclass
class Model:
    """A model of the library with all that was found in it; `whole` has no sharded layout."""

    name: str
    structures: int
    whole: list[str]
    rows: list[Row]
    problem: str = ""


def find(name: str, degrees: tuple[int, ...]) -> tuple[Model, list[tuple[Row, Layout, Case]]]:
    """The layouts of a model, and a case for each that can be made again."""
    torch.manual_seed(0)
    try:
        graph = library.build(name, degrees=degrees, cache=False)
        spec = library.spec(name)
        subjects = subjects_of(spec.make(), spec.example(BATCH), graph)
    except (RlplaceError, RuntimeError, AssertionError) as error:
        return Model(name, 0, [], [], f"{type(error).__name__}: {error}"), []
    rows, cases = [], []
    whole = [graph.groups[s.group].name for s in subjects if not _layouts(graph, s)]
    for subject in subjects:
        for layout in _layouts(graph, subject):
            row = row_of(name, graph, subject, layout)
            rows.append(row)
            try:
                cases.append((row, layout, case_of(subject, layout, row.group)))
            except RlplaceError as error:
                row.problem = str(error)
    return Model(name, len(graph.structures), whole, rows), cases


def _layouts(graph: OpGraph, subject: Subject) -> tuple[Layout, ...]:
    structure = graph.structure(subject.group)
    return (*structure.layouts, *structure.bordered)


def row_of(name: str, graph: OpGraph, subject: Subject, layout: Layout) -> Row:
    """A layout in words and figures."""
    group, work = graph.groups[subject.group], graph.structure(subject.group).work
    names = dict.fromkeys(name for _, name in subject.piece.states)
    return Row(
        name,
        group.name,
        sum(each.structure == group.structure for each in graph.groups),
        layout.name,
        layout.axis,
        layout.degree,
        _share(layout.work.flops, work.flops),
        layout.work.params / work.params if work.params else None,
        _sent(layout, "forward"),
        _sent(layout, "backward"),
        {name: short(p) for name, p in zip(names, layout.params, strict=True)},
        [short(p) for p in layout.reads],
        [short(p) for p in layout.writes],
        bytes_of(layout, BATCH),
        {},
    )


def _share(own: Affine, whole: Affine) -> float | None:
    return own(BATCH) / whole(BATCH) if whole(BATCH) else None


def _sent(layout: Layout, phase: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for collective in layout.collectives:
        if collective.phase == phase:
            found.setdefault(collective.kind, []).append(int(collective.floats(BATCH)))
    return found


def short(placement: Placement) -> str:
    """``S0`` is cut in dim 0, ``S0x3`` in three blocks, ``S0/32`` run by run; ``R`` is whole."""
    if not isinstance(placement, Shard):
        return "R"
    blocks = f"x{placement.blocks}" if placement.blocks > 1 else ""
    return f"S{placement.dim}{blocks}" + (f"/{placement.run}" if placement.run else "")


def execute(cases: Sequence[tuple[Row, Layout, Case]], ranks: int, progress: Progress) -> None:
    """Run all cases of a degree on as many ranks, and note what they did."""
    task = progress.add_task(f"on {ranks} ranks", total=len(cases))
    found = run_cases(
        [case for _, _, case in cases],
        ranks,
        progress=lambda done: progress.update(task, completed=done),
    )
    for (row, layout, case), result in zip(cases, found, strict=True):
        verdict = judge(case, layout, BATCH, result)
        row.error, row.sent_bytes = verdict.error, dict(verdict.sent)
        row.problem = verdict.problem


def table_of(model: Model) -> Table:
    """All layouts of a model."""
    title = f"{model.name}: {model.structures} distinct groups"
    if model.whole:
        title += f", of which run whole: {', '.join(model.whole)}"
    table = Table(title=title, title_justify="left", pad_edge=False)
    for column in ("group", "layout", "FLOPs", "params", "forward", "backward", "parameters"):
        right = column in ("FLOPs", "params")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for column in ("reads -> writes", "error", "bytes", "ok"):
        table.add_column(column, overflow="fold")
    before = ""
    for row in model.rows:
        times = f" x{row.repeats}" if row.repeats > 1 else ""
        table.add_row(
            f"{row.group}{times}" if row.group != before else "",
            f"{row.layout} {row.axis}{row.degree}",
            _percent(row.flops_share),
            _percent(row.params_share),
            _elements(row.forward),
            _elements(row.backward),
            _states(row.params),
            f"{_uniq(row.reads)} -> {_uniq(row.writes)}" if row.reads or row.writes else "whole",
            "-" if row.error is None else f"{row.error:.0e}",
            "=" if row.sent_bytes == row.expected_bytes else "differ",
            "ok" if not row.problem else "WRONG",
        )
        before = row.group
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _elements(sent: dict[str, list[int]]) -> str:
    parts = [f"{len(n)} {_SHORT[kind]} {sum(n):,}" for kind, n in sent.items()]
    return ", ".join(parts) or "-"


def _states(params: dict[str, str]) -> str:
    """Those that are cut, by the last two parts of their names."""
    cut = [f"{'.'.join(n.split('.')[-2:])} {p}" for n, p in params.items() if p != "R"]
    whole = len(params) - len(cut)
    return ", ".join([*cut, *([f"{whole} R"] if whole else [])]) or "-"


def _uniq(placements: list[str]) -> str:
    counts = Counter(placements)
    return " ".join(p if n == 1 else f"{n}{p}" for p, n in counts.items()) or "R"


def summary(models: Sequence[Model], ranks: Sequence[int]) -> str:
    """One line, and one for each failure."""
    rows = [row for model in models for row in model.rows]
    groups = {(row.model, row.group) for row in rows}
    failures = [f"{m.name}: {m.problem}" for m in models if m.problem]
    failures += [
        f"{r.model} {r.group} {r.layout} {r.axis}{r.degree}: {r.problem}" for r in rows if r.problem
    ]
    run = sum(row.error is not None for row in rows)
    on = " and ".join(str(count) for count in ranks)
    head = f"{run} layouts of {len(groups)} groups of {len(models)} models executed on {on} ranks: "
    return head + ("\n  ".join(["failures", *failures]) if failures else "all equal")


def _chosen(names: Sequence[str]) -> Iterator[str]:
    yield from names or [name for name in MODELS if name.endswith("-tiny")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", help="by default the tiny model of every family")
    parser.add_argument("--ranks", default="2,4", help="degrees, each on as many ranks")
    parser.add_argument("--json", action="store_true", help="print one object")
    args = parser.parse_args()
    ranks = tuple(int(count) for count in args.ranks.split(","))
    warnings.filterwarnings("ignore", "The tensor attributes", UserWarning)
    torch.set_num_threads(1)
    started = time.monotonic()
    errors = Console(stderr=True)
    models, cases = [], []
    with Progress(console=errors) as progress:
        names = list(_chosen(args.models))
        task = progress.add_task("finding", total=len(names))
        for name in names:
            progress.update(task, description=f"finding {name}")
            model, found = find(name, ranks)
            models.append(model)
            cases += found
            progress.advance(task)
        for count in ranks:
            execute([case for case in cases if case[1].degree == count], count, progress)
    if args.json:
        print(
            json.dumps({"models": [asdict(m) for m in models], "summary": summary(models, ranks)})
        )
    else:
        console = Console() if sys.stdout.isatty() else Console(width=200)
        for model in models:
            console.print(table_of(model))
        console.print(summary(models, ranks), highlight=False)
        console.print(f"in {time.monotonic() - started:.0f} s")
    failed = any(m.problem or any(row.problem for row in m.rows) for m in models)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
