"""Annealing over units, towards the least largest load; parts need not be contiguous.

Tarnawski et al., NeurIPS 2020, find such placements by an integer program (section 5.2, Gurobi,
20 minutes); pipelining then only needs the schedule of its figure 7. Here instead: simulated
annealing with block moves, from the contiguous optimum, where there is one, and its own results.

Decision space: any device for every color class. A move takes a unit, or a connected block of up
to `_BLOCK` units of one device, to another device that shares a net with it or to any, and half of
the time a unit of that device back. The energy is the logarithm of the sum of exp(beta * load /
unit) over the devices: with a small beta all loads count, with a large one the largest alone, so
that raising beta cools (Kirkpatrick et al. 1983). A move costs the nets of the units that it takes:
only the two devices pay more or less.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from rlplace.graph.formats.types import LoadCosts
from rlplace.planners.given.units import Units, ragged

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Units that move together, at most.
_BLOCK = 24
#: First and last beta, for loads in units of the lower bound.
_WARM, _COLD = 30.0, 1500.0


@dataclass(frozen=True)
class Annealer:
    """Anneals placements of the units of one instance.

    Args:
        units: The units.
        costs: Devices and their memory.
        unit: The load that energies are measured in.
    """

    units: Units
    costs: LoadCosts
    unit: float

    def run(self, device_of: Ints, moves: int, warm: float, seed: int) -> tuple[Ints, float]:
        """The best placement of one cooling, and its largest load.

        Args:
            device_of: Device of each unit to start from; legal.
            moves: Moves to try.
            warm: The first beta as a multiple of the usual one.
            seed: Of the random moves.
        """
        units, costs = self.units, self.costs
        is_cpu = np.arange(costs.devices) < costs.cpus
        times = np.where(is_cpu, units.cpu[:, None], units.accelerator[:, None])
        pins = ragged(units.nets)
        best = device_of.copy()
        load = _anneal(
            times,
            units.memory,
            np.where(is_cpu, np.inf, costs.memory_cap),
            (*ragged(units.nets_of), *pins),
            units.prices,
            np.where(is_cpu, 0.0, 1.0),
            best,
            (moves, _WARM * warm, max(_COLD, _WARM * warm), self.unit),
            seed,
        )
        return best, load


@numba.njit(cache=True)
def _anneal(
    times: Floats,
    memory: Floats,
    caps: Floats,
    nets: tuple[Ints, Ints, Ints, Ints],
    prices: Floats,
    pays: Floats,
    best: Ints,
    schedule: tuple[int, float, float, float],
    seed: int,
) -> float:
    """Anneal from `best`, leave the best placement there, and return its largest load."""
    np.random.seed(seed)
    moves, beta, cold, unit = schedule
    units, devices = times.shape
    device_of = best.copy()
    touched = np.zeros((len(prices), devices), np.int64)
    spread = np.zeros(len(prices), np.int64)
    loads, bytes_ = np.zeros(devices), np.zeros(devices)
    for u in range(units):
        _put(u, device_of[u], times, memory, nets, prices, pays, touched, spread, loads, bytes_)
    least = loads.max()
    heat = np.exp(beta * (loads / unit - 1.0)).sum()
    block = np.zeros(_BLOCK + 1, np.int64)
    factor = (cold / beta) ** (1.0 / max(moves / 1000, 1.0))
    for move in range(moves):
        if move % 1000 == 999:
            beta *= factor
            heat = np.exp(beta * (loads / unit - 1.0)).sum()
        source, target, size, ahead = _draw(device_of, nets, devices, block)
        if target == source:
            continue
        old_a, old_b = loads[source], loads[target]
        bytes_a, bytes_b = bytes_[source], bytes_[target]
        for at in range(size):
            u = block[at]
            a, b = (target, source) if at >= ahead else (source, target)
            _take(u, a, times, memory, nets, prices, pays, touched, spread, loads, bytes_)
            _put(u, b, times, memory, nets, prices, pays, touched, spread, loads, bytes_)
        before = np.exp(beta * (old_a / unit - 1.0)) + np.exp(beta * (old_b / unit - 1.0))
        after = np.exp(beta * (loads[source] / unit - 1.0))
        after += np.exp(beta * (loads[target] / unit - 1.0))
        new_heat = max(heat - before, 0.0) + after
        fits = bytes_[source] <= caps[source] and bytes_[target] <= caps[target]
        if fits and (new_heat <= heat or np.random.random() * new_heat < heat):
            heat = new_heat
            for at in range(size):
                device_of[block[at]] = source if at >= ahead else target
            if max(loads[source], loads[target]) < least and loads.max() < least:
                least = loads.max()
                best[:] = device_of
            continue
        for at in range(size):
            u = block[at]
            a, b = (source, target) if at >= ahead else (target, source)
            _take(u, a, times, memory, nets, prices, pays, touched, spread, loads, bytes_)
            _put(u, b, times, memory, nets, prices, pays, touched, spread, loads, bytes_)
        loads[source], loads[target] = old_a, old_b
        bytes_[source], bytes_[target] = bytes_a, bytes_b
    return float(least)


@numba.njit(cache=True)
def _draw(
    device_of: Ints, nets: tuple[Ints, Ints, Ints, Ints], devices: int, block: Ints
) -> tuple[int, int, int, int]:
    """A random move: source, target, units in `block`, and how many of those go ahead."""
    u = np.random.randint(len(device_of))
    source, target = device_of[u], np.random.randint(devices)
    if np.random.random() < 0.7:
        v = _neighbour(u, nets)
        if device_of[v] != source:
            target = device_of[v]
    wanted = 1
    if np.random.random() < 0.4:
        wanted = np.random.randint(2, _BLOCK + 1)
    block[0], size = u, 1
    for _ in range(3 * wanted):
        if size == wanted:
            break
        v = _neighbour(block[np.random.randint(size)], nets)
        if device_of[v] == source and not (block[:size] == v).any():
            block[size] = v
            size += 1
    ahead = size
    if target != source and np.random.random() < 0.5:
        v = np.random.randint(len(device_of))
        if np.random.random() < 0.5:
            v = _neighbour(u, nets)
        if device_of[v] == target:
            block[size] = v
            size += 1
    return source, target, size, ahead


@numba.njit(cache=True)
def _neighbour(u: int, nets: tuple[Ints, Ints, Ints, Ints]) -> int:
    """A random unit of a random net of a unit; itself where it has none."""
    net_first, net_of, pin_first, pin_of = nets
    if net_first[u] == net_first[u + 1]:
        return u
    net = net_of[np.random.randint(net_first[u], net_first[u + 1])]
    return int(pin_of[np.random.randint(pin_first[net], pin_first[net + 1])])


@numba.njit(cache=True)
def _put(
    u: int,
    d: int,
    times: Floats,
    memory: Floats,
    nets: tuple[Ints, Ints, Ints, Ints],
    prices: Floats,
    pays: Floats,
    touched: Ints,
    spread: Ints,
    loads: Floats,
    bytes_: Floats,
) -> None:
    """Add a unit to a device. Where a net now touches a second device, both begin to pay."""
    loads[d] += times[u, d]
    bytes_[d] += memory[u]
    for at in range(nets[0][u], nets[0][u + 1]):
        net = nets[1][at]
        touched[net, d] += 1
        if touched[net, d] == 1:
            spread[net] += 1
            if spread[net] == 2:
                for other in range(len(loads)):
                    if touched[net, other]:
                        loads[other] += prices[net] * pays[other]
            elif spread[net] > 2:
                loads[d] += prices[net] * pays[d]


@numba.njit(cache=True)
def _take(
    u: int,
    d: int,
    times: Floats,
    memory: Floats,
    nets: tuple[Ints, Ints, Ints, Ints],
    prices: Floats,
    pays: Floats,
    touched: Ints,
    spread: Ints,
    loads: Floats,
    bytes_: Floats,
) -> None:
    """Take a unit from a device: `_put` the other way round."""
    loads[d] -= times[u, d]
    bytes_[d] -= memory[u]
    for at in range(nets[0][u], nets[0][u + 1]):
        net = nets[1][at]
        if touched[net, d] == 1:
            if spread[net] == 2:
                for other in range(len(loads)):
                    if touched[net, other]:
                        loads[other] -= prices[net] * pays[other]
            elif spread[net] > 2:
                loads[d] -= prices[net] * pays[d]
            spread[net] -= 1
        touched[net, d] -= 1
