from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest

from rlplace.cost.given.event_loop import event_arrays, run_many
from rlplace.cost.given.events import TIE_ORDERS, makespan, median_makespan, simulate_events
from rlplace.errors import InputError
from rlplace.graph.formats.doppler import read_doppler
from rlplace.graph.formats.giph import read_giph
from rlplace.graph.formats.piper import read_piper
from rlplace.graph.formats.types import EventCosts, GivenInstance
from tests.graph.formats.examples import doppler, giph, piper
from tests.planners.given.cases import random_doppler, random_giph


def by_a_heap_of_all_events(  # noqa: C901  # an oracle in one place
    instance: GivenInstance, placement: list[int]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Starts and ends, written as plainly as the rule is: every event lies in the heap."""
    costs = instance.costs
    assert isinstance(costs, EventCosts)
    ops, order = len(placement), count()
    heap: list[tuple[float, int, str, int]] = []
    waiting: list[deque[int]] = [deque() for _ in range(costs.devices)]
    busy = [False] * costs.devices
    missing, start, end = [0] * ops, [0.0] * ops, [0.0] * ops
    for edge in instance.graph.edges:
        missing[edge.dst] += 1

    def begin(op: int, time: float) -> None:
        device = placement[op]
        busy[device], start[op] = True, time
        end[op] = time + costs.compute[op] * costs.rates[device]
        heapq.heappush(heap, (end[op], next(order), "end", op))

    def ask(op: int, time: float) -> None:
        if busy[placement[op]]:
            waiting[placement[op]].append(op)
        else:
            begin(op, time)

    for op in range(ops):
        if not missing[op]:
            ask(op, 0.0)
    while heap:
        time, _, event, op = heapq.heappop(heap)
        if event == "arrival":
            missing[op] -= 1
            if not missing[op]:
                ask(op, time)
            continue
        here = placement[op]
        busy[here] = False
        if waiting[here]:
            begin(waiting[here].popleft(), time)
        for edge, size in zip(instance.graph.edges, costs.sizes, strict=True):
            if edge.src == op:
                there = placement[edge.dst]
                delay = costs.delays[here][there] + size * costs.transfer_rates[here][there]
                arrival = time + (0.0 if here == there else delay)
                heapq.heappush(heap, (arrival, next(order), "arrival", edge.dst))
    return tuple(start), tuple(end)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("make", [random_doppler, random_giph])
def test_the_loop_gives_what_a_heap_of_all_events_gives_bit_for_bit(
    make: Callable[..., GivenInstance], seed: int
) -> None:
    # Costs of DOPPLER's are small integers, so that ties are everywhere.
    rng = np.random.default_rng(seed)
    instance = make(rng, ops=int(rng.integers(1, 40)), devices=1 + seed % 5)
    costs = instance.costs
    assert isinstance(costs, EventCosts)
    for _ in range(5):
        placement = [int(rng.choice(legal)) for legal in costs.legal]
        schedule = simulate_events(instance, placement)
        assert (schedule.start, schedule.end) == by_a_heap_of_all_events(instance, placement)
        assert makespan(instance, placement) == max(schedule.end)


def test_the_first_tie_order_is_that_of_the_graph_and_the_others_are_legal_too() -> None:
    instance = random_doppler(np.random.default_rng(3), ops=30, devices=3)
    placement = [op % 3 for op in range(30)]
    found = run_many(event_arrays(instance, 9), 9, np.array([placement]))[0]
    assert found[0] == makespan(instance, placement)
    assert len(set(found)) > 1
    assert np.array_equal(found, run_many(event_arrays(instance, 9), 9, np.array([placement]))[0])
    found = run_many(event_arrays(instance, TIE_ORDERS), TIE_ORDERS, np.array([placement]))
    assert median_makespan(instance, placement) == np.median(found)


def test_the_median_by_hand() -> None:
    # Ops 1 and 2 read op 0 on device 0 and take 2 each; op 3 reads op 1 and op 2 over a link of 1.
    # Whichever goes first, both orders end alike: nothing but names differs.
    instance = read_doppler(doppler(), "tiny")
    assert median_makespan(instance, [0, 0, 0, 1]) == makespan(instance, [0, 0, 0, 1]) == 7.0
    # Let op 1 alone feed a longer tail on the other device: then it should go first, and the
    # order of the file decides; half of the orders take it second.
    data = {
        "comp": [1e10, 2e10, 2e10, 5e10],
        "comm": [0, 0, 0, 0],
        "edges": [[0, 1], [0, 2], [1, 3]],
        "default_devices": 2,
    }
    instance = read_doppler(data, "tail")
    assert makespan(instance, [0, 0, 0, 1]) == 8.0
    found = run_many(event_arrays(instance, 31), 31, np.array([[0, 0, 0, 1]]))
    assert set(found[0]) == {8.0, 10.0}


def test_illegal_placements_and_other_forms_are_refused() -> None:
    with pytest.raises(InputError, match="placement of op1=1: may not run there"):
        median_makespan(read_giph(giph(), "0/0"), [0, 1, 0, 0])
    with pytest.raises(InputError, match="needs EventCosts"):
        event_arrays(read_piper(piper(), "tiny"))
