"""Which runs of devices a stage may take, and in which shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlplace.cluster.types import Cluster
from rlplace.errors import InputError
from rlplace.plan.testing import chain, cluster, round_kind, transformer
from rlplace.plan.types import Instance, Mesh
from rlplace.planners.grid import micro_batch_counts, shapes
from rlplace.planners.meshes import device_orders, equal_nodes, mesh_shapes, refuse_shapeless, runs

_FAST, _SLOW = round_kind("fast"), round_kind("slow", 0.5)


def _instance(devices: Cluster, batch: int = 16) -> Instance:
    return Instance(transformer(2), devices, batch)


def test_small_clusters_have_every_run() -> None:
    instance = _instance(cluster([[_FAST] * 5]))
    assert len(runs(instance, tuple(range(5)))) == 5 * 6 / 2


def test_nodes_of_different_sizes_are_cut_and_the_slowest_go_first() -> None:
    instance = _instance(cluster([[_FAST] * 4, [_SLOW] * 2]))
    assert list(equal_nodes(instance)) == [(4, 5), (0, 1), (2, 3)]


def test_large_clusters_have_aligned_runs() -> None:
    instance = _instance(cluster([[_FAST] * 8] * 16))
    found = runs(instance, tuple(range(128)))
    assert len(found) == len(set(found)) < 500
    for start, stop in found:
        width = stop - start
        assert 0 <= start < stop <= 128
        if width <= 8:
            assert 8 % width == 0
            assert start % width == 0
        else:
            assert start % 8 == stop % 8 == 0
    assert (0, 128) in found


def test_orders_of_islands() -> None:
    instance = _instance(cluster([[_FAST] * 2, [_SLOW] * 2]))
    assert device_orders(instance) == ((0, 1, 2, 3), (2, 3, 0, 1))
    scattered = _instance(cluster([[_FAST, _SLOW]] * 2))
    assert device_orders(scattered) == ((0, 2, 1, 3), (1, 3, 0, 2))


def test_many_islands_have_a_few_orders() -> None:
    """Of 14 islands there are 8.7e10 orders."""
    kinds = [round_kind(f"kind-{index}") for index in range(14)]
    orders = device_orders(_instance(cluster([[kind] for kind in kinds])))
    assert 1 <= len(orders) <= 6
    assert all(sorted(order) == list(range(14)) for order in orders)


def test_shapes_of_a_run() -> None:
    instance = _instance(cluster([[_FAST] * 4] * 2))
    assert mesh_shapes(instance, (0, 1, 2, 3), 4) == [
        Mesh((0, 1, 2, 3), 1, 4),
        Mesh((0, 1, 2, 3), 1, 2, 1, 2),
        Mesh((0, 1, 2, 3), 1, 1, 1, 4),
    ]
    both = mesh_shapes(instance, tuple(range(8)), 8)
    assert Mesh(tuple(range(8)), 2, 4) in both, "shard inside a node, replicate across"
    assert {mesh.tp for mesh in both} == {1, 2, 4}
    assert mesh_shapes(instance, (0, 1, 2), 4) == [], "three replicas do not divide 4 samples"


def test_tensor_parallel_stays_in_a_node_and_a_kind() -> None:
    instance = _instance(cluster([[_FAST, _FAST, _SLOW, _SLOW], [_FAST] * 4]))
    assert {m.tp for m in mesh_shapes(instance, (0, 1, 2, 3), 4)} == {1, 2}
    assert {m.tp for m in mesh_shapes(instance, (1, 2), 4)} == {1}
    assert {m.tp for m in mesh_shapes(instance, (3, 4), 4)} == {1}


@pytest.mark.parametrize("batch", [1, 7, 16])
def test_the_grid_uses_what_the_batch_lets_it(batch: int) -> None:
    instance = _instance(cluster([[_FAST] * 4] * 2), batch)
    found = list(shapes(instance))
    assert len(found) == len(set(found)) > 0
    for pp, tp, dp in found:
        assert pp * tp * dp <= 8
        assert batch % dp == 0
        counts = micro_batch_counts(instance, dp, pp)
        assert 1 <= len(counts) <= 6
        assert all(batch // dp % count == 0 for count in counts)


def test_a_graph_without_layouts_has_no_tensor_parallel_shapes() -> None:
    instance = Instance(chain([1e9] * 3), cluster([[_FAST] * 4]), 4)
    assert {tp for _, tp, _ in shapes(instance)} == {1}


def test_only_the_tp_degrees_that_are_asked_for() -> None:
    instance = replace(_instance(cluster([[_FAST] * 8])), tp_degrees=(2,))
    found = mesh_shapes(instance, tuple(range(8)), 16)
    assert {mesh.tp for mesh in found} == {2}
    assert {tp for _, tp, _ in shapes(instance)} == {2}
    refuse_shapeless(instance)


def test_degrees_that_no_run_of_devices_can_take_are_refused() -> None:
    """Nodes of six devices are cut into halves, thirds and sixths."""
    instance = replace(_instance(cluster([[_FAST] * 6] * 3)), tp_degrees=(4,))
    with pytest.raises(InputError, match="a whole number of such tp groups"):
        refuse_shapeless(instance)
