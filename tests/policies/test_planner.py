from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from rlplace.policies.network import PlaceNet, untrained
from rlplace.policies.planner import RolloutConfig, Rollouts, proposals


def rollouts(toy: SimpleNamespace, net: PlaceNet, seed: int = 0) -> Rollouts:
    return Rollouts(net, toy.builder, toy.instances[0], np.random.default_rng(seed))


def test_untrained_greedy_plan_is_the_heuristics(toy: SimpleNamespace) -> None:
    runs = rollouts(toy, untrained())
    state = toy.rollout(
        toy.instances[0], lambda c: int(np.where(c.mask, c.features[:, 0], -np.inf).argmax())
    )
    assert toy.builder.plan(runs.state(runs.greedy())) == toy.builder.plan(state)


def test_proposals_are_complete_distinct_and_legal(
    toy: SimpleNamespace, trained_like: PlaceNet
) -> None:
    runs = rollouts(toy, trained_like)
    config = RolloutConfig(first_choices=3, samples=20, batch=6)
    paths = [path for batch in proposals(runs, config) for path in batch]
    assert len(set(paths)) == len(paths) > 3
    assert paths[0] == runs.greedy()
    for path in paths:
        state = toy.builder.start(toy.instances[0])
        for index in path:
            assert toy.builder.candidates(state).mask[index]
            state = toy.builder.apply(state, index)
        assert toy.builder.done(state)


def test_first_decisions_differ(toy: SimpleNamespace, trained_like: PlaceNet) -> None:
    runs = rollouts(toy, trained_like)
    config = RolloutConfig(first_choices=9, samples=0)
    paths = [path for batch in proposals(runs, config) for path in batch]
    hosts = len(toy.instances[0].speeds)
    assert sorted(path[0] for path in paths) == list(range(hosts))


def test_same_seed_same_proposals(toy: SimpleNamespace, trained_like: PlaceNet) -> None:
    config = RolloutConfig(samples=12)
    first, second, other = (
        list(proposals(rollouts(toy, trained_like, seed), config)) for seed in (1, 1, 2)
    )
    assert first == second
    assert first != other


def test_samples_follow_the_policy(toy: SimpleNamespace, trained_like: PlaceNet) -> None:
    runs = rollouts(toy, trained_like)
    paths = runs.run([()] * 4000, 1.0)
    state = toy.builder.start(toy.instances[0])
    encoding = trained_like.encode(toy.builder.view(state))
    (log_probs,) = trained_like.score(encoding, [toy.builder.candidates(state)], 0)
    drawn = np.bincount([path[0] for path in paths], minlength=len(log_probs)) / len(paths)
    np.testing.assert_allclose(drawn, np.exp(log_probs), atol=0.03)
