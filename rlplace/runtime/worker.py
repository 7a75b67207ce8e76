"""The ranks of a pool: `python -m rlplace.runtime.worker FOLDER COUNT`.

This process exports the models and forks the ranks, which take one order after the other: names
of folders with jobs, a line each, on stdin. A line on stdout says when an order is done, and rank
0 prints one JSON line a step. Once a rank has failed, the next order gets new ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from rlplace.errors import InputError
from rlplace.graph.library import spec
from rlplace.graph.program import Program, export_program
from rlplace.runtime.jobs import (
    PAUSE,
    Fault,
    Job,
    read_jobs,
    write_codes,
    write_error,
    write_result,
)
from rlplace.runtime.measure import Measurement
from rlplace.runtime.model import cast, library_batches
from rlplace.runtime.ranks import Ranks, die_with_parent
from rlplace.runtime.run import run
from rlplace.runtime.world import World, join

#: In place of the name of an order: end the ranks, but keep the models.
STOP = "stop"

#: Bytes of a file that still fit where a disk is full: a few lines of stderr.
_SMALL = 2048

#: What a rank says when it has run an order, or refused it before any collective.
_DONE, _REFUSED = b".", b"!"


def main(folder: Path, count: int) -> int:
    """Serve orders on `count` ranks until stdin ends."""
    die_with_parent()
    programs: dict[str, Program] = {}
    crew: Crew | None = None
    for start, name in enumerate(name for name in _lines(0) if name != STOP):
        jobs, timeout = read_jobs(folder / name)
        new = export_all([job for job in jobs if program_key(job) not in programs])
        programs |= new
        if crew is not None and (new or not crew.alive):
            crew.end()
            crew = None
        if crew is None:
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(start)
            crew = Crew(count, folder, jobs[0].device, timeout, programs)
        codes = crew.serve(name)
        write_codes(folder / name, codes)
        failed = len(codes) < count or any(codes.values())
        sys.stdout.write(json.dumps({"order": name, "failed": failed}) + "\n")
        sys.stdout.flush()
    return 0


def _lines(stream: int) -> Iterator[str]:
    """Lines of a pipe, read only when there is nothing left to do."""
    while text := os.read(stream, 4096):
        yield from (line for line in text.decode().split("\n") if line)


class Crew:
    """Forked ranks in one process group that take orders.

    Args:
        count: Number of ranks.
        folder: Folder of the pool; an order is a folder in it.
        device: ``cpu`` or ``cuda``.
        timeout: Seconds that a rank waits for another.
        programs: Of all models, by `program_key`.
    """

    def __init__(
        self,
        count: int,
        folder: Path,
        device: str,
        timeout: float,
        programs: Mapping[str, Program],
    ) -> None:
        pipes = [os.pipe() for _ in range(count)]
        self._done, done = os.pipe()

        def work() -> int:
            for _, writer in pipes:
                os.close(writer)
            rank = int(os.environ["RANK"])
            orders = os.fdopen(pipes[rank][0])
            return _rank(folder, orders, done, (device, timeout), programs)

        self._ranks = Ranks(count, folder, work)
        self._count, self._orders = count, [writer for _, writer in pipes]
        self._said: dict[int, bytes] = {}
        self.alive = True
        for reader in (*(reader for reader, _ in pipes), done):
            os.close(reader)

    def serve(self, name: str) -> dict[int, int]:
        """Let all ranks run an order.

        Returns:
            Exit code of each rank, 0 of those that live on and 1 where they refused; those that
            had to be ended are left out.
        """
        self._said = {}
        for pipe in self._orders:
            with contextlib.suppress(BrokenPipeError):
                os.write(pipe, f"{name}\n".encode())
        self._ranks.wait(self._over)
        self.alive = self.alive and not self._ranks.codes
        refused = {rank: int(word == _REFUSED) for rank, word in self._said.items()}
        return refused if self.alive else self._ranks.codes

    def end(self) -> None:
        """End the ranks."""
        self._ranks.end()
        for pipe in (*self._orders, self._done):
            os.close(pipe)

    def _over(self) -> bool:
        """Whether all ranks have said that they are done, or the pool wants no more of this."""
        ready, _, _ = select.select([self._done, 0], [], [], 0)
        if 0 in ready:
            self._ranks.end()
            self.alive = False
            return True
        if self._done in ready:
            for word in os.read(self._done, 4096).splitlines():
                rank, said = word.split()
                self._said[int(rank)] = said
        return len(self._said) == self._count


def _rank(
    folder: Path,
    orders: Iterable[str],
    done: int,
    joining: tuple[str, float],
    programs: Mapping[str, Program],
) -> int:
    """What one rank does until there are no more orders."""
    world = join(*joining)
    world.owned = False
    for line in orders:
        word = _serve(world, folder / line.strip(), programs)
        os.write(done, b"%d %s\n" % (world.rank, word))
    dist.destroy_process_group()
    return 0


def _serve(world: World, order: Path, programs: Mapping[str, Program]) -> bytes:
    """Run the jobs of an order; all ranks refuse a plan together, and live on."""
    index = 0
    try:
        for index, job in enumerate(read_jobs(order)[0]):
            listener = _Listener(world.rank, index, job.fault)
            program = programs[program_key(job)]
            try:
                measurement = run_job(world, job, program, listener.on_step, listener.on_phase)
            finally:
                _limit_files(None)
            if world.rank == 0:
                write_result(order, index, measurement)
    except Exception as error:
        write_error(order, world.rank, index, error)
        if isinstance(error, InputError):
            return _REFUSED
        raise
    return _DONE


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


def run_job(
    world: World,
    job: Job,
    program: Program,
    on_step: Callable[[int, float], None],
    on_phase: Callable[[str], None] | None = None,
) -> Measurement:
    """Run one job on the ranks that have joined; all of them call this."""
    model = spec(**job.source)  # type: ignore[arg-type]
    return run(
        job.plan,
        model.make,
        library_batches(model, job.rows or job.plan.global_batch, job.data_seed),
        options=job.options,
        optimizer=job.optimizer,
        graph=job.graph,
        program=program,
        world=world,
        on_step=on_step,
        on_phase=on_phase,
    )


class _Listener:
    """Reports steps to the launcher, and fails where that was asked for."""

    def __init__(self, rank: int, job: int, fault: Fault | None) -> None:
        self._rank, self._job = rank, job
        self._fault = fault if fault is not None and fault.rank == rank else None
        self._steps = 0

    def on_step(self, step: int, seconds: float) -> None:
        """A step is over."""
        self._steps = step + 1
        if self._rank == 0:
            line = {"job": self._job, "step": step, "seconds": seconds}
            print(json.dumps(line), flush=True)
        if self._fault is not None and (self._fault.phase, self._fault.step) == ("", step):
            _fail(self._fault)

    def on_phase(self, phase: str) -> None:
        """A phase begins; a checkpoint is written beside the steps after its own."""
        fault = self._fault
        kind, _, saved = phase.partition(" ")
        if fault is None or fault.phase != kind:
            return
        if int(saved) > fault.step if saved else self._steps == fault.step:
            _fail(fault)


def _limit_files(size: int | None) -> None:
    """Let the kernel refuse files of this process beyond so many bytes, as a full disk does."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


def _fail(fault: Fault) -> None:
    sys.stderr.write(f"rank {fault.rank} fails on purpose at {time.time():.3f}\n")
    sys.stderr.flush()
    if fault.kind == "full":
        return _limit_files(_SMALL)
    if fault.kind == "raise":
        raise RuntimeError(f"rank {fault.rank} fails on purpose after step {fault.step}")
    if fault.kind == "pause":
        subprocess.Popen(["sh", "-c", f"sleep {PAUSE}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)


if __name__ == "__main__":
    status = main(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(status)  # the interpreter would take seconds to free an exported model
