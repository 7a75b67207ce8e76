"""Uniform plans from degrees."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.errors import InputError
from rlplace.plan.check import check
from rlplace.plan.testing import chain, cluster, round_kind, transformer
from rlplace.plan.types import Instance, Mesh
from rlplace.plan.uniform import balanced_cuts, layer_cuts, uniform_plan


def _instance(devices: int = 16, global_batch: int = 32, layers: int = 8) -> Instance:
    return Instance(transformer(layers), cluster([[round_kind()] * devices]), global_batch)


def _sizes(flops: list[float], pp: int) -> list[int]:
    instance = Instance(chain(flops), cluster([[round_kind()]]), 1)
    bounds = (0, *balanced_cuts(instance, pp), len(flops))
    return [stop - start for start, stop in pairwise(bounds)]


def test_devices_are_laid_out_as_megatron_does() -> None:
    instance = _instance()
    plan = uniform_plan(instance, pp=2, tp=4, dp_replicate=2, micro_batch=2)
    assert [stage.mesh for stage in plan.stages] == [
        Mesh(tuple(range(8)), 2, 1, 1, 4),
        Mesh(tuple(range(8, 16)), 2, 1, 1, 4),
    ]
    assert plan.stages[0].mesh.tp_groups() == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert plan.stages[0].mesh.dp_groups() == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert plan.micro_batches == 8
    assert {choice.layout for stage in plan.stages for choice in stage.choices} == {"shard"}
    check(instance, plan)


def test_replicas_are_what_the_devices_leave() -> None:
    assert uniform_plan(_instance(), pp=2, tp=2).stages[0].mesh.dp_replicate == 4
    sharded = uniform_plan(_instance(), pp=2, zero=3).stages[0].mesh
    assert (sharded.dp_replicate, sharded.dp_shard) == (1, 8)
    hybrid = uniform_plan(_instance(), dp_shard=4, zero=3).stages[0].mesh
    assert (hybrid.dp_replicate, hybrid.dp_shard) == (4, 4)


def test_a_zero_level_is_never_without_effect() -> None:
    mesh = uniform_plan(_instance(), pp=2, tp=4, dp_replicate=2, zero=1).stages[0].mesh
    assert (mesh.dp_replicate, mesh.dp_shard) == (1, 2)


def test_layers_are_redone_as_one() -> None:
    plan = uniform_plan(_instance(layers=4), pp=2, recompute="layer", balance="layers")
    modes = [[choice.recompute for choice in stage.choices] for stage in plan.stages]
    assert modes == [["none", *["full", "joined"] * 2], [*["full", "joined"] * 2, "none"]]
    check(_instance(layers=4), plan)


def test_a_layer_that_is_cut_is_redone_in_two_parts() -> None:
    plan = uniform_plan(_instance(layers=2), pp=2, recompute="layer", cuts=(2,))
    modes = [[choice.recompute for choice in stage.choices] for stage in plan.stages]
    assert modes == [["none", "full"], ["full", "full", "joined", "none"]]
    check(_instance(layers=2), plan)


@pytest.mark.parametrize(
    ("layers", "stages", "cuts"), [(8, 4, (5, 9, 13)), (7, 3, (7, 11)), (3, 1, ())]
)
def test_stages_share_the_layers(layers: int, stages: int, cuts: tuple[int, ...]) -> None:
    # Two groups a layer, after the embedding.
    assert layer_cuts(_instance(layers=layers), stages) == cuts


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(InputError, match=r"at least one layer .nearest legal: 8"):
        uniform_plan(_instance(), pp=16, balance="layers")


def test_virtual_stages_are_dealt_out_in_turn() -> None:
    instance = _instance()
    plan = uniform_plan(
        instance, pp=4, schedule="interleaved", virtual=2, micro_batch=1, balance="layers"
    )
    first = [stage.mesh.devices[0] for stage in plan.stages]
    assert first == [0, 4, 8, 12, 0, 4, 8, 12]
    check(instance, plan)
    turned = uniform_plan(instance, pp=4, schedule="zb-v", micro_batch=1, balance="layers")
    assert [s.mesh.devices[0] for s in turned.stages] == [0, 4, 8, 12, 12, 8, 4, 0]
    check(instance, turned)


@pytest.mark.parametrize(("schedule", "virtual", "near"), [("zb-v", 3, "2"), ("1f1b", 0, "1")])
def test_a_wrong_number_of_virtual_stages(schedule: str, virtual: int, near: str) -> None:
    with pytest.raises(InputError, match=f"virtual.*nearest legal: {near}"):
        uniform_plan(_instance(), pp=4, schedule=schedule, virtual=virtual)


def test_optimizer_states_on_the_host() -> None:
    instance = _instance()
    plan = uniform_plan(instance, offload=True)
    with pytest.raises(InputError, match=r"offload.*no memory of a host"):
        check(instance, plan)


def test_a_group_without_a_layout_stays_replicated() -> None:
    instance = Instance(chain([1e9] * 4), cluster([[round_kind()] * 2]), 4)
    assert uniform_plan(instance, tp=2).stages[0].choices[0].layout == "replicate"


@pytest.mark.parametrize(
    ("groups", "pp", "heaviest"), [(30, 4, 8), (42, 16, 3), (38, 8, 5), (7, 7, 1), (5, 1, 5)]
)
def test_equal_layers_are_spread_evenly(groups: int, pp: int, heaviest: int) -> None:
    sizes = _sizes([1e9] * groups, pp)
    assert len(sizes) == pp
    assert min(sizes) >= 1
    assert max(sizes) == heaviest
    assert sum(sizes) == groups


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_no_cuts_have_a_lighter_heaviest_stage(work: list[int], data: st.DataObject) -> None:
    pp = data.draw(st.integers(1, len(work)))

    def lightest(start: int, stages: int) -> float:
        if stages == 1:
            return sum(work[start:])
        return min(
            max(sum(work[start:stop]), lightest(stop, stages - 1))
            for stop in range(start + 1, len(work) - stages + 2)
        )

    sizes = _sizes([float(w) for w in work], pp)
    starts = [sum(sizes[:i]) for i in range(pp)]
    heaviest = max(sum(work[a : a + n]) for a, n in zip(starts, sizes, strict=True))
    assert heaviest == lightest(0, pp)


@pytest.mark.parametrize(
    ("arguments", "field", "nearest"),
    [
        ({"pp": 0}, "pp", 1),
        ({"tp": -1}, "tp", 1),
        ({"dp_replicate": 0}, "dp_replicate", 1),
        ({"dp_shard": 0}, "dp_shard", 1),
        ({"pp": 3}, "pp, tp, cp, dp_shard", None),
        ({"pp": 19, "dp_replicate": 1}, "pp, tp, cp, dp", 16),
        ({"pp": 4, "tp": 4, "dp_replicate": 2}, "pp, tp, cp, dp", 16),
        ({"dp_replicate": 3}, "dp_replicate * dp_shard", 2),
        ({"dp_replicate": 16, "micro_batch": 3}, "micro_batch", 2),
        ({"dp_replicate": 16, "micro_batches": 3}, "micro_batches", 2),
        ({"dp_replicate": 16, "micro_batch": 0}, "micro_batch", 1),
        ({"micro_batch": 2, "micro_batches": 2}, "micro_batches", 2),
        ({"pp": 2, "cuts": ()}, "cuts", None),
        ({"pp": 4, "cuts": (3,)}, "cuts", None),
        ({"pp": 3, "cuts": (5, 5), "dp_replicate": 1}, "cuts", None),
        ({"pp": 2, "cuts": (18,)}, "cuts", None),
    ],
)
def test_bad_degrees(arguments: dict[str, Any], field: str, nearest: object) -> None:
    with pytest.raises(InputError) as caught:
        uniform_plan(_instance(), **arguments)
    assert caught.value.field == field
    if nearest is not None:
        assert caught.value.nearest == nearest


def test_more_stages_than_groups() -> None:
    instance = Instance(chain([1e9] * 3), cluster([[round_kind()] * 4]), 4)
    with pytest.raises(InputError, match="at least one group") as caught:
        uniform_plan(instance, pp=4)
    assert caught.value.nearest == 3


def test_a_global_batch_that_no_replica_count_divides() -> None:
    instance = _instance(devices=4, global_batch=7)
    with pytest.raises(InputError, match="4 replicas must divide the global batch of 7"):
        uniform_plan(instance)


def test_unequal_shares() -> None:
    instance = _instance(2)
    plan = uniform_plan(instance, shares=(5, 3))
    assert (plan.micro_batches, plan.stages[0].shares) == (4, (5, 3))
    check(instance, plan)
    with pytest.raises(InputError, match="together divide the global batch of 32") as caught:
        uniform_plan(instance, shares=(5, 4))
    assert caught.value.nearest == (4, 4)
    with pytest.raises(InputError, match="make another number"):
        uniform_plan(instance, shares=(5, 3), micro_batches=2)
