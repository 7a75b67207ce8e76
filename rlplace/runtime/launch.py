"""Runs plans on ranks of this machine: starts the workers, watches them, ends what it started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import IO

from torch.distributed.distributed_c10d import TCPStore

from rlplace.errors import InputError, RankFailedError
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Plan
from rlplace.runtime.jobs import Argument, Job, read_error, read_result, write_jobs
from rlplace.runtime.measure import Measurement
from rlplace.runtime.trainer import Options

#: (job, step, seconds) of every step, as rank 0 sees it.
Progress = Callable[[int, int, float], None]

_POLL = 0.02
#: Seconds that the other ranks have to say why they stop, once one has failed.
_GRACE = 5.0
_TAIL = 2000


def launch(
    plan: Plan,
    model: str = "",
    args: Mapping[str, Argument] | None = None,
    *,
    graph: OpGraph | None = None,
    options: Options | None = None,
    device: str = "cpu",
    timeout: float = 60.0,
    limit: float = 3600.0,
    progress: Progress | None = None,
) -> Measurement:
    """Run a plan on ranks of this machine.

    Args:
        plan: The plan; as many ranks are started as it uses.
        model: Name in the library; by default the plan's source.
        args: Arguments of the library.
        graph: The plan's graph, if it is at hand.
        options: Steps, seed, learning rate.
        device: ``cpu`` or ``cuda``.
        timeout: Seconds after which a rank gives up waiting for another.
        limit: Seconds after which all ranks are ended.
        progress: Called after every step.

    Raises:
        InputError: If the plan is for another graph.
        RankFailedError: If a rank failed; names it and the cause.
    """
    job = Job(plan, graph, model, args or {}, options or Options(), device=device)
    return launch_many([job], timeout=timeout, limit=limit, progress=progress)[0]


def launch_many(
    jobs: Sequence[Job],
    *,
    ranks: int | None = None,
    timeout: float = 60.0,
    limit: float = 3600.0,
    progress: Progress | None = None,
) -> list[Measurement]:
    """Run several jobs, one after the other, in one start of the ranks.

    Args:
        jobs: All for the same device.
        ranks: Ranks to start; by default as many as the largest plan needs.
        timeout: Seconds after which a rank gives up waiting for another.
        limit: Seconds after which all ranks are ended.
        progress: Called after every step.

    Raises:
        InputError: If a plan is for another graph or needs more ranks.
        RankFailedError: If a rank failed; names it, the job and the cause.
    """
    if not jobs:
        return []
    checked = [_checked(job, ranks, jobs[0].device) for job in jobs]
    count = ranks or max(job.ranks for job in jobs)
    with tempfile.TemporaryDirectory(prefix="rlplace-run-") as name:
        folder = Path(name)
        write_jobs(folder, checked, timeout)
        with _started(folder, count) as workers:
            _watch(folder, workers, limit, progress)
        return [read_result(folder, index) for index in range(len(jobs))]


def _checked(job: Job, ranks: int | None, device: str) -> Job:
    """A job with its graph, which is that of its plan."""
    if ranks is not None and job.ranks > ranks:
        rule = f"the plan uses {job.ranks} ranks"
        raise InputError("ranks", ranks, rule, job.ranks)
    if job.device != device:
        raise InputError("device", job.device, "jobs of one launch have one device", device)
    graph = job.graph
    if graph is None:
        from rlplace.graph.library import build

        graph = build(**job.source)  # type: ignore[arg-type]
    if job.plan.graph != graph.fingerprint:
        rule = "the plan was made for another graph; plan again for this one"
        raise InputError("plan.graph", job.plan.graph, rule, graph.fingerprint)
    return replace(job, graph=graph)


@dataclass
class _Worker:
    """A rank that was started, in a process group of its own."""

    rank: int
    process: subprocess.Popen[str]
    errors: Path

    def tail(self) -> str:
        """The end of what it wrote to stderr."""
        return self.errors.read_text(errors="replace")[-_TAIL:].strip()

    def end(self) -> None:
        """End it and whatever it started."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextlib.contextmanager
def _started(folder: Path, count: int) -> Iterator[list[_Worker]]:
    """Start the ranks; whatever happens, none of them is left."""
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    workers: list[_Worker] = []
    try:
        for rank in range(count):
            errors = folder / f"stderr-{rank}"
            with errors.open("w") as stream:
                process = subprocess.Popen(
                    [sys.executable, "-m", "rlplace.runtime.worker", str(folder)],
                    env=_environment(rank, count, store.port),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=stream,
                    text=True,
                    start_new_session=True,
                )
            workers.append(_Worker(rank, process, errors))
        yield workers
    finally:
        for worker in workers:
            worker.end()


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    """What torchrun would set; the store is this process's own."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _watch(
    folder: Path, workers: Sequence[_Worker], limit: float, progress: Progress | None
) -> None:
    """Wait for the ranks.

    Raises:
        RankFailedError: As soon as one has failed and the others had time to say what they saw.
    """
    stdout = workers[0].process.stdout
    assert stdout is not None
    reader = threading.Thread(target=_read, args=(stdout, progress), daemon=True)
    reader.start()
    deadline = time.monotonic() + limit
    while True:
        codes = [worker.process.poll() for worker in workers]
        failed = [worker for worker, code in zip(workers, codes, strict=True) if code]
        if failed:
            _wait(workers, min(time.monotonic() + _GRACE, deadline))
            raise RankFailedError(_cause(folder, failed, workers))
        if all(code == 0 for code in codes):
            break
        if time.monotonic() > deadline:
            raise RankFailedError(f"the ranks did not end within {limit:.0f} s")
        time.sleep(_POLL)
    reader.join()


def _read(stream: IO[str], progress: Progress | None) -> None:
    """Pass on the JSON lines of rank 0; whatever else a library prints is not ours."""
    for line in stream:
        if progress is not None and line.startswith('{"job"'):
            note = json.loads(line)
            progress(note["job"], note["step"], note["seconds"])


def _wait(workers: Sequence[_Worker], until: float) -> None:
    while time.monotonic() < until and any(w.process.poll() is None for w in workers):
        time.sleep(_POLL)


def _cause(folder: Path, failed: Sequence[_Worker], workers: Sequence[_Worker]) -> str:
    """Which rank failed and why: a signal first, then what the ranks said themselves."""
    for worker in failed:
        code = worker.process.returncode
        if code < 0:
            name = signal.Signals(-code).name
            return f"rank {worker.rank} was ended by {name}; its stderr ends: {worker.tail()}"
    said = [(worker, read_error(folder, worker.rank)) for worker in workers]
    for worker, error in said:
        if error is not None:
            own = "" if error["kind"] == "RankFailedError" else f"rank {worker.rank} failed: "
            message = f"{own}{error['message']} (job {error['job']})"
            return f"{message}; its stderr ends: {worker.tail()}"
    first = failed[0]
    return f"rank {first.rank} ended with code {first.process.returncode}: {first.tail()}"
