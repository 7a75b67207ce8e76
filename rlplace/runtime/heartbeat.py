"""Signs of life, by which ranks find out which of them is lost.

A thread of every rank counts up a number in the store. A killed rank stops counting, and so does a
frozen one (SIGSTOP stops all threads). Lost connections and time-outs are mere echoes of that.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

from rlplace.runtime.frozen import end_if_frozen

#: Seconds between two signs, and without one after which a rank counts as lost.
PERIOD, SILENCE = 1.0, 3.0
#: Seconds that a rank has to end by itself once it is known that one has failed.
GRACE = 5.0
_POLL = 0.1
_OVER = "over"


def failure_key(joined: int) -> str:
    """Where the rank that failed first is written down."""
    return f"rlplace/failure/{joined}"


def beat_key(joined: int, rank: int) -> str:
    """Where a rank counts."""
    return f"rlplace/beat/{joined}/{rank}"


class Heartbeat:
    """The signs of one rank, and its eye on the next rank.

    Once a failure is written down, a rank that still waits is ended after `GRACE` seconds: some
    waits (of NCCL) have no end of their own. The thread ends before the interpreter does, also
    where nobody calls `stop`: one that comes back from the store afterwards aborts the process.

    Args:
        store: That all ranks reach.
        joined, rank, size: As in `World`.
        timeout: Seconds of silence after which the next rank is declared lost, whether or not
            anybody waits for it.
        phase: What this rank does just now, in words.
    """

    def __init__(
        self,
        store: Store,
        joined: int,
        rank: int,
        size: int,
        timeout: float,
        phase: Callable[[], str],
    ) -> None:
        # Of its own, for a wait on the other one would block this thread.
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
        self._joined, self._rank, self._timeout = joined, rank, max(timeout, SILENCE)
        self._next, self._phase = (rank + 1) % size, phase
        self._over = threading.Event()
        self._count, self._failed_at = 0, 0.0
        self._seen, self._seen_at = b"", time.monotonic()
        self._beat()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the signs; the others no longer expect any."""
        atexit.unregister(self.stop)
        self._over.set()
        self._thread.join(GRACE)

    def _run(self) -> None:
        try:
            while not self._over.wait(PERIOD):
                self._beat()
                self._watch()
                self._end_if_stuck()
            self._store.set(beat_key(self._joined, self._rank), _OVER)
        except RuntimeError:
            return  # the store is gone, and with it the job: the main thread finds that out too

    def _beat(self) -> None:
        self._count += 1
        said = f"{self._count} {self._phase()}"
        self._store.set(beat_key(self._joined, self._rank), said)

    def _watch(self) -> None:
        """Declare the next rank lost if it has been silent for too long."""
        key, now = beat_key(self._joined, self._next), time.monotonic()
        seen = self._store.get(key) if self._store.check([key]) else b""
        if seen != self._seen or seen in (b"", _OVER.encode()):
            self._seen, self._seen_at = seen, now
        elif now - self._seen_at > self._timeout:
            text = json.dumps(lost(self._next, seen.decode()))
            self._store.compare_set(failure_key(self._joined), "", text)

    def _end_if_stuck(self) -> None:
        if not self._store.check([failure_key(self._joined)]):
            return
        now = time.monotonic()
        self._failed_at = self._failed_at or now
        first = json.loads(self._store.get(failure_key(self._joined)))
        end_if_frozen(self._store, self._joined, first["rank"])
        if now - self._failed_at > GRACE and not self._over.is_set():
            sys.stderr.write(
                f"rank {self._rank} still waits and is ended: rank {first['rank']} failed: "
                f"{first['cause']}\n"
            )
            sys.stderr.flush()
            os._exit(1)


def lost(rank: int, said: str) -> dict[str, object]:
    """What is written down of a rank that gives no more signs.

    Args:
        rank: The rank.
        said: Its last sign.
    """
    phase = said.partition(" ")[2]
    return {"rank": rank, "cause": f"no sign of life (killed or frozen?), last seen in {phase}"}


def find_lost(store: Store, joined: int, rank: int, size: int) -> dict[str, object] | None:
    """Which rank gives no more signs; waits for as long as that takes to tell.

    Returns:
        What `lost` says of the first one, or None if all live or somebody else has written down
        who failed.
    """
    others = {other: beat_key(joined, other) for other in range(size) if other != rank}
    known = {other: store.get(key) for other, key in others.items() if store.check([key])}
    begin = time.monotonic()
    while time.monotonic() - begin < SILENCE:
        time.sleep(_POLL)
        if store.check([failure_key(joined)]):
            return None
    for other, before in known.items():
        if before != _OVER.encode() and store.get(others[other]) == before:
            return lost(other, before.decode())
    return None
