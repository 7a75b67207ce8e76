"""Plans for Sailor's problems, by branch and bound around a dynamic program.

The problem and its rule: `rlplace.cost.given.sailor` (Strati et al., SOSP 2025, arXiv 2504.17096).
The step of a plan with D replicas and M micro-batches is

    (M - 1) * slowest stage + sum of the stages + slowest gradient reduction + update.

For a micro-batch, a D, and caps on the slowest stage and on the slowest reduction, `sweep` finds
the least sum exactly, with all memory limits. Over (micro-batch, D, mixture) and boxes of
[low, high] caps the search is best-first: a box is worth at least its low corner plus the sum at
its high corner, whose pipeline is also a plan. It ends when no box can be better than the best plan
by more than `GAP`. Of all D that need the same M only the least is tried: it leaves most devices
over and reduces gradients fastest.

Decision space: any stages, each with one kind and tp for all its replicas, but for at most one
stage that mixes kinds, with one tp of each (an exchange of replicas between two stages with the
same mixture makes one of them pure, and is never slower). Left out: several tp degrees of one kind
in a stage, two different mixtures, tp degrees that do not divide the nodes of their kind, and D so
small that the states of the program pass `STATES`. Sailor itself fixes tp by what fits into memory,
and prunes by heuristics.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import numpy as np

from rlplace.cost.given.sailor import sailor_seconds, sailor_step
from rlplace.cost.given.sailor_form import SailorInstance, SailorPlan
from rlplace.planners.given.sailor_limits import Limits, limits
from rlplace.planners.given.sailor_sweep import Sweep, SweepTables, sweep
from rlplace.planners.given.sailor_tables import SailorTables, Type
from rlplace.planners.given.search import PlacementSearch
from rlplace.planners.given.types import Placed
from rlplace.planners.types import Budget

#: How much better than the answer a plan of the decision space may be, as a share.
GAP = 5e-4
#: The first part of a box, over its low corner.
SLICE = 1.1
#: Most states of the dynamic program; beyond it a number of replicas is left out.
STATES = 8_000_000


@dataclass(frozen=True)
class SailorPlaced(Placed[SailorPlan]):
    """What was found; its value is in seconds, and dynamic programs are counted.

    Args:
        bound: No plan of the decision space is faster.
    """

    bound: float = 0.0


@dataclass(frozen=True)
class _Root:
    """A micro-batch, a number of replicas and a mixture; the micro-batches and limits they give."""

    micro_batch: int
    replicas: int
    mixture: Type
    micro_batches: int
    least: Limits


@dataclass(frozen=True)
class _Box:
    """Caps in [low, high] of a root, and the pipeline of the high corner once it is known."""

    root: _Root
    slowest: tuple[float, float]
    reduction: tuple[float, float]
    solved: _Solved | None = None


@dataclass(frozen=True)
class _Solved:
    """The least filling time under caps, and the slowest stage and reduction of its pipeline."""

    filling: float
    slowest: float
    reduction: float


def place_sailor(
    instance: SailorInstance, budget: Budget, rng: np.random.Generator
) -> SailorPlaced:
    """The fastest plan of a problem of Sailor.

    Args:
        instance: The problem.
        budget: Seconds, and dynamic programs to run (`evaluations`).
        rng: Not used: nothing is random.
    """
    search = _Search(instance, PlacementSearch("sailor", partial(sailor_seconds, instance), budget))
    search.run()
    return search.result()


@dataclass
class _Search:
    instance: SailorInstance
    kept: PlacementSearch[SailorPlan]
    bound: float = 0.0
    _order: Iterator[int] = field(default_factory=count)
    _heap: list[tuple[float, int, _Box]] = field(default_factory=list)
    _made: dict[_Root, SweepTables] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tables = SailorTables(self.instance)
        self._slots = np.full(STATES, -1, np.int32)
        self._update = min(self.instance.model.updates.values())

    @property
    def least(self) -> float:
        """Seconds of the best plan so far."""
        return self.kept.best[1] if self.kept.best is not None else math.inf

    def result(self) -> SailorPlaced:
        """What was found so far."""
        return SailorPlaced(**vars(self.kept.result()), bound=min(self.bound, self.least))

    def run(self) -> None:
        """Plans without a mixture first: they are a tenth, and the best of them rules out most."""
        pure, mixed = ([r for r in self._roots() if bool(r.mixture) == x] for x in (False, True))
        done = self._drain(pure)
        self.bound = min(done, self._drain(mixed))

    def _drain(self, roots: list[_Root]) -> float:
        """Search the plans of some roots; no plan of them is faster than the answer."""
        self._heap.clear()
        for root in roots:
            least = root.least
            box = _Box(root, (least.slowest, least.ceiling), (least.reduction, math.inf))
            self._push(least.step, box)
        while self._heap:
            bound, _, box = heapq.heappop(self._heap)
            if bound >= self.least * (1.0 - GAP) or self.kept.stopped:
                return bound
            self._open(box, bound)
        return self.least * (1.0 - GAP)

    def _push(self, bound: float, box: _Box) -> None:
        if bound < self.least * (1.0 - GAP):
            heapq.heappush(self._heap, (bound, next(self._order), box))

    def _roots(self) -> Iterator[_Root]:
        devices = sum(self.instance.counts.values())
        for size in self._tables.micro_batches:
            needed = math.ceil(self.instance.batch / size)
            offered = self._tables.replicas(size)
            for replicas in sorted({math.ceil(needed / m) for m in range(1, needed + 1)}):
                if replicas > devices:
                    break
                least = [limits(self.instance, offered, size, replicas, x) for x in (False, True)]
                turns = math.ceil(needed / replicas)
                for mixture in self._tables.mixtures(size):
                    yield _Root(size, replicas, mixture, turns, least[bool(mixture)])

    def _open(self, box: _Box, bound: float) -> None:
        """Run the program of a box if that was not done, and push its two halves.

        Of a box that is high only the lowest part is looked at first: there the program is short.
        """
        weight = box.root.micro_batches - 1
        (low, high), (cheap, _) = box.slowest, box.reduction
        if box.solved is None and weight and high > SLICE * low * (1.0 + 1e-9):
            middle = SLICE * low
            self._push(bound, _Box(box.root, (low, middle), box.reduction))
            rest = _Box(box.root, (middle, high), box.reduction)
            self._push(max(bound, weight * middle + box.root.least.rest), rest)
            return
        solved = box.solved or self._solve(box)
        if solved is None:
            return
        if weight * (solved.slowest - low) >= solved.reduction - cheap:
            middle = (low + min(solved.slowest, box.slowest[1])) / 2
            below = _Box(box.root, (low, middle), box.reduction)
            above = _Box(box.root, (middle, box.slowest[1]), box.reduction, solved)
        else:
            middle = (cheap + min(solved.reduction, box.reduction[1])) / 2
            below = _Box(box.root, box.slowest, (cheap, middle))
            above = _Box(box.root, box.slowest, (middle, box.reduction[1]), solved)
        self._push(self._bound(box, solved), below)
        self._push(self._bound(above, solved), above)

    def _bound(self, box: _Box, solved: _Solved) -> float:
        weight = box.root.micro_batches - 1
        return weight * box.slowest[0] + solved.filling + box.reduction[0] + self._update

    def _solve(self, box: _Box) -> _Solved | None:
        root = box.root
        tables = self._tables_of(root)
        if not len(tables.after) or tables.states > STATES:
            return None
        weight = root.micro_batches - 1
        below = self.least - weight * box.slowest[0] - box.reduction[0] - self._update
        caps = [box.slowest[1], box.reduction[1]]
        if weight and math.isfinite(below):
            caps[0] = min(caps[0], box.slowest[0] + below / weight)
        self.kept.evaluations += 1
        found = sweep(tables, caps[0], caps[1], below, self._slots)
        return self._offer(root, found) if found else None

    def _tables_of(self, root: _Root) -> SweepTables:
        if root not in self._made:
            self._made[root] = self._tables.make(root.micro_batch, root.replicas, root.mixture)
        return self._made[root]

    def _offer(self, root: _Root, found: Sweep) -> _Solved:
        plan = self._tables.plan(root.micro_batch, root.replicas, root.mixture, found.stages)
        step = sailor_step(self.instance, plan)
        self.kept.take(plan, step.seconds, evaluations=0)
        pairs = zip(step.compute, step.transfer, strict=True)
        return _Solved(found.filling, max(a + b for a, b in pairs), step.reduction)
