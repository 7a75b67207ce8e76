"""Provable lower limits of the step time of an instance, under the analytic cost model.

Every plan takes at least `bound` seconds, if it is legal, chooses what the instance offers, gives
all replicas of a mesh equally many samples, and fits. (Unequal shares may beat it on devices of
several kinds.) What a group costs at least is in `rlplace.simulate.bounds`; here is what a step
does at least, whatever its stages are. T is the step time, a *lane* is a mesh with all its stages,
n its devices.

*A lane.* Its devices run all micro-batches of all its groups, then the part of the gradient
reduction that cannot hide, then the optimizer: T >= sum of `step` over its groups. When the last
backward of any of its stages begins, all its forwards are done, and the reductions queue on one
channel after that: T >= sum of `tail`. Before its first action, which is a forward of its first
stage, the first micro-batch has passed all groups before it; of lanes in the order of their first
stages, those of number l (from 0) have at least the first l groups before them. So both sums may
begin with `head_l`, the forward of one micro-batch through the first l groups.

*All lanes.* With weights w >= 0 for a device of each kind and g >= 0 for a lane, the inequalities
of all devices and all lanes add up to

    T * (sum of w over devices + g * lanes) >=
        sum over groups of (n * w + g) * step + g * sum of heads over lanes

where each group takes its part of its own mesh; a mesh of several kinds is no faster than any of
them, and the mean of its devices no less than the least. The right side is at least its least over
all ways to run each group: that is independent of the plan but for the number of micro-batches and
of lanes, over which the least is taken. There are no more lanes than groups or devices. g = 0 is
*work over speed*, with the optimizer and the exposed collectives; a large g is the *fill* of the
pipeline and what forces large meshes, with their collectives, where lanes are few. Devices that
share a core take turns and count as one, each with its part of what they wait for together.

*Memory.* What the groups of a lane hold, states and one micro-batch, is at most the room of each of
its devices. These inequalities are added with multipliers a >= 0 for a device and b >= 0 for a
lane (Lagrangian relaxation): the right side gains (a * n + b) * held for each group, and loses
a * room of all devices + b * room of the largest for each lane. A way that does not fit alone is
none. So, where states do not fit, a plan has to shard them and pay ZeRO's traffic, to cut them and
pay the layout's collectives, to redo or to offload, or to take many lanes and pay the fill.

*Critical path and fill of stages.* The first forward of a stage waits for the first micro-batch to
pass all groups before, and after its last backward that micro-batch passes them back; the gradients
of parameters may be made later. In between the stage runs every micro-batch. So with x(h) the
seconds of `through`, a micro-batch through group h and back, and M micro-batches, whatever the
schedule and however many stages are on a lane,

    T >= M * x(h) + sum of x over the groups before h        for every group h.

Added up with weights q, q^2, ... from the last group to the first, where q = 1 - 1 / M, every x has
the same factor: T * (1 - q^groups) >= sum of x over all groups. This is added to the others with a
multiplier of its own: what makes the path short, large meshes, makes work long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from rlplace.cost import memory
from rlplace.graph.types import Layout
from rlplace.plan.types import GroupChoice, Instance, Mesh
from rlplace.simulate.bounds.frame import Frame, room
from rlplace.simulate.bounds.splits import Floats
from rlplace.simulate.bounds.ways import Ways, ways_of

#: Multiples of the step time that a device's room is worth, by turns.
_PRICES = (0.5, 2.0, 8.0)
#: Weights of the path, in those of all devices.
_PATHS = (0.0, 0.25, 1.0, 4.0)


def bound(instance: Instance) -> float:
    """Seconds that no plan that fits can beat; where none fits, that no plan can beat."""
    if not _roomy(instance):
        forced = _Relaxation(instance, tight=True).together()
        if np.isfinite(forced):
            return forced
    return _Relaxation(instance, tight=False).together()


def limits(instance: Instance) -> dict[str, float]:
    """What each limit is by itself (seconds), for reports; the largest is `bound`.

    ``work`` over speed, with optimizer and exposed collectives; ``reduce``, work with the forward
    passes and then all reductions; ``path`` of one micro-batch; ``lanes``, which is all of these
    together with the fill and the number of lanes; and ``memory``, which is that with what the
    memory limit forces (0 where it forces nothing).
    """
    free = _Relaxation(instance, tight=False)
    whole = free.together()
    forced = bound(instance)
    return free.alone() | {"lanes": whole, "memory": forced if forced > whole else 0.0}


def _roomy(instance: Instance) -> bool:
    """Whether the smallest device holds the whole model with all samples at once."""
    graph, samples = instance.graph, float(instance.global_batch)
    choice, one = GroupChoice(), Mesh((0,))
    held = largest = 0.0
    for index, count in Counter(group.structure for group in graph.groups).items():
        layout = Layout("replicate", 1, graph.structures[index].work)
        states = memory.states(instance, layout.work, choice, one).total
        held += count * (states + memory.saved(instance, layout, choice, samples, 0.0))
        largest = max(largest, memory.transient(instance, layout, choice, one, samples))
    return held + largest <= min(room(instance, kind) for kind in instance.cluster.kinds)


@dataclass(frozen=True)
class _Relaxation:
    """The inequalities of an instance; M are its possible numbers of micro-batches."""

    instance: Instance
    tight: bool

    @cached_property
    def _frame(self) -> Frame:
        return Frame(self.instance, tight=self.tight)

    @cached_property
    def _ways(self) -> dict[int, tuple[int, Ways]]:
        """How often each structure occurs, and its ways."""
        graph = self.instance.graph
        tied = dict.fromkeys(range(len(graph.structures)), 0)
        for group in graph.groups:
            own = sum(size for name, size in graph.tied if name in group.params)
            tied[group.structure] = max(tied[group.structure], own)
        counts = Counter(group.structure for group in graph.groups)
        return {
            index: (count, ways_of(self._frame, graph.structures[index], tied[index]))
            for index, count in counts.items()
        }

    @cached_property
    def _weights(self) -> Floats:
        """Of a device of each kind: the inverse of what all work would take it."""
        kinds = range(len(self.instance.cluster.kinds))
        taken = np.zeros(len(kinds))
        for count, ways in self._ways.values():
            spent = ways.devices * ways.step
            taken += [count * spent[:, ways.kind == kind].min() for kind in kinds]
        usable = np.isfinite(taken) & (taken > 0.0)
        if not usable.any():
            return np.ones(len(kinds))
        return np.where(usable, taken[usable].min() / np.where(usable, taken, 1.0), 0.0)

    @cached_property
    def _total(self) -> float:
        """The weights of all cores, each as much as the heaviest of its devices."""
        weights = dict(
            zip((k.name for k in self.instance.cluster.kinds), self._weights, strict=True)
        )
        cores: dict[tuple[int, int], float] = {}
        for device in self.instance.cluster.devices:
            core = (-1, device.index) if device.core is None else (device.node, device.core)
            cores[core] = max(cores.get(core, 0.0), weights[device.kind])
        return float(sum(cores.values()))

    @cached_property
    def _room(self) -> tuple[float, float]:
        """Bytes of all devices, and of the largest."""
        each = {
            kind.name: max(0.0, room(self.instance, kind)) for kind in self.instance.cluster.kinds
        }
        return sum(each[d.kind] for d in self.instance.cluster.devices), max(each.values())

    @cached_property
    def _heads(self) -> Floats:
        """Sum of the heads of so many lanes (lanes, M): at [v - 1, m]."""
        least = {i: self._frame.cut.least(ways.forward) for i, (_, ways) in self._ways.items()}
        each = np.array([least[group.structure] for group in self.instance.graph.groups])
        before = np.concatenate([np.zeros((1, each.shape[1])), np.cumsum(each, axis=0)[:-1]])
        return np.cumsum(before, axis=0)

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        """Ranges of the number of lanes, doubling."""
        most = min(len(self.instance.graph.groups), len(self.instance.cluster.devices))
        starts = [2**power for power in range(most.bit_length())]
        return [(start, min(2 * start - 1, most)) for start in starts]

    @cached_property
    def _filled(self) -> Floats:
        """What a pipeline of all groups takes over its path at least, for each split (P,)."""
        left = (1.0 - 1.0 / self._frame.cut.count) ** len(self.instance.graph.groups)
        return 1.0 / (1.0 - left)

    def alone(self) -> dict[str, float]:
        """Seconds of work, of work with its reductions, and of the critical path."""
        return {
            "work": float(self._work("step").min()),
            "reduce": float(self._work("tail").min()),
            "path": float(self._path.min()),
        }

    def together(self) -> float:
        """The least over micro-batches of the best of all multipliers.

        Numbers of micro-batches that are above that before all multipliers were tried are left.
        """
        found = np.maximum(self._path, np.maximum(self._work("step"), self._work("tail")))
        known: set[int] = set()
        while (least := int(found.argmin())) not in known and np.isfinite(found[least]):
            known.add(least)
            found[least] = self._best(least, float(found[least]))
        return float(found[least])

    def _best(self, number: int, start: float) -> float:
        """The least over lanes of the best of all multipliers, with one number of micro-batches.

        Args:
            number: Which.
            start: What is known to be a limit.
        """
        part = self._part(number)
        most = self._spans[-1][1]
        powers = range(-2, most.bit_length() + 3, 2)
        lanes = (0.0, *(self._total * 2.0**power / most for power in powers))
        paths = tuple(share * self._total for share in _PATHS)
        best = np.full(len(self._spans), start)
        for lane, path in product(lanes, paths):
            best = np.maximum(best, self._limit(part, number, lane, path, 0.0))
        if self.tight:
            unit = float(best.min())
            for lane, path, price in product(lanes[::2], paths[::2], _PRICES):
                best = np.maximum(best, self._limit(part, number, lane, path, price * unit))
        return float(best.min())

    def _work(self, name: str) -> Floats:
        """The sum of ``step`` or ``tail`` over all devices (M,)."""
        terms = (
            (count, _weighed(self._weighted(ways, slice(None)), getattr(ways, name)))
            for count, ways in self._ways.values()
        )
        return self._added(terms) / self._total

    def _weighted(self, ways: Ways, own: slice) -> Floats:
        """Devices of some ways, by their weights (ways, splits)."""
        return ways.devices[:, own] * self._weights[ways.kind][:, None]

    @cached_property
    def _path(self) -> Floats:
        """Seconds of the path, filled with micro-batches (M,)."""
        terms = ((count, ways.through * self._filled) for count, ways in self._ways.values())
        return self._added(terms)

    def _added(self, terms: Iterable[tuple[int, Floats]]) -> Floats:
        """The least of each structure, by number of micro-batches, for all groups (M,)."""
        each = [count * self._frame.cut.least(value) for count, value in terms]
        found: Floats = np.sum(each, axis=0)
        return found

    def _part(self, number: int) -> list[_Part]:
        """The ways of each structure with one number of micro-batches."""
        first = (*self._frame.cut.first.tolist(), len(self._frame.cut.count))
        own = slice(first[number], first[number + 1])
        return [
            _Part(
                count,
                ways.devices[:, own],
                self._weighted(ways, own),
                ways.step[:, :, own],
                ways.through[:, own] * self._filled[own],
                ways.held[:, :, own],
            )
            for count, ways in self._ways.values()
        ]

    def _limit(
        self, parts: list[_Part], number: int, lane: float, path: float, price: float
    ) -> Floats:
        """Seconds for each range of lanes (spans,).

        Args:
            parts: The ways.
            number: Which number of micro-batches they have.
            lane: Weight of a lane.
            path: Weight of the path.
            price: Seconds that the room of a device is worth.
        """
        total, largest = (max(size, 1.0) for size in self._room)
        bytes_of = price * self._total / total, price * lane / largest
        lanes = np.array([lane * most for _, most in self._spans])
        found = sum(part.least(lane, path, bytes_of) for part in parts)
        heads = self._heads[[least - 1 for least, _ in self._spans], number] if lane else 0.0
        right = found + lane * heads - price * (self._total + lanes)
        limit: Floats = right / (self._total + path + lanes)
        return limit


def _weighed(weights: Floats, seconds: Floats) -> Floats:
    """The product; a way that does not fit stays impossible on devices that count nothing."""
    if weights.all():
        return weights * seconds
    possible = np.isfinite(seconds)
    return np.where(possible, weights * np.where(possible, seconds, 0.0), np.inf)


@dataclass(frozen=True, slots=True)
class _Part:
    """The ways of a structure with one number of micro-batches, p of them (see `Ways`)."""

    uses: int
    devices: Floats
    weighted: Floats
    step: Floats
    through: Floats
    held: Floats

    def least(self, lane: float, path: float, held: tuple[float, float]) -> float:
        """The right side for all groups; `held` weighs a byte of a device and of a lane."""
        value = _weighed(self.weighted + lane, self.step)
        if path:
            value = value + path * self.through
        if any(held):
            value = value + (held[0] * self.devices + held[1]) * self.held
        return self.uses * float(value.min())
