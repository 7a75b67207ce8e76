from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in its stubs

from rlplace.runtime.frozen import end_if_frozen, note_place

RANK = 3


def test_a_rank_writes_down_where_it_is() -> None:
    store = HashStore()
    note_place(store, 1, RANK)
    assert (
        store.get(f"rlplace/place/1/{RANK}")
        == f'["{socket.gethostname()}", {os.getpid()}]'.encode()
    )


@pytest.mark.parametrize(
    ("stopped", "host", "sibling", "ended"),
    [
        (True, "", True, True),
        (False, "", True, False),
        (True, "elsewhere", True, False),
        (True, "", False, False),
    ],
    ids=["frozen", "alive", "on another host", "started by another launcher"],
)
def test_only_a_stopped_rank_of_this_host_and_launcher_is_ended(
    stopped: bool, host: str, sibling: bool, ended: bool
) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        if stopped:
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
        store = HashStore()
        place = f'["{host or socket.gethostname()}", {process.pid}]'
        store.set(f"rlplace/place/1/{RANK}", place)
        if sibling:
            fork = os.fork()
            if not fork:
                end_if_frozen(store, 1, RANK)
                os._exit(0)
            assert os.waitpid(fork, 0)[1] == 0
        else:
            end_if_frozen(store, 1, RANK)
        process.send_signal(signal.SIGCONT)
        process.communicate(b"\n", timeout=60)
        assert process.returncode == (-signal.SIGKILL if ended else 0)
    finally:
        process.kill()
        process.wait()


def test_a_rank_that_is_not_known_is_left_alone() -> None:
    end_if_frozen(HashStore(), 1, RANK)
