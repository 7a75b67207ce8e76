"""The least largest load of contiguous parts: a dynamic program over ideals.

Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020
(arXiv 2006.16423), section 5.1: best[ideal, a, c], the least largest load of an ideal on a
accelerators and c CPUs, is the minimum over smaller ideals of the larger of its value and the load
of the difference on one device more. Each device runs one contiguous part of the forward graph,
and the ops of its color classes in the backward graph (section 5.3).

Made quick and still exact: a limit on the load is doubled above a lower bound until something fits
under it. Then parts are grown op by op along the lattice, their loads kept up as they grow, and a
part is left as soon as it is too long or too large for every device; so is a state that leaves
more work than the devices left can do below the limit. Complexity: pairs of ideals of which the
difference fits below the limit, times devices. Not here: replicated parts (the paper's appendix).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numba
import numpy as np
import numpy.typing as npt

from rlplace.cost.given.common import costs_of
from rlplace.graph.formats.types import GivenInstance, LoadCosts
from rlplace.planners.given.ideals import Ideals, find_ideals
from rlplace.planners.given.units import Units, contiguous_units, ragged

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: More ideals than these are not worth it.
_IDEALS = 100_000
#: The first limit on the load over its lower bound, and what a limit grows by at most.
_FIRST, _GROWTH = 1.02, 1.2


@dataclass(frozen=True)
class Contiguous:
    """A contiguous placement.

    Args:
        placement: Device of each op; empty where nothing fits.
        load: Its largest load.
        bound: What no contiguous placement is below; `load` itself where that is proven the best.
    """

    placement: tuple[int, ...]
    load: float
    bound: float


def best_contiguous(instance: GivenInstance, most: int = _IDEALS) -> Contiguous:
    """The contiguous placement with the least largest load.

    Where memory binds and the ideals are too many, units without time join a neighbour together
    with their bytes; the same without their bytes then bounds what this may cost. Where they are
    still too many, the parts are runs of one topological order, as PipeDream's are.

    Args:
        instance: The instance.
        most: Ideals that are worth it.
    """
    exact = _solve(instance, contiguous_units(instance), most)
    if exact is not None:
        return exact
    units = contiguous_units(instance, "all")
    merged = _solve(instance, units, most)
    below = _solve(instance, contiguous_units(instance, "weightless"), most)
    if merged is not None and below is not None:
        return replace(merged, bound=below.load)
    in_line = _solve(instance, units.in_line, len(units) + 1)
    assert in_line is not None, "a line has one ideal a unit"
    return replace(in_line, bound=load_bound(units, costs_of(instance, LoadCosts)))


def load_bound(units: Units, costs: LoadCosts) -> float:
    """What no placement of the units is below: work shared evenly, and the longest unit."""
    longest = float(np.minimum(units.cpu, units.accelerator).max())
    servers = costs.accelerators + costs.cpus * _relief(units)
    return max(longest, _work(units).sum() / servers if servers > 0.0 else 0.0)


def _solve(instance: GivenInstance, units: Units, enough: int) -> Contiguous | None:
    ideals = find_ideals([sorted(before) for before in units.before], enough)
    if ideals is None:
        return None
    costs = costs_of(instance, LoadCosts)
    most = units.cpu.sum() + _work(units).sum() + units.prices.sum()
    lower = max(load_bound(units, costs), 1e-9 * most)
    limit = _FIRST * lower
    while True:
        best, came = _program(units, costs, ideals, limit)
        load = float(best[-1].min())
        if np.isfinite(load):
            device_of = _devices(costs, ideals, best, came)
            return Contiguous(units.placement(device_of), load, load)
        if limit > most:
            return Contiguous((), np.inf, np.inf)
        limit = min(lower + 2.0 * (limit - lower), _GROWTH * limit)


def _work(units: Units) -> Floats:
    """Time of each unit on an accelerator; 0 where it cannot run there."""
    return np.where(np.isfinite(units.accelerator), units.accelerator, 0.0)


def _relief(units: Units) -> float:
    """Work that a CPU takes from the accelerators in a unit of time, at most."""
    work = _work(units)
    with np.errstate(divide="ignore"):
        return float(np.max(work[work > 0.0] / units.cpu[work > 0.0], initial=0.0))


def _program(units: Units, costs: LoadCosts, ideals: Ideals, limit: float) -> tuple[Floats, Ints]:
    """Largest load and origin of each (ideal, accelerators, CPUs); see `_fill`."""
    shape = (len(ideals), costs.accelerators + 1, costs.cpus + 1)
    best, came = np.full(shape, np.inf), np.full(shape, -1)
    best[0, 0, 0] = 0.0
    work = _work(units)
    behind = work.sum() - ideals.sums(work)
    # Work that the devices left can take below the limit, by devices taken.
    left = (np.arange(shape[1])[::-1, None] + np.arange(shape[2])[::-1] * _relief(units)) * limit
    _fill(
        (ideals.first, ideals.target, ideals.vertex),
        (units.cpu, units.accelerator, units.memory),
        (*ragged(units.nets_of), np.array([len(net) for net in units.nets], np.int64)),
        units.prices,
        behind,
        left + 1e-9 * work.sum(),
        limit,
        costs.memory_cap,
        best,
        came,
    )
    return best, came


def _devices(costs: LoadCosts, ideals: Ideals, best: Floats, came: Ints) -> Ints:
    """Device of each unit: CPUs and accelerators are numbered from the last part to the first."""
    taken, cpus = (int(i) for i in np.unravel_index(np.argmin(best[-1]), best[-1].shape))
    device_of = np.full(ideals.members[-1].bit_length(), -1)
    ideal = len(ideals) - 1
    while ideal:
        origin, on_cpu = divmod(int(came[ideal, taken, cpus]), 2)
        taken, cpus = (taken, cpus - 1) if on_cpu else (taken - 1, cpus)
        device_of[list(ideals.between(origin, ideal))] = cpus if on_cpu else costs.cpus + taken
        ideal = origin
    return device_of


@numba.njit(cache=True)
def _fill(  # noqa: C901 - one walk; its parts would each take all these arrays
    lattice: tuple[Ints, Ints, Ints],
    unit: tuple[Floats, Floats, Floats],
    nets: tuple[Ints, Ints, Ints],
    prices: Floats,
    behind: Floats,
    left: Floats,
    limit: float,
    cap: float,
    best: Floats,
    came: Ints,
) -> None:
    """Fill `best` and `came` (2 * origin, plus 1 for a CPU) from the empty ideal upward.

    From each ideal that some devices reach, a walk visits every larger ideal once, and keeps the
    times and bytes of the part between them; `inside` counts the units of each net in the part.
    A net that the origin shares stays cut however the part grows: `held` is what those cost.
    """
    first, target, vertex = lattice
    cpu_time, accelerator_time, memory = unit
    net_first, net_of, pins = nets
    count, most, cpus = best.shape
    depth = len(cpu_time) + 1
    seen = np.full(count, -1)
    inside = np.zeros(len(pins), np.int64)
    place, step = np.zeros(depth, np.int64), np.zeros(depth, np.int64)
    on_cpu, on_accelerator = np.zeros(depth), np.zeros(depth)
    bytes_, cut, held = np.zeros(depth), np.zeros(depth), np.zeros(depth)
    lower, via = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for ideal in range(count):
        for at in range(first[ideal], first[ideal + 1]):
            lower[target[at]], via[target[at]] = ideal, vertex[at]
    shared = np.zeros(len(pins), np.int64)
    states = np.zeros((most * cpus, 2), np.int64)
    for origin in range(count - 1):
        found = _undominated(best[origin], states)
        if not found:
            continue
        shared[:] = 0
        below = origin
        while below:
            v = via[below]
            for at in range(net_first[v], net_first[v + 1]):
                shared[net_of[at]] = 1
            below = lower[below]
        top = 0
        place[0], step[0] = origin, first[origin]
        while top >= 0:
            here = place[top]
            if step[top] == first[here + 1]:
                if top:
                    v = vertex[step[top - 1] - 1]
                    for at in range(net_first[v], net_first[v + 1]):
                        inside[net_of[at]] -= 1
                top -= 1
                continue
            upper, v = target[step[top]], vertex[step[top]]
            step[top] += 1
            if seen[upper] == origin:
                continue
            seen[upper] = origin
            long = on_cpu[top] + cpu_time[v]
            quick = on_accelerator[top] + accelerator_time[v]
            size = bytes_[top] + memory[v]
            if size > cap:
                quick = np.inf
            kept = held[top]
            for at in range(net_first[v], net_first[v + 1]):
                net = net_of[at]
                if shared[net] and not inside[net]:
                    kept += prices[net]
            if long > limit and quick + kept > limit:
                continue
            paid = cut[top]
            for at in range(net_first[v], net_first[v + 1]):
                net = net_of[at]
                inside[net] += 1
                if inside[net] == 1:
                    paid += prices[net]
                if inside[net] == pins[net]:
                    paid -= prices[net]
            top += 1
            place[top], step[top] = upper, first[upper]
            on_cpu[top], on_accelerator[top], bytes_[top] = long, quick, size
            cut[top], held[top] = paid, kept
            if min(long, quick + paid) > limit:
                continue
            for at in range(found):
                a, c = states[at]
                before = best[origin, a, c]
                load = max(before, quick + paid)
                if a + 1 < most and load <= limit and behind[upper] <= left[a + 1, c]:
                    if load < best[upper, a + 1, c]:
                        best[upper, a + 1, c] = load
                        came[upper, a + 1, c] = 2 * origin
                load = max(before, long)
                if c + 1 < cpus and load <= limit and behind[upper] <= left[a, c + 1]:
                    if load < best[upper, a, c + 1]:
                        best[upper, a, c + 1] = load
                        came[upper, a, c + 1] = 2 * origin + 1
            if upper == count - 1:
                limit = min(limit, best[upper].min())


@numba.njit(cache=True)
def _undominated(best: Floats, states: Ints) -> int:
    """How many states are reached that none with fewer devices is as good as; into `states`."""
    found = 0
    for a in range(best.shape[0]):
        for c in range(best.shape[1]):
            if best[a, c] < np.inf and (best[: a + 1, : c + 1] <= best[a, c]).sum() == 1:
                states[found] = a, c
                found += 1
    return found
