"""How well estimates agree with published measurements, table by table.

Every row of a published table is rebuilt from its columns as a graph, a cluster, an instance and a
uniform plan, and estimated. Step times are judged by the error, by the order within groups of the
same model, devices and sequence (Kendall's tau) and by what the predicted best costs (regret);
memory by the error and by what is said to fit. Healthy rows have at least half of the throughput
of the best of their group. Rows that constants may be fitted to are a seeded sample, named in the
output, and are no test rows. Published data is read from `$RLPLACE_DATA` or `--data`; a table that
is absent is skipped. Capturing all graphs takes some minutes the first time; `--graphs` asks for
fewer.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script or as a module

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.fidelity_tables.plots import draw, memory_scatter, time_scatter
from benchmarks.fidelity_tables.read import data_folder
from benchmarks.fidelity_tables.registry import TABLES
from benchmarks.fidelity_tables.report import (
    Scores,
    memory_table,
    notes,
    scores,
    time_table,
    write_residuals,
)
from benchmarks.fidelity_tables.types import Result, Row
from benchmarks.fidelity_tables.workloads import estimate_row


def of_few_graphs(rows: list[Row], count: int | None) -> list[Row]:
    """The rows of the `count` graphs that most rows have; all rows for None."""
    graphs = Counter(row.workload.graph for row in rows)
    chosen = {graph for graph, _ in graphs.most_common(count)}
    return [row for row in rows if row.workload.graph in chosen]


def results_of(name: str, rows: list[Row], progress: Progress) -> list[Result]:
    """Estimates of rows of a table."""
    task = progress.add_task(name, total=len(rows))
    found = []
    for row in rows:
        found.append(estimate_row(row))
        progress.advance(task)
    return found


def run(
    names: list[str], data: Path, console: Console, graphs: int | None = None
) -> tuple[dict[str, Scores], dict[str, list[Result]]]:
    """Scores and results of the tables that are there."""
    found: dict[str, Scores] = {}
    results: dict[str, list[Result]] = {}
    bars = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*bars, console=console) as progress:
        for name in names:
            file, read = TABLES[name]
            if not (data / file).exists():
                console.print(f"{name}: skipped, there is no {file} in {data}")
                continue
            started = time.process_time()
            reading = read(data)
            rows = of_few_graphs(reading.rows, graphs)
            results[name] = results_of(name, rows, progress)
            found[name] = scores(results[name], reading)
            found[name]["cpu_seconds"] = time.process_time() - started
    return found, results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="folder of the published tables (default $RLPLACE_DATA)")
    parser.add_argument("--table", action="append", choices=TABLES, help="only this (repeatable)")
    parser.add_argument("--graphs", type=int, help="only rows of this many graphs of a table")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--plots", type=Path, help="draw scatter plots into this folder")
    parser.add_argument("--residuals", type=Path, help="write every row to this CSV file")
    args = parser.parse_args()
    console = Console(width=120)
    found, results = run(args.table or list(TABLES), data_folder(args.data), console, args.graphs)
    for name, score in found.items():
        console.print("\n".join(notes(name, score)), highlight=False)
    console.print(time_table(found), memory_table(found))
    seconds = sum(score["cpu_seconds"] for score in found.values())
    rows = sum(score["rows"] for score in found.values())
    console.print(f"{rows:,} rows in {seconds:.1f} CPU seconds")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1))
    if args.residuals:
        write_residuals(args.residuals, [r for rows in results.values() for r in rows])
    if args.plots:
        for name, rows in results.items():
            for kind, scatter in (
                ("time", time_scatter(name, rows)),
                ("memory", memory_scatter(name, rows)),
            ):
                if scatter.clouds:
                    draw(scatter, args.plots / f"{name}-{kind}.png")


if __name__ == "__main__":
    main()
