from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.cluster.types import Cluster
from rlplace.envs.builders.rollouts import best_index, greedy_state
from rlplace.envs.builders.stagewise import StagewiseBuilder, StagewiseState, permute_symmetric
from rlplace.envs.families import transformer
from rlplace.envs.instances import InstanceGenerator
from rlplace.envs.types import CANDIDATE_FEATURES, MAX_CANDIDATES
from rlplace.plan.check import check
from rlplace.plan.types import Instance, Plan
from rlplace.planners.grid import grid
from rlplace.planners.types import Budget
from rlplace.simulate.estimate import Estimator, estimate

_GENERATOR = InstanceGenerator(max_devices=16, max_groups=40, cpu_share=0.15)
_BUILDER = StagewiseBuilder(refined=1)


@cache
def _instance(seed: int) -> Instance:
    return _GENERATOR(np.random.default_rng([5, seed]))


def _on(cluster: str, batch: int = 64, params: float = 4e8, seed: int = 0) -> Instance:
    graph = transformer(np.random.default_rng(seed), params)
    return Instance(graph, Cluster.parse(cluster), batch, precision="fp16-mixed")


def _random_plan(instance: Instance, rng: np.random.Generator) -> tuple[Plan, StagewiseState]:
    state = _BUILDER.start(instance, rng)
    while not _BUILDER.done(state):
        candidates = _BUILDER.candidates(state)
        rows = len(candidates.mask)
        assert 1 <= rows <= MAX_CANDIDATES
        assert candidates.mask.any()
        assert candidates.features.shape == (rows, CANDIDATE_FEATURES)
        assert np.isfinite(candidates.features).all()
        assert (candidates.spans[:, 0] < candidates.spans[:, 1]).all()
        assert (candidates.spans[:, 1] <= len(instance.graph.groups)).all()
        assert (candidates.spans[:, 2] < candidates.spans[:, 3]).all()
        assert (candidates.spans[:, 3] <= len(instance.cluster.nodes)).all()
        state = _BUILDER.apply(state, int(rng.choice(np.flatnonzero(candidates.mask))))
    return _BUILDER.plan(state), state


@settings(max_examples=40)
@given(st.integers(0, 30), st.integers(0, 10_000))
def test_random_legal_choices_end_in_a_legal_plan(number: int, seed: int) -> None:
    instance = _instance(number)
    plan, state = _random_plan(instance, np.random.default_rng(seed))
    check(instance, plan)
    used = [device for stage in plan.stages for device in stage.mesh.devices]
    assert len(used) == len(set(used))
    if state.progress.overflow == 0.0:
        assert Estimator(instance).estimate(plan).feasible


@pytest.mark.parametrize(
    ("cluster", "batch"),
    [
        ("1xA100-80", 8),
        ("3xA100-80", 8),
        ("6xV100-32", 64),
        ("12xA100-40", 16),
        ("2x3xV100-16", 96),
        ("3x6x3090-24:eth25", 64),
        ("8x8xA100-80", 512),
        ("2x(2x3080-10+2x4090-24):eth25", 32),
    ],
)
def test_odd_and_large_clusters_end_in_legal_plans(cluster: str, batch: int) -> None:
    instance = _on(cluster, batch)
    for seed in range(3):
        plan, _ = _random_plan(instance, np.random.default_rng(seed))
        check(instance, plan)


def test_a_rollout_is_the_same_every_time() -> None:
    instance = _instance(2)
    plans = [_random_plan(instance, np.random.default_rng(7))[0] for _ in range(2)]
    assert plans[0] == plans[1]
    fresh = StagewiseBuilder(refined=1)
    state = fresh.start(instance)
    ours = _BUILDER.candidates(_BUILDER.start(instance))
    np.testing.assert_array_equal(fresh.candidates(state).features, ours.features)


def test_a_permutation_of_symmetric_devices_changes_ranks_and_not_the_step_time() -> None:
    instance = _on("2x4xA100-80+2x2xV100-32", 64)
    base = greedy_state(_BUILDER, instance)
    wanted = estimate(instance, _BUILDER.plan(base)).step_time
    moved = 0
    for seed in range(5):
        state = _BUILDER.start(instance, np.random.default_rng(seed))
        while not _BUILDER.done(state):
            state = _BUILDER.apply(state, best_index(_BUILDER.candidates(state)))
        plan = _BUILDER.plan(state)
        assert estimate(instance, plan).step_time == pytest.approx(wanted, rel=1e-9)
        moved += plan != _BUILDER.plan(base)
    assert moved > 0


def test_a_permutation_keeps_kinds_and_nodes_together() -> None:
    cluster = Cluster.parse("2x4xA100-80+2x2xV100-32")
    instance = Instance(_on("1xA100-80").graph, cluster, 64, precision="fp16-mixed")
    relabel = permute_symmetric(instance, np.random.default_rng(3))
    assert sorted(relabel) == list(range(len(cluster.devices)))
    for device in cluster.devices:
        image = cluster.devices[relabel[device.index]]
        assert image.kind == device.kind
        for other in cluster.devices:
            same = cluster.devices[relabel[other.index]].node == image.node
            assert same == (other.node == device.node)


def test_the_first_candidate_has_the_best_score_and_its_promise_is_kept() -> None:
    ratios = []
    for number in range(12):
        instance = _instance(number)
        state = _BUILDER.start(instance)
        candidates = _BUILDER.candidates(state)
        assert candidates.features[0, 0] == candidates.features[:, 0].max()
        promised = float(np.exp(-candidates.features[0, 0])) * state.desk.bound
        plan = _BUILDER.plan(greedy_state(_BUILDER, instance))
        ratios.append(Estimator(instance).estimate(plan).step_time / promised)
    assert 0.9 < np.median(ratios) < 1.1
    assert max(ratios) < 1.5


def test_greedy_is_never_far_from_the_grid() -> None:
    gaps = []
    for number in range(16):
        instance = _instance(number)
        plan = _BUILDER.plan(greedy_state(_BUILDER, instance))
        own = estimate(instance, plan)
        assert own.feasible
        best = grid(instance, Budget(seconds=2.0, evaluations=200), np.random.default_rng(0))
        if best.estimate is not None and best.plan is not None:
            gaps.append(float(np.log(own.step_time / best.estimate.step_time)))
    assert np.mean(gaps) < 0.02
    assert max(gaps) < 0.25


def test_where_nothing_fits_a_plan_is_still_found_and_reported_over() -> None:
    instance = _on("2xT4", 8, params=3e10)
    state = greedy_state(_BUILDER, instance)
    plan = _BUILDER.plan(state)
    check(instance, plan)
    assert state.progress.overflow > 0.0
    assert not estimate(instance, plan).feasible


def test_a_slow_island_may_stay_idle() -> None:
    instance = _on("8xH100-80+1xT4:eth10", 64, params=2e8)
    plan = _BUILDER.plan(greedy_state(_BUILDER, instance))
    kinds = {instance.cluster.devices[device].kind for device in plan.devices}
    assert kinds == {"H100-80"}


def test_tp_stays_inside_a_node_and_a_kind() -> None:
    instance = _on("2x(2x3080-10+2x4090-24):eth25", 32)
    for seed in range(6):
        plan, _ = _random_plan(instance, np.random.default_rng(seed))
        for stage in plan.stages:
            for group in stage.mesh.tp_groups():
                members = [instance.cluster.devices[device] for device in group]
                assert len({(member.kind, member.node) for member in members}) == 1


def test_what_cannot_be_chosen_is_refused() -> None:
    instance = _on("2xA100-80", 8)
    state = _BUILDER.start(instance)
    with pytest.raises(ValueError, match="candidates"):
        _BUILDER.apply(state, 10_000)
    with pytest.raises(ValueError, match="not done"):
        _BUILDER.plan(state)
    done = greedy_state(_BUILDER, instance)
    with pytest.raises(ValueError, match="nothing is left"):
        _BUILDER.candidates(done)


def test_what_does_not_fit_is_masked_where_something_fits_and_cannot_be_chosen() -> None:
    seen = 0
    for number in range(12):
        state = _BUILDER.start(_instance(number))
        while not _BUILDER.done(state):
            candidates = _BUILDER.candidates(state)
            for index in np.flatnonzero(~candidates.mask):
                # Columns 11 and 12: overflow of the stage, and of what is ahead.
                assert candidates.features[index, 11:13].sum() > 0.0
                with pytest.raises(ValueError, match="masked"):
                    _BUILDER.apply(state, int(index))
                seen += 1
            state = _BUILDER.apply(state, best_index(candidates))
    assert seen > 0
