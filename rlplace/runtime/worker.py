"""One rank of a launch: `python -m rlplace.runtime.worker FOLDER`, with torchrun's environment.

It runs the jobs of the folder one after the other in one process group, since starting up takes
longer than many a job. Rank 0 prints one JSON line a step.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from rlplace.graph.library import spec
from rlplace.graph.program import Program, export_program
from rlplace.runtime.jobs import Fault, Job, read_jobs, write_error, write_result
from rlplace.runtime.measure import Measurement
from rlplace.runtime.model import Batch, cast
from rlplace.runtime.trainer import run
from rlplace.runtime.world import World, join


def main(folder: Path) -> int:
    """Run the jobs of a folder; 0 if all went well."""
    jobs, timeout = read_jobs(folder)
    rank, index = int(os.environ["RANK"]), 0
    try:
        world = join(jobs[0].device, timeout)
        world.owned = False
        programs: dict[str, Program] = {}
        for index, job in enumerate(jobs):
            measurement = _run(world, index, job, programs)
            if rank == 0:
                write_result(folder, index, measurement)
        dist.destroy_process_group()
    except Exception as error:
        write_error(folder, rank, index, error)
        raise
    return 0


def _run(world: World, index: int, job: Job, programs: dict[str, Program]) -> Measurement:
    model = spec(**job.source)  # type: ignore[arg-type]
    dtype = job.options.dtype_for(job.plan)
    key = f"{json.dumps(job.source)} {dtype}"
    if key not in programs:
        with torch.device("meta"):
            twin = model.make().train().to(dtype)
        example = cast(model.example(2), dtype)
        assert isinstance(example, dict)
        programs[key] = export_program(twin, (), example)

    def data() -> Iterator[Batch]:
        for step in itertools.count(job.data_seed):
            yield model.example(job.plan.global_batch, step)

    return run(
        job.plan,
        model.make,
        data(),
        options=job.options,
        optimizer=job.optimizer,
        graph=job.graph,
        program=programs[key],
        world=world,
        on_step=_reporter(world.rank, index, job.fault),
    )


def _reporter(rank: int, job: int, fault: Fault | None) -> Callable[[int, float], None]:
    def report(step: int, seconds: float) -> None:
        if rank == 0:
            print(json.dumps({"job": job, "step": step, "seconds": seconds}), flush=True)
        if fault is not None and (fault.rank, fault.step) == (rank, step):
            _fail(fault)

    return report


def _fail(fault: Fault) -> None:
    if fault.kind == "raise":
        raise RuntimeError(f"rank {fault.rank} fails on purpose after step {fault.step}")
    os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
