"""Rules on what groups may do: every planner obeys them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import rlplace
from rlplace.cost.masked import Rule, masked
from rlplace.errors import InfeasibleError, InputError
from rlplace.plan.testing import cluster, round_kind, transformer
from rlplace.plan.types import Instance
from rlplace.planners.costing import Costing
from rlplace.planners.overlap import overlap
from rlplace.planners.registry import PLANNERS
from rlplace.planners.types import Budget

_FAST, _SLOW = round_kind("fast"), round_kind("slow", 0.5)
_INSTANCE = Instance(transformer(2, 512, degrees=(2,)), cluster([[_FAST, _FAST, _SLOW, _SLOW]]), 8)
_MLP = _INSTANCE.graph.groups[1].name
_RULES = (
    Rule("*", zero_levels=(0, 3), recompute_modes=("none",)),
    Rule(_MLP, layouts=("replicate",), kinds=("fast",)),
)

#: Their plans put a group on both kinds, or they begin with such plans and find no way out.
_FIND_NOTHING = {
    *("data_parallel", "zero1", "zero2", "zero3", "osdp", "poplar"),
    *("pipedream", "dapple", "hill_climb", "anneal"),
}


def _obeys(instance: Instance, plan: rlplace.Plan) -> None:
    groups = instance.graph.groups
    equal = {g.index for g in groups if g.structure == groups[1].structure}
    for stage in plan.stages:
        kinds = {instance.cluster.devices[device].kind for device in stage.mesh.devices}
        for group, choice in zip(range(stage.start, stage.stop), stage.choices, strict=True):
            assert choice.zero in (0, 3)
            assert choice.recompute == "none"
            if group in equal:
                assert choice.layout == "replicate"
                assert kinds == {"fast"}


@pytest.mark.parametrize("planner", [name for name in PLANNERS if name != "exhaustive"])
def test_every_planner_obeys(planner: str) -> None:
    costing = Costing(_INSTANCE, masked(_INSTANCE, _RULES))
    budget = Budget(evaluations=200)
    found = PLANNERS[planner](_INSTANCE, budget, np.random.default_rng(0), costing)
    assert (found.plan is None) == (planner in _FIND_NOTHING)
    if found.plan is not None:
        _obeys(_INSTANCE, found.plan)


def test_place_obeys_and_says_where_nothing_is_left() -> None:
    placed = rlplace.place(_INSTANCE, 0.2, planner="overlap", rules=_RULES)
    _obeys(_INSTANCE, placed.plan)
    free = rlplace.place(_INSTANCE, 0.2, planner="overlap")
    assert free.estimate.step_time < placed.estimate.step_time
    both = (Rule("*", kinds=("fast",)), Rule(_MLP, kinds=("slow",)))
    with pytest.raises(InfeasibleError):
        rlplace.place(_INSTANCE, 0.2, rules=both)


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        (Rule("no such group"), "groups"),
        (Rule("*", layouts=("diagonal",)), "layouts"),
        (Rule("*", zero_levels=(4,)), "zero_levels"),
        (Rule("*", recompute_modes=("some",)), "recompute_modes"),
        (Rule("*", tp_degrees=(3,)), "tp_degrees"),
        (Rule("*", kinds=("slower",)), "kinds"),
    ],
)
def test_rules_for_nothing_are_refused(rule: Rule, field: str) -> None:
    with pytest.raises(InputError, match=rf"rules\[1\].{field}"):
        masked(_INSTANCE, (Rule("*"), rule))


def test_without_rules_nothing_changes() -> None:
    plain = replace(_INSTANCE)
    results = [
        PLANNERS["grid"](plain, Budget(), np.random.default_rng(0), costing)
        for costing in (Costing(plain), Costing(plain, masked(plain, ())))
    ]
    assert results[0].plan == results[1].plan
    assert results[0].evaluations == results[1].evaluations


def test_a_rule_that_no_replica_could_obey_alone() -> None:
    # Nothing is sharded on one device, so there only the mesh as a whole can be asked.
    costing = Costing(_INSTANCE, masked(_INSTANCE, (Rule("*", zero_levels=(3,)),)))
    found = overlap(_INSTANCE, Budget(evaluations=200), np.random.default_rng(0), costing)
    assert found.plan is not None
    assert all(choice.zero == 3 for stage in found.plan.stages for choice in stage.choices)
    assert len({_INSTANCE.cluster.devices[device].kind for device in found.plan.devices}) == 2
