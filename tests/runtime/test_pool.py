"""Ranks that stay: what one plan breaks, the next one finds mended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from rlplace.errors import InputError, RankFailedError
from rlplace.graph.library import build
from rlplace.plan.types import Instance
from rlplace.plan.uniform import uniform_plan
from rlplace.runtime.jobs import Fault, Job
from rlplace.runtime.options import Options
from rlplace.runtime.pool import Pool
from rlplace.runtime.validate import stand_in_cluster
from tests.runtime.small import graph, plan, workers

pytestmark = pytest.mark.dist

SHORT = Options(steps=1, warmup=0)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Two ranks for all tests of this file."""
    with Pool(2, timeout=20) as made:
        yield made
    assert not workers()


def measured(pool: Pool) -> tuple[float, ...]:
    return pool.measure(plan(), graph=graph(), options=SHORT, limit=120).losses


def test_the_ranks_stay_between_plans(pool: Pool) -> None:
    first = measured(pool)
    before = workers()
    assert len(before) == 3  # with the process that they are forks of
    assert measured(pool) == first
    single = pool.measure(plan(pp=1), graph=graph(), options=SHORT, limit=60)
    assert single.losses == pytest.approx(first)
    assert [use.total > 0 for use in single.memory] == [True, False]
    assert workers() == before


def test_another_model_is_added(pool: Pool) -> None:
    before = measured(pool)
    other = build("gpt", layers=2, hidden=16, heads=2, ffn=16, vocab=32, seq_len=8)
    instance = Instance(other, stand_in_cluster(2), 4, precision="fp32")
    found = pool.measure(uniform_plan(instance, pp=2), graph=other, options=SHORT, limit=120)
    assert len(found.losses) == 1
    assert measured(pool) == before


def test_a_refused_plan_costs_nothing(pool: Pool) -> None:
    measured(pool)
    before = workers()
    with pytest.raises(RankFailedError, match=r"InputError|precision"):
        pool.measure(replace(plan(), precision="fp8-mixed"), graph=graph(), options=SHORT)
    assert workers() == before
    with pytest.raises(InputError, match="made for another graph"):
        pool.measure(replace(plan(), graph="0" * 16), graph=graph())
    assert measured(pool)


def test_new_ranks_after_a_failure(pool: Pool) -> None:
    expected = measured(pool)
    before = workers()
    job = Job(plan(), graph(), options=Options(steps=500), fault=Fault(1, 1, "kill"))
    with pytest.raises(RankFailedError, match="rank 1 was ended by SIGKILL"):
        pool.run([job], limit=120)
    assert measured(pool) == expected
    assert len(workers()) == 3
    assert len(workers() & before) == 1  # the one that holds the models


def test_new_ranks_after_the_limit(pool: Pool) -> None:
    expected = measured(pool)
    before = workers()
    slow = Options(steps=100_000)
    with pytest.raises(RankFailedError, match="did not end within 2 s"):
        pool.measure(plan(), graph=graph(), options=slow, limit=2)
    assert measured(pool) == expected
    assert len(workers() & before) == 1


def test_a_pool_has_ranks() -> None:
    with pytest.raises(InputError, match="ranks=0: must be at least 1"):
        Pool(0)
