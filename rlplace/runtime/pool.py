"""Ranks of this machine that run plan after plan: started once, watched, and ended for sure."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its stubs

from rlplace.errors import InputError, RankFailedError
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Plan
from rlplace.runtime.jobs import (
    Argument,
    Job,
    checked,
    read_codes,
    read_error,
    read_result,
    write_jobs,
)
from rlplace.runtime.measure import Measurement
from rlplace.runtime.options import Options

#: (job, step, seconds) of every step, as rank 0 sees it.
Progress = Callable[[int, int, float], None]

_TAIL = 2000
#: Seconds that the ranks have to end when they are told to; then they are ended.
_GRACE = 5.0
_STOP = "stop\n"


class Pool:
    """Ranks that stay between plans; models are exported once and kept.

    A plan that fails or takes too long costs the ranks, which are started anew for the next one,
    but not the models. Use it in a ``with``, or call `close`.

    Args:
        ranks: Number of ranks; a plan may use fewer.
        device: ``cpu`` or ``cuda``.
        timeout: Seconds after which a rank gives up waiting for another.

    Raises:
        InputError: If there is no rank.
    """

    def __init__(self, ranks: int, *, device: str = "cpu", timeout: float = 60.0) -> None:
        if ranks < 1:
            raise InputError("ranks", ranks, "must be at least 1", 1)
        self.ranks, self.device, self.timeout = ranks, device, timeout
        self._server: _Server | None = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks; the next plan starts others."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def measure(
        self,
        plan: Plan,
        model: str = "",
        args: Mapping[str, Argument] | None = None,
        *,
        graph: OpGraph | None = None,
        options: Options | None = None,
        limit: float = 3600.0,
    ) -> Measurement:
        """Run a plan; see `rlplace.runtime.launch.launch`."""
        job = Job(plan, graph, model, args or {}, options or Options(), device=self.device)
        return self.run([job], limit=limit)[0]

    def run(
        self, jobs: Sequence[Job], *, limit: float = 3600.0, progress: Progress | None = None
    ) -> list[Measurement]:
        """Run several jobs, one after the other.

        Args:
            jobs: All for the device of the pool.
            limit: Seconds after which the ranks are ended.
            progress: Called after every step.

        Raises:
            InputError: If a plan is for another graph or needs more ranks.
            RankFailedError: If a rank failed; names it, the job and the cause.
        """
        ready = [checked(job, self.ranks, self.device) for job in jobs]
        if not ready:
            return []
        if self._server is None or not self._server.alive:
            self.close()
            self._server = _Server(self.ranks)
        order = self._server.order(ready, self.timeout)
        self._server.wait(order, limit, progress)
        return [read_result(order, index) for index in range(len(ready))]


class _Server:
    """The process that holds the models and the ranks (`rlplace.runtime.worker`)."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self._orders = ranks, 0
        scratch = tempfile.TemporaryDirectory(prefix=f"rlplace-run-{os.getpid()}-")
        self._folder = Path(scratch.name)
        limit = timedelta(seconds=60)
        self._store = TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
        with (self._folder / "stderr").open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "rlplace.runtime.worker", scratch.name, str(ranks)],
                env=_environment(self._store.port),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                start_new_session=True,
            )
        assert process.stdin is not None
        self._process, self._stdin = process, process.stdin
        # Also if nobody closes the pool: when it is collected, or this process ends.
        self._end = weakref.finalize(self, _end, process, scratch)
        self._notes: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        reader = threading.Thread(target=_read, args=(process.stdout, self._notes), daemon=True)
        reader.start()

    @property
    def alive(self) -> bool:
        return self._end.alive and self._process.poll() is None

    def close(self) -> None:
        """End the process and its ranks."""
        self._end()

    def order(self, jobs: Sequence[Job], timeout: float) -> Path:
        """Hand jobs over; gives the folder of their results."""
        order = self._folder / str(self._orders)
        self._orders += 1
        order.mkdir()
        write_jobs(order, jobs, timeout)
        self._say(f"{order.name}\n")
        return order

    def wait(self, order: Path, limit: float, progress: Progress | None) -> None:
        """Wait until an order is done.

        Raises:
            RankFailedError: If a rank failed, or the time is up.
        """
        try:
            reply = self._reply(order.name, time.monotonic() + limit, progress)
            if reply is None:
                self._say(_STOP)
                if self._reply(order.name, time.monotonic() + _GRACE, None) is None:
                    self.close()
        except BaseException:  # Ctrl-C among others: what runs is of no use to anybody
            self.close()
            raise
        if reply is None:
            raise RankFailedError(f"the ranks did not end within {limit:.0f} s")
        if reply["failed"]:
            raise RankFailedError(self._cause(order))

    def _reply(
        self, name: str, deadline: float, progress: Progress | None
    ) -> dict[str, Any] | None:
        """What the process says of an order when it is over; None if the time is over before."""
        while True:
            try:
                note = self._notes.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            if note is None:
                return {"failed": True}
            if note.get("order") == name:
                return note
            if progress is not None and "job" in note:
                progress(note["job"], note["step"], note["seconds"])

    def _say(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended, as `_reply` will find
            self._stdin.write(line)
            self._stdin.flush()

    def _cause(self, order: Path) -> str:
        """Which rank failed and why: a signal first, then silence, then what the ranks said."""
        codes = read_codes(order)
        for rank, code in codes.items():
            if code < 0:
                how = f"was ended by {signal.Signals(-code).name}"
                return f"rank {rank} {how}{self._said(order, codes)}{self._tail(rank)}"
        silent = [rank for rank in range(self._ranks) if codes and rank not in codes]
        if silent:
            how = "did not answer, and was ended"
            return f"rank {silent[0]} {how}{self._said(order, codes)}{self._tail(silent[0])}"
        for rank in codes:
            error = read_error(order, rank)
            if error is not None:
                own = f"rank {rank} failed: {error['kind']}: "
                own = "" if error["kind"] == "RankFailedError" else own
                return f"{own}{error['message']} (job {error['job']}){self._tail(rank)}"
        failed = [rank for rank, code in codes.items() if code]
        if failed:
            return f"rank {failed[0]} ended with code {codes[failed[0]]}{self._tail(failed[0])}"
        return f"the ranks did not start{self._tail()}"

    def _said(self, order: Path, codes: Mapping[int, int]) -> str:
        """What the first of the other ranks said that could."""
        errors = ((rank, read_error(order, rank)) for rank in codes)
        words = [f" (rank {rank}: {error['message']})" for rank, error in errors if error]
        return words[0] if words else ""

    def _tail(self, rank: int | None = None) -> str:
        """The end of what a rank, or the process before the ranks, wrote to stderr."""
        path = self._folder / ("stderr" if rank is None else f"stderr-{rank}")
        text = path.read_text(errors="replace")[-_TAIL:].strip() if path.exists() else ""
        return f"; its stderr ends:\n{text}" if text else ""


def _end(process: subprocess.Popen[str], scratch: tempfile.TemporaryDirectory[str]) -> None:
    """End a process with all ranks that it started, by their group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    scratch.cleanup()


def _read(stream: IO[str], notes: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    """Pass on the JSON lines of the ranks; whatever else a library prints is not ours."""
    for line in stream:
        if line.startswith(('{"job"', '{"order"')):
            notes.put(json.loads(line))
    notes.put(None)


def _environment(port: int) -> dict[str, str]:
    """What torchrun would set, but for the ranks; the store is this process's own."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
