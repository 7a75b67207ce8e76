"""An axis whose devices are threads of this process: lockstep, no ranks, no sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass
class _Meeting:
    """Where the threads lay down what they have and pick up what the others have."""

    size: int
    slots: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = [None] * self.size
        self.barrier = threading.Barrier(self.size)

    def exchange(self, rank: int, given: Any) -> list[Any]:
        self.slots[rank] = given.detach() if isinstance(given, Tensor) else given
        self.barrier.wait(30)
        everything = list(self.slots)
        self.barrier.wait(30)
        return everything


@dataclass
class ThreadAxis:
    """One thread's view of the axis."""

    meeting: _Meeting
    rank: int

    @property
    def size(self) -> int:
        return self.meeting.size

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        stacked = torch.stack(self.meeting.exchange(self.rank, tensor))
        return stacked.sum(0) if op == "sum" else stacked.amax(0)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat(self.meeting.exchange(self.rank, tensor), dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        total = torch.stack(self.meeting.exchange(self.rank, tensor)).sum(0)
        return total.chunk(self.size, dim)[self.rank]

    def all_to_all(self, tensor: Tensor, dim: int, joined: int) -> Tensor:
        given = self.meeting.exchange(self.rank, tensor)
        return torch.cat([each.chunk(self.size, dim)[self.rank] for each in given], joined)

    def all_to_all_rows(self, tensor: Tensor, sent: Sequence[int], got: Sequence[int]) -> Tensor:
        assert sum(sent) == len(tensor)
        chunks = self.meeting.exchange(self.rank, torch.split(tensor.detach(), list(sent)))
        mine = [chunk[self.rank] for chunk in chunks]
        assert [len(chunk) for chunk in mine] == list(got)
        return torch.cat(mine)


def on_threads(size: int, work: Callable[[ThreadAxis], T]) -> list[T]:
    """The result of each device; the first error of any is raised."""
    meeting = _Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadAxis(meeting, rank))
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
