"""Tables for people and plain data for files, from results."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.fidelity_tables.metrics import (
    MemoryScore,
    TimeScore,
    healthy_lines,
    memory_error,
    memory_score,
    time_error,
    time_score,
)
from benchmarks.fidelity_tables.types import Reading, Result

Scores = dict[str, Any]


def scores(results: Sequence[Result], reading: Reading) -> Scores:
    """All figures of one table: test rows (healthy and all), fit rows, memory, what is left out."""
    healthy = healthy_lines(reading.rows)
    test = [result for result in results if not result.row.fit]
    good = [result for result in test if (result.row.table, result.row.line) in healthy]
    problems: dict[str, int] = {}
    for result in results:
        if result.problem:
            problems[result.problem] = problems.get(result.problem, 0) + 1
    return {
        "rows": len(reading.rows),
        "fit_lines": [row.line for row in reading.rows if row.fit],
        "healthy": _plain(time_score(good)),
        "all": _plain(time_score(test)),
        "fitted": _plain(time_score([result for result in results if result.row.fit])),
        "memory": asdict(memory_score(test)),
        "left_out": dict(reading.left_out),
        "problems": problems,
    }


def time_table(found: Mapping[str, Scores]) -> Table:
    """Step times: one line for the healthy test rows of each table, one for all of them."""
    table = Table(title="step time, test rows")
    for name in ("table", "rows", "n", "median", "p90", "bias", "tau", "tau mean", "regret"):
        table.add_column(name, justify="left" if name in ("table", "rows") else "right")
    table.add_column("groups", justify="right")
    for name, score in found.items():
        for kind in ("healthy", "all"):
            if score[kind] is not None:
                table.add_row(name, kind, *_time_cells(TimeScore(**score[kind])))
    return table


def memory_table(found: Mapping[str, Scores]) -> Table:
    """Memory and feasibility of the test rows."""
    table = Table(title="memory, test rows")
    names = ("table", "n", "within 15 %", "median", "bias", "ran: fits", "oom: does not fit")
    for name in names:
        table.add_column(name, justify="left" if name == "table" else "right")
    for name, score in found.items():
        memory = MemoryScore(**score["memory"])
        if memory.n or memory.oom:
            ran = f"{memory.ran_feasible} / {memory.ran}" if memory.ran else ""
            oom = f"{memory.oom_infeasible} / {memory.oom}" if memory.oom else ""
            shares = (_percent(memory.within), _percent(memory.median), _percent(memory.bias))
            table.add_row(name, str(memory.n), *shares, ran, oom)
    return table


def notes(name: str, score: Scores) -> list[str]:
    """What is left out of a table and why, and which rows may be fitted."""
    lines = [f"{name}: {score['rows']} rows"]
    if score["fit_lines"]:
        lines.append(f"  {len(score['fit_lines'])} fit rows, lines {_numbers(score['fit_lines'])}")
    lines += [f"  left out, {why}: {count}" for why, count in score["left_out"].items()]
    lines += [f"  no estimate, {why}: {count}" for why, count in score["problems"].items()]
    return lines


def write_residuals(path: Path, results: Sequence[Result]) -> None:
    """A CSV file with every row: key, measured, predicted, errors and breakdown."""
    rows = [residual(result) for result in results]
    names = list(dict.fromkeys(name for row in rows for name in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def residual(result: Result) -> dict[str, Any]:
    """One line of the residuals."""
    row, measured = result.row, result.row.measured
    line: dict[str, Any] = {"table": row.table, "line": row.line, "fit": int(row.fit)}
    line |= row.key | {f"plan_{name}": value for name, value in row.plan.items()}
    line |= {"problem": result.problem, "ran": measured.ran, "feasible": result.feasible}
    line |= {"measured_time": measured.step_time, "measured_memory": measured.memory}
    if result.problem:
        return line
    line |= {"predicted_time": result.step_time, "predicted_memory": result.memory}
    if measured.step_time is not None:
        line["time_error"] = time_error(result)
    if measured.memory is not None:
        line["memory_error"] = memory_error(result)
    return line | result.details


def _time_cells(score: TimeScore) -> list[str]:
    shares = [_percent(value) for value in (score.median, score.p90, score.bias)]
    taus = ["" if math.isnan(tau) else f"{tau:.2f}" for tau in (score.tau, score.tau_mean)]
    return [str(score.n), *shares, *taus, _percent(score.regret), str(score.groups or "")]


def _percent(value: float) -> str:
    return "" if math.isnan(value) else f"{100 * value:.1f} %"


def _plain(score: TimeScore | None) -> dict[str, Any] | None:
    return None if score is None else asdict(score)


def _numbers(lines: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(lines)[:12]))
    return shown if len(lines) <= 12 else f"{shown}, ... (all in --json)"
