"""Ranks as forks of one process, which waits for them and leaves none behind.

Importing torch and exporting a model take longer than many a job, so it is done once, before the
ranks part ways.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

#: Seconds that the other ranks have to say why they stop, once one has failed.
GRACE = 5.0
_POLL = 0.01
_PR_SET_PDEATHSIG = 1


class Ranks:
    """Forks of this process that work side by side, with torchrun's environment.

    Args:
        count: Number of ranks.
        folder: Where each rank's stderr goes, as ``stderr-RANK``.
        work: What a rank does; returns its exit code.
    """

    def __init__(self, count: int, folder: Path, work: Callable[[], int]) -> None:
        self._alive = {_fork(rank, count, folder, work): rank for rank in range(count)}
        #: Exit code of each rank in the order in which they ended; minus the signal that ended it.
        #: Those that had to be ended here are left out.
        self.codes: dict[int, int] = {}

    def wait(self, over: Callable[[], bool] = lambda: False) -> None:
        """Wait until all have ended, or `over` says so; once one has failed, all are ended.

        Args:
            over: Asked again and again; true if the ranks may live on.
        """
        deadline = float("inf")
        while self._alive and not over():
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in self._alive:
                code = os.waitstatus_to_exitcode(status)
                self.codes[self._alive.pop(pid)] = code
                if code:
                    deadline = min(deadline, time.monotonic() + GRACE)
            elif time.monotonic() > deadline:
                self.end()
            else:
                time.sleep(_POLL)
        if any(self.codes.values()):
            self.end()

    def end(self) -> None:
        """End those that are left."""
        for pid in self._alive:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._alive.clear()


def fork_ranks(count: int, folder: Path, work: Callable[[], int]) -> dict[int, int]:
    """Run `work` in `count` ranks until all of them have ended; `Ranks.codes` of them."""
    ranks = Ranks(count, folder, work)
    ranks.wait()
    return ranks.codes


def die_with_parent() -> None:
    """Ask the kernel to end this process when the one that started it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _fork(rank: int, count: int, folder: Path, work: Callable[[], int]) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent()
        _redirect(rank, folder)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count)
        )
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(rank: int, folder: Path) -> None:
    """Send stderr to a file, and stdout nowhere but on rank 0."""
    with (folder / f"stderr-{rank}").open("w") as stream:
        os.dup2(stream.fileno(), 2)
    if rank:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
