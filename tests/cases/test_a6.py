"""Llama-2-70B on sixteen V100-32 (llama-cookbook#120): no, 69 GB of states a card; and no bf16."""

from __future__ import annotations

import pytest

import rlplace
from rlplace.cluster.types import Cluster
from rlplace.errors import InfeasibleError, InputError
from rlplace.graph.types import OpGraph
from rlplace.plan.types import default_precision

_CLUSTER = Cluster.parse("2x8xV100-32")


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return rlplace.library.build("llama-2-70b", seq_len=2048, degrees=())


def test_a_v100_has_no_bf16(graph: OpGraph) -> None:
    with pytest.raises(InputError, match=r"V100-32 has no bf16 \(nearest legal: .*fp16-mixed\)"):
        rlplace.Instance(graph, _CLUSTER, 16)
    assert default_precision(_CLUSTER) == "fp16-mixed"


def test_nothing_fits(graph: OpGraph) -> None:
    instance = rlplace.Instance(graph, _CLUSTER, 16, precision="fp16-mixed")
    plan = rlplace.uniform_plan(instance, zero=3, micro_batch=1, recompute="layer")
    found = rlplace.estimate(instance, plan)
    use = found.memory[0]
    assert use.params + use.gradients + use.optimizer == pytest.approx(69e9, rel=0.01)
    assert not found.feasible
    with pytest.raises(InfeasibleError, match="times the devices") as caught:
        rlplace.place(instance, time_limit=0.1)
    assert "V100-32" in str(caught.value)
