from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlplace.errors import InputError
from rlplace.policies.imitate import (
    ImitationState,
    evaluate_fit,
    imitate,
    minibatches,
    split,
)
from rlplace.policies.network import PlaceNet, untrained
from rlplace.policies.types import ImitationConfig, NetConfig, Recorder, Records

SMALL = NetConfig(width=32, rounds=1, scale=4.0)


def adam(net: PlaceNet) -> torch.optim.Adam:
    return torch.optim.Adam(net.parameters(), lr=3e-3)


@pytest.fixture(scope="module")
def records(toy: SimpleNamespace) -> Records:
    parts = []
    for instance in toy.instances:
        state = toy.builder.start(instance)
        recorder = Recorder(toy.builder.view(state))
        while not toy.builder.done(state):
            candidates = toy.builder.candidates(state)
            index = toy.teacher(candidates)
            recorder.choose(candidates, state.step, index)
            state = toy.builder.apply(state, index)
        parts.append(recorder.records())
    return Records.join(parts)


def test_records_hold_legal_rows_and_distributions(records: Records) -> None:
    sums = np.add.reduceat(records.target, records.starts[:-1])
    np.testing.assert_allclose(sums, 1.0, rtol=1e-6)
    assert records.starts[-1] == len(records.features) == len(records.spans)
    assert set(records.graph.tolist()) == set(range(len(records.views)))


def test_small_set_is_learned_by_heart(records: Records) -> None:
    net = untrained(SMALL)
    config = ImitationConfig(epochs=60, held_out=0.0, patience=60)
    everything = np.arange(len(records))
    before = evaluate_fit(net, records, everything, config)
    imitate(net, adam(net), records, config, seed=0)
    after = evaluate_fit(net, records, everything, config)
    assert before.accuracy < 0.7
    assert after.accuracy > 0.97
    assert after.loss < 0.25 * before.loss


def test_soft_targets_are_reached(records: Records) -> None:
    view, rows = records.views[0], slice(0, int(records.starts[1]))
    target = np.linspace(1.0, 2.0, rows.stop).astype(np.float32)
    target /= target.sum()
    one = Records(
        (view,),
        np.zeros(1, dtype=np.int64),
        np.zeros(1, dtype=np.int64),
        np.array([0, rows.stop]),
        records.features[rows],
        records.spans[rows],
        target,
    )
    net = untrained(SMALL)
    imitate(net, adam(net), one, ImitationConfig(epochs=200, patience=200), seed=0)
    entropy = -float((target * np.log(target)).sum())
    fit = evaluate_fit(net, one, np.array([0]), ImitationConfig())
    assert fit.loss == pytest.approx(entropy, abs=1e-3)


def test_same_seed_gives_the_same_weights(records: Records) -> None:
    nets = [untrained(SMALL), untrained(SMALL)]
    for net in nets:
        imitate(net, adam(net), records, ImitationConfig(epochs=3), seed=1)
    for first, second in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(first, second)


def test_resumed_run_equals_an_uninterrupted_one(records: Records) -> None:
    config = ImitationConfig(epochs=6, patience=6)
    whole = untrained(SMALL)
    imitate(whole, adam(whole), records, config, seed=1)

    class Stop(Exception):
        pass

    def stop(state: ImitationState, loss: float, fit: object) -> None:
        if state.epoch == 3:
            raise Stop

    net = untrained(SMALL)
    optimizer, state = adam(net), ImitationState()
    with pytest.raises(Stop):
        imitate(net, optimizer, records, config, 1, state, stop)
    imitate(net, optimizer, records, config, 1, state)
    for first, second in zip(whole.parameters(), net.parameters(), strict=True):
        assert torch.equal(first, second)


def test_it_stops_early_and_keeps_the_best(records: Records) -> None:
    net = untrained(SMALL)
    losses: list[float] = []
    config = ImitationConfig(epochs=200, patience=2, learning_rate=0.1, held_out=0.3)
    fast = torch.optim.Adam(net.parameters(), lr=0.1)
    state = imitate(net, fast, records, config, 0, on_epoch=lambda s, t, f: losses.append(f.loss))
    assert state.epoch < 200
    assert state.best_loss == min(losses)
    _, held = split(records, 0.3, 0)
    assert evaluate_fit(net, records, held, config).loss == pytest.approx(min(losses), abs=1e-5)


def test_held_out_instances_are_not_trained_on(records: Records) -> None:
    train, held = split(records, 0.25, seed=3)
    assert not set(records.graph[train]) & set(records.graph[held])
    assert len(train) + len(held) == len(records)
    assert len(set(records.graph[held])) == 3


def test_minibatches_hold_few_instances(records: Records) -> None:
    config = ImitationConfig(graphs_per_batch=2, states_per_batch=5)
    batches = list(minibatches(records, np.arange(len(records)), config, np.random.default_rng(0)))
    assert all(len(np.unique(records.graph[batch])) <= 2 and len(batch) <= 5 for batch in batches)
    assert sorted(np.concatenate(batches)) == list(range(len(records)))


def test_no_records_are_refused(records: Records) -> None:
    net = untrained(SMALL)
    empty = Records(
        (),
        records.graph[:0],
        records.step[:0],
        records.starts[:1],
        records.features[:0],
        records.spans[:0],
        records.target[:0],
    )
    with pytest.raises(InputError, match="at least one decision"):
        imitate(net, adam(net), empty, ImitationConfig(), 0)
