"""The ranks of a launch: `python -m rlplace.runtime.worker FOLDER COUNT`.

They run the jobs of the folder one after the other in one process group. Rank 0 prints one JSON
line a step.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from rlplace.graph.library import spec
from rlplace.graph.program import Program, export_program
from rlplace.runtime.jobs import Fault, Job, read_jobs, write_codes, write_error, write_result
from rlplace.runtime.measure import Measurement
from rlplace.runtime.model import Batch, cast
from rlplace.runtime.ranks import die_with_parent, fork_ranks
from rlplace.runtime.trainer import run
from rlplace.runtime.world import World, join


def main(folder: Path, count: int) -> int:
    """Run the jobs of a folder on `count` ranks; 0 if all went well."""
    die_with_parent()
    jobs, timeout = read_jobs(folder)
    programs = export_all(jobs)
    codes = fork_ranks(count, folder, lambda: _rank(folder, jobs, timeout, programs))
    write_codes(folder, codes)
    return int(any(codes.values()) or len(codes) < count)


def export_all(jobs: Sequence[Job]) -> dict[str, Program]:
    """The exported program of every model of some jobs, by `program_key`."""
    return {key: _export(job) for key, job in {program_key(job): job for job in jobs}.items()}


def program_key(job: Job) -> str:
    """Equal for jobs that run the same exported program."""
    return f"{json.dumps(job.source)} {job.options.dtype_for(job.plan)}"


def _export(job: Job) -> Program:
    model = spec(**job.source)  # type: ignore[arg-type]
    dtype = job.options.dtype_for(job.plan)
    with torch.device("meta"):
        twin = model.make().train().to(dtype)
    example = cast(model.example(2), dtype)
    assert isinstance(example, dict)
    return export_program(twin, (), example)


def _rank(folder: Path, jobs: list[Job], timeout: float, programs: Mapping[str, Program]) -> int:
    """What one rank does."""
    rank, index = int(os.environ["RANK"]), 0
    try:
        world = join(jobs[0].device, timeout)
        world.owned = False
        for index, job in enumerate(jobs):
            report = _reporter(world.rank, index, job.fault)
            measurement = run_job(world, job, programs[program_key(job)], report)
            if rank == 0:
                write_result(folder, index, measurement)
        dist.destroy_process_group()
    except Exception as error:
        write_error(folder, rank, index, error)
        raise
    return 0


def run_job(
    world: World, job: Job, program: Program, on_step: Callable[[int, float], None]
) -> Measurement:
    """Run one job on the ranks that have joined; all of them call this."""
    model = spec(**job.source)  # type: ignore[arg-type]

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
        program=program,
        world=world,
        on_step=on_step,
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
    status = main(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(status)  # the interpreter would take seconds to free an exported model
