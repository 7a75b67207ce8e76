from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlplace.errors import InputError
from rlplace.graph.library import build
from rlplace.plan.types import Instance, Plan
from rlplace.plan.uniform import uniform_plan
from rlplace.runtime.optimizers import ELEMENTWISE, check_optimizer
from rlplace.runtime.validate import stand_in_cluster

GRAPH = build("gpt", layers=1, hidden=16, heads=2, ffn=16, vocab=32, seq_len=4)
Make = Callable[[Any], torch.optim.Optimizer]


def plan(**degrees: int) -> Plan:
    instance = Instance(GRAPH, stand_in_cluster(2), 4, precision="fp32")
    return uniform_plan(instance, **degrees)  # type: ignore[arg-type]  # degrees are numbers


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_elementwise_ones_may_be_sharded(kind: Make) -> None:
    check_optimizer(plan(dp_shard=2, zero=3), GRAPH, kind, grouped=False)
    check_optimizer(plan(tp=2), GRAPH, kind, grouped=True)


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon])
def test_others_need_whole_parameters(kind: Make) -> None:
    check_optimizer(plan(dp_shard=2, zero=0), GRAPH, kind, grouped=False)
    name = kind.__name__
    with pytest.raises(InputError, match=rf"choices\[0\]\.zero=1: {name} needs.*legal: 0\)"):
        check_optimizer(plan(dp_shard=2, zero=1), GRAPH, kind, grouped=False)
    with pytest.raises(InputError, match=rf"layout=.*{name} needs.*legal: replicate\)"):
        check_optimizer(plan(tp=2), GRAPH, kind, grouped=False)


def test_levels_without_shards_cut_nothing() -> None:
    one = plan()
    (stage,) = one.stages
    choices = tuple(replace(choice, zero=3) for choice in stage.choices)
    cut = replace(one, stages=(replace(stage, choices=choices),))
    check_optimizer(cut, GRAPH, torch.optim.Adafactor, grouped=False)


def test_a_closure_is_not_run() -> None:
    with pytest.raises(InputError, match=r"LBFGS.*runs the model again"):
        check_optimizer(plan(), GRAPH, torch.optim.LBFGS, grouped=False)


def test_one_of_ones_own_may_vouch_for_itself() -> None:
    class Own(torch.optim.Optimizer):
        elementwise = True

        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

    check_optimizer(plan(dp_shard=2, zero=2), GRAPH, Own, grouped=False)
