from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from rlplace.errors import InputError, RankFailedError
from rlplace.runtime.world import World, join


def worlds(size: int, timeout: float = 5.0) -> list[World]:
    """Ranks that share nothing but a store."""
    store = HashStore()
    return [World(r, size, store, torch.device("cpu"), timeout, owned=False) for r in range(size)]


def test_all_agree() -> None:
    ranks = worlds(3)
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda world: world.together(lambda: world.rank), ranks))
    assert results == [0, 1, 2]


def test_one_that_fails_alone_stops_the_others_with_its_cause() -> None:
    def work(rank: int) -> Callable[[], int]:
        def go() -> int:
            if rank == 1:
                raise InputError("data", 7, "is odd")
            return rank

        return go

    def attempt(world: World) -> str:
        with pytest.raises((InputError, RankFailedError)) as caught:
            world.together(work(world.rank))
        return f"{caught.type.__name__}: {caught.value}"

    with ThreadPoolExecutor(3) as pool:
        said = list(pool.map(attempt, worlds(3)))
    assert said[1] == "InputError: data=7: is odd"
    assert said[0] == said[2]
    assert said[0].startswith("RankFailedError: rank 1 refused the run: InputError: data=7: is odd")


def test_one_that_says_nothing_is_named() -> None:
    first, _ = worlds(2, timeout=0.2)
    with pytest.raises(RankFailedError, match=r"rank 1 said nothing"):
        first.together(lambda: None)


def test_the_first_failure_is_the_one_that_counts() -> None:
    first, second = worlds(2)
    assert "rank 1 failed: ValueError: bad" in str(second.fail(ValueError("bad")))
    assert "rank 1 failed: ValueError: bad" in str(first.fail(RuntimeError("connection reset")))


def test_joining_needs_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("os.sched_setaffinity", lambda pid, cores: None)
    with pytest.raises(InputError, match="start with torchrun"):
        join()
    with pytest.raises(InputError, match="must be cpu or cuda"):
        join("tpu")
