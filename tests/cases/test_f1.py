"""Llama-7B on two nodes of 2 x 3080-10 and 2 x 4090-24 (Megatron-LM#1757).

No tensor-parallel group mixes cards, layers follow memory and speed, the answer shows how full each
card is and which rank is where.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

import rlplace
from rlplace.cli import OK, main
from rlplace.cluster.types import Cluster
from rlplace.plan.types import Plan
from rlplace.planners.dynamic import dynamic
from rlplace.planners.grid import grid
from rlplace.planners.types import Budget

_CLUSTER = "2x(2x3080-10+2x4090-24):eth25"
_SMALL, _LARGE = "3080-10", "4090-24"


@pytest.fixture(scope="module")
def instance() -> rlplace.Instance:
    graph = rlplace.library.build("llama-2-7b", seq_len=1024)
    return rlplace.Instance(graph, Cluster.parse(_CLUSTER), 8)


def _kind(instance: rlplace.Instance, device: int) -> str:
    return instance.cluster.kind(device).name


def _looks_right(instance: rlplace.Instance, plan: Plan) -> None:
    found = rlplace.estimate(instance, plan)
    assert found.feasible
    filled = [found.peak_memory[d] / instance.memory_limit(d) for d in plan.devices]
    assert max(filled) > 0.9, "it is tight"
    shares: dict[str, list[float]] = {_SMALL: [], _LARGE: []}
    for stage in plan.stages:
        for group in stage.mesh.tp_groups():
            assert len({_kind(instance, device) for device in group}) == 1
        kinds = {_kind(instance, device) for device in stage.mesh.devices}
        params = sum(
            instance.graph.structure(g).work.params for g in range(stage.start, stage.stop)
        )
        for kind in kinds:
            shares[kind].append(params / len(stage.mesh.devices))
    assert shares[_LARGE]
    assert not shares[_SMALL] or max(shares[_SMALL]) < min(shares[_LARGE]), "more on a larger card"


def test_equal_stages_do_not_fit(instance: rlplace.Instance) -> None:
    found = grid(instance, Budget(), np.random.default_rng(0))
    assert found.plan is None
    assert found.overflow > 0.5, "of a small card"


def test_a_planner_of_unequal_stages_finds_it(instance: rlplace.Instance) -> None:
    found = dynamic(instance, Budget(), np.random.default_rng(0))
    assert found.plan is not None
    _looks_right(instance, found.plan)


def test_the_answer(instance: rlplace.Instance) -> None:
    _looks_right(instance, rlplace.place(instance, time_limit=0.5).plan)


def test_the_command_line_tells_who_is_where(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["plan", "llama-2-7b", _CLUSTER, "--global-batch", "8", "--seq-len", "1024", "--json"]
    with pytest.raises(SystemExit) as ended:
        main(ask)
    assert ended.value.code == OK
    answer = json.loads(capsys.readouterr().out)
    named = " ".join(stage["devices"] for stage in answer["stages"])
    assert _LARGE in named
    assert 0.85 < max(stage["memory_share"] for stage in answer["stages"]) <= 1.0
