"""Placers of dnn-partitioning: the least largest load of a device, by contiguous parts or any.

Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020
(arXiv 2006.16423). `contiguous` is its dynamic program, `scattered` stands where its integer
program for parts of any shape does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rlplace.cost.given import max_load
from rlplace.cost.given.common import costs_of
from rlplace.graph.formats.types import GivenInstance, LoadCosts
from rlplace.planners.given.contiguous import best_contiguous, load_bound
from rlplace.planners.given.scattered import Annealer
from rlplace.planners.given.search import PlacementSearch
from rlplace.planners.given.types import Placed, Placement
from rlplace.planners.given.units import Units, color_units
from rlplace.planners.types import Limits

Ints = npt.NDArray[np.int64]

#: Moves of a cooling, and coolings where the budget does not end before.
_MOVES, _COOLINGS = 300_000, 12
#: First beta of the coolings in turn, as a multiple of the usual one.
_WARMTH = (1.0, 4.0, 0.3)


def contiguous(
    instance: GivenInstance, budget: Limits, rng: np.random.Generator
) -> Placed[Placement]:
    """The best placement of contiguous parts; one evaluation, whatever the budget."""
    search = _search("contiguous", instance, budget)
    found = best_contiguous(instance)
    if found.placement:
        search.offer(found.placement)
    return search.result()


def scattered(
    instance: GivenInstance, budget: Limits, rng: np.random.Generator
) -> Placed[Placement]:
    """The best placement of any shape found: the contiguous one, then coolings in turn.

    Every third cooling starts from the contiguous placement, the others from the best so far.
    """
    costs = costs_of(instance, LoadCosts)
    search = _search("scattered", instance, budget)
    units = color_units(instance)
    found = best_contiguous(instance)
    start = _by_unit(units, found.placement) if found.placement else _first_fit(units, costs)
    if start is None:
        return search.result()
    load = search.offer(units.placement(start))
    annealer = Annealer(units, costs, load)
    best = start
    for cooling in range(_COOLINGS):
        if search.stopped or load <= load_bound(units, costs):
            break
        moves = min(_MOVES, search.left)
        seed = int(rng.integers(2**31))
        begin = start if cooling % len(_WARMTH) == 0 else best
        device_of, _ = annealer.run(begin, moves, _WARMTH[cooling % len(_WARMTH)], seed)
        if (value := search.offer(units.placement(device_of), moves)) < load:
            best, load = device_of, value
    return search.result()


def _search(name: str, instance: GivenInstance, budget: Limits) -> PlacementSearch[Placement]:
    costs_of(instance, LoadCosts)
    return PlacementSearch(name, lambda placement: max_load(instance, placement), budget)


def _by_unit(units: Units, placement: Placement) -> Ints:
    device_of = np.zeros(len(units), np.int64)
    for unit, device in zip(units.unit_of, placement, strict=True):
        device_of[unit] = device
    return device_of


def _first_fit(units: Units, costs: LoadCosts) -> Ints | None:
    """Largest units first, each where most memory is free; None if that does not go."""
    free = np.full(costs.accelerators, costs.memory_cap)
    device_of = np.zeros(len(units), np.int64)
    for unit in np.argsort(-units.memory, kind="stable"):
        if not np.isfinite(units.accelerator[unit]) or not len(free):
            return None
        device = int(np.argmax(free))
        free[device] -= units.memory[unit]
        if free[device] < 0.0:
            return None
        device_of[unit] = costs.cpus + device
    return device_of
