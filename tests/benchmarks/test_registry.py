"""Each published table reads; skipped where the data is absent."""

import inspect

import pytest

from benchmarks.fidelity_tables.read import data_folder
from benchmarks.fidelity_tables.registry import TABLES
from benchmarks.fidelity_tables.types import Reading
from benchmarks.fidelity_tables.workloads import EXTRAS, cluster_of
from rlplace.graph.models.shapes import FAMILIES
from rlplace.plan.types import OPTIMIZERS, PRECISIONS, RECOMPUTE_MODES
from rlplace.plan.uniform import uniform_plan

#: Arguments that some tables need and `uniform_plan` does not have.
MISSING = {"cp", "async_tp"}


def read(name: str) -> Reading:
    file, rows = TABLES[name]
    if not (data_folder() / file).exists():
        pytest.skip(f"there is no {file} in {data_folder()}")
    return rows(data_folder())


@pytest.mark.parametrize("name", TABLES)
def test_a_table_reads(name: str) -> None:
    rows = read(name).rows
    assert rows
    assert {row.table for row in rows} == {name}
    assert len({row.line for row in rows}) == len(rows)
    arguments = set(inspect.signature(uniform_plan).parameters) | EXTRAS | MISSING
    for row in rows:
        workload, plan = row.workload, row.plan
        assert workload.precision in PRECISIONS
        assert workload.optimizer in OPTIMIZERS
        assert workload.global_batch > 0
        assert plan.keys() <= arguments
        assert plan.get("recompute", "none") in (*RECOMPUTE_MODES, "layer")
        degrees = (plan.get("pp", 1), plan.get("tp", 1), plan.get("cp", 1))
        dp = plan.get("dp_replicate", 1) * plan.get("dp_shard", 1)
        assert dp * degrees[0] * degrees[1] * degrees[2] == workload.cluster.gpus
        if workload.graph.family in FAMILIES:
            fields = set(FAMILIES[workload.graph.family].__dataclass_fields__)
            assert {field for field, _ in workload.graph.shape} <= fields


@pytest.mark.parametrize("name", TABLES)
def test_the_clusters_of_a_table_exist(name: str) -> None:
    for spec in {row.workload.cluster for row in read(name).rows}:
        assert len(cluster_of(spec).devices) == spec.gpus


@pytest.mark.parametrize("name", TABLES)
def test_fit_rows_are_the_same_each_time_and_few(name: str) -> None:
    first, second = read(name).rows, read(name).rows
    fitted = {row.line for row in first if row.fit}
    assert fitted == {row.line for row in second if row.fit}
    assert len(fitted) <= len(first) / 5


def test_what_the_vendor_says_is_fitted_to_nowhere() -> None:
    for name in ("nemo", "megatron_bridge", "pytorch_fsdp", "korthikanti", "torchgpipe"):
        assert not any(row.fit for row in read(name).rows)
