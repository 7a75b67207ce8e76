"""Tests of costing from measured tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.cluster.types import Cluster, CollectiveCurve, DeviceKind, Link
from rlplace.cost.profiled import (
    BandwidthFit,
    ClusterNetwork,
    FittedNetwork,
    LayerPoint,
    LayerTable,
    Profile,
    ProfiledCost,
    profile_graph,
)
from rlplace.errors import InputError
from rlplace.graph.types import Affine
from rlplace.plan import testing
from rlplace.plan.frameworks import Framework
from rlplace.plan.types import GroupChoice, Instance, Mesh, Stage
from rlplace.plan.uniform import make_plan, uniform_plan
from rlplace.simulate.estimate import Estimator, estimate

SLOW, FAST = testing.round_kind("slow"), testing.round_kind("fast", memory=40e9)
LAYERS = ("embed", "block", "block", "head")


def table(forward: float, scale: float = 1.0) -> LayerTable:
    """Measured at 1 and 4 samples, the larger batch used better; backward takes twice as long."""
    points = tuple(
        LayerPoint(b, t * scale, 2 * t * scale, saved=1e6 * b, transient=2e6 * b)
        for b, t in ((1, forward), (4, 3 * forward))
    )
    return LayerTable(points, optimizer=0.5 * scale)


PROFILE = Profile(
    name="toy",
    layers=LAYERS,
    tables={
        (kind, layer, tp): table(seconds, scale / tp)
        for kind, scale in (("slow", 1.0), ("fast", 0.5))
        for layer, seconds in (("embed", 1.0), ("block", 4.0), ("head", 2.0))
        for tp in (1, 2)
    },
    params={(layer, tp): 1000 // tp for layer in ("embed", "block", "head") for tp in (1, 2)},
    outputs={"embed": Affine(0.0, 100.0), "block": Affine(0.0, 100.0)},
    tokens_per_sample=16,
)
GRAPH = profile_graph(PROFILE)
#: Gradients are reduced after the backward pass.
LATE = Framework("late", overlap_reduce=0.0)


def instance(
    kinds: list[list[DeviceKind]], batch: int = 8, framework: Framework = LATE
) -> Instance:
    """The toy on some nodes, in fp32."""
    return Instance(GRAPH, testing.cluster(kinds), batch, "fp32", framework=framework)


# --- tables


def test_between_two_sizes_along_the_line_and_on_them_exactly() -> None:
    own = table(1.0)
    assert own.at(4) == own.points[1]
    assert own.at(2).forward == pytest.approx(1.0 + 2.0 / 3.0)
    assert own.at(2).saved == pytest.approx(2e6)


def test_beyond_the_table_the_line_goes_on() -> None:
    own = table(1.0)
    assert own.at(7).forward == pytest.approx(5.0)
    # The line would reach 0.67 at half a sample, more than half of the time of one.
    assert own.at(0.5).forward == pytest.approx(1.0 - 0.5 * 2.0 / 3.0)


def test_no_size_is_used_better_than_the_nearest_that_was_measured_allows() -> None:
    # Superlinear times: the line falls below what is proportional, and rises above it.
    own = LayerTable((LayerPoint(2, 1.0, 1.0), LayerPoint(4, 4.0, 4.0)))
    assert own.at(1).forward == pytest.approx(0.5)
    assert own.at(8).forward == pytest.approx(8.0)


def test_one_point_scales() -> None:
    own = LayerTable((LayerPoint(2, 1.0, 3.0, 10.0, 20.0),))
    assert own.at(5) == LayerPoint(5, 2.5, 7.5, 25.0, 50.0)


@given(st.floats(0.1, 100.0), st.floats(0.1, 100.0))
def test_more_samples_never_take_less(a: float, b: float) -> None:
    own = table(1.0)
    assert own.at(min(a, b)).forward <= own.at(max(a, b)).forward + 1e-12


def test_what_was_not_measured_is_refused() -> None:
    with pytest.raises(InputError, match="no such measurement") as refused:
        PROFILE.table("fast", "block", 4)
    assert "('fast', 2)" in str(refused.value.nearest)
    unseen = Profile("toy", ("none",), {}, {})
    with pytest.raises(InputError, match="never measures"):
        profile_graph(unseen)


# --- graph


def test_the_graph_is_a_chain_with_the_parameters_of_the_table() -> None:
    assert [group.name for group in GRAPH.groups] == ["0.embed", "1.block", "2.block", "3.head"]
    assert len(GRAPH.structures) == 3
    assert GRAPH.params == 4000
    assert GRAPH.tp_degrees(4) == (1, 2)
    assert [edge.floats(2.0) for edge in GRAPH.edges] == [200.0, 200.0, 200.0]
    assert GRAPH.tokens_per_sample == 16


# --- cost


def test_one_device_takes_the_sum_of_its_layers() -> None:
    asked = instance([[SLOW]])
    plan = uniform_plan(asked, micro_batch=4)
    found = estimate(asked, plan, ProfiledCost(PROFILE))
    # Two micro-batches of 3 * (1 + 4 + 4 + 2) forward and twice that backward, four optimizers.
    assert found.step_time == pytest.approx(2 * 3 * 33.0 + 4 * 0.5)
    use = found.memory[0]
    assert use.params + use.gradients + use.optimizer == 4000 * 16
    assert use.activations == pytest.approx(4 * 4e6)
    assert use.transient == pytest.approx(8e6)


def test_a_mesh_is_as_fast_as_its_slowest_kind() -> None:
    asked = instance([[FAST, FAST], [SLOW, SLOW]])
    costs = ProfiledCost(PROFILE)

    def forward(*devices: int) -> float:
        choice, structure = GroupChoice("shard"), GRAPH.structure(1)
        mesh = Mesh(devices, len(devices) // 2, 1, 1, 2)
        return costs.group(asked, structure, choice, mesh, 1.0, 0.0).forward

    assert (forward(0, 1), forward(2, 3), forward(0, 1, 2, 3)) == (1.0, 2.0, 2.0)


def test_recompute_runs_the_forward_again_and_keeps_the_inputs() -> None:
    asked, mesh = instance([[SLOW]]), Mesh((0,))
    costs, block = ProfiledCost(PROFILE), GRAPH.structure(1)
    plain = costs.group(asked, block, GroupChoice(), mesh, 4.0, 1600.0)
    again = costs.group(asked, block, GroupChoice(recompute="full"), mesh, 4.0, 1600.0)
    assert again.backward == plain.backward + plain.forward
    assert (plain.saved, again.saved) == (4e6, 1600.0)
    assert again.transient == plain.transient + plain.saved
    with pytest.raises(InputError, match="'none' and 'full' only"):
        costs.group(asked, block, GroupChoice(recompute="attention"), mesh, 4.0, 0.0)


def test_gradients_hide_behind_the_backward_where_the_framework_has_it() -> None:
    curve = CollectiveCurve("all_reduce", 2, 1.0, 0.0)
    kind = DeviceKind("slow", 1, {"fp32": 1.0}, 1.0, overlap=0.5)
    where = testing.cluster([[kind, kind]], curves=(curve,))
    for framework, hidden in ((LATE, 0.0), (Framework("early"), 0.5)):
        asked = Instance(GRAPH, where, 8, "fp32", framework=framework)
        mesh = Mesh((0, 1), 2)
        found = ProfiledCost(PROFILE).group(asked, GRAPH.structure(1), GroupChoice(), mesh, 1.0, 0)
        assert (found.reduce, found.hidden) == (1.0, hidden)


def test_zero_moves_states_and_shares_the_optimizer() -> None:
    asked = instance([[SLOW, SLOW]])
    mesh = Mesh((0, 1), 1, 2)
    block, costs = GRAPH.structure(1), ProfiledCost(PROFILE)
    found = [
        costs.group(asked, block, GroupChoice(zero=level), mesh, 1.0, 0.0) for level in range(4)
    ]
    assert [cost.static for cost in found] == [16000.0, 12000.0, 10000.0, 8000.0]
    assert found[1].optimizer > 0.5 * found[0].optimizer
    assert found[3].optimizer == 0.5 * found[0].optimizer
    assert found[0].forward == found[2].forward
    assert found[2].backward > found[1].backward  # reduce-scatter after every micro-batch
    assert found[3].transient == found[0].transient + 8000.0


def test_a_pipeline_of_two_kinds_is_estimated() -> None:
    asked = instance([[SLOW], [FAST]], batch=4)
    none = (GroupChoice(),) * 2
    stages = (Stage(0, 2, Mesh((1,)), none), Stage(2, 4, Mesh((0,)), none))
    found = Estimator(asked, ProfiledCost(PROFILE)).estimate(make_plan(asked, stages, 4))
    assert found.stages[0].forward == pytest.approx(2.5)
    assert found.stages[1].forward == pytest.approx(6.0)
    assert found.step_time > 4 * 18.0


# --- networks


@given(st.floats(1.0, 1e10))
def test_a_fit_takes_longer_for_more(size: float) -> None:
    fit = BandwidthFit(-0.16570216, 2.7943117, 11.744097)  # GH200 to GH200, Sailor
    assert fit.seconds(2 * size) >= fit.seconds(size) > 0.0
    assert fit.seconds(0.0) == 0.0


def test_a_fit_at_a_megabyte_has_its_constant_as_bandwidth() -> None:
    assert BandwidthFit(-0.1, 2.0, 10.0).seconds(1e6) == pytest.approx(1e6 / 10e9)
    # Beyond the summit, at 2**10 MB, its 20 GB/s hold.
    assert BandwidthFit(-0.1, 2.0, 10.0).seconds(1e12) == pytest.approx(50.0)


def fitted() -> FittedNetwork:
    """1 GB/s between single devices, 2 GB/s between pairs of them; 0.5 GB/s from slow to fast."""
    rates = {("slow", "slow"): 1.0, ("slow", "fast"): 0.5, ("fast", "slow"): 0.5}
    return FittedNetwork(
        {
            (a, n, b, n): BandwidthFit(0.0, 0.0, rate * n)
            for (a, b), rate in rates.items()
            for n in (1, 2)
        }
    )


def test_replicas_send_at_once_and_the_slowest_pair_counts() -> None:
    where = testing.cluster([[SLOW, SLOW], [SLOW, SLOW], [FAST, FAST], [SLOW, SLOW]])
    network = fitted()
    one = network.transfer(where, Mesh((0, 1), tp=2), Mesh((2, 3), tp=2), 2e9)
    assert one == pytest.approx(1.0)
    two = network.transfer(where, Mesh((0, 1, 2, 3), 2, tp=2), Mesh((4, 5, 6, 7), 2, tp=2), 2e9)
    assert two == pytest.approx(1.0)  # a gigabyte each, one of them at half the speed


def test_a_ring_is_as_fast_as_its_slowest_pair_and_shards_share_the_nic() -> None:
    where = testing.cluster([[SLOW, SLOW], [SLOW, SLOW], [FAST, FAST]])
    network = fitted()
    alone = network.collective("all_reduce", where, Mesh((0, 2), 2), (0, 2), 1e9)
    assert alone == pytest.approx(1.0)  # two passes of half of it
    both = Mesh((0, 1, 2, 3), 2, tp=2)
    # Two gigabytes over links that two devices use: here twice as fast as one.
    assert network.collective("all_reduce", where, both, (0, 2), 1e9) == pytest.approx(1.0)
    mixed = Mesh((0, 2, 4), 3)
    assert network.collective("all_gather", where, mixed, (0, 2, 4), 3e9) == pytest.approx(4.0)
    assert network.collective("all_reduce", where, Mesh((0,)), (0,), 1e9) == 0.0
    with pytest.raises(InputError, match="no bandwidth"):
        network.transfer(where, Mesh((4,)), Mesh((5,)), 1.0)


def test_the_links_of_the_cluster_serve_where_nothing_else_was_measured() -> None:
    where: Cluster = testing.cluster(
        [[SLOW], [SLOW]], nic=Link(1e9, 0.0, "net"), intra=Link(1e10, 0.0, "in")
    )
    network = ClusterNetwork()
    assert network.transfer(where, Mesh((0,)), Mesh((1,)), 1e9) == pytest.approx(1.0)
    assert network.collective("all_reduce", where, Mesh((0, 1), 2), (0, 1), 1e9) > 0.9
