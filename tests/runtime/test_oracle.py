"""Schedules give what torch's own give for the same pipeline: losses and gradients.

Torch divides by the number of micro-batches at the end, and we divide every loss: bit for bit the
same where that number is a power of two.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.dist

SCRIPT = """
import sys

import torch
import torch.distributed as dist

from benchmarks.runtime_parts.model import Model, Shape, batch_of
from benchmarks.runtime_parts.public import passes
from rlplace.graph.capture import capture
from rlplace.graph.program import export_program
from rlplace.plan.types import Instance
from rlplace.plan.uniform import uniform_plan
from rlplace.runtime.options import Options
from rlplace.runtime.trainer import Trainer
from rlplace.runtime.validate import stand_in_cluster
from rlplace.runtime.world import join
from tests.runtime.test_oracle import SCHEDULES, sizes_for

world = join("cpu", 60)
world.owned = False
shape = Shape(**sizes_for(world.size))
batch, micro_batches = batch_of(shape), 2 * world.size
graph = capture(Model(shape), (), batch)
program = export_program(Model(shape).double(), (), batch)
instance = Instance(graph, stand_in_cluster(world.size), shape.batch, precision="fp32")
options = Options(steps=1, warmup=0, collect=True, dtype="float64")


def ours(schedule):
    degrees = {"pp": world.size, "micro_batches": micro_batches, "schedule": schedule}
    plan = uniform_plan(instance, balance="layers", **degrees)
    more = {"options": options, "graph": graph, "program": program, "example": batch}
    with Trainer(plan, lambda: Model(shape), world=world, **more) as trainer:
        loss = trainer.step(batch).loss
        tensors = trainer.measurement().tensors
        gradients = {n.partition("/")[2]: t for n, t in tensors.items() if n.startswith("grad")}
        return {"stages": len(plan.stages), "loss": loss, "gradients": gradients}


def theirs(schedule):
    torch.manual_seed(0)
    whole = {n.removeprefix("part."): t for n, t in Model(shape).double().state_dict().items()}
    parts, run = passes(shape, micro_batches, schedule)
    for part in parts:
        part.double().load_state_dict({name: whole[name] for name in part.state_dict()})
    losses = run(batch)
    own = {f"part.{n}": p.grad for part in parts for n, p in part.named_parameters()}
    every = [None] * world.size
    dist.all_gather_object(every, (own, [float(loss) for loss in losses]))
    gradients = {name: grad for part, _ in every for name, grad in part.items()}
    return {"loss": sum(every[-1][1]) / micro_batches, "gradients": gradients}


found = {schedule: (ours(schedule), theirs(schedule)) for schedule in SCHEDULES}
if world.rank == 0:
    torch.save(found, sys.argv[1])
"""

#: Stages of each rank.
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1}


def sizes_for(ranks: int) -> dict[str, int]:
    """A model of two layers for each rank."""
    sizes = {"hidden": 16, "heads": 2, "vocab": 32, "seq_len": 8}
    return {"layers": 2 * ranks, "batch": 4 * ranks, **sizes}


@pytest.fixture(scope="module", params=[2, 3])
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Both sides of every schedule, on 2 and on 3 ranks."""
    folder = tmp_path_factory.mktemp("oracle")
    script = folder / "compare.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n{SCRIPT}"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(request.param), str(script), str(folder / "found")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = torch.load(folder / "found")
    return {"ranks": request.param, **content}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_loss_and_gradients_are_those_of_torch(found: dict[str, Any], schedule: str) -> None:
    ours, theirs = found[schedule]
    assert ours["stages"] == found["ranks"] * SCHEDULES[schedule]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-14)
    assert ours["gradients"].keys() == theirs["gradients"].keys()
    largest = max(float(wanted.abs().max()) for wanted in theirs["gradients"].values())
    for name, wanted in theirs["gradients"].items():
        if found["ranks"] == 2:
            assert torch.equal(ours["gradients"][name], wanted), name
        assert (ours["gradients"][name] - wanted).abs().max() <= 1e-14 * largest, name
