"""A rank that is lost because it was stopped (SIGSTOP) is ended by another one on its host.

What starts ranks ends them with SIGTERM, which a stopped process does not get, and waits for it:
torchrun for 30 s. SIGKILL reaches it at once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

from torch.distributed.distributed_c10d import Store

_STOPPED = "T"


def note_place(store: Store, joined: int, rank: int) -> None:
    """Write down which process of which host this rank is.

    Args:
        store: That all ranks reach.
        joined: How often this rank has joined the store before.
        rank: This rank.
    """
    store.set(_key(joined, rank), json.dumps([socket.gethostname(), os.getpid()]))


def end_if_frozen(store: Store, joined: int, rank: int) -> None:
    """End a rank that counts as lost, if it is stopped, on this host, and of the same launcher.

    One that is slow, or on another host, is left alone.

    Args:
        store: That all ranks reach.
        joined: As it wrote itself down.
        rank: The rank that is lost.
    """
    key = _key(joined, rank)
    if not store.check([key]):
        return
    host, pid = json.loads(store.get(key))
    if host == socket.gethostname() and _stopped_sibling(pid):
        sys.stderr.write(f"rank {rank} is stopped (SIGSTOP) and was not heard of: it is ended\n")
        sys.stderr.flush()
        os.kill(pid, signal.SIGKILL)


def _key(joined: int, rank: int) -> str:
    return f"rlplace/place/{joined}/{rank}"


def _stopped_sibling(pid: int) -> bool:
    """Whether a process is stopped and was started by what started this one (Linux)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    state, parent = text.rpartition(")")[2].split()[:2]
    return (state, int(parent)) == (_STOPPED, os.getppid())
