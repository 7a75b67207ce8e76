import dataclasses

import pytest

import rlplace
from rlplace.api import place
from rlplace.errors import InfeasibleError, InputError
from rlplace.plan.check import check
from rlplace.planners.remedies import scaled


def instance(cluster: str = "2x4xA100-40:ib200", **changes: object) -> rlplace.Instance:
    graph = rlplace.library.build("gpt2", seq_len=256)
    settings: dict[str, object] = {"global_batch": 32} | changes
    return rlplace.Instance(graph, rlplace.Cluster.parse(cluster), **settings)  # type: ignore[arg-type]


def test_place_answers_with_a_legal_plan_that_no_heuristic_beats() -> None:
    asked = instance()
    placed = place(asked, time_limit=0.5)
    check(asked, placed.plan)
    assert placed.estimate.feasible
    found = [r for r in placed.alternatives.values() if r.plan is not None and r.estimate]
    assert {"policy", "data_parallel", "zero3", "grid"} <= set(placed.alternatives)
    assert placed.estimate.step_time == min(r.estimate.step_time for r in found if r.estimate)
    assert placed.estimate.step_time == rlplace.estimate(asked, placed.plan).step_time
    assert placed.gap >= 0.0


def test_place_reports_what_misses_and_what_would_fit() -> None:
    graph = rlplace.library.build("llama", layers=8, hidden=4096, heads=32, ffn=11008, vocab=32000)
    asked = rlplace.Instance(graph, rlplace.Cluster.parse("1xV100-16"), 8, "fp16-mixed")
    with pytest.raises(InfeasibleError, match=r"limit is .* GiB") as caught:
        place(asked, time_limit=0.2)
    assert "times the devices" in str(caught.value)


def test_scaled_cluster_repeats_nodes_and_keeps_links() -> None:
    small, large = instance("1xA100-40").cluster, instance("2x8xA100-40:ib200").cluster
    assert len(scaled(small, 4).devices) == 4
    assert len(scaled(small, 4).nodes) == 1
    double = scaled(large, 2)
    assert len(double.devices) == 32
    assert double.link(0, 31) == large.link(0, 15)


def test_plan_files_go_through_the_public_names(tmp_path: object) -> None:
    asked = instance()
    plan = rlplace.uniform_plan(asked, pp=2, tp=2, micro_batches=8, zero=1)
    path = f"{tmp_path}/plan.json"
    plan.save(path)
    assert rlplace.Plan.load(path) == plan


def test_another_graph_is_refused() -> None:
    asked = instance()
    other = dataclasses.replace(asked, graph=rlplace.library.build("gpt2", seq_len=128))
    with pytest.raises(InputError, match=r"plan\.graph.*another graph"):
        rlplace.estimate(other, rlplace.uniform_plan(asked))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"global_batch": 0}, "global_batch=0: must be at least 1"),
        ({"precision": "bf17-mixed"}, "bf16-mixed"),
        ({"optimizer": "adam"}, "adamw"),
        ({"attention": "flush"}, "flash"),
        ({"memory_margin": 1.5}, r"in \[0, 1\)"),
        ({"cluster": "8xV100-16"}, "V100-16 has no bf16.*fp16-mixed"),
    ],
)
def test_bad_instances_name_the_field_and_a_legal_value(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        instance(**changes)  # type: ignore[arg-type]


def test_unknown_public_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'plase'"):
        rlplace.plase  # noqa: B018


@pytest.mark.parametrize("left", [3, 8])
def test_a_plan_for_the_devices_that_are_left_uses_them_alone(left: int) -> None:
    asked = instance("2x8xA100-80", global_batch=48)
    plan = rlplace.uniform_plan(asked, pp=2)
    found = rlplace.replanner(asked.graph, asked.cluster)(plan, left)
    assert 0 < len(found.devices) <= left
    assert max(found.devices) < left
    assert (found.graph, found.global_batch) == (plan.graph, plan.global_batch)
