from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.plan.types import Mesh, Plan, Stage
from rlplace.runtime.rows import micro_batch_rows, replica_of, replica_rows, rows_of


def plan_of(shares: tuple[int, ...], micro_batches: int) -> Plan:
    """Two stages: one replica, then replicas with shares."""
    last = Mesh(tuple(range(1, 1 + len(shares))), dp_replicate=len(shares))
    stages = (Stage(0, 1, Mesh((0,)), ()), Stage(1, 2, last, (), shares))
    return Plan(stages, micro_batches, micro_batches * sum(shares))


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(1, 4),
    st.floats(0.0, 1.0),
)
def test_every_row_is_of_one_replica(shares: list[int], micro_batches: int, part: float) -> None:
    plan = plan_of(tuple(shares), micro_batches)
    rows = max(1, round(part * plan.global_batch))
    for stage in range(2):
        replicas, counts = range(plan.stages[stage].mesh.dp), range(micro_batches)
        runs = [rows_of(plan, stage, r, m, rows) for m, r in product(counts, replicas)]
        assert [row for run in runs for row in run] == list(range(rows))
        full = [rows_of(plan, stage, r, m, plan.global_batch) for m, r in product(counts, replicas)]
        for run, whole in zip(runs, full, strict=True):
            assert set(run) <= set(whole)


def test_the_last_runs_are_shorter_or_empty() -> None:
    plan = plan_of((3, 1), 3)
    assert [micro_batch_rows(plan, m, 6) for m in range(3)] == [4, 2, 0]
    assert [len(rows_of(plan, 1, r, m, 6)) for m in range(3) for r in range(2)] == [
        3,
        1,
        2,
        0,
        0,
        0,
    ]
    assert rows_of(plan, 1, 0, 1, 6) == range(4, 6)


def test_equal_shares_need_no_word() -> None:
    stage = Stage(0, 1, Mesh((0, 1), dp_shard=2), ())
    assert replica_rows(stage, 6, 6) == (range(3), range(3, 6))


@pytest.mark.parametrize(
    ("mesh", "replicas"),
    [(Mesh((4, 5, 6, 7), dp_shard=2, tp=2), [0, 0, 1, 1]), (Mesh((4, 5), cp=2), [0, 0])],
)
def test_ranks_of_an_axis_share_the_rows(mesh: Mesh, replicas: list[int]) -> None:
    assert [replica_of(Stage(0, 1, mesh, ()), rank) for rank in mesh.devices] == replicas
