"""The strategies of Galvatron: how many there are, and the meshes that they mean."""

from __future__ import annotations

import pytest

from rlplace.plan.types import Mesh
from rlplace.planners.strategies import Strategy, data_meshes, strategies


@pytest.mark.parametrize(
    ("devices", "all_of_them", "pruned"), [(2, 4, 4), (4, 13, 11), (8, 34, 22), (16, 73, 37)]
)
def test_there_are_as_many_as_the_paper_counts(devices: int, all_of_them: int, pruned: int) -> None:
    assert len(set(strategies(devices, mixed=True))) == all_of_them
    assert len(set(strategies(devices))) == pruned
    assert len(set(strategies(devices, recompute=True))) == 2 * pruned


def test_any_number_of_devices_has_strategies() -> None:
    assert len(strategies(1)) == 1
    # Three replicas of two shards, or two of three; each either way round, dp or sdp: 8. One
    # paradigm: 3 on six, 3 on three, 3 on two devices of a stage. Six stages: 1.
    assert len(strategies(6)) == 8 + 3 + 3 + 3 + 1


def test_the_outermost_level_takes_the_largest_runs() -> None:
    ranks = tuple(range(4))
    assert Strategy(1, (("dp", 2), ("tp", 2))).mesh(ranks) == Mesh((0, 1, 2, 3), 2, 1, 1, 2)
    outer = Strategy(1, (("tp", 2), ("sdp", 2))).mesh(ranks)
    assert outer == Mesh((0, 2, 1, 3), 1, 2, 1, 2)
    assert outer.tp_groups() == ((0, 2), (1, 3))
    assert outer.dp_groups() == ((0, 1), (2, 3))


def test_three_levels_become_three_axes() -> None:
    mesh = Strategy(1, (("sdp", 2), ("tp", 2), ("dp", 2))).mesh(tuple(range(8)))
    assert (mesh.dp_replicate, mesh.dp_shard, mesh.tp) == (2, 2, 2)
    # dp pairs are neighbours, tp pairs two apart, sdp pairs four apart.
    assert mesh.devices == (0, 2, 4, 6, 1, 3, 5, 7)


def test_a_stage_has_a_mesh_for_each_order_of_degrees() -> None:
    meshes = data_meshes(tuple(range(4)), (1, 2, 4))
    assert [(mesh.dp, mesh.tp) for mesh in meshes] == [(2, 2), (4, 1), (2, 2), (1, 4)]
    assert len(set(meshes)) == 4
    assert {mesh.dp_replicate for mesh in meshes} == {1}
    assert [mesh.tp for mesh in data_meshes(tuple(range(4)), (1,))] == [1]
