from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rlplace.errors import InputError
from rlplace.policies.network import untrained
from rlplace.policies.planner import Rollouts
from rlplace.policies.records import load_records, save_records
from rlplace.policies.teacher import TeacherConfig, records_of, search
from rlplace.policies.types import Records


def objective(toy: SimpleNamespace, number: int) -> tuple[Rollouts, dict[tuple[int, ...], float]]:
    runs = Rollouts(untrained(), toy.builder, toy.instances[number], np.random.default_rng(0))
    config = TeacherConfig(evaluations=150)
    return runs, search(runs, lambda state: float(np.log(toy.time(state))), config)


def test_search_beats_the_heuristic_and_keeps_to_the_rules(toy: SimpleNamespace) -> None:
    gains = []
    for number in range(len(toy.instances)):
        runs, found = objective(toy, number)
        assert len(found) <= 150 + TeacherConfig().batch
        gains.append(found[runs.greedy()] - min(found.values()))
        for path in found:
            state = toy.builder.start(toy.instances[number])
            for index in path:
                assert toy.builder.candidates(state).mask[index]
                state = toy.builder.apply(state, index)
            assert toy.builder.done(state)
    assert min(gains) >= 0.0
    assert np.mean(gains) > 0.2


def test_plans_from_elsewhere_are_among_those_found(toy: SimpleNamespace) -> None:
    instance = toy.instances[0]
    path, state = [], toy.builder.start(instance)
    while not toy.builder.done(state):
        path.append(toy.teacher(toy.builder.candidates(state)))
        state = toy.builder.apply(state, path[-1])
    runs = Rollouts(untrained(), toy.builder, instance, np.random.default_rng(0))
    config = TeacherConfig(evaluations=30)
    found = search(runs, toy.time, config, extra=[tuple(path)])
    assert found[tuple(path)] == toy.time(state)


def test_targets_follow_the_best_plans(toy: SimpleNamespace) -> None:
    runs, found = objective(toy, 1)
    best = min(found, key=lambda path: found[path])
    records = records_of(runs, found, TeacherConfig(near=0.0, tolerance=1e-6))
    first = records.target[records.starts[0] : records.starts[1]]
    assert first.sum() == pytest.approx(1.0)
    winners = {path[0] for path in found if found[path] == found[best]}
    assert set(np.flatnonzero(first > 0.01).tolist()) == winners


def test_records_survive_the_disk(toy: SimpleNamespace, tmp_path: Path) -> None:
    runs, found = objective(toy, 2)
    records = records_of(runs, found, TeacherConfig())
    save_records(records, tmp_path / "a.safetensors")
    again = load_records(tmp_path / "a.safetensors")
    for name in ("graph", "step", "starts", "features", "spans", "target"):
        np.testing.assert_array_equal(getattr(again, name), getattr(records, name))
    np.testing.assert_array_equal(again.views[0].op_features, records.views[0].op_features)
    assert len(Records.join([again, records])) == 2 * len(records)


def test_cut_off_records_are_refused(toy: SimpleNamespace, tmp_path: Path) -> None:
    runs, found = objective(toy, 2)
    file = tmp_path / "a.safetensors"
    save_records(records_of(runs, found, TeacherConfig()), file)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(InputError, match="cut off"):
        load_records(file)
