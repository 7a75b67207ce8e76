"""``rlplace run``: train by a plan, on ranks of this machine or as a rank of torchrun."""

from __future__ import annotations

import json as jsonlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro
from rich.console import Console

if TYPE_CHECKING:
    from rlplace.plan.types import Plan
    from rlplace.runtime.measure import Measurement
    from rlplace.runtime.options import Options

#: Share of the cores in use above which a measurement is warned about.
_BUSY = 0.15
#: Exit code of what Ctrl-C has ended.
_INTERRUPTED = 130


@dataclass(frozen=True)
class Outputs:
    """Where a measurement goes: files, and JSON or a table on stdout."""

    out: Path | None
    picture: Path | None
    trace: Path | None
    json: bool

    def show(self, measured: Measurement) -> None:
        """Write and print it."""
        from rlplace.report.run_view import measurement_data, render_measurement
        from rlplace.report.timeline_view import draw, save_trace

        if self.out is not None:
            measured.save(self.out)
        if self.picture is not None:
            draw([measured.timeline], self.picture)
        if self.trace is not None:
            save_trace(measured.timeline, self.trace)
        if not measured.step_times and not self.json:
            Console().print("the checkpoint has all these steps already: raise --steps to go on")
        elif self.json:
            print(jsonlib.dumps(measurement_data(measured), indent=1))
        else:
            Console().print(render_measurement(measured))


@dataclass(frozen=True)
class Extras:
    """What makes a run more than a measurement: a module of one's own, or a training's options."""

    module: str = ""
    seq_len: int | None = None
    accumulate: int = 1
    track: bool = False
    replan: str = ""


def run(
    plan: tyro.conf.Positional[Path],
    module: tyro.conf.Positional[str] = "",
    *,
    steps: int = 20,
    warmup: int = 3,
    lr: float = 1e-3,
    seed: int = 0,
    device: str = "cpu",
    timeout: float = 60.0,
    seq_len: int | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    track: bool = False,
    checkpoint: Path | None = None,
    every: int = 100,
    keep: int = 3,
    resume: bool = False,
    replan: str = "",
    max_restarts: int = 0,
    out: Path | None = None,
    picture: Path | None = None,
    trace: Path | None = None,
    json: bool = False,
) -> int:
    """Run a plan and measure it: a library model with random data, or your own module.

    It starts the ranks on this machine; under torchrun (see `rlplace launch`) it is one of them.
    Ctrl-C ends it after the step that runs.

    Args:
        plan: A plan file that `rlplace plan --out` wrote.
        module: Your own function as train.py:make (or train.py, if it is named make), the one that
            `rlplace plan` was given. The file may also have `data` (batches, or a function that
            gives them; the same on every rank), `optimizer`, `scheduler` and `groups`, as
            `rlplace.Trainer` takes them.
        steps: Measured steps.
        warmup: Steps before them.
        lr: Learning rate of the plan's optimizer.
        seed: Seed of the parameters and the data.
        device: cpu (gloo) or cuda (NCCL).
        timeout: Seconds after which a rank gives up waiting for another.
        seq_len: Given to your function, as by `rlplace plan`.
        accumulate: Batches of one step.
        clip: Largest global norm of the gradients.
        track: Log every step to Weights & Biases (offline where no key is set).
        checkpoint: Folder of checkpoints, seen by all ranks; Ctrl-C leaves one too.
        every: Steps between two checkpoints.
        keep: How many of them stay.
        resume: Go on from the last good checkpoint, if there is one. A restart does so anyway.
        replan: The plan's cluster, as for `rlplace plan` (a YAML file, or 2x8xH100-80): where
            there are fewer ranks than the plan needs, go on with another plan for its first
            devices.
        max_restarts: How often the ranks of this machine are started again after a failure.
        out: Write the measurement here as JSON.
        picture: Draw one measured step here.
        trace: Write one measured step here as a Chrome trace, for Perfetto.
        json: Print one JSON object.
    """
    from rlplace.plan.types import Plan
    from rlplace.runtime.checkpoint import Checkpoints
    from rlplace.runtime.options import Options

    loaded = Plan.load(plan)
    saved = None
    if checkpoint is not None:
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        saved = Checkpoints(str(checkpoint), every, keep, resume or again)
    options = Options(steps=steps, warmup=warmup, lr=lr, seed=seed, clip=clip, checkpoint=saved)
    outputs = Outputs(out, picture, trace, json)
    extras = Extras(module, seq_len, accumulate, track, replan)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _as_rank(loaded, options, extras, device, timeout, outputs)
    if extras == Extras() and not max_restarts and checkpoint is None:
        return _measure(loaded, options, device, timeout, outputs)
    _refuse_another_graph(loaded, extras)
    flags = {
        "steps": steps,
        "warmup": warmup,
        "lr": lr,
        "seed": seed,
        "device": device,
        "timeout": timeout,
        "seq-len": seq_len,
        "accumulate": accumulate,
        "clip": clip,
        "track": track,
        "checkpoint": checkpoint,
        "every": every,
        "keep": keep,
        "resume": resume,
        "replan": replan or None,
        "out": out,
        "picture": picture,
        "trace": trace,
        "json": json,
    }
    ranks = max(loaded.devices) + 1
    return _start_ranks(ranks, max_restarts, rank_arguments(plan, module, flags))


def rank_arguments(plan: Path, module: str, flags: dict[str, object]) -> list[str]:
    """The same command as each rank gets it; None and False are left out."""
    found = ["run", str(plan), *([module] if module else [])]
    for name, value in flags.items():
        if value is True:
            found.append(f"--{name}")
        elif value is not None and value is not False:
            found += [f"--{name}", str(value)]
    return found


def _measure(plan: Plan, options: Options, device: str, timeout: float, outputs: Outputs) -> int:
    """Run a library model on forked ranks of this machine."""
    from rlplace.cluster.discover import busy
    from rlplace.report.run_view import step_progress
    from rlplace.runtime.launch import launch

    if device == "cpu" and not outputs.json and (load := busy()) > _BUSY:
        Console(stderr=True).print(
            f"[yellow]{load:.0%} of the cores are busy: times will be off[/]"
        )
    with step_progress(options.steps + options.warmup, quiet=outputs.json) as progress:
        measured = launch(plan, options=options, device=device, timeout=timeout, progress=progress)
    outputs.show(measured)
    return 0


def _start_ranks(count: int, max_restarts: int, arguments: list[str]) -> int:
    """Start the ranks of this machine by torchrun, and wait for them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(count), "--max-restarts", str(max_restarts)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    process = subprocess.Popen([*command, "-m", "rlplace.cli", *arguments], env=environment)
    interrupted = False
    while True:
        try:
            code = process.wait()
            return _INTERRUPTED if interrupted else int(code != 0)
        except KeyboardInterrupt:
            interrupted = True  # the terminal has told torchrun too, which waits for the ranks


def _as_rank(
    plan: Plan, options: Options, extras: Extras, device: str, timeout: float, outputs: Outputs
) -> int:
    """Be one rank of torchrun."""
    import torch

    from rlplace.api import replanner
    from rlplace.commands.clusters import named_cluster
    from rlplace.commands.user_training import UserTraining, library_training, user_training
    from rlplace.training import run as train

    torch.manual_seed(options.seed)  # of data that the file draws: alike on all ranks
    job: UserTraining = (
        user_training(extras.module, plan, extras.seq_len)
        if extras.module
        else library_training(plan, options.seed)
    )
    measured = train(
        plan,
        job.make,
        job.data,
        job.loss,
        job.optimizer,
        example=job.example,
        graph=job.graph,
        options=options,
        device=device,
        timeout=timeout,
        scheduler=job.scheduler,
        groups=job.groups,
        accumulate=extras.accumulate,
        track=extras.track,
        replan=replanner(job.graph, named_cluster(extras.replan)) if extras.replan else None,
        progress=False if outputs.json else None,
    )
    if os.environ["RANK"] == "0":
        outputs.show(measured)
    return 0


def _refuse_another_graph(plan: Plan, extras: Extras) -> None:
    """Capture the module here, so that the ranks find it in the cache.

    Raises:
        InputError: If the plan is not for this module.
    """
    from rlplace.commands.user_training import captured, library_graph
    from rlplace.plan.check import refuse_other

    graph = captured(extras.module, plan, extras.seq_len) if extras.module else library_graph(plan)
    refuse_other("graph", plan.graph, graph.fingerprint)
