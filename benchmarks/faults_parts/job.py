"""One rank of a training that loses a rank, or goes on with fewer: started by torchrun.

    torchrun ... -m benchmarks.faults_parts.job FOLDER STEPS [SIGNAL]

With a signal, rank 1 sends it to itself in the middle of the steps.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import rlplace
from rlplace.graph import library
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Instance, Plan
from rlplace.plan.uniform import uniform_plan
from rlplace.runtime.checkpoint import Checkpoints
from rlplace.runtime.model import library_batches
from rlplace.runtime.options import Options
from rlplace.runtime.reports import StepReport
from rlplace.runtime.trainer import Trainer

MODEL = "llama"
SIZES = {"layers": 3, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 32, "vocab": 32, "seq_len": 8}
CLUSTER, BATCH, TIMEOUT = "1x2xA100-80", 8, 5.0


def graph_of() -> OpGraph:
    """The graph, which is in the cache once it was captured."""
    return library.build(MODEL, **SIZES)  # type: ignore[arg-type]  # sizes are ints


class Marks:
    """Moments of a training (seconds since the epoch), and its losses.

    Args:
        folder: Where they are left, and rank 1 ends.
        number: The signal by which it does, 0 for none.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self._folder, self._signal = folder, number
        self.rank = -1
        self.moments = {"imported": time.time()}
        self.losses: dict[int, float] = {}

    def begin(self, steps: int | None) -> None:
        """The ranks are assembled, and have restored what there was."""
        self.moments["ready"] = time.time()

    def step(self, report: StepReport) -> None:
        """Note a step, and fail after the fifth."""
        self.moments.setdefault("first step", time.time())
        self.losses[report.step] = report.loss
        if self.rank == 1 and self._signal and report.step == 5:
            (self._folder / "failed").write_text(str(time.time()))
            os.kill(os.getpid(), self._signal)

    def end(self) -> None:
        """Leave what was noted."""
        if self.rank == 0:
            content = {"moments": self.moments, "losses": self.losses}
            (self._folder / "marks.json").write_text(json.dumps(content))


def main(folder: Path, steps: int, number: int) -> None:
    """Train."""
    marks = Marks(folder, number)
    graph, cluster = graph_of(), rlplace.Cluster.parse(CLUSTER)
    plan = uniform_plan(Instance(graph, cluster, BATCH, precision="fp32"), pp=2, micro_batches=2)
    make_plan = rlplace.replanner(graph, cluster)

    def replan(plan: Plan, ranks: int) -> Plan:
        start = time.time()
        found = make_plan(plan, ranks)
        marks.moments["replan seconds"] = time.time() - start
        return found

    spec = library.spec(MODEL, **SIZES)  # type: ignore[arg-type]  # sizes are ints
    checkpoint = Checkpoints(str(folder / "checkpoints"), every=1)
    with Trainer(
        plan,
        spec.make,
        example=spec.example(BATCH, 0),
        options=Options(dtype="float64", checkpoint=checkpoint),
        graph=graph,
        timeout=TIMEOUT,
        callbacks=[marks],
        replan=replan,
    ) as trainer:
        marks.rank = trainer.world.rank
        trainer.fit(library_batches(spec, BATCH, 0), steps)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), getattr(signal, sys.argv[3]) if sys.argv[3:] else 0)
