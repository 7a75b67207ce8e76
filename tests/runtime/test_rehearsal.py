"""A stage that runs without devices sends what the layouts of its groups say."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from rlplace.plan.types import Plan
from rlplace.runtime.planned import planned_traffic
from rlplace.simulate.traffic import layout_traffic, state_traffic
from tests.runtime.traffic_cases import CASES, job, program_of

#: Plans that cut something over tp or cp.
CUT = [name for name, case in CASES.items() if any(d[2] * d[3] > 1 for d in case.degrees)]


def kept(plan: Plan) -> Plan:
    """The plan without recompute."""
    stages = (
        replace(stage, choices=tuple(replace(one, recompute="none") for one in stage.choices))
        for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))


@pytest.mark.parametrize("name", CUT)
def test_stages_send_what_their_layouts_say(name: str) -> None:
    instance, own = job(name)
    planned = Counter(planned_traffic(instance, own.plan, program_of(CASES[name].model)))
    planned.subtract(state_traffic(instance, own.plan))
    planned.pop("p2p", 0)
    sent = {kind: size for kind, size in planned.items() if size}
    most, least = (layout_traffic(instance, plan) for plan in (own.plan, kept(own.plan)))
    assert sent.keys() == most.keys()
    for kind, size in sent.items():
        # Equal, where nothing is redone; what is redone ends early. On two axes each rank of tp
        # sends two numbers of the loss, which is 64 bytes at most.
        spare = 64 if name.startswith("context x") else 0.5
        assert least[kind] - spare <= size <= most[kind] + spare, kind


def test_a_second_run_leaves_out_what_backward_does_not_need() -> None:
    instance, own = job("shard, redone")
    sent = planned_traffic(instance, own.plan, program_of("llama"))
    whole, once = (layout_traffic(instance, plan) for plan in (own.plan, kept(own.plan)))
    assert once["all_reduce"] < sent["all_reduce"] < whole["all_reduce"]
