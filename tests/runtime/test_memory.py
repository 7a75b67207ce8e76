"""What a rank holds in a step, and in each of its phases, is what the estimate counts."""

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
    "pp2 gpipe, redone": {"pp": 2, "micro_batches": 4, "schedule": "gpipe", "recompute": "full"},
    "zero0": {"dp_replicate": 2, "micro_batches": 2},
    "zero1": {"dp_shard": 2, "zero": 1, "micro_batches": 2},
    "zero2": {"dp_shard": 2, "zero": 2, "micro_batches": 2},
    "zero3": {"dp_shard": 2, "zero": 3, "micro_batches": 2},
    "zero3, slices": {"dp_shard": 2, "zero": 3, "micro_batches": 2, "slices": 4},
}
CASES = [(family, name) for family in ("gpt", "llama") for name in DEGREES]
#: Smaller than the gradients of a group, which the estimate takes to be whole one after the other.
BUCKET = 100_000
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
    options = Options(steps=1, warmup=0, bucket_bytes=BUCKET)
    jobs = [Job(question(*case)[1], graph_of(case[0]), options=options) for case in CASES]
    with Pool(2, timeout=60) as pool:
        return dict(zip(CASES, pool.run(jobs, limit=280), strict=True))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_ranks_hold_what_the_estimate_counts(case: tuple[str, str]) -> None:
    instance, plan = question(*case)
    found, estimate = measured()[case], Estimator(instance).estimate(plan)
    assert most_held(found.memory) == pytest.approx(most_held(estimate.memory), rel=TOLERANCE)
    for own, told in zip(found.memory, estimate.memory, strict=False):  # a rank may be idle
        assert own.activations == pytest.approx(told.activations + told.logits, rel=TOLERANCE)
        assert own.total == pytest.approx(told.total, rel=TOLERANCE)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_the_fullest_phase_is_the_one_that_the_estimate_names(case: tuple[str, str]) -> None:
    instance, plan = question(*case)
    found, estimate = measured()[case], Estimator(instance).estimate(plan)
    for rank, told in enumerate(estimate.memory):
        peaks, phase = found.phase_peaks[rank], estimate.peak_phase[rank]
        assert max(peaks.values()) == found.peak_memory[rank]
        # Forward and backward hold nearly as much where a loss is large.
        assert peaks[phase.split()[0]] == pytest.approx(max(peaks.values()), rel=0.05)
        # The estimate says of the optimizer what it makes and frees: `cached`, and no activations.
        states = told.params + told.gradients + told.optimizer
        assert peaks["optimizer"] == pytest.approx(states + told.cached, rel=TOLERANCE)
        assert peaks["reduce"] <= peaks["optimizer"] * (1 + TOLERANCE)
