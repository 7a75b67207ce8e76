"""Fit the shipped constants to published measurements: which constants, on which rows.

The rows are those that `benchmarks/fidelity.py` marks as fit rows (a seeded sample of each table,
named in its output) and that are healthy; all other rows are held out, and give the error bands.
Kinds and frameworks are fitted in the order of `FITS`, each with the constants of those before.
`--out` adds the result to a calibration file.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script or as a module

from rich.console import Console
from rich.progress import Progress

from benchmarks.fidelity_tables.metrics import healthy_lines
from benchmarks.fidelity_tables.read import data_folder
from benchmarks.fidelity_tables.registry import TABLES
from benchmarks.fidelity_tables.types import Row
from benchmarks.fidelity_tables.workloads import plan_of
from rlplace.cost.calibrate import fit
from rlplace.cost.calibration_file import save
from rlplace.cost.measured import Calibration, Measured
from rlplace.errors import InputError
from rlplace.report.calibration_view import render_calibration
from rlplace.simulate.predict import predict


@dataclass(frozen=True)
class Fit:
    """Constants that are fitted together.

    Args:
        tables: The tables whose rows are taken.
        gpus: Kinds of device of those rows.
        names: The constants.
    """

    tables: tuple[str, ...]
    gpus: tuple[str, ...]
    names: tuple[str, ...]


def _kind(name: str, *fields: str) -> tuple[str, ...]:
    return tuple(f"kind.{name}.{field}" for field in fields)


def _framework(name: str, *fields: str) -> tuple[str, ...]:
    return tuple(f"framework.{name}.{field}" for field in fields)


#: The fits, by name.
FITS: dict[str, Fit] = {
    "llm-foundry": Fit(
        ("llmfoundry",), ("A100-40", "A100-80", "H100-80"), _framework("llm-foundry", "attention")
    ),
    "torchtitan": Fit(("torchtitan",), ("H100-96-500W",), _kind("H100-96-500W", "max_efficiency")),
    "nanotron": Fit(
        ("nanotron",),
        ("H100-80",),
        _framework("nanotron", "launch", "collective_launch", "fusion", "overlap_reduce"),
    ),
    "megatron-deepspeed": Fit(
        ("bigscience",), ("A100-80",), _framework("megatron-deepspeed", "fusion")
    ),
}


def measured_rows(chosen: Fit, data: Path) -> tuple[list[Measured], list[Measured]]:
    """(fit rows, held-out rows) of a fit: the healthy ones with a step time that can be built."""
    fitted: list[Measured] = []
    others: list[Measured] = []
    for name in chosen.tables:
        file, read = TABLES[name]
        if not (data / file).exists():
            raise SystemExit(f"there is no {file} in {data}")
        rows = read(data).rows
        healthy = healthy_lines(rows)
        for row in rows:
            usable = row.measured.step_time is not None and row.measured.ran
            if usable and row.workload.cluster.gpu in chosen.gpus:
                if (row.table, row.line) in healthy and (made := _measured(row)) is not None:
                    (fitted if row.fit else others).append(made)
    return fitted, others


def _measured(row: Row) -> Measured | None:
    if row.tries:
        return None
    try:
        instance, plan = plan_of(row)
    except InputError:
        return None
    return Measured(instance, plan, row.measured.step_time, name=f"{row.table}:{row.line}")


def _fit(
    name: str, fitted: list[Measured], others: list[Measured], console: Console
) -> Calibration:
    """A fit, with a line that says how far it is."""
    with Progress(console=console) as progress:
        task = progress.add_task(name, total=None)

        def tell(count: int, error: float) -> None:
            text = f"{name}: {count} evaluations, median {error:.1%}"
            progress.update(task, description=text)

        return fit(fitted, FITS[name].names, predict, held_out=others, progress=tell)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="folder of the published tables (default $RLPLACE_DATA)")
    parser.add_argument("--fit", action="append", choices=FITS, help="only this (repeatable)")
    parser.add_argument("--out", type=Path, help="calibration file that the constants go into")
    args = parser.parse_args()
    console = Console(width=140)
    for name in args.fit or FITS:
        fitted, others = measured_rows(FITS[name], data_folder(args.data))
        found = _fit(name, fitted, others, console)
        console.print(name, render_calibration(found))
        if args.out:
            tables = ", ".join(FITS[name].tables)
            save(found, args.out, f"fit rows of {tables} on {', '.join(FITS[name].gpus)}")


if __name__ == "__main__":
    main()
