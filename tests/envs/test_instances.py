from __future__ import annotations

import numpy as np
import pytest

from rlplace.envs.builders.room import has_room
from rlplace.envs.clusters import HELD_OUT_KINDS, TRAIN_KINDS, random_cluster
from rlplace.envs.families import HELD_OUT_FAMILIES, TRAIN_FAMILIES
from rlplace.envs.instances import InstanceGenerator, random_instance, suite
from rlplace.errors import InputError
from rlplace.graph.types import OpGraph

_SMALL = InstanceGenerator(max_devices=12, max_groups=60)


def _saved(graph: OpGraph) -> float:
    return sum(graph.structure(g.index).work.saved.per_sample for g in graph.groups)


@pytest.mark.parametrize("name", [*TRAIN_FAMILIES, *HELD_OUT_FAMILIES])
def test_a_family_makes_well_formed_graphs_near_the_size_asked_for(name: str) -> None:
    family = (TRAIN_FAMILIES | HELD_OUT_FAMILIES)[name]
    sizes = []
    for seed in range(8):
        graph = family(np.random.default_rng(seed), 2e9)
        assert all(edge.src < edge.dst < len(graph.groups) for edge in graph.edges)
        assert [group.index for group in graph.groups] == list(range(len(graph.groups)))
        read = {edge.dst for edge in graph.edges}
        sources = set(range(len(graph.groups))) - read
        assert len(sources) <= 2
        assert len({s.hash for s in graph.structures}) == len(graph.structures)
        assert _saved(graph) > 0
        sizes.append(graph.params)
    assert 0.3 * 2e9 < np.median(sizes) < 3 * 2e9


@pytest.mark.parametrize("name", list(TRAIN_FAMILIES | HELD_OUT_FAMILIES))
def test_sharding_divides_flops_and_never_adds_parameters(name: str) -> None:
    graph = (TRAIN_FAMILIES | HELD_OUT_FAMILIES)[name](np.random.default_rng(1), 1e9)
    for structure in graph.structures:
        for layout in structure.layouts:
            whole, part = structure.work.flops(1), layout.work.flops(1)
            assert part * layout.degree == pytest.approx(whole)
            assert layout.work.params >= structure.work.params / layout.degree
            assert layout.work.saved(1) <= structure.work.saved(1)
            assert layout.collectives


def test_equal_seeds_give_equal_instances_and_others_do_not() -> None:
    first, again, other = (_SMALL(np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert first == again
    assert first.graph.fingerprint == again.graph.fingerprint
    assert first != other


def test_instances_have_room_stay_within_limits_and_half_are_mixed() -> None:
    drawn = [_SMALL(np.random.default_rng(seed)) for seed in range(40)]
    mixed = sum(len(instance.cluster.islands) > 1 for instance in drawn)
    assert 12 <= mixed <= 28
    for instance in drawn:
        assert len(instance.graph.groups) <= 60
        assert len(instance.cluster.devices) <= 12
        assert has_room(instance)


def test_memory_is_tight_for_some_and_loose_for_others() -> None:
    shares = []
    for seed in range(30):
        instance = _SMALL(np.random.default_rng(seed))
        size = instance.bytes.weight + instance.bytes.gradient + instance.optimizer_bytes
        kinds = [instance.cluster.kind(device.index) for device in instance.cluster.devices]
        shares.append(instance.graph.params * size / max(kind.memory for kind in kinds))
    assert min(shares) < 0.3
    assert max(shares) > 1.5  # no device could hold it alone


def test_what_does_not_fit_is_drawn_only_where_asked_for() -> None:
    rng = np.random.default_rng(0)
    drawn = [random_instance(rng, _SMALL, feasible=False) for _ in range(60)]
    assert not all(has_room(instance) for instance in drawn)


@pytest.mark.parametrize("limit", [2, 3, 6, 12, 64])
def test_clusters_keep_the_number_of_devices(limit: int) -> None:
    for seed in range(20):
        cluster = random_cluster(np.random.default_rng(seed), mixed=True, max_devices=limit)
        assert 2 <= len(cluster.devices) <= limit
        assert len(cluster.islands) >= 2


def test_held_out_families_and_kinds_are_never_trained_on() -> None:
    assert not set(TRAIN_FAMILIES) & set(HELD_OUT_FAMILIES)
    assert not set(TRAIN_KINDS) & set(HELD_OUT_KINDS)


def test_a_suite_is_the_same_every_time() -> None:
    assert suite("train", 4, seed=1) == suite("train", 4, seed=1)
    assert suite("train", 4, seed=1) != suite("train", 4, seed=2)


@pytest.mark.slow
def test_the_held_out_suite_is_a_third_mixed_and_a_third_real() -> None:
    held = suite("held-out", 9)
    assert sum(len(instance.cluster.islands) > 1 for instance in held) >= 3
    real = [instance for instance in held if instance.graph.source]
    assert 3 <= len(real) < 9
    assert any(len(instance.cluster.islands) > 1 for instance in real)
    assert {i.graph.name for i in held if not i.graph.source} <= set(HELD_OUT_FAMILIES)


def test_bad_input_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match="held-out"):
        suite("heldout")
    with pytest.raises(InputError, match="at least 1"):
        suite("train", 0)
    with pytest.raises(InputError, match="transformer"):
        InstanceGenerator(families=("transformr",))
    with pytest.raises(InputError, match="at least 2"):
        InstanceGenerator(max_devices=1)
