from __future__ import annotations

from dataclasses import replace

import pytest

from rlplace.cluster.types import Cluster
from rlplace.errors import InputError
from rlplace.graph import library
from rlplace.graph.types import Replicate, Shard
from rlplace.plan.check import check
from rlplace.plan.tied import conflict, settle
from rlplace.plan.types import GroupChoice, Instance, Mesh, Stage
from rlplace.plan.uniform import make_plan


@pytest.fixture(scope="module")
def instance() -> Instance:
    """GPT-2 with tied embeddings: the first and the last group share a parameter."""
    return Instance(library.build("gpt2-tiny"), Cluster.parse("2xA100-40"), 8)


def mixed_stage(instance: Instance, first: str, last: str) -> Stage:
    count = len(instance.graph.groups)
    middle = (GroupChoice("shard"),) * (count - 2)
    choices = (GroupChoice(first), *middle, GroupChoice(last, recompute="full"))
    return Stage(0, count, Mesh((0, 1), tp=2), choices)


@pytest.mark.parametrize(("first", "last"), [("replicate", "shard"), ("shard", "replicate")])
def test_groups_that_share_a_parameter_agree(instance: Instance, first: str, last: str) -> None:
    stage = mixed_stage(instance, first, last)
    assert conflict(instance.graph, stage) is not None
    settled = settle(instance.graph, stage)
    assert conflict(instance.graph, settled) is None
    assert settled.choices[0].layout == settled.choices[-1].layout == "shard"
    assert settled.choices[-1].recompute == "full"
    assert settled.choices[1:-1] == stage.choices[1:-1]


def test_check_refuses_what_planners_settle(instance: Instance) -> None:
    plan = make_plan(instance, (mixed_stage(instance, "replicate", "shard"),), 2)
    check(instance, plan)
    torn = replace(plan, stages=(mixed_stage(instance, "replicate", "shard"),))
    with pytest.raises(
        InputError, match=r"layout='shard': groups that share .*wte.* same placement"
    ):
        check(instance, torn)


def test_nothing_changes_where_layouts_agree_or_there_is_no_tp(instance: Instance) -> None:
    alike = mixed_stage(instance, "replicate", "replicate")
    assert settle(instance.graph, alike) is alike
    alone = replace(alike, mesh=Mesh((0, 1), dp_shard=2))
    assert settle(instance.graph, alone) is alone


def test_the_layouts_of_the_tied_groups_have_one_placement_in_common(instance: Instance) -> None:
    held = set()
    for index in (0, len(instance.graph.groups) - 1):
        group = instance.graph.groups[index]
        at = group.params.index(instance.graph.tied[0][0])
        layouts = instance.graph.structure(index).layouts_at(2)
        held.add(tuple(x.params[at] if x.params else Replicate() for x in layouts))
    assert held == {(Replicate(), Shard(0))}


def test_stages_of_one_mesh_hold_a_shared_parameter_alike(instance: Instance) -> None:
    """A V: the first and the last stage on devices 0 and 1, between them one on 2 and 3."""
    four = replace(instance, cluster=Cluster.parse("4xA100-40"))
    count, ends, middle = len(instance.graph.groups), Mesh((0, 1), tp=2), Mesh((2, 3), tp=2)
    stages = tuple(
        Stage(start, stop, mesh, (GroupChoice("shard"),) * (stop - start))
        for start, stop, mesh in ((0, 1, ends), (1, count - 1, middle), (count - 1, count, ends))
    )
    plan = make_plan(four, stages, 2)
    check(four, plan)
    torn = replace(plan, stages=(*stages[:2], replace(stages[2], choices=(GroupChoice(),))))
    with pytest.raises(InputError, match=r"stages\[2\].*groups that share .*wte.* same placement"):
        check(four, torn)


@pytest.mark.parametrize(
    ("first", "last", "torn"),
    [
        ("sequence", "sequence", False),
        ("sequence", "shard", False),
        ("sequence", "replicate", True),
        ("replicate", "sequence", True),
    ],
)
def test_layouts_with_cut_activations_hold_it_somehow_too(
    instance: Instance, first: str, last: str, torn: bool
) -> None:
    stage = mixed_stage(instance, first, last)
    assert (conflict(instance.graph, stage) is not None) == torn
