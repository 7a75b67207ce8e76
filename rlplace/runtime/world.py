"""The ranks of a run: joining them, groups of them, and one word when one of them fails."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.distributed.rendezvous import rendezvous

from rlplace.errors import InputError, RankFailedError
from rlplace.runtime.frozen import end_if_frozen, note_place
from rlplace.runtime.heartbeat import Heartbeat, failure_key, find_lost

T = TypeVar("T")


@dataclass
class World:
    """All ranks, as one of them sees them.

    Args:
        rank: This rank.
        size: Number of ranks.
        store: Key-value store that all ranks reach without a collective.
        device: Where this rank computes.
        timeout: Seconds that a collective or a message may take.
        owned: Whether `close` may end the process group.
        joined: How often this rank has joined the store before; keeps the words of runs apart.
    """

    rank: int
    size: int
    store: Store
    device: torch.device
    timeout: float
    owned: bool
    joined: int = 0
    _groups: dict[tuple[str, tuple[int, ...]], Any] = field(default_factory=dict)
    _down: Any = None
    _rounds: int = 0
    _heartbeat: Heartbeat | None = None

    def group(self, ranks: Iterable[int], purpose: str = "") -> Any:
        """The process group of some ranks; every rank must ask for the same ones in order.

        Args:
            ranks: Its members. Their order is that of the group: it says which coordinate of a
                mesh axis each has, and a mesh may have its devices in any order.
            purpose: Groups of the same ranks with another purpose have an order of their own.
        """
        members = tuple(dict.fromkeys(ranks))
        if (purpose, members) not in self._groups:
            self._groups[purpose, members] = dist.new_group(
                list(members), timeout=timedelta(seconds=self.timeout), sort_ranks=False
            )
        return self._groups[purpose, members]

    def direction(self, down: bool) -> Any:
        """The group for messages to lower ranks, or to higher ones.

        NCCL ignores tags and runs the messages of a pair of a group one after the other, so a
        message one way never waits behind one the other way.
        """
        if not down:
            return dist.group.WORLD
        if self._down is None:
            self._down = dist.new_group(timeout=timedelta(seconds=self.timeout))
        return self._down

    def together(self, work: Callable[[], T]) -> T:
        """Do what may fail on one rank alone; then wait, without a collective, for all to agree.

        Raises:
            RankFailedError: With the first error of another rank; this rank raises its own.
        """
        try:
            result = work()
        except Exception as error:
            self._agree(error)
            raise
        self._agree(None)
        return result

    def from_first(self, work: Callable[[], str]) -> str:
        """What rank 0 alone works out, on every rank; as safe as `together`.

        Raises:
            RankFailedError: If rank 0 failed, or said nothing.
        """
        own = self.together(lambda: work() if self.rank == 0 else "")
        key = f"rlplace/word/{self.joined}/{self._rounds}"
        if self.rank == 0:
            self.store.set(key, own)
        return self._wait_for(key, 0)

    def _agree(self, error: Exception | None) -> None:
        self._rounds += 1
        prefix = f"rlplace/agree/{self.joined}/{self._rounds}"
        text = "" if error is None else f"{type(error).__name__}: {error}"
        self.store.set(f"{prefix}/{self.rank}", text)
        if error is not None:
            return
        for rank in range(self.size):
            said = self._wait_for(f"{prefix}/{rank}", rank)
            if said:
                raise RankFailedError(f"rank {rank} refused the run: {said}")

    def _wait_for(self, key: str, rank: int) -> str:
        try:
            self.store.wait([key], timedelta(seconds=self.timeout))
        except RuntimeError as error:
            end_if_frozen(self.store, self.joined, rank)
            raise RankFailedError(
                f"rank {rank} said nothing for {self.timeout:.0f} s before the first collective"
            ) from error
        return str(self.store.get(key).decode())

    def fail(self, error: BaseException) -> RankFailedError:
        """Tell the others that this rank failed, unless one of them did so before.

        Returns:
            What to raise here: it names the rank that failed first, and why.
        """
        own = {"rank": self.rank, "cause": f"{type(error).__name__}: {error}"}
        try:
            if is_echo(error):
                own = find_lost(self.store, self.joined, self.rank, self.size) or own
            said = self.store.compare_set(failure_key(self.joined), "", json.dumps(own))
            first = json.loads(said.decode())
            end_if_frozen(self.store, self.joined, first["rank"])
        except (RuntimeError, ValueError):
            first = own
        return RankFailedError(f"rank {first['rank']} failed: {first['cause']}")

    def begin(self, phase: Callable[[], str]) -> None:
        """Give signs of life from now on, until `close` or the next `begin`.

        Args:
            phase: What this rank does just now, in words.
        """
        self._end_signs()
        self._heartbeat = Heartbeat(
            self.store, self.joined, self.rank, self.size, self.timeout, phase
        )

    def close(self) -> None:
        """Leave the process group, if this module made it."""
        self._end_signs()
        if self.owned and dist.is_initialized():
            dist.destroy_process_group()

    def _end_signs(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None


def is_echo(error: BaseException) -> bool:
    """Whether an error is a lost connection or a time-out: another rank may have caused it."""
    if isinstance(error, dist.DistError):
        return True
    words = ("gloo", "connection", "timed out", "nccl")
    return isinstance(error, RuntimeError) and any(w in str(error).lower() for w in words)


def join(device: str = "cpu", timeout: float = 600.0) -> World:
    """Join the ranks that torchrun started, or take the process group that there is.

    Each restart of torchrun gets a name space of its own in the store, so that it never meets
    the addresses of the attempt before.

    Args:
        device: ``cpu`` (gloo) or ``cuda`` (NCCL).
        timeout: Seconds that a collective or a message may take.

    Raises:
        InputError: If torchrun did not start this process, or the device is unknown.
    """
    if device not in ("cpu", "cuda"):
        raise InputError("device", device, "must be cpu or cuda", "cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    place = torch.device("cuda", local) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
    else:
        pin(local)
    owned = not dist.is_initialized()
    if owned:
        _init("nccl" if device == "cuda" else "gloo", timeout)
    store = _get_default_store()
    rank = dist.get_rank()
    joined = store.add(f"rlplace/joined/{rank}", 1)
    note_place(store, joined, rank)
    return World(rank, dist.get_world_size(), store, place, timeout, owned, joined)


def _init(backend: str, timeout: float) -> None:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    if missing:
        rule = "is not set: start with torchrun, or make a process group first"
        raise InputError("environment", missing[0], rule, "torchrun --nproc-per-node N ...")
    limit = timedelta(seconds=timeout)
    store, rank, size = next(rendezvous("env://", timeout=limit))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend,
        store=PrefixStore(f"att{attempt}", store),
        rank=rank,
        world_size=size,
        timeout=limit,
    )


def pin(local_rank: int) -> None:
    """Give this rank a core of its own (or its share of one) and one thread."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[local_rank % len(cores)]})
