"""How the analysis of a model grows with its equal layers.

CPU seconds of the export, of cutting it into groups, and of counting and finding the layouts of
what is distinct, for a model with more and more equal layers. Equal layers are analysed once, so
the last column should hardly grow. Best of several repeats, in one process, after a warm-up.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from itertools import pairwise

import torch
from rich.console import Console
from rich.table import Table

from rlplace.graph import library
from rlplace.graph.coarsen import coarsen
from rlplace.graph.groups.drafts import drafts_of
from rlplace.graph.models.make import empty
from rlplace.graph.program import export_program
from rlplace.graph.structures import Structures
from rlplace.graph.types import TP_DEGREES


@dataclass(frozen=True)
class Row:
    """CPU seconds of a model with `layers` layers."""

    layers: int
    groups: int
    structures: int
    export_seconds: float
    group_seconds: float
    analyse_seconds: float


def row_of(family: str, layers: int, repeats: int) -> Row:
    """Best times of several captures."""
    spec = library.spec(family, layers=layers)
    with torch.device("meta"):
        module = spec.make()
    rows = []
    for _ in range(repeats):
        times = [time.process_time()]
        program = export_program(module, (), empty(spec.shape, 2))
        times.append(time.process_time())
        drafts = drafts_of(program, coarsen(program))
        times.append(time.process_time())
        structures = Structures(program, TP_DEGREES, frozenset())
        for draft in drafts:
            structures.index(draft)
        times.append(time.process_time())
        seconds = [after - before for before, after in pairwise(times)]
        rows.append(Row(layers, len(drafts), len(structures.found), *seconds))
    return Row(
        layers,
        rows[0].groups,
        rows[0].structures,
        min(row.export_seconds for row in rows),
        min(row.group_seconds for row in rows),
        min(row.analyse_seconds for row in rows),
    )


def table_of(family: str, rows: list[Row]) -> Table:
    table = Table(title=f"{family} with more and more equal layers")
    columns = ("layers", "groups", "distinct", "export", "grouping", "layouts and counts", "ratio")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row.layers),
            str(row.groups),
            str(row.structures),
            f"{row.export_seconds:.2f} s",
            f"{row.group_seconds:.2f} s",
            f"{row.analyse_seconds:.2f} s",
            f"{row.analyse_seconds / rows[0].analyse_seconds:.2f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--family", default="llama", help="a family with layers")
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48, 96])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    row_of(args.family, 2, 1)  # imports and lazily made caches
    rows = [row_of(args.family, layers, args.repeats) for layers in args.layers]
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        Console().print(table_of(args.family, rows))


if __name__ == "__main__":
    main()
