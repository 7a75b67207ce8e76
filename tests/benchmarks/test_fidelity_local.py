from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fidelity_local_parts import cases as cases_module
from benchmarks.fidelity_local_parts import places as places_module
from benchmarks.fidelity_local_parts.cases import (
    COMMON,
    FAMILIES,
    FURTHER,
    LAYOUTS,
    Case,
    Family,
    cases,
)
from benchmarks.fidelity_local_parts.places import places, unable
from benchmarks.fidelity_local_parts.predict import FITTED, Row, limited_cluster, rows
from benchmarks.fidelity_local_parts.records import Log, Record, Run, Setting, join, load
from benchmarks.fidelity_local_parts.report import plan_table, score, score_table
from benchmarks.fidelity_local_parts.runs import computing, measure
from rlplace.cluster.dump import dump_cluster
from rlplace.cluster.types import Cluster, CollectiveCurve, Device, DeviceKind, Link, Node
from rlplace.cost.analytic import view
from rlplace.plan.check import check
from rlplace.plan.types import Instance, Mesh
from rlplace.simulate.types import Estimate, Event, MemoryUse, Timeline

KIND = DeviceKind("cpu", 2**33, {"fp32": 8e10}, 2e10, 2e-6, half_flops=1e6, overlap=0.0)
CURVE = CollectiveCurve("all_reduce", 2, 1e-4, 1e-9, ((1e3, 1e-4), (1e6, 1e-3)))


def machine(ranks: int) -> Cluster:
    devices = tuple(Device(rank, "cpu", 0, rank % 2) for rank in range(ranks))
    return Cluster(devices, (Node(0, Link(1e9, 1e-4, "gloo")),), (KIND,), curves=(CURVE,))


def test_there_are_enough_plans_of_enough_families() -> None:
    every = cases()
    assert len({case.name for case in every}) == len(every)
    unfitted = [case for case in every if (case.family, case.ranks, case.layout) not in FITTED]
    assert len(unfitted) >= 30
    assert len({case.family for case in unfitted}) >= 4
    assert {case.ranks for case in unfitted} == {2, 4}
    assert all(layout in LAYOUTS[ranks] for ranks in COMMON for layout in COMMON[ranks])
    assert all(layout in LAYOUTS[ranks] for ranks in FURTHER for _, layout in FURTHER[ranks])


def test_constants_are_fitted_to_six_plans_that_are_measured() -> None:
    measured = {(case.family, case.ranks, case.layout) for case in cases()}
    assert len(set(FITTED)) == 6
    assert set(FITTED) <= measured


@pytest.mark.parametrize("family", ["dlrm", "vit"])
def test_every_plan_of_a_family_is_legal(family: str) -> None:
    graph = FAMILIES[family].graph()
    for case in cases([family]):
        plan = case.plan(graph)
        instance = Instance(graph, machine(case.ranks), FAMILIES[family].batch, "fp32")
        check(instance, replace(plan, cluster=instance.cluster.fingerprint))
        assert max(plan.devices) < case.ranks


def run(seconds: float, *, pace: float = 1.0, shared: float = 1.0) -> Run:
    return Run((seconds, seconds, 9.0), (pace,) * 4, (MemoryUse(params=100.0),), shared, 0.0)


def record(layout: str = "dp2", *runs: Run, family: str = "gpt", setting: str = "s") -> Record:
    return Record(setting, family, 2, layout, {}, runs or (run(1.0),))


def test_only_the_computing_part_of_a_step_follows_the_pace() -> None:
    slow = Run((2.0,), (3.0, 1.0), (), 0.75, 0.0)
    assert slow.pace == 2.0
    assert slow.step_time(1.0) == pytest.approx(2.0 * (0.25 + 0.75 / 2))
    assert slow.step_time(2.0) == pytest.approx(2.0)


def test_a_log_reads_back_and_joins_the_runs_of_a_plan(tmp_path: Path) -> None:
    settings = {"s": Setting(2, 1e6, (1, 0.5))}
    first = Log("here", settings, {2: "text"}, (record("dp2"), record("tp2")))
    second = Log("here", settings, {2: "text"}, (record("dp2", run(3.0, pace=2.0)),))
    both = join([first, second])
    assert [len(one.runs) for one in both.records] == [2, 1]
    assert both.usual_pace() == 1.0
    both.save(tmp_path / "log.json")
    assert load(tmp_path / "log.json") == both


def test_the_busiest_rank_says_how_much_of_a_step_is_computing() -> None:
    events = (
        Event(0, "F", 0, 0, 0.0, 1.0),
        Event(0, "reduce", 0, 0, 1.0, 4.0),
        Event(1, "F", 0, 0, 0.0, 2.0),
        Event(1, "optimizer", 0, 0, 3.0, 4.0),
    )
    assert computing(Timeline(events)) == 0.75
    assert computing(Timeline(())) == 1.0


def test_a_network_joins_hosts_of_one_core() -> None:
    limited = limited_cluster(machine(4), Setting(nodes=2, bandwidth=1e8))
    assert [device.node for device in limited.devices] == [0, 0, 1, 1]
    assert limited.link(0, 1).bandwidth == 1e9
    assert limited.link(1, 2).bandwidth == 1e8
    assert limited.curves == ()
    assert view(limited, Mesh((0, 1), tp=2)).turns == 2
    assert view(limited, Mesh((0, 2), tp=2)).turns == 1


def test_a_quota_slows_one_rank_and_what_it_takes_part_in() -> None:
    limited = limited_cluster(machine(2), Setting(slow=(1, 0.5)))
    slow = limited.kind(1)
    assert limited.kind(0) == KIND
    assert slow.peak_flops["fp32"] == 4e10
    assert slow.bandwidth == 1e10
    assert limited.curves[0].seconds(1e6) == 2e-3
    assert limited_cluster(machine(2), Setting()) == machine(2)


def row(
    layout: str, predicted: float, measured: float, *, held: float = 1.0, fitted: bool = False
) -> Row:
    use = (MemoryUse(params=100.0 * held),)
    estimate = Estimate(predicted, (100.0,), True, (), (), use, 1.0, 1.0)
    return Row(record(layout), measured, 0.02, 100.0, estimate, fitted)


def test_scores_by_hand() -> None:
    own = [
        row("dp2", 1.1, 1.0),
        row("tp2", 1.0, 2.0, held=1.3),
        row("single", 3.0, 3.0),
        row("dp2 m4", 1.2, 1.0, fitted=True),
    ]
    found = score(own)
    assert found.n == 3
    assert found.median == pytest.approx(0.1)
    assert found.bias == pytest.approx(0.0)
    assert found.p90 == pytest.approx(0.42)
    # Of three pairs that nothing was fitted to, one is in the wrong order.
    assert found.tau_all == pytest.approx(1 / 3)
    # The predicted best takes 2 s, the best 1 s.
    assert found.regret == pytest.approx(1.0)
    assert found.memory_within == pytest.approx(2 / 3)
    assert score_table({"s": found}).row_count == 1
    assert plan_table("s", own).row_count == 4


def test_who_is_not_root_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in unable(links=True, quota=False)
    assert "root" in unable(links=False, quota=True)
    assert unable(links=False, quota=False) == ""


def leftovers() -> list[str]:
    return [name for name in places_module._made() if name.startswith(f"rlp{os.getpid()}")]


@pytest.mark.skipif(bool(unable(links=True, quota=True)), reason=unable(links=True, quota=True))
def test_places_are_removed_whatever_happens() -> None:
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012, what is inside is what is removed
        with places(4, nodes=2, bandwidth=1e8, slow=(1, 0.5)) as where:
            assert [place.core for place in where.ranks] == [0, 0, 1, 1]
            assert len({place.namespace for place in where.ranks}) == 2
            assert [bool(place.group) for place in where.ranks] == [False, True, False, False]
            assert leftovers()
            raise KeyboardInterrupt
    assert leftovers() == []


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 128, "seq_len": 32}
    monkeypatch.setitem(cases_module.FAMILIES, "gpt", Family({"name": "gpt", **shape}, 8))


@pytest.mark.dist
@pytest.mark.usefixtures("_tiny")
def test_two_tiny_plans_are_measured_and_predicted(tmp_path: Path) -> None:
    setting = Setting(nodes=0 if unable(links=True, quota=False) else 2, bandwidth=1e8)
    told: list[str] = []
    wanted = [Case("gpt", 2, "dp2"), Case("gpt", 2, "pp2 1f1b m4")]
    found = measure("s", setting, wanted, 2, told.append)
    assert len(told) == 2
    log = Log("here", {"s": setting}, {2: dump_cluster(machine(2))}, tuple(found))
    log.save(tmp_path / "log.json")
    own = rows(load(tmp_path / "log.json"))[0]["s"]
    assert [one.case for one in own] == wanted
    for one in own:
        assert 0.0 < one.measured < 60.0
        assert 0.0 < one.estimate.step_time < 1.0
        assert abs(one.memory_error) < 0.05
        assert len(one.record.runs[0].paces) == 3
    assert leftovers() == []
