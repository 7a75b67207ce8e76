"""From rows to plans and estimates: cuts, what is redone, shared instances, problems."""

from dataclasses import replace
from functools import cache

import pytest

from benchmarks.fidelity_tables import workloads
from benchmarks.fidelity_tables.types import ClusterSpec, GraphSpec, Measured, Row, Workload
from benchmarks.fidelity_tables.workloads import (
    cluster_of,
    counted_ends,
    estimate_row,
    layers_of,
    make_plan,
    memory_of,
    weighed_blocks,
)
from rlplace.cluster.types import Cluster
from rlplace.errors import InputError
from rlplace.graph.types import OpGraph
from rlplace.plan.testing import transformer
from rlplace.plan.types import Instance
from rlplace.simulate.estimate import Estimator


@pytest.fixture
def instance() -> Instance:
    return Instance(transformer(6), Cluster.parse("8xA100-80"), 16)


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> Row:
    """A row whose graph needs no capture."""

    @cache
    def graph_of(spec: GraphSpec) -> OpGraph:
        return transformer(dict(spec.shape)["layers"])  # type: ignore[arg-type]  # an int here

    monkeypatch.setattr(workloads, "graph_of", graph_of)
    workloads.estimator_of.cache_clear()
    graph = GraphSpec("gpt", (("layers", 6),))
    workload = Workload(graph, ClusterSpec("A100-80", 8), 16, "bf16-mixed", "unheard-of")
    plan = {"pp": 2, "tp": 2, "dp_replicate": 2, "micro_batch": 1}
    return Row("t", 1, {}, workload, plan, Measured(1.0, 2e9, "driver"), ("g",))


def test_groups_belong_to_layers_and_to_the_ends(instance: Instance) -> None:
    assert layers_of(instance.graph) == [-1, *(n for n in range(6) for _ in range(2)), 6]


def test_a_stage_ends_with_the_block_that_passes_its_share(instance: Instance) -> None:
    graph = instance.graph
    works = [graph.structure(group.index).work for group in graph.groups]
    weights = [work.params if work.flops(1) else 0 for work in works]
    (cut,) = weighed_blocks(graph, 2)
    assert layers_of(graph)[cut] != layers_of(graph)[cut - 1]
    assert sum(weights[:cut]) > sum(weights) / 2 >= sum(weights[: cut - 2])


def test_every_stage_has_a_block(instance: Instance) -> None:
    # Embedding, six layers, head: as many blocks as stages, whatever they weigh.
    assert weighed_blocks(instance.graph, 8) == (1, 3, 5, 7, 9, 11, 13)
    with pytest.raises(InputError, match="more stages"):
        weighed_blocks(instance.graph, 9)


def test_embedding_and_head_count_as_a_layer_each(instance: Instance) -> None:
    # 6 layers and 2 ends on 4 stages: two blocks each.
    owners = layers_of(instance.graph)
    assert [owners[cut] for cut in counted_ends(instance.graph, 4)] == [1, 3, 5]


def test_every_second_layer_is_redone(instance: Instance) -> None:
    plan = make_plan(instance, {"recompute": "full", "every": 2})
    owners = layers_of(instance.graph)
    for owner, choice in zip(owners, plan.stages[0].choices, strict=True):
        assert (choice.recompute == "full") == (owner in (0, 2, 4)), "layers only, not the head"


def test_a_stage_is_redone_as_one(instance: Instance) -> None:
    plan = make_plan(instance, {"pp": 2, "recompute": "full", "joined": True})
    for stage in plan.stages:
        modes = [choice.recompute for choice in stage.choices]
        assert modes == ["full", *["joined"] * (len(modes) - 1)]


def test_a_row_is_estimated_and_its_instance_shared(row: Row) -> None:
    found = estimate_row(row)
    assert not found.problem
    assert found.feasible
    assert found.step_time > 0.0
    assert found.memory == pytest.approx(
        sum(v for name, v in found.details.items() if name.startswith("memory_")), rel=1e-3
    )
    before = workloads.estimator_of.cache_info().misses
    again = estimate_row(replace(row, plan=row.plan | {"micro_batch": 2}))
    assert workloads.estimator_of.cache_info().misses == before
    assert again.step_time != found.step_time


def test_the_quickest_try_that_fits_is_taken(row: Row) -> None:
    plan = {name: value for name, value in row.plan.items() if name != "micro_batch"}
    chosen = estimate_row(replace(row, plan=plan, tries=(1, 2, 3, 4)))
    times = [
        estimate_row(replace(row, plan=row.plan | {"micro_batch": size})).step_time
        for size in (1, 2, 4)
    ]
    assert chosen.step_time == min(times)


def test_what_cannot_be_asked_is_a_problem(row: Row) -> None:
    unknown = estimate_row(replace(row, plan=row.plan | {"wishful": True}))
    assert unknown.problem == "uniform_plan has no wishful"
    illegal = estimate_row(replace(row, plan=row.plan | {"micro_batch": 3}))
    assert "micro_batch" in illegal.problem


def test_memory_counts_what_the_figure_counts(instance: Instance) -> None:
    estimate = Estimator(instance).estimate(make_plan(instance, {"micro_batch": 1}))
    use = estimate.memory[0]
    busy = replace(estimate, memory=(replace(use, cached=1e9, reserve=use.reserve + 2e9),))
    context = instance.cluster.kinds[0].reserve + instance.execution.reserve
    assert memory_of(busy, "allocated", instance) == use.held + use.transient
    assert memory_of(busy, "driver", instance) == pytest.approx(use.total + 3e9)
    assert memory_of(busy, "reserved", instance) == pytest.approx(use.total + 3e9 - context)
    assert memory_of(busy, "activations", instance) == use.activations > 0.0
    light = replace(estimate, memory=(replace(use, activations=1.0), use))
    assert memory_of(light, "activations", instance, 1) == 1.0
    assert memory_of(light, "activations", instance) == use.activations


def test_what_is_cached_ends_where_the_device_does(instance: Instance) -> None:
    estimate = Estimator(instance).estimate(make_plan(instance, {"micro_batch": 1}))
    greedy = replace(estimate, memory=(replace(estimate.memory[0], cached=1e12),))
    assert memory_of(greedy, "driver", instance) == instance.cluster.kinds[0].memory


def test_a_part_of_a_host_and_a_slow_network() -> None:
    assert len(cluster_of(ClusterSpec("A100-80", 4)).nodes) == 1
    slow = cluster_of(ClusterSpec("V100-16", 16, 8, "eth10", 0.05))
    assert [node.nic and node.nic.latency for node in slow.nodes] == [0.05, 0.05]
