"""What a rank of the cp axis does and sends, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlplace.cost.analytic import AnalyticCost, view
from rlplace.cost.compute import Compute
from rlplace.cost.context import context_collectives, ring_attention
from rlplace.cost.memory import states
from rlplace.cost.types import GroupCost
from rlplace.errors import InputError
from rlplace.graph.types import Affine, Collective, Layout, Structure, Work
from rlplace.plan.testing import chain, cluster, round_kind
from rlplace.plan.types import GroupChoice, Instance, Mesh

_WORK = Work(
    flops=Affine(0.0, 1e9),
    backward_flops=Affine(0.0, 2e9),
    matmuls=2,
    moved=Affine(0.0, 5e6),
    backward_moved=Affine(0.0, 9e6),
    saved=Affine(0.0, 4e6),
    params=10**6,
)
_GATHER = Collective("all_gather", "forward", Affine(0.0, 1e6))
_CONTEXT = Layout("context", 2, _WORK, (_GATHER,), axis="cp")
_STRUCTURE = Structure("x", _WORK, bordered=(_CONTEXT,))
_DEVICES = cluster([[round_kind()] * 4])


def _cost(mesh: Mesh, choice: GroupChoice | None = None, samples: float = 2.0) -> GroupCost:
    instance = Instance(chain([1.0]), _DEVICES, round(samples * mesh.dp))
    structure = replace(_STRUCTURE, bordered=() if mesh.cp == 1 else (_CONTEXT,))
    return AnalyticCost().group(
        instance, structure, choice or GroupChoice(), mesh, samples, 1e6 * samples
    )


def test_a_rank_does_its_part_of_the_samples() -> None:
    apart, alone = _cost(Mesh((0, 1), cp=2)), _cost(Mesh((0,)), samples=1.0)
    gather = apart.forward - alone.forward
    assert gather > 0.0
    assert apart.backward == pytest.approx(alone.backward)
    assert apart.saved == alone.saved
    again = _cost(Mesh((0, 1), cp=2), GroupChoice(recompute="full"))
    assert again.saved == 1e6
    assert again.backward == pytest.approx(alone.backward + alone.forward + gather)


def test_gradients_are_summed_over_dp_and_cp() -> None:
    both, replicas = Mesh((0, 1, 2, 3), dp_replicate=2, cp=2), Mesh((0, 1, 2, 3), dp_replicate=4)
    assert both.dp_groups() == replicas.dp_groups() == ((0, 1, 2, 3),)
    assert _cost(both).reduce == _cost(replicas).reduce > 0.0
    assert _cost(Mesh((0, 1), cp=2)).reduce > 0.0, "a single replica has something to sum"


def test_zero_shards_over_both() -> None:
    instance = Instance(chain([1.0]), _DEVICES, 2)
    mesh, choice = Mesh((0, 1, 2, 3), dp_shard=2, cp=2), GroupChoice(zero=3)
    assert mesh.shards == 4
    assert states(instance, _WORK, choice, mesh).total == 10**6 * 16 / 4
    assert view(_DEVICES, mesh).shard.ranks == 4


def test_a_tp_rank_sends_the_keys_of_its_own_heads() -> None:
    # Counted for the samples of a rank, half of those of the replica.
    (whole,) = context_collectives(_STRUCTURE, Mesh((0, 1), cp=2))
    assert whole.floats == Affine(0.0, 2e6)
    (own,) = context_collectives(_STRUCTURE, Mesh((0, 1, 2, 3), cp=2, tp=2))
    assert own.floats == Affine(0.0, 1e6)
    assert context_collectives(_STRUCTURE, Mesh((0,))) == ()
    assert context_collectives(Structure("y", _WORK), Mesh((0, 1), cp=2)) == ()
    with pytest.raises(InputError, match="known at") as caught:
        context_collectives(_STRUCTURE, Mesh((0, 1, 2), cp=3))
    assert caught.value.nearest == 2


def test_axes_of_a_mesh() -> None:
    mesh = Mesh((0, 1, 2, 3), cp=2, tp=2)
    found = view(_DEVICES, mesh)
    assert found.axes == (1, 1, 2, 2)
    assert found.cp.ranks == found.tp.ranks == 2


def test_attention_takes_longer_in_blocks() -> None:
    own = Compute(
        forward=3.0, backward=7.0, weight=2.0, attention=1.0, attention_back=2.0, light=0.5,
        matmul=1.5, last=0.5, host_forward=0.0, host_backward=0.0,
    )  # fmt: skip
    assert ring_attention(own, 1) == own
    two, many = ring_attention(own, 2), ring_attention(own, 64)
    assert (two.backward - 7.0) == pytest.approx(2 * (two.forward - 3.0))
    assert 3.0 < two.forward < many.forward < 4.0
