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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import IO

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rlplace.errors import InputError, RankFailedError
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Plan
from rlplace.runtime.jobs import Argument, Job, read_codes, read_error, read_result, write_jobs
from rlplace.runtime.measure import Measurement
from rlplace.runtime.trainer import Options

#: (job, step, seconds) of every step, as rank 0 sees it.
Progress = Callable[[int, int, float], None]

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
    with tempfile.TemporaryDirectory(prefix=f"rlplace-run-{os.getpid()}-") as name:
        folder = Path(name)
        write_jobs(folder, checked, timeout)
        with _started(folder, count) as process:
            _watch(folder, process, count, limit, progress)
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


@contextlib.contextmanager
def _started(folder: Path, count: int) -> Iterator[subprocess.Popen[str]]:
    """Start the ranks, in a process group of their own; whatever happens, none of them is left."""
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    with (folder / "stderr").open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "rlplace.runtime.worker", str(folder), str(count)],
            env=_environment(store.port),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment(port: int) -> dict[str, str]:
    """What torchrun would set, but for the ranks; the store is this process's own."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _watch(
    folder: Path,
    process: subprocess.Popen[str],
    count: int,
    limit: float,
    progress: Progress | None,
) -> None:
    """Wait for the ranks.

    Raises:
        RankFailedError: If one failed, or the time is up.
    """
    reader = threading.Thread(target=_read, args=(process.stdout, progress), daemon=True)
    reader.start()
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired as error:
        raise RankFailedError(f"the ranks did not end within {limit:.0f} s") from error
    reader.join()
    if code:
        raise RankFailedError(_cause(folder, read_codes(folder), count))


def _read(stream: IO[str], progress: Progress | None) -> None:
    """Pass on the JSON lines of rank 0; whatever else a library prints is not ours."""
    for line in stream:
        if progress is not None and line.startswith('{"job"'):
            note = json.loads(line)
            progress(note["job"], note["step"], note["seconds"])


def _cause(folder: Path, codes: Mapping[int, int], count: int) -> str:
    """Which rank failed and why: a signal first, then silence, then what the ranks said."""
    for rank, code in codes.items():
        if code < 0:
            return f"rank {rank} was ended by {signal.Signals(-code).name}{_tail(folder, rank)}"
    silent = [rank for rank in range(count) if codes and rank not in codes]
    if silent:
        return f"rank {silent[0]} did not answer, and was ended"
    for rank in codes:
        error = read_error(folder, rank)
        if error is not None:
            own = "" if error["kind"] == "RankFailedError" else f"rank {rank} failed: "
            return f"{own}{error['message']} (job {error['job']}){_tail(folder, rank)}"
    failed = [rank for rank, code in codes.items() if code]
    if failed:
        return f"rank {failed[0]} ended with code {codes[failed[0]]}{_tail(folder, failed[0])}"
    return f"the ranks did not start{_tail(folder)}"


def _tail(folder: Path, rank: int | None = None) -> str:
    """The end of what a rank, or the process before the ranks, wrote to stderr."""
    path = folder / ("stderr" if rank is None else f"stderr-{rank}")
    text = path.read_text(errors="replace")[-_TAIL:].strip() if path.exists() else ""
    return f"; its stderr ends:\n{text}" if text else ""
