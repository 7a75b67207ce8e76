from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from rlplace.cost.given.event_loop import event_arrays
from rlplace.graph.formats.types import EventCosts, GivenInstance
from rlplace.planners.given.dlplacer import dlplacer
from rlplace.planners.given.exhaustive import exhaustive
from rlplace.planners.given.heft import heft_schedule
from rlplace.planners.given.schedule_milp import Schedule, Tasks, least_makespan, tasks_of
from rlplace.planners.types import Limits
from tests.planners.given.cases import random_doppler, random_giph

_RNG = np.random.default_rng(0)


def every_schedule(tasks: Tasks) -> float:
    """The least makespan of all placements and orders, each op put on as soon as it may be."""
    ops, devices = tasks.times.shape
    reads: list[list[tuple[int, int]]] = [[] for _ in range(ops)]
    for edge, (source, target) in enumerate(zip(tasks.sources, tasks.targets, strict=True)):
        reads[target].append((int(source), edge))
    best = math.inf

    def put(ends: dict[int, float], on: dict[int, int], free: list[float]) -> None:
        nonlocal best
        if max(free) >= best:
            return
        if len(ends) == ops:
            best = max(free)
        for op in range(ops):
            if op in ends or any(source not in ends for source, _ in reads[op]):
                continue
            for device in np.flatnonzero(tasks.legal[op]).tolist():
                sent = [ends[s] + tasks.transfers[e, on[s], device] for s, e in reads[op]]
                end = float(max([free[device], *sent]) + tasks.times[op, device])
                later = [*free[:device], end, *free[device + 1 :]]
                put({**ends, op: end}, {**on, op: device}, later)

    put({}, {}, [0.0] * devices)
    return best


def solved(instance: GivenInstance) -> tuple[Tasks, Schedule]:
    arrays = event_arrays(instance)
    tasks = tasks_of(arrays)
    return tasks, least_makespan(tasks, float(heft_schedule(arrays).end.max()))


@pytest.mark.parametrize("make", [random_giph, random_doppler])
@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_best_of_all_schedules(make: object, seed: int) -> None:
    assert callable(make)
    instance = make(np.random.default_rng(seed), 6, 3)
    tasks, found = solved(instance)
    assert found.makespan == pytest.approx(every_schedule(tasks), rel=1e-6)
    assert found.bound == pytest.approx(found.makespan, rel=1e-6)


def test_starts_obey_transfers_and_devices() -> None:
    instance = random_giph(np.random.default_rng(3), 12, 3)
    tasks, found = solved(instance)
    assert found.placement is not None
    on, start = found.placement, found.start
    end = start + tasks.times[np.arange(12), on]
    assert end.max() == pytest.approx(found.makespan)
    for edge, (source, target) in enumerate(zip(tasks.sources, tasks.targets, strict=True)):
        sent = tasks.transfers[edge, on[source], on[target]]
        assert start[target] >= end[source] + sent - 1e-6
    for device in range(3):
        own = sorted((start[op], end[op]) for op in np.flatnonzero(on == device))
        assert all(one[1] <= other[0] + 1e-6 for one, other in pairwise(own))


def test_the_worked_case() -> None:
    """Two ops of 2 and 3 that feed one of 1, on two devices: apart if the transfer is below 2."""
    instance = random_doppler(np.random.default_rng(0), 3, 2)
    costs = instance.costs
    assert isinstance(costs, EventCosts)
    tasks = tasks_of(event_arrays(instance))
    times = np.repeat([[2.0], [3.0], [1.0]], 2, axis=1)
    for sent, expected in ((0.5, 4.0), (1.5, 4.5), (3.0, 6.0)):
        links = np.array([[[0.0, sent], [sent, 0.0]]] * 2)
        own = Tasks(times, np.array([0, 1]), np.array([2, 2]), links, tasks.alike)
        assert least_makespan(own, 100.0).makespan == pytest.approx(expected)
        assert every_schedule(own) == expected


def test_below_the_optimum_there_is_nothing_and_no_node_is_no_answer() -> None:
    tasks, found = solved(random_giph(np.random.default_rng(3), 8, 3))
    none = least_makespan(tasks, 0.99 * found.makespan)
    assert none.placement is None
    assert math.isinf(none.makespan)
    assert none.bound == 0.99 * found.makespan


@pytest.mark.parametrize("seed", range(4))
def test_dlplacer_is_the_optimum_where_first_come_is_no_loss(seed: int) -> None:
    instance = random_giph(np.random.default_rng(seed), 6, 3)
    _, schedule = solved(instance)
    found = dlplacer(instance, Limits(), _RNG)
    best = exhaustive(instance, Limits(), _RNG)
    assert schedule.makespan <= best.value * (1 + 1e-6)
    assert best.value <= found.value
    if best.value <= schedule.makespan * (1 + 1e-6):
        assert found.value == pytest.approx(best.value)


def test_a_program_that_is_too_large_leaves_the_list_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    instance = random_giph(np.random.default_rng(3), 12, 3)
    rows = tasks_of(event_arrays(instance)).rows
    monkeypatch.setattr("rlplace.planners.given.dlplacer.MOST_ROWS", rows - 1)
    found = dlplacer(instance, Limits(), _RNG)
    assert (found.evaluations, found.stopped) == (1, "done")
    assert found.placement is not None
    monkeypatch.setattr("rlplace.planners.given.dlplacer.MOST_ROWS", rows)
    assert dlplacer(instance, Limits(), _RNG).evaluations > 1
