"""Tests of reading Sailor's profiles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlplace.cost.profiled import (
    ProfiledCost,
    profile_graph,
    read_sailor,
    read_sailor_network,
    sailor_cluster,
)
from rlplace.errors import InputError
from rlplace.plan.frameworks import Framework
from rlplace.plan.types import GroupChoice, Instance, Mesh, Stage
from rlplace.plan.uniform import make_plan
from rlplace.simulate.estimate import Estimator

SHARED = Path(__file__).parents[3] / "shared/data/profiles/sailor"


def write(folder: Path) -> None:
    """Two layers on one kind at tp 1 and 2, one network fit."""
    (folder / "layer_times.csv").write_text(
        "model,gpu,micro_batch,tp,layer,fwd_s,bwd_s,update_s\n"
        + "".join(
            f"toy,card,{b},{tp},{layer},{b * (layer + 1) / tp},{2 * b / tp},0.3\n"
            for b in (2, 1)
            for tp in (1, 2)
            for layer in (0, 1)
        )
    )
    (folder / "layer_memory.csv").write_text(
        "model,tp,layer,params_floats,act_output_floats,act_mem_bytes\n"
        "toy,1,0,100,8,64\ntoy,1,1,200,8,128\ntoy,2,0,50,8,32\ntoy,2,1,100,8,64\n"
    )
    (folder / "network_fits.csv").write_text(
        "send_zone,send_gpu,send_gpus,recv_zone,recv_gpu,recv_gpus,c2,c1,c0\n"
        "us-central1-a,card,1,us-central1-a,card,1,0.0,0.0,2.0\n"
        "elsewhere,card,2,us-central1-a,card,1,0.0,0.0,1.0\n"
    )
    machines = {"card": {"gpus_per_node": 4, "mem_per_gpu": 7_000_000_000}, "zone": "a"}
    (folder / "setup.json").write_text(json.dumps({"machines": machines}))


def test_layers_come_in_seconds_elements_and_bytes(tmp_path: Path) -> None:
    write(tmp_path)
    profile = read_sailor(tmp_path, "toy")
    assert profile.layers == ("0", "1")
    second = profile.table("card", "1", 2)
    assert [point.samples for point in second.points] == [1, 2]
    assert (second.at(2).forward, second.at(2).backward, second.at(2).saved) == (2.0, 2.0, 128.0)
    # The optimizer step of the model, shared by parameters.
    assert second.optimizer == pytest.approx(0.2)
    assert profile.params["0", 1] == 100
    assert profile.outputs["0"](3.0) == 24.0
    graph = profile_graph(profile)
    assert (graph.params, graph.tp_degrees(4)) == (300, (1, 2))


def test_a_network_is_of_one_zone(tmp_path: Path) -> None:
    write(tmp_path)
    network = read_sailor_network(tmp_path)
    assert list(network.fits) == [("card", 1, "card", 1)]
    cluster = sailor_cluster(tmp_path, [("card", 1), ("card", 1)])
    assert cluster.kind(0).memory == 7_000_000_000
    assert network.transfer(cluster, Mesh((0,)), Mesh((1,)), 4e9) == pytest.approx(2.0)


def test_what_is_not_there_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_sailor(tmp_path, "toy")
    write(tmp_path)
    with pytest.raises(InputError, match="no such model") as refused:
        read_sailor(tmp_path, "tiy")
    assert refused.value.nearest == "toy"
    with pytest.raises(InputError, match="no such device"):
        sailor_cluster(tmp_path, [("cart", 1)])


@pytest.mark.skipif(not SHARED.exists(), reason="needs the published profiles")
def test_a_measured_plan_on_slow_links() -> None:
    # Sailor's validation, mit/N4 D4: one stage of four tp groups of eight cards of three kinds
    # over 1 Gb/s; 83.45 s measured, 65.99 s predicted by Sailor. The shards share the NIC.
    profile = read_sailor(SHARED, "OPT-350")
    graph = profile_graph(profile)
    kinds = ("RTX-3090", "RTX-2080", "Titan-RTX", "RTX-2080")
    cluster = sailor_cluster(SHARED, [(kind, 8) for kind in kinds])
    framework = Framework("megatron-deepspeed", overlap_reduce=0.0)
    instance = Instance(graph, cluster, 256, "fp32", framework=framework)
    mesh = Mesh(tuple(range(32)), 4, 1, 1, 8)
    stage = Stage(0, 26, mesh, (GroupChoice("shard"),) * 26)
    plan = make_plan(instance, (stage,), 256 // 8)
    cost = ProfiledCost(profile, read_sailor_network(SHARED))
    assert Estimator(instance, cost).estimate(plan).step_time == pytest.approx(83.45, rel=0.03)
