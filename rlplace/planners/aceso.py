"""Aceso: moves that relieve the bottleneck (Liu et al., EuroSys 2024).

Decision space: contiguous stages on neighbouring runs of a line of devices, each with its own width
and tp degree (the rest is dp); the micro-batch count; the choices of every group.

Algorithm: for each number of stages, start from equal stages. Again and again: find the bottleneck
(the fullest stage if one is overfull, else the slowest) and the resource that it lacks; list the
primitives that spend less of it, with a partner that has it to spare: move groups to another stage
(through those between), take devices from another stage (more dp or more tp), trade dp for tp,
more or fewer micro-batches. If one of them is an improvement it is taken; if none is, the search
goes on from the most promising of them, up to some hops deep; if that fails too, from the best
configuration that was seen and not yet searched. Recompute (and ZeRO, where it is offered) is not a
move of its own: as Aceso attaches it to any primitive that changes memory, each stage that a
primitive touches redoes as little as fits (`MeshOptions.solve`).

Complexity: hops x primitives estimates an iteration; primitives <= 6 x stages. Left out: tp degrees
of single ops inside a stage (a stage has one mesh), and its parallel start of all stage numbers. A
cost model gives a group's tp collectives inside its seconds, so they count as compute.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import lcm

import numpy as np

from rlplace.plan.check import legal_micro_batches
from rlplace.plan.types import Instance, Mesh, Plan, Stage
from rlplace.plan.uniform import make_plan
from rlplace.planners.costing import Costing
from rlplace.planners.galvatron import balanced
from rlplace.planners.mesh_options import MeshTables
from rlplace.planners.meshes import device_orders, whole
from rlplace.planners.search import Search, objective
from rlplace.planners.types import Budget, PlannerResult
from rlplace.simulate.types import Estimate

_HOPS = 4
_BREADTH = 3
#: Configurations that the search starts anew from, for each number of stages.
_RESTARTS = 12
#: Improvements smaller than this share are none: they would use up the hops.
_LEAST = 1e-6


@dataclass(frozen=True, slots=True)
class Config:
    """A configuration of the search.

    Args:
        bounds: First group of each stage, and the number of groups.
        widths: Devices of each stage, in the order of the line.
        tps: Tp degree of each stage.
        micro_batches: Of a step.
    """

    bounds: tuple[int, ...]
    widths: tuple[int, ...]
    tps: tuple[int, ...]
    micro_batches: int


def aceso(
    instance: Instance, budget: Budget, rng: np.random.Generator, costing: Costing | None = None
) -> PlannerResult:
    """The best configuration that the moves lead to, over all numbers of stages and orders."""
    search = Search("aceso", costing or Costing(instance), budget)
    most = min(len(instance.cluster.devices), len(instance.graph.groups))
    for order in device_orders(instance):
        for stages in range(1, most + 1):
            if len(order) % stages and len(order) > 8:
                continue
            if search.stopped:
                return search.result()
            _Moves(search, MeshTables(search.costing), order).run(stages)
    return search.result()


@dataclass
class _Moves:
    """The search on one line of devices."""

    search: Search
    tables: MeshTables
    order: tuple[int, ...]
    _seen: dict[Config, tuple[float, Estimate]] = field(default_factory=dict)
    _stages: dict[tuple[object, ...], Stage] = field(default_factory=dict)
    _even_out: dict[Config, tuple[int, ...]] = field(default_factory=dict)

    def run(self, stages: int) -> None:
        """Improve from equal stages until no configuration that was seen leads further."""
        current, restarts, searched = self._start(stages), 0, set[Config]()
        while current is not None and restarts <= _RESTARTS and not self.search.stopped:
            searched.add(current)
            better = self._hop(current, self._value(current), _HOPS, searched)
            if better is None:
                restarts += 1
                fresh = [config for config in self._seen if config not in searched]
                better = min(fresh, key=self._value, default=None)
            current = better

    def _start(self, stages: int) -> Config | None:
        """Equal stages of replicas, of the smallest micro-batch; fewer devices if they must."""
        instance = self.search.costing.instance
        for width in range(len(self.order) // stages, 0, -1):
            for tp in instance.offered_tp:
                if width % tp:
                    continue
                legal = legal_micro_batches(instance.global_batch, width // tp)
                for number in reversed(legal):
                    shape = ((width,) * stages, (tp,) * stages, number)
                    config = Config(tuple(range(stages + 1)), *shape)
                    if self._legal(config):
                        return self._balanced(config)
        return None

    def _balanced(self, config: Config) -> Config:
        """With stages of equal seconds."""
        number, key = config.micro_batches, replace(config, bounds=())
        if key not in self._even_out:
            options = [self.tables.options(mesh, number) for mesh in self._meshes(config)]
            loads = [(number * own.work + own.once).min(axis=1) for own in options]
            self._even_out[key] = balanced(np.array(loads))
        return replace(config, bounds=self._even_out[key])

    def _meshes(self, config: Config) -> list[Mesh]:
        ends = list(accumulate(config.widths, initial=0))
        return [
            Mesh(self.order[first:last], 1, (last - first) // tp, 1, tp)
            for (first, last), tp in zip(pairwise(ends), config.tps, strict=True)
        ]

    def _legal(self, config: Config) -> bool:
        micro_batch = self.search.costing.instance.global_batch // config.micro_batches
        return (
            all(a < b for a, b in pairwise(config.bounds))
            and sum(config.widths) <= len(self.order)
            and all(
                width >= 1 and width % tp == 0 and micro_batch % (width // tp) == 0
                for width, tp in zip(config.widths, config.tps, strict=True)
            )
            and all(self._known(mesh) for mesh in self._meshes(config))
        )

    def _known(self, mesh: Mesh) -> bool:
        """Whether a mesh may be a stage's, and every group has a choice on it."""
        solver = self.search.costing.solver
        if mesh.tp > 1 and not whole(solver.instance, mesh.devices, mesh.tp):
            return False
        return mesh.tp in solver.instance.offered_tp and solver.usable(mesh)

    def _value(self, config: Config) -> float:
        if config not in self._seen:
            estimate = self.search.offer(self._plan(config))
            self._seen[config] = (objective(self.search.costing.instance, estimate), estimate)
        return self._seen[config][0]

    def _plan(self, config: Config) -> Plan:
        number, stages = config.micro_batches, []
        for index, (span, mesh) in enumerate(
            zip(pairwise(config.bounds), self._meshes(config), strict=True)
        ):
            held = min(number, len(config.widths) - index)
            key = (*span, mesh, number, held)
            if key not in self._stages:
                _, choices = self.tables.options(mesh, number).solve(*span, number, held)
                self._stages[key] = Stage(*span, mesh, choices)
            stages.append(self._stages[key])
        return make_plan(self.search.costing.instance, tuple(stages), number)

    def _hop(
        self, config: Config, target: float, hops: int, searched: set[Config]
    ) -> Config | None:
        """A configuration that is better than `target`, at most so many primitives away."""
        reached: list[tuple[float, int, Config]] = []
        for number, other in enumerate(self._primitives(config)):
            if self.search.stopped:
                return None
            value = self._value(other)
            if value < target - _LEAST:
                return other
            if other not in searched:
                reached.append((value, number, other))
        if hops <= 1:
            return None
        for _, _, other in heapq.nsmallest(_BREADTH, reached):
            if other in searched:
                continue
            searched.add(other)
            found = self._hop(other, target, hops - 1, searched)
            if found is not None:
                return found
        return None

    def _primitives(self, config: Config) -> Iterator[Config]:
        """Legal primitives for the bottleneck, those first that relieve what it lacks."""
        loads, lacks = self._loads(config)
        slow = int(np.argmax(loads))
        partners = [int(stage) for stage in np.argsort(loads, kind="stable") if stage != slow]
        moves = [*self._hand_on(config, slow, partners)]
        devices = [*_take(config, slow, partners, len(self.order) - sum(config.widths))]
        trade = [*_trade(config, slow)]
        batches = [*self._batches(config, fewer=lacks == "communication")]
        ordered = {
            "compute": (moves, devices, trade, batches),
            "communication": (trade, batches, moves, devices),
            "memory": (moves, batches, devices, trade),
        }[lacks]
        for kind in ordered:
            for other in kind:
                fitted = self._fitted(other)
                if self._legal(fitted):
                    yield fitted

    def _fitted(self, config: Config) -> Config:
        """With larger micro-batches, where its replicas do not divide them."""
        samples = self.search.costing.instance.global_batch
        shapes = zip(config.widths, config.tps, strict=True)
        dp = lcm(*(max(1, width // tp) for width, tp in shapes))
        legal = [n for n in legal_micro_batches(samples, dp) if n <= config.micro_batches]
        return replace(config, micro_batches=legal[-1]) if legal else config

    def _loads(self, config: Config) -> tuple[list[float], str]:
        """How loaded each stage is, and what the most loaded one lacks."""
        instance, (_, estimate) = self.search.costing.instance, self._seen[config]
        if not estimate.feasible:
            full = [
                max(estimate.peak_memory[d] / instance.memory_limit(d) for d in mesh.devices)
                for mesh in self._meshes(config)
            ]
            return full, "memory"
        number = config.micro_batches
        work = [number * (stage.forward + stage.backward) for stage in estimate.stages]
        rest = [stage.reduce for stage in estimate.stages]
        loads = [a + b for a, b in zip(work, rest, strict=True)]
        slow = int(np.argmax(loads))
        return loads, "communication" if rest[slow] > work[slow] else "compute"

    def _hand_on(self, config: Config, slow: int, partners: list[int]) -> Iterator[Config]:
        """One group, or as many as even the two out, to a partner, through those between."""
        own = config.bounds[slow + 1] - config.bounds[slow]
        for to in partners:
            for groups in dict.fromkeys((1, max(1, own // 4))):
                step = groups if to < slow else -groups
                touched = range(to + 1, slow + 1) if to < slow else range(slow + 1, to + 1)
                bounds = tuple(b + step * (i in touched) for i, b in enumerate(config.bounds))
                yield replace(config, bounds=bounds)
        if len(config.widths) > 1:
            yield self._balanced(config)

    def _batches(self, config: Config, *, fewer: bool) -> Iterator[Config]:
        legal = legal_micro_batches(self.search.costing.instance.global_batch, 1)
        at = legal.index(config.micro_batches)
        for step in (-1, 1) if fewer else (1, -1):
            if 0 <= at + step < len(legal):
                yield replace(config, micro_batches=legal[at + step])


def _take(config: Config, slow: int, partners: list[int], idle: int) -> Iterator[Config]:
    """More devices for the bottleneck, idle ones or a partner's: more dp, or more tp."""
    for giver in (None, *partners) if idle else partners:
        spare = idle if giver is None else config.widths[giver] - 1
        for size in dict.fromkeys((min(config.widths[slow], spare), 1)):
            if not 0 < size <= spare:
                continue
            widths, tps = list(config.widths), list(config.tps)
            widths[slow] += size
            if giver is not None:
                widths[giver] -= size
                while widths[giver] % tps[giver]:
                    tps[giver] -= 1
            for tp in dict.fromkeys((tps[slow], 2 * tps[slow], 1)):
                with_tp = tuple(tp if i == slow else old for i, old in enumerate(tps))
                yield replace(config, widths=tuple(widths), tps=with_tp)


def _trade(config: Config, slow: int) -> Iterator[Config]:
    """Twice the tp and half the dp, or the other way round: of the bottleneck, or of all."""
    for factor in (2, 0.5):
        for stages in dict.fromkeys(((slow,), tuple(range(len(config.tps))))):
            tps = tuple(
                max(1, int(tp * factor)) if i in stages else tp for i, tp in enumerate(config.tps)
            )
            if tps != config.tps:
                yield replace(config, tps=tps)
