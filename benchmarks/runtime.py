"""What the runtime costs: a plan's step over the same written by hand with torch's public APIs.

Both sides run in the same pinned ranks (gloo, one thread each), a few steps by turns, on the same
model, batch, degrees and optimizer (AdamW, fused). The ratio is of the medians over all turns; the
spread is that of the ratios of single turns. Start it on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

# Started as a script, python looks beside it; as a module, in the folder above.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # has no stub

import rlplace
from benchmarks.runtime_parts.cases import PAIRS, Pair
from benchmarks.runtime_parts.model import Model, Shape, batch_of
from benchmarks.runtime_parts.public import LR
from rlplace.graph.program import Program, export_program
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Instance
from rlplace.runtime.assemble import assemble, optimizer_factory
from rlplace.runtime.cuts import BUCKET_BYTES
from rlplace.runtime.model import load_model
from rlplace.runtime.ranks import fork_ranks
from rlplace.runtime.validate import stand_in_cluster, validate
from rlplace.runtime.world import World, join

#: Seconds that a rank waits for another.
_PATIENCE = 120.0


@dataclass(frozen=True)
class Row:
    """Medians of a pair.

    Args:
        name, rival: Of the pair.
        ours, theirs: Seconds of a step.
        low, high: Quartiles of the ratio of single turns.
        why: If it did not run.
    """

    name: str
    rival: str
    ours: float = 0.0
    theirs: float = 0.0
    low: float = 0.0
    high: float = 0.0
    why: str = ""

    @property
    def ratio(self) -> float:
        """Ours over theirs."""
        return self.ours / self.theirs if self.theirs else float("nan")


@dataclass(frozen=True)
class Subject:
    """What all pairs run: sizes, and the model as it was captured and exported once."""

    shape: Shape
    graph: OpGraph
    program: Program


def compare(world: World, pair: Pair, subject: Subject, turns: int, steps: int) -> Row:
    """Run both sides of a pair by turns; every rank calls this."""
    batch = batch_of(subject.shape)
    sides = [(_plan_step(world, pair, subject), batch), (_twin_step(pair, subject), batch)]
    if pair.shares:
        part = {name: value.chunk(pair.ranks)[world.rank] for name, value in batch.items()}
        sides[1] = (sides[1][0], part)
    for side in sides:
        _timed(*side, 2)
    taken = [[_timed(*side, steps) for side in sides] for _ in range(turns)]
    ours, theirs = (statistics.median(side) for side in zip(*taken, strict=True))
    ratios = [own / other for own, other in taken]
    low, _, high = statistics.quantiles(ratios, n=4)
    return Row(pair.name, pair.rival, ours, theirs, low, high)


def _plan_step(
    world: World, pair: Pair, subject: Subject
) -> Callable[[Mapping[str, Tensor]], object]:
    """A step of the plan with the pair's degrees."""
    shape, graph = subject.shape, subject.graph
    instance = Instance(graph, stand_in_cluster(pair.ranks), shape.batch, precision="fp32")
    plan = rlplace.uniform_plan(
        instance,
        balance="layers",
        micro_batches=pair.micro_batches,
        **pair.degrees,  # type: ignore[arg-type]  # one dict for arguments of several types
    )
    validate(plan, graph, subject.program, world.size)
    model = load_model(
        plan,
        lambda: Model(shape),
        batch_of(shape),
        dtype=torch.float32,
        seed=0,
        graph=graph,
        program=subject.program,
    )
    made = assemble(world, plan, model, optimizer_factory("adamw", LR), True, BUCKET_BYTES)
    assert made.interpreter is not None
    return made.interpreter.step


def _twin_step(pair: Pair, subject: Subject) -> Callable[[Mapping[str, Tensor]], object]:
    torch.manual_seed(0)
    return pair.twin(subject.shape, pair.micro_batches)


def _timed(
    step: Callable[[Mapping[str, Tensor]], object], batch: Mapping[str, Tensor], steps: int
) -> float:
    """Seconds of a step, over the ranks."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step(batch)
    dist.barrier()
    return (time.perf_counter() - start) / steps


def run_pairs(
    pairs: Sequence[Pair], subject: Subject, turns: int, steps: int, folder: Path
) -> list[Row]:
    """Run pairs of one number of ranks; rank 0 leaves its rows in the folder."""
    ranks = pairs[0].ranks
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }

    def work() -> int:
        world = join("cpu", _PATIENCE)
        rows = []
        for pair in pairs:
            print(pair.name, file=sys.stderr, flush=True)
            try:
                rows.append(compare(world, pair, subject, turns, steps))
            except rlplace.errors.InputError as error:  # on every rank alike, before any message
                rows.append(Row(pair.name, pair.rival, why=str(error)))
            if world.rank == 0:
                (folder / "rows.json").write_text(json.dumps([asdict(row) for row in rows]))
        dist.barrier()
        return 0

    codes = fork_ranks(ranks, folder, work)
    if any(codes.values()) or len(codes) < ranks:
        for rank in range(ranks):
            print((folder / f"stderr-{rank}").read_text()[-3000:], file=sys.stderr)
        raise SystemExit(f"ranks ended with {codes}")
    return [Row(**row) for row in json.loads((folder / "rows.json").read_text())]


def table_of(rows: Sequence[Row]) -> Table:
    """A line for each pair."""
    table = Table(title="step time over the same written by hand")
    for name in ("plan", "by hand", "ours ms", "theirs ms", "ratio", "quartiles"):
        table.add_column(name, justify="left" if name in ("plan", "by hand") else "right")
    for row in rows:
        if row.why:
            table.add_row(row.name, row.rival, "", "", "", row.why)
            continue
        times = (f"{1e3 * row.ours:.1f}", f"{1e3 * row.theirs:.1f}", f"{row.ratio:.3f}")
        table.add_row(row.name, row.rival, *times, f"{row.low:.3f}-{row.high:.3f}")
    return table


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=8, help="times that both sides take turns")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--only", default="", help="pairs whose name contains this")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    pairs = [pair for pair in PAIRS if options.only in pair.name]
    shape = Shape(hidden=options.hidden)
    torch.set_num_threads(1)
    module, batch = Model(shape), batch_of(shape)
    subject = Subject(shape, rlplace.capture(module, (), batch), export_program(module, (), batch))
    rows: list[Row] = []
    for ranks in sorted({pair.ranks for pair in pairs}):
        own = [pair for pair in pairs if pair.ranks == ranks]
        with tempfile.TemporaryDirectory(prefix="rlplace-bench-") as folder:
            rows += run_pairs(own, subject, options.turns, options.steps, Path(folder))
    if options.json:
        print(json.dumps([asdict(row) | {"ratio": row.ratio} for row in rows]))
        return
    console = Console()
    console.print(table_of(rows))
    ratios = [row.ratio for row in rows if not row.why]
    console.print(f"median ratio {statistics.median(ratios):.3f}, worst {max(ratios):.3f}")


if __name__ == "__main__":
    main()
