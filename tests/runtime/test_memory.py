"""What a rank holds in a step is what the estimate counts: states and saved activations."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from rlplace.graph.library import build
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Instance, Plan
from rlplace.plan.uniform import uniform_plan
from rlplace.runtime.jobs import Job
from rlplace.runtime.measure import Measurement
from rlplace.runtime.options import Options
from rlplace.runtime.pool import Pool
from rlplace.runtime.validate import stand_in_cluster
from rlplace.simulate.estimate import Estimator
from rlplace.simulate.types import most_held

pytestmark = pytest.mark.dist

SHAPE = {"layers": 4, "hidden": 128, "heads": 4, "ffn": 512, "vocab": 512, "seq_len": 64}
BATCH = 8
#: Degrees of uniform plans.
DEGREES: dict[str, dict[str, Any]] = {
    "single": {"micro_batches": 2},
    "single, redone": {"micro_batches": 2, "recompute": "full"},
    "tp2": {"tp": 2, "micro_batches": 2},
    "pp2": {"pp": 2, "micro_batches": 4},
    "pp2 gpipe": {"pp": 2, "micro_batches": 4, "schedule": "gpipe"},
    "pp2, redone": {"pp": 2, "micro_batches": 4, "recompute": "full"},
    "zero0": {"dp_replicate": 2, "micro_batches": 2},
    "zero1": {"dp_shard": 2, "zero": 1, "micro_batches": 2},
    "zero2": {"dp_shard": 2, "zero": 2, "micro_batches": 2},
    "zero3": {"dp_shard": 2, "zero": 3, "micro_batches": 2},
    "zero3, slices": {"dp_shard": 2, "zero": 3, "micro_batches": 2, "slices": 4},
}
CASES = [(family, name) for family in ("gpt", "llama") for name in DEGREES]
#: A gloo rank counts storages; the estimate counts by op, so that they differ by a few views.
TOLERANCE = 0.15


@functools.cache
def graph_of(family: str) -> OpGraph:
    more = {"kv_heads": 2} if family == "llama" else {"tie_embeddings": False}
    return build(family, **SHAPE, **more)  # type: ignore[arg-type]  # a dict has one type of values


def question(family: str, name: str) -> tuple[Instance, Plan]:
    degrees = DEGREES[name]
    ranks = degrees.get("pp", 1) * degrees.get("tp", 1)
    ranks *= degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
    instance = Instance(graph_of(family), stand_in_cluster(ranks), BATCH, precision="fp32")
    return instance, uniform_plan(instance, **{"dp_replicate": 1, **degrees})


@functools.cache
def measured() -> dict[tuple[str, str], Measurement]:
    options = Options(steps=1, warmup=0)
    jobs = [Job(question(*case)[1], graph_of(case[0]), options=options) for case in CASES]
    with Pool(2, timeout=60) as pool:
        return dict(zip(CASES, pool.run(jobs, limit=280), strict=True))


def handed_on(instance: Instance, plan: Plan) -> float:
    """Bytes of the outputs that the first stage keeps until their gradients come.

    Autograd begins there, so a rank holds them; the estimate counts what the ops of a stage save.
    """
    if len(plan.stages) == 1:
        return 0.0
    floats, _ = instance.graph.crossings[plan.stages[1].start]
    held = plan.micro_batches if plan.schedule == "gpipe" else len(plan.stages)
    return 4.0 * floats(plan.micro_batch) * held


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_ranks_hold_what_the_estimate_counts(case: tuple[str, str]) -> None:
    instance, plan = question(*case)
    found, estimate = measured()[case], Estimator(instance).estimate(plan)
    assert most_held(found.memory) == pytest.approx(most_held(estimate.memory), rel=TOLERANCE)
    told = [use.activations + use.logits for use in estimate.memory]
    told[0] += handed_on(instance, plan)
    kept = [use.activations for use in found.memory]
    assert max(kept) == pytest.approx(max(told), rel=TOLERANCE)
    assert all(phase.startswith(("forward", "backward")) for phase in found.peak_phase if phase)
