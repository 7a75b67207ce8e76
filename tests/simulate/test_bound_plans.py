"""The lower bound against the plans that there are: every one of tiny instances, many of others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.cluster.types import Cluster, DeviceKind, Link
from rlplace.graph import library
from rlplace.graph.types import OpGraph
from rlplace.plan.frameworks import Framework
from rlplace.plan.testing import chain, cluster, random_plan, round_kind, transformer
from rlplace.plan.types import Instance, Plan
from rlplace.plan.uniform import make_plan, uniform_plan
from rlplace.planners.exhaustive import all_plans
from rlplace.simulate.bound import bound, limits
from rlplace.simulate.estimate import Estimator

_TIGHT = 1 + 1e-9
_FRAMEWORK = Framework(
    "own", 2e-6, 3e-6, bucket=1e6, overlap_reduce=0.9, overlap_gather=0.8, regather=True
)
#: What makes a step shorter than its parts.
_QUICK = Framework("quick", early_stop=True, overlap_exchange=1.0, gather_bytes=1, clips=False)


def _kind(rng: np.random.Generator, name: str) -> DeviceKind:
    """A device whose every constant is drawn."""
    speed = float(rng.choice((0.3, 1.0, 3.0)))
    return replace(
        round_kind(name, speed, overlap=float(rng.choice((0.0, 0.5, 1.0)))),
        launch_overhead=float(rng.choice((0.0, 1e-5))),
        half_flops=float(rng.choice((0.0, 1e8))),
        half_depth=float(rng.choice((0.0, 64.0))),
        sms=int(rng.choice((0, 16))),
        host_bandwidth=float(rng.choice((0.0, 1e10))),
        collective_launch=float(rng.choice((0.0, 1e-5))),
    )


def _link(rng: np.random.Generator) -> Link:
    return Link(float(rng.choice((1e9, 1e10, 1e12))), float(rng.choice((0.0, 1e-5))))


def _cluster(rng: np.random.Generator, devices: int) -> Cluster:
    kinds = [_kind(rng, "one"), _kind(rng, "other")]
    mixed, split = rng.random() < 0.4, rng.random() < 0.4
    own = [kinds[int(rng.integers(2)) if mixed else 0] for _ in range(devices)]
    shared = [int(core) for core in rng.integers(0, devices, devices)]
    return cluster(
        [own[:1], own[1:]] if split and devices > 1 else [own],
        intra=_link(rng),
        nic=_link(rng),
        cores=shared if rng.random() < 0.2 else None,
    )


def _graph(rng: np.random.Generator) -> OpGraph:
    if rng.random() < 0.5:
        flops = [float(f) for f in rng.choice((1e8, 1e9, 3e9), int(rng.integers(1, 4)))]
        params = int(rng.choice((10**5, 10**7, 10**8)))
        return chain(flops, floats=float(rng.choice((1e3, 1e6))), params=params)
    tied = bool(rng.random() < 0.3)
    width = int(rng.choice((32, 256)))
    return transformer(int(rng.integers(0, 2)), width, vocab=256, degrees=(2,), tied=tied)


def _instance(seed: int) -> Instance:
    """A tiny instance with few choices a group, its devices too small for all plans but some."""
    rng = np.random.default_rng(seed)
    graph = _graph(rng)
    few = len(graph.groups) < 4
    levels = rng.choice(4, 2 if few else 1, replace=False)
    instance = Instance(
        graph,
        _cluster(rng, int(rng.integers(1, 4 if few else 3))),
        int(rng.choice((1, 2, 3, 4, 6))),
        precision=str(rng.choice(("fp32", "bf16-mixed"))),
        optimizer=str(rng.choice(("adamw", "sgd"))),
        attention=str(rng.choice(("flash", "math"))),
        memory_margin=0.0,
        zero_levels=tuple(int(level) for level in levels),
        recompute_modes=(("none", "full"), ("none",), ("full",), ("ops",))[int(rng.integers(4))],
        framework=("torch", "torch", _FRAMEWORK, _QUICK)[int(rng.integers(4))],
    )
    rng = np.random.default_rng(seed + 1)
    estimator = Estimator(instance)
    some = [estimator.estimate(random_plan(instance, rng)).peak_memory for _ in range(20)]
    needs = sorted(max(peaks) for peaks in some)
    limit = needs[int(rng.integers(len(needs)))] * float(rng.choice((0.8, 1.01, 2.0)))
    kinds = tuple(replace(kind, memory=int(limit) + 1) for kind in instance.cluster.kinds)
    return replace(instance, cluster=replace(instance.cluster, kinds=kinds))


def _best(instance: Instance, plans: Iterator[Plan]) -> float:
    """The least step time of plans that fit."""
    estimator = Estimator(instance)
    found = (estimator.estimate(plan) for plan in plans)
    return min((own.step_time for own in found if own.feasible), default=np.inf)


@settings(max_examples=40)
@given(st.integers(0, 2**31))
def test_never_above_the_best_of_all_plans(seed: int) -> None:
    instance = _instance(seed)
    schedule = ("1f1b", "gpipe", "zb-h1")[seed % 3]
    assert bound(instance) <= _best(instance, all_plans(instance, schedule)) * _TIGHT


@settings(max_examples=10)
@given(st.integers(0, 2**31))
def test_never_above_plans_of_all_shapes_and_schedules(seed: int) -> None:
    """More devices than can be enumerated, with replicas of shards and zero-bubble schedules."""
    rng = np.random.default_rng(seed)
    graph = transformer(2, 128, vocab=512, degrees=(2, 4))
    instance = Instance(graph, _cluster(rng, 8), 24, precision="fp32", framework=_FRAMEWORK)
    plans = (random_plan(instance, rng) for _ in range(60))
    every = (
        make_plan(instance, plan.stages, plan.micro_batches, name)
        for plan in plans
        for name in ("1f1b", "gpipe", "zb-h1")
    )
    assert bound(instance) <= _best(instance, every) * _TIGHT


def test_never_above_plans_of_a_captured_model() -> None:
    """Matmuls by shape, sequence parallelism, offload: what synthetic graphs do not have."""
    graph = library.build("gpt2-tiny", degrees=(2,))
    asked = Instance(graph, Cluster.parse("2x4xA100-40"), 16, "bf16-mixed", offload=True)
    rng = np.random.default_rng(0)
    plans = [random_plan(asked, rng) for _ in range(20)]
    plans += [
        uniform_plan(asked, tp=2, micro_batch=2, sequence_parallel=True, recompute=mode)
        for mode in ("none", "full", "layer")
    ]
    assert bound(asked) <= _best(asked, iter(plans)) * _TIGHT


def test_memory_that_forces_sharding_raises_it() -> None:
    """A group that fits on no device is sharded, and its gradients cross the slow link."""
    graph = chain([4e9], floats=1e5, params=4 * 10**8)
    free, full = (
        Instance(graph, cluster([[round_kind(memory=size)] * 4], intra=Link(1e9, 0.0)), 4, "fp32")
        for size in (1e11, 6e9)
    )
    scattered = 0.5 * 16e8 / 1e9
    assert bound(free) < 0.1 * scattered
    assert scattered <= bound(full) <= _best(full, all_plans(full)) * _TIGHT


def test_limits_by_name() -> None:
    instance = Instance(transformer(2), cluster([[round_kind(memory=2e7)] * 4]), 8)
    found = limits(instance)
    assert set(found) == {"work", "reduce", "path", "lanes", "memory"}
    assert max(found.values()) == bound(instance)
    assert found["lanes"] >= max(found[name] for name in ("work", "path"))
