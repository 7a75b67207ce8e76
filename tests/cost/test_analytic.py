"""Cost of groups on meshes, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.cluster.types import Cluster, Link
from rlplace.cost.analytic import AnalyticCost, find_layout, view
from rlplace.cost.compute import matmul_seconds
from rlplace.cost.types import GroupCost
from rlplace.graph.types import Affine, Collective, Layout, Product, Structure, Work
from rlplace.plan.frameworks import Framework
from rlplace.plan.testing import NIC, chain, cluster, round_kind, transformer
from rlplace.plan.types import GroupChoice, Instance, Mesh, Recompute

_KIND = round_kind()
_WORK = Work(
    flops=Affine(0.0, 1e9),
    backward_flops=Affine(0.0, 2e9),
    matmuls=2,
    kernels=10,
    moved=Affine(1e6, 5e6),
    backward_moved=Affine(2e6, 9e6),
    fused_kernels=4,
    fused_moved=Affine(0.0, 3e6),
    fused_backward_moved=Affine(0.0, 6e6),
    score_floats=Affine(0.0, 1e6),
    params=10**7,
)


def _cost(
    devices: Cluster, mesh: Mesh, choice: GroupChoice | None = None, samples: float = 1.0
) -> GroupCost:
    # One micro-batch a step: no gradients to add to.
    instance = Instance(chain([1.0]), devices, max(1, round(samples * mesh.dp)))
    structure = Structure("x", _WORK)
    return AnalyticCost().group(instance, structure, choice or GroupChoice(), mesh, samples, 0.0)


def test_compute_is_flops_and_bytes_and_launches() -> None:
    kind = replace(
        _KIND,
        launch_overhead=1e-5,
        max_efficiency=0.5,
        half_flops=1e9,
        memory_efficiency=0.8,
    )
    cost = _cost(cluster([[kind]]), Mesh((0,)), samples=2)
    # Each of the two matmuls has 1e9 FLOPs, the size at which half of the efficiency is reached.
    forward = 2e9 / (1e12 * 0.5 * 0.5) + 11e6 * 2 / 0.8e12 + 10 * 1e-5
    assert cost.forward == pytest.approx(forward)
    # Twice the matmuls of twice the FLOPs, and twice the launches.
    backward = 4e9 / (1e12 * 0.5 * 0.5) + 20e6 * 2 / 0.8e12 + 20 * 1e-5
    assert cost.backward == pytest.approx(backward)
    moved = 10**7 * (2 * 2 + 2 + 2 * 12)
    assert cost.optimizer == pytest.approx(moved / 0.8e12)


def test_gradients_of_later_micro_batches_are_added() -> None:
    one = cluster([[_KIND]])
    structure, cost = Structure("x", _WORK), AnalyticCost()
    once, four = (
        cost.group(Instance(chain([1.0]), one, n), structure, GroupChoice(), Mesh((0,)), 1.0, 0.0)
        for n in (1, 4)
    )
    added = 10**7 * (2 + 2 + 2)  # the sum is read and written, the new gradient is read
    assert four.backward - once.backward == pytest.approx(3 / 4 * added / 1e12)


def test_a_math_kernel_moves_the_scores() -> None:
    instance = Instance(chain([1.0]), cluster([[_KIND]]), 1)
    mesh, structure, cost = Mesh((0,)), Structure("x", _WORK), AnalyticCost()
    flash = cost.group(instance, structure, GroupChoice(), mesh, 1, 0.0)
    slow = replace(instance, attention="math")
    math = cost.group(slow, structure, GroupChoice(), mesh, 1, 0.0)
    assert math.forward - flash.forward == pytest.approx((4 + 4) * 1e6 * 2 / 1e12)
    assert math.backward - flash.backward == pytest.approx((7 + 2) * 1e6 * 2 / 1e12)
    assert math.saved - flash.saved == 1e6 * 2


def test_fused_ops_launch_and_move_less() -> None:
    kind = replace(_KIND, launch_overhead=1e-5)
    instance = Instance(chain([1.0]), cluster([[kind]]), 1)
    mesh, structure, cost = Mesh((0,)), Structure("x", _WORK), AnalyticCost()
    apart = cost.group(instance, structure, GroupChoice(), mesh, 1, 0.0)
    fused = cost.group(replace(instance, fused=True), structure, GroupChoice(), mesh, 1, 0.0)
    assert apart.forward - fused.forward == pytest.approx((6e6 - 3e6) * 2 / 1e12 + 6 * 1e-5)
    assert apart.backward - fused.backward == pytest.approx((11e6 - 6e6) * 2 / 1e12 + 12 * 1e-5)
    assert apart.saved == fused.saved


def test_the_slowest_kind_of_a_mesh_decides() -> None:
    mixed = cluster([[_KIND, round_kind("slow", 0.25)]])
    alone = _cost(mixed, Mesh((0,)))
    both = _cost(mixed, Mesh((0, 1), 2))
    assert both.forward == pytest.approx(4 * alone.forward)
    assert both.optimizer == pytest.approx(4 * alone.optimizer)


def test_ranks_that_share_a_core_take_turns() -> None:
    shared = cluster([[_KIND] * 4], cores=(0, 1, 0, 1))
    assert _cost(shared, Mesh((0, 1), 2)).forward == _cost(shared, Mesh((0,))).forward
    assert _cost(shared, Mesh((0, 2), 2)).forward == 2 * _cost(shared, Mesh((0,))).forward
    two_hosts = cluster([[_KIND]] * 2, cores=(0, 0))
    assert view(two_hosts, Mesh((0, 1), 2)).turns == 1, "a core number is of one node"


def test_full_recompute_runs_the_forward_again() -> None:
    one = cluster([[_KIND]])
    none = _cost(one, Mesh((0,)))
    full = _cost(one, Mesh((0,)), GroupChoice(recompute="full"))
    assert full.forward == none.forward
    assert full.backward == pytest.approx(none.backward + none.forward)


def test_traffic_of_the_zero_levels() -> None:
    """Two replicas, 1e7 parameters of 2 bytes: half of 20 MB moves in a scatter or a gather."""
    pair = cluster([[_KIND] * 2], intra=Link(1e9, 0.0))
    mesh = Mesh((0, 1), 1, 2)
    half = 0.5 * 2e7 / 1e9
    plain, one, two, three = (_cost(pair, mesh, GroupChoice(zero=zero)) for zero in range(4))
    assert plain.reduce == pytest.approx(2 * half)
    assert one.reduce == pytest.approx(half)
    assert one.optimizer == pytest.approx(plain.optimizer / 2 + half)
    assert two.reduce == 0.0
    assert two.backward == pytest.approx(plain.backward + half)
    assert three.forward == pytest.approx(plain.forward + half)
    assert three.backward == pytest.approx(plain.backward + 2 * half)
    assert three.optimizer == pytest.approx(plain.optimizer / 2)


def test_a_framework_that_all_reduces_for_zero_1() -> None:
    pair = cluster([[_KIND] * 2], intra=Link(1e9, 0.0))
    own = Framework("own", scatters=False, clips=False)
    instance = Instance(chain([1.0]), pair, 2, framework=own)
    structure, mesh = Structure("x", _WORK), Mesh((0, 1), 1, 2)
    found = AnalyticCost().group(instance, structure, GroupChoice(zero=1), mesh, 1.0, 0.0)
    assert found.reduce == pytest.approx(2e7 / 1e9), "both ways, as for ZeRO-0"
    assert found.optimizer == _cost(pair, mesh, GroupChoice(zero=1)).optimizer


def test_a_framework_that_clips_reads_the_gradients_twice_and_writes_them() -> None:
    pair = cluster([[_KIND] * 2], intra=Link(1e9, 0.0))
    structure, mesh = Structure("x", _WORK), Mesh((0, 1), 1, 2)
    for zero, share in ((1, 1.0), (2, 0.5)):
        found = [
            AnalyticCost().group(
                Instance(chain([1.0]), pair, 2, framework=Framework("own", clips=clips)),
                structure,
                GroupChoice(zero=zero),
                mesh,
                1.0,
                0.0,
            )
            for clips in (False, True)
        ]
        # Of the gradients that a rank holds.
        more = share * 3 * 2e7 / 1e12
        assert found[1].optimizer - found[0].optimizer == pytest.approx(more)


def test_sums_of_gradients_and_the_optimizer_stream() -> None:
    quick = replace(_KIND, memory_efficiency=0.25, stream_efficiency=0.5)
    slow = replace(_KIND, memory_efficiency=0.25)
    one, other = (_cost(cluster([[kind]]), Mesh((0,))) for kind in (quick, slow))
    assert one.optimizer == pytest.approx(other.optimizer / 2)
    assert one.forward == other.forward


def test_the_host_launches_collectives_too() -> None:
    pair = cluster([[replace(_KIND, sms=1)] * 2], intra=Link(1e12, 0.0))
    layout = Layout("shard", 2, _WORK, (Collective("all_reduce", "forward", Affine(0.0, 1.0)),) * 3)
    structure, mesh = Structure("x", _WORK, (layout,)), Mesh((0, 1), tp=2)
    own = Framework("own", launch=1e-3, collective_launch=1e-2)
    instance = Instance(chain([1.0]), pair, 1, framework=own)
    found = AnalyticCost().group(instance, structure, GroupChoice("shard"), mesh, 1.0, 0.0)
    assert found.forward == pytest.approx(10 * 1e-3 + 3 * 1e-2)


def test_redoing_the_light_ops() -> None:
    one = cluster([[_KIND]])
    none, ops = (_cost(one, Mesh((0,)), GroupChoice(recompute=r)) for r in ("none", "ops"))
    assert ops.backward - none.backward == pytest.approx(6e6 * 2 / 1e12)
    assert ops.saved == 0.0, "no product gives anything, and there are no inputs"


def test_offloaded_states_pass_the_host_link() -> None:
    kind = replace(_KIND, host_bandwidth=1e9)
    plain, away = (
        _cost(cluster([[kind]]), Mesh((0,)), GroupChoice(offload=offload))
        for offload in (False, True)
    )
    assert plain.static - away.static == 12 * 10**7
    assert away.optimizer == pytest.approx(2 * 2e7 / 1e9 + 24 * 10**7 / 50e9)


def test_what_hides_behind_compute() -> None:
    """The longer of gather and forward, and of the shorter what does not overlap."""
    mesh = Mesh((0, 1), 1, 2)
    for overlap in (0.0, 0.5):
        kind = round_kind(overlap=overlap)
        fast, slow = (cluster([[kind] * 2], intra=Link(b, 0.0)) for b in (1e12, 1e9))
        plain = _cost(slow, Mesh((0,))).forward
        quick = _cost(fast, mesh, GroupChoice(zero=3)).forward
        assert quick == pytest.approx(plain + (1.0 - overlap) * 1e7 / 1e12)
        exposed = _cost(slow, mesh, GroupChoice(zero=3)).forward
        assert exposed == pytest.approx(1e7 / 1e9 + (1.0 - overlap) * plain)


def test_the_slowest_group_of_an_axis_stands_for_all() -> None:
    fast, slow = round_kind("fast"), round_kind("slow")
    base = cluster([[fast] * 2, [slow] * 2])
    hosts = (base.nodes[0], replace(base.nodes[1], intra=Link(1e9, 1e-6)))
    mixed = replace(base, nodes=hosts)
    looks = view(mixed, Mesh((0, 1, 2, 3), 2, 1, 1, 2))
    assert looks.tp.intra == Link(1e9, 1e-6)
    assert looks.kinds == ("fast", "slow")


def test_kinds_of_one_name_on_two_clusters_are_told_apart() -> None:
    """A calibrated kind keeps its name: a shared cost model must not mix them up."""
    graph, cost = chain([1e9]), AnalyticCost()
    structure = graph.structure(0)
    found = [
        cost.group(
            Instance(graph, cluster([[round_kind("cpu", speed)]]), 1),
            structure,
            GroupChoice(),
            Mesh((0,)),
            1.0,
            0.0,
        ).forward
        for speed in (1.0, 0.5)
    ]
    assert found[1] == pytest.approx(2 * found[0])


def test_tensor_parallel_layouts_bring_their_collectives() -> None:
    graph = transformer(2)
    instance = Instance(graph, cluster([[_KIND] * 4], intra=Link(1e9, 0.0)), 4)
    structure, cost = graph.structure(1), AnalyticCost()
    mesh = Mesh((0, 1, 2, 3), tp=4)
    sharded = cost.group(instance, structure, GroupChoice("shard"), mesh, 1, 0.0)
    whole = cost.group(instance, structure, GroupChoice(), mesh, 1, 0.0)
    exchange = 2 * 3 / 4 * (128 * 256 * 2) / 1e9
    assert sharded.forward == pytest.approx(whole.forward / 4 + exchange, rel=1e-6)
    with pytest.raises(KeyError, match="no layout 'shard' at tp=3"):
        find_layout(structure, "shard", 3)


def test_transfers_between_meshes() -> None:
    instance = Instance(chain([1.0]), cluster([[_KIND] * 4] * 2, intra=Link(1e9, 0.0)), 4)
    cost = AnalyticCost()
    inside = cost.transfer(instance, Mesh((0, 1), 2), Mesh((2, 3), 2), 1e6, 0.0)
    assert inside == pytest.approx(1e6 * 2 / 2 / 1e9)
    across = cost.transfer(instance, Mesh((0,)), Mesh((4,)), 0.0, 1e6)
    assert across == pytest.approx(NIC.latency + 1e6 / NIC.bandwidth)
    copies = cost.transfer(instance, Mesh((0, 1), tp=2), Mesh((4, 5), tp=2), 0.0, 1e6)
    assert copies == pytest.approx(2 * across), "each tp rank gets its own"


@given(st.floats(1.0, 1e15), st.floats(1.0, 1e15), st.integers(1, 99))
def test_more_flops_never_take_less_and_never_beat_the_peak(
    one: float, other: float, kernels: int
) -> None:
    kind = replace(_KIND, max_efficiency=0.7, half_flops=1e9)
    small, large = (matmul_seconds(kind, "fp32", f, kernels) for f in sorted((one, other)))
    assert small <= large
    assert large >= max(one, other) / 1e12
    assert matmul_seconds(kind, "fp32", 0.0, kernels) == 0.0


def test_what_a_framework_leaves_out_of_recompute() -> None:
    size = Affine(64.0)
    product = Product("matmul", "forward", 2, size, size, size, size, Affine(4e9), Affine(0.0))
    structure = Structure("x", replace(_WORK, products=(product,), moved=Affine(1e8)))
    devices, cost = cluster([[_KIND]]), AnalyticCost()

    def backward(recompute: Recompute, own: Framework) -> GroupCost:
        instance = Instance(chain([1.0]), devices, 1, framework=own)
        choice = GroupChoice(recompute=recompute)
        return cost.group(instance, structure, choice, Mesh((0,)), 1.0, 0.0)

    plain, early = Framework("plain"), Framework("early", early_stop=True, redone_matmuls=0.5)
    none = backward("none", plain).backward
    assert backward("none", early).skipped == backward("full", plain).skipped == 0.0
    # Two equal matmuls, of which the second is not needed.
    assert backward("full", early).skipped == pytest.approx(2e9 / 1e12)
    assert backward("full", early).backward == backward("full", plain).backward
    light = 2e8 / 1e12
    assert backward("ops", plain).backward - none == pytest.approx(light)
    assert backward("ops", early).backward - none == pytest.approx(light + 4e9 / 1e12 / 2)


def test_collectives_in_pieces_hide_all_but_the_first() -> None:
    gather = Collective("all_gather", "forward", Affine(0.0, 1e8))
    structure = Structure("x", _WORK, (Layout("shard", 4, _WORK, (gather,)),))
    devices, mesh = cluster([[_KIND] * 4]), Mesh((0, 1, 2, 3), tp=4)

    def exposed(share: float) -> float:
        own = Framework("own", overlap_exchange=share)
        instance = Instance(chain([1.0]), devices, 1, framework=own)
        whole = AnalyticCost().group(instance, structure, GroupChoice("shard"), mesh, 1.0, 0.0)
        alone = AnalyticCost().group(
            instance, Structure("y", _WORK), GroupChoice(), Mesh((0,)), 1.0, 0.0
        )
        return whole.forward - alone.forward

    assert exposed(1.0) == pytest.approx(exposed(0.0) * (1 - _KIND.overlap * 3 / 4))


def test_weights_are_gathered_in_what_the_framework_casts_them_to() -> None:
    devices, mesh = cluster([[_KIND] * 2]), Mesh((0, 1), dp_shard=2)
    work = Work(params=10**9)
    whole, half = (
        AnalyticCost().group(
            Instance(chain([1.0]), devices, 2, framework=Framework("own", gather_bytes=size)),
            Structure("x", work), GroupChoice(zero=3), mesh, 1.0, 0.0,
        )
        for size in (0, 1)
    )  # fmt: skip
    assert half.forward == pytest.approx(whole.forward / 2, rel=0.01)
