"""Ranks that are killed, frozen or out of disk in the middle of training: what the others do.

Each trial trains a tiny model by a plan on 2 or 3 ranks, with a checkpoint every second step, and
lets one rank fail in one phase. Then the same job is started again, and must give the losses of a
job that nothing happened to.

    python benchmarks/faults.py --out faults.md

Behind them: how long a plan for fewer devices takes for models that were captured, and a training
under torchrun in all that loses one of its two ranks and goes on with the other.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

# Started as a script, python looks beside it; as a module, in the folder above.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro

from benchmarks.faults_parts.job import MODEL, SIZES, graph_of
from benchmarks.faults_parts.replan import replans, restart_table, restarts
from rlplace.errors import RankFailedError
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Instance, Plan
from rlplace.plan.uniform import uniform_plan
from rlplace.runtime import manifest
from rlplace.runtime.checkpoint import Checkpoints
from rlplace.runtime.jobs import Fault, Job
from rlplace.runtime.options import Options
from rlplace.runtime.pool import Pool
from rlplace.runtime.validate import stand_in_cluster

STEPS, EVERY, STEP = 8, 2, 5
PHASES = ("F", "B", "reduce", "optimizer", "checkpoint")


@dataclass(frozen=True)
class Trial:
    """What a trial gave.

    Args:
        plan: Name of the plan.
        fault: What was done.
        seconds: From the fault to the end of the job on every rank; None where it went on.
        named: What the job said of the rank.
        right: Whether that was the right rank, and the others found out too.
        step: The checkpoint that the second start went on from.
        equal: Whether its losses were those of a job without a fault.
    """

    plan: str
    fault: Fault
    seconds: float | None
    named: str
    right: bool
    step: int
    equal: bool


def main(out: Path | None = None, timeout: float = 5.0, skip: int = 0, limit: int = 50) -> None:
    """Run the trials and write a table.

    Args:
        out: Where the table goes, beside the terminal.
        timeout: Seconds that a rank waits for another.
        skip: Trials at the beginning that are left out.
        limit: Where they end.
    """
    graph = graph_of()
    plans = {name: make_plan(graph, name) for name in ("pp2", "dp2", "tp2", "pp3")}
    with TemporaryDirectory() as folder, Pool(3, timeout=timeout) as pool:
        bench = Bench(Path(folder), pool, graph, plans)
        trials = []
        for name, fault in itertools.islice(faults(), skip, limit):
            trials.append(bench.trial(name, fault))
            print(row(trials[-1]), flush=True)
        lines = [*table(trials), "", *replans(5), ""]
        lines += restart_table(restarts(Path(folder)))
    print("\n".join(lines))
    if out is not None:
        out.write_text("\n".join(lines) + "\n")


def make_plan(graph: OpGraph, name: str) -> Plan:
    """A plan by the name of its one axis and its degree."""
    axis, degree = name[:2], int(name[2])
    instance = Instance(graph, stand_in_cluster(degree), 8, precision="fp32")
    return uniform_plan(
        instance,
        pp=degree if axis == "pp" else 1,
        tp=degree if axis == "tp" else 1,
        micro_batches=2,
    )


def faults() -> Iterator[tuple[str, Fault]]:
    """Plans and faults, the more telling ones first."""
    for kind, phase, rank in itertools.product(("kill", "stop"), PHASES, (0, 1)):
        yield "pp2", Fault(rank, STEP, kind, phase)  # type: ignore[arg-type]  # of a literal
    for phase, rank in itertools.product(PHASES, (0, 1, 2)):
        yield "pp3", Fault(rank, STEP, "kill", phase)
    for name, rank in itertools.product(("dp2", "tp2"), (0, 1)):
        yield name, Fault(rank, STEP, "kill", "B")
        yield name, Fault(rank, STEP, "stop", "checkpoint")
    for name, rank in itertools.product(("pp2", "dp2"), (0, 1)):
        yield name, Fault(rank, STEP, "full", "checkpoint")
        yield name, Fault(rank, STEP, "raise", "B")


class Bench:
    """Runs trials.

    Args:
        folder: For checkpoints.
        pool: The ranks.
        graph: Of the model.
        plans: By name.
    """

    def __init__(self, folder: Path, pool: Pool, graph: OpGraph, plans: dict[str, Plan]) -> None:
        self._folder, self._pool, self._graph, self._plans = folder, pool, graph, plans
        self._count = 0
        self._whole = {name: self._run(self._job(name, folder / name)) for name in plans}

    def trial(self, name: str, fault: Fault) -> Trial:
        """Let a rank fail, and start again."""
        self._count += 1
        folder = self._folder / str(self._count)
        try:
            losses = self._run(replace(self._job(name, folder), fault=fault))
            said, seconds = "", None
            right = losses == self._whole[name]  # a full disk ends no job
        except RankFailedError as error:
            said = str(error)
            at = re.findall(r"on purpose at ([\d.]+)", said)
            seconds = time.time() - float(at[-1]) if at else math.nan
            right = f"rank {fault.rank} failed" in said
        if fault.kind == "full":
            with next(manifest.found(folder)[0].glob("__*")).open("r+b") as stream:
                stream.truncate(100)  # and the last good one is damaged too
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            last = manifest.latest_good(folder)
        step = int(last.name.partition("-")[2]) if last is not None else 0
        equal = self._run(self._job(name, folder)) == self._whole[name][step:]
        named = (
            re.findall(r"rank \d failed: .*?last seen in [^\n);]*|rank \d failed: [^\n);]*", said)
            or [""]
        )[-1]
        return Trial(name, fault, seconds, named, right, step, equal)

    def _job(self, name: str, folder: Path) -> Job:
        checkpoint = Checkpoints(str(folder), every=EVERY)
        options = Options(steps=STEPS, warmup=0, dtype="float64", checkpoint=checkpoint)
        return Job(self._plans[name], self._graph, MODEL, SIZES, options)

    def _run(self, job: Job) -> tuple[float, ...]:
        return self._pool.run([job], limit=120)[0].losses


def row(trial: Trial) -> str:
    """A trial as a row of Markdown."""
    fault = trial.fault
    seconds = "goes on" if trial.seconds is None else f"{trial.seconds:.1f}"
    cells = (trial.plan, fault.rank, fault.kind, fault.phase, seconds, trial.named)
    marks = ("yes" if trial.right else "NO", trial.step, "yes" if trial.equal else "NO")
    return f"| {' | '.join(map(str, (*cells, *marks)))} |"


def table(trials: list[Trial]) -> list[str]:
    """The trials as Markdown, and what they come to."""
    lines = [
        "| plan | rank | fault | phase | seconds to end | named | right | restored | equal |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [row(one) for one in trials]
    ended = [one.seconds for one in trials if one.seconds and math.isfinite(one.seconds)]
    right, equal = sum(one.right for one in trials), sum(one.equal for one in trials)
    lines.append("")
    lines.append(
        f"{len(trials)} trials: right rank in {right}, equal losses in {equal}; "
        f"at most {max(ended, default=0.0):.1f} s to the end."
    )
    return lines


if __name__ == "__main__":
    tyro.cli(main)
