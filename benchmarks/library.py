"""What every model of the library is, and what its capture costs.

Each model is captured in a process of its own without the cache. Seconds are those of
`library.build` alone, on the clock and of the CPU (which says more on a busy machine); those of the
imports of torch and of what the family needs stand apart. The peak memory is that of the whole
process, imports included. FLOPs and saved bytes are of the forward pass of one sample (saved floats
at 4 bytes each, attention by a flash kernel), without what does not grow with the batch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from rlplace.graph import library
from rlplace.graph.models.named import MODELS
from rlplace.units import format_bytes

_GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One model: what it is, and seconds and bytes of its capture."""

    name: str
    family: str
    ops: int
    groups: int
    structures: int
    params: int
    flops: float
    saved_bytes: float
    capture_seconds: float
    capture_cpu_seconds: float
    import_seconds: float
    peak_rss: int


def row_of(name: str) -> Row:
    """Capture a model in this process and describe it."""
    started = time.perf_counter()
    import torch

    from rlplace.graph.capture import capture  # noqa: F401 - its imports are not counted
    from rlplace.graph.models.make import make

    family, _ = MODELS[name]
    with torch.device("meta"):  # imports what the family needs, which is of no interest here
        make(MODELS[f"{'gat' if name.startswith('gat') else _tiny(family)}-tiny"][1])
    imported, busy = time.perf_counter(), time.process_time()
    graph = library.build(name, cache=False)
    done, spent = time.perf_counter(), time.process_time()
    works = [graph.structure(group.index).work for group in graph.groups]
    return Row(
        name,
        family,
        sum(len(group.ops) for group in graph.groups),
        len(graph.groups),
        len(graph.structures),
        graph.params,
        sum(work.flops.per_sample for work in works),
        sum(4 * work.saved.per_sample + work.saved_bytes.per_sample for work in works),
        done - imported,
        spent - busy,
        imported - started,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def in_a_child(name: str, limit: float) -> Row | str:
    """The row of a fresh process, or what went wrong in a line."""
    command = [sys.executable, __file__, "--child", name]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, env=environment
        )
    except subprocess.TimeoutExpired:
        return f"not captured in {limit:.0f} s"
    if done.returncode:
        lines = done.stderr.strip().split("\n")
        return lines[-1] if lines else f"exit {done.returncode}"
    return Row(**json.loads(done.stdout.strip().split("\n")[-1]))


def table_of(rows: list[Row]) -> Table:
    title = f"Library models, {os.cpu_count()} cores, Python {platform.python_version()}"
    table = Table(title=title)
    for column in ("model", "family"):
        table.add_column(column, no_wrap=True)
    for column in (
        "ops",
        "groups",
        "distinct",
        "params",
        "GFLOPs",
        "saved",
        "capture",
        "CPU",
        "imports",
        "peak RSS",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name,
            row.family,
            str(row.ops),
            str(row.groups),
            str(row.structures),
            f"{row.params / 1e6:,.2f} M",
            f"{row.flops / 1e9:,.4g}",
            format_bytes(row.saved_bytes),
            f"{row.capture_seconds:.1f} s",
            f"{row.capture_cpu_seconds:.1f} s",
            f"{row.import_seconds:.1f} s",
            f"{row.peak_rss / _GIB:.2f} GiB",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="model; may be repeated")
    parser.add_argument("--family", action="append", metavar="NAME", help="all of a family")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds a model")
    parser.add_argument("--json", action="store_true", help="rows as JSON on stdout")
    parser.add_argument("--child", metavar="NAME", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(asdict(row_of(args.child))))
        return
    console = Console(stderr=True)
    rows, failed = [], {}
    with Progress(console=console) as progress:
        names = _chosen(args.only, args.family)
        task = progress.add_task("", total=len(names))
        for name in names:
            progress.update(task, description=name)
            row = in_a_child(name, args.limit)
            if isinstance(row, Row):
                rows.append(row)
            else:
                failed[name] = row
                console.print(f"{name}: {row}")
            progress.advance(task)
    if args.json:
        print(json.dumps({"models": [asdict(row) for row in rows], "failed": failed}, indent=2))
    else:
        width = None if sys.stdout.isatty() else 140
        Console(width=width).print(table_of(rows))
        print(f"{len(rows)} models of {len({row.family for row in rows})} families")
    sys.exit(bool(failed))


def _chosen(only: list[str] | None, families: list[str] | None) -> list[str]:
    if not only and not families:
        return [name for name in MODELS if not name.endswith(("-tiny", "-demo"))]
    for name in only or ():
        library.spec(name)  # refuses an unknown one
    wanted = {*(only or ()), *(families or ())}
    return [name for name, (family, _) in MODELS.items() if {name, family} & wanted]


def _tiny(family: str) -> str:
    return {"gpt": "gpt2"}.get(family, family)


if __name__ == "__main__":
    main()
