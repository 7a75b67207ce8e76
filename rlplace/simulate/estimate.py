"""A plan's step time, memory and breakdown: stage costs through the event simulator."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from rlplace.cost.analytic import AnalyticCost
from rlplace.cost.collectives import point_to_point
from rlplace.cost.memory import StateBytes
from rlplace.cost.types import CostModel
from rlplace.plan import schedules
from rlplace.plan.check import check
from rlplace.plan.types import Instance, Mesh, Plan, Stage
from rlplace.simulate.stages import StageCost, boundaries, stage_cost, tied_states, users
from rlplace.simulate.timeline import Floats, Ints, Orders, Times, orders, simulate
from rlplace.simulate.types import Estimate, Event, MemoryUse, StageEstimate, Timeline
from rlplace.units import format_bytes, ranges


@dataclass(frozen=True, slots=True)
class _Tail:
    """Seconds at which a lane's last action ends, its reduction ends, its optimizer runs."""

    last: float
    reduced: float
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class _Run:
    """A simulated step: costs by stage, and what happens when on each lane."""

    costs: list[StageCost]
    lanes: tuple[Mesh, ...]
    order: Orders
    times: Times
    tails: list[_Tail]


@dataclass
class Estimator:
    """Estimates plans of one instance; remembers stages, so that a search pays for what changes.

    Args:
        instance: The question.
        cost: The cost model; by default a fresh `AnalyticCost`.
    """

    instance: Instance
    cost: CostModel = field(default_factory=AnalyticCost)
    evaluations: int = 0
    _stages: dict[tuple[Stage, int], StageCost] = field(default_factory=dict)
    _orders: dict[tuple[object, ...], Orders] = field(default_factory=dict)

    def __post_init__(self) -> None:
        instance = self.instance
        devices = range(len(instance.cluster.devices))
        dtype = instance.bytes.compute
        self._reads = boundaries(instance.graph)
        self._limits = [instance.memory_limit(device) for device in devices]
        self._peak = sum(instance.cluster.kind(device).peak_flops[dtype] for device in devices)
        self._flops = instance.graph.model_flops(instance.global_batch)

    def estimate(self, plan: Plan) -> Estimate:
        """The estimate of a legal plan (legality is not checked here)."""
        self.evaluations += 1
        run = self._run(plan)
        step_time = max(tail.end for tail in run.tails)
        memory = self._memory(plan, run.costs)
        totals = _totals(memory)
        reasons = self._reasons(totals)
        samples = self.instance.global_batch
        return Estimate(
            step_time=step_time,
            peak_memory=totals,
            feasible=not reasons,
            reasons=reasons,
            stages=self._breakdown(plan, run, step_time),
            memory=memory,
            tokens_per_s=samples * self.instance.graph.tokens_per_sample / step_time,
            mfu=self._flops / step_time / self._peak,
        )

    def timeline(self, plan: Plan) -> Timeline:
        """The predicted events of one step, for pictures and traces."""
        run = self._run(plan)
        order, times = run.order, run.times
        events: list[Event] = []
        for index, (mesh, tail) in enumerate(zip(run.lanes, run.tails, strict=True)):
            rows = range(order.first[index], order.first[index + 1])
            for device in mesh.devices:
                for row in rows:
                    kind = "B" if order.backward[row] else "F"
                    stage, micro_batch = int(order.stage[row]), int(order.micro_batch[row])
                    start, end = float(times.start[row]), float(times.end[row])
                    events.append(Event(device, kind, stage, micro_batch, start, end))
                stage = int(order.stage[order.first[index]])
                events.append(Event(device, "reduce", stage, 0, tail.last, tail.reduced))
                events.append(Event(device, "optimizer", stage, 0, tail.begin, tail.end))
        return Timeline(tuple(events), "predicted")

    def _run(self, plan: Plan) -> _Run:
        """Simulate one step."""
        costs = [self._stage(stage, plan.micro_batches) for stage in plan.stages]
        lanes = schedules.lanes(plan)
        order, cores = self._order(plan, lanes), self._cores(lanes)
        forward = np.array([cost.forward for cost in costs])
        backward = np.array([cost.backward for cost in costs])
        transfer = np.array([self._transfer(plan, cut) for cut in range(1, len(costs))])
        times = simulate(order, forward, backward, transfer, cores)
        tails = self._tails(
            plan, costs, lanes, np.maximum.reduceat(times.end, order.first[:-1]), cores
        )
        return _Run(costs, lanes, order, times, tails)

    def _stage(self, stage: Stage, micro_batches: int) -> StageCost:
        key = (stage, micro_batches)
        if key not in self._stages:
            self._stages[key] = stage_cost(
                self.instance, stage, micro_batches, self.cost, self._reads
            )
        return self._stages[key]

    def _order(self, plan: Plan, lanes: tuple[Mesh, ...]) -> Orders:
        own = tuple(lanes.index(stage.mesh) for stage in plan.stages)
        key = (plan.schedule, plan.micro_batches, own)
        if key not in self._orders:
            self._orders[key] = orders(schedules.actions(plan))
        return self._orders[key]

    def _transfer(self, plan: Plan, cut: int) -> float:
        """Seconds of one micro-batch from stage `cut - 1` to stage `cut`."""
        before, after = plan.stages[cut - 1], plan.stages[cut]
        if before.mesh == after.mesh:
            return 0.0
        floats, other = self.instance.graph.crossings[after.start]
        size = plan.micro_batch
        return self.cost.transfer(self.instance, before.mesh, after.mesh, floats(size), other(size))

    def _cores(self, lanes: tuple[Mesh, ...]) -> Ints:
        """One number for all lanes that share a core, directly or through others."""
        owner: dict[tuple[int, int], int] = {}
        label = list(range(len(lanes)))
        for index, mesh in enumerate(lanes):
            for device in mesh.devices:
                found = self.instance.cluster.devices[device]
                if found.core is not None:
                    other = label[owner.setdefault((found.node, found.core), index)]
                    mine = label[index]
                    label = [other if value == mine else value for value in label]
        return np.array(label, np.int64)

    def _tails(
        self,
        plan: Plan,
        costs: list[StageCost],
        lanes: tuple[Mesh, ...],
        last: Floats,
        cores: Ints,
    ) -> list[_Tail]:
        """What follows the last action of each lane; optimizers on one core take turns."""
        tied = self._tied_seconds(plan)
        ends: list[tuple[int, float]] = list(zip(cores.tolist(), last.tolist(), strict=True))
        free: dict[int, float] = {}
        for core, end in ends:
            free[core] = max(free.get(core, 0.0), end)
        tails = []
        for mesh, (core, end) in zip(lanes, ends, strict=True):
            own = [c for c, stage in zip(costs, plan.stages, strict=True) if stage.mesh == mesh]
            reduced = end + sum(cost.exposed_reduce for cost in own) + tied
            begin = max(reduced, free[core])
            free[core] = begin + sum(cost.optimizer for cost in own)
            tails.append(_Tail(end, reduced, begin, free[core]))
        return tails

    def _tied_seconds(self, plan: Plan) -> float:
        """Seconds to sum the gradients of parameters that several meshes hold."""
        total = 0.0
        for name, elements in self.instance.graph.tied:
            owners = [s.mesh for s in plan.stages if users(self.instance.graph, s, name)]
            size = float(elements * self.instance.bytes.gradient)
            for before, after in pairwise(dict.fromkeys(owners)):
                first, second = before.devices[:1], after.devices[:1]
                total += 2 * point_to_point(self.instance.cluster, first, second, size)
        return total

    def _memory(self, plan: Plan, costs: list[StageCost]) -> tuple[MemoryUse, ...]:
        """By device; devices with the same use share one object, for there may be thousands."""
        cluster = self.instance.cluster
        uses = [MemoryUse()] * len(cluster.devices)
        parts = self._parts(plan, costs)
        for mesh in schedules.lanes(plan):
            own = [use for use, stage in zip(parts, plan.stages, strict=True) if stage.mesh == mesh]
            known: dict[str, MemoryUse] = {}
            for device in mesh.devices:
                kind = cluster.devices[device].kind
                if kind not in known:
                    known[kind] = _together(own, float(cluster.kind(device).reserve))
                uses[device] = known[kind]
        return tuple(uses)

    def _parts(self, plan: Plan, costs: list[StageCost]) -> list[MemoryUse]:
        """Each stage's part of what a device of its mesh holds.

        A tied parameter that an earlier stage of the same mesh holds is that one's part: a V
        schedule, whose first and last stage share a mesh, needs no copy.
        """
        found = []
        for index, (stage, cost) in enumerate(zip(plan.stages, costs, strict=True)):
            held = schedules.in_flight(plan.schedule, index, len(plan.stages), plan.micro_batches)
            shared = self._shared(plan, index)
            found.append(
                MemoryUse(
                    params=cost.params - sum(states.params for states in shared),
                    gradients=cost.gradients - sum(states.gradients for states in shared),
                    optimizer=cost.optimizer_states - sum(states.optimizer for states in shared),
                    activations=held * (cost.saved - cost.saved_logits),
                    logits=held * cost.saved_logits + cost.transient_logits,
                    transient=cost.transient - cost.transient_logits,
                    reserve=float(self.instance.cluster.kind(stage.mesh.devices[0]).reserve),
                )
            )
        return found

    def _shared(self, plan: Plan, index: int) -> list[StateBytes]:
        """States of a stage that an earlier stage of its mesh holds."""
        graph, stage = self.instance.graph, plan.stages[index]
        before = [other for other in plan.stages[:index] if other.mesh == stage.mesh]
        found = []
        for tied in graph.tied:
            own = users(graph, stage, tied[0])
            if own and any(users(graph, other, tied[0]) for other in before):
                choice = stage.choices[own[0].index - stage.start]
                found.append(tied_states(self.instance, own[0], choice, stage.mesh, tied))
        return found

    def _reasons(self, totals: tuple[float, ...]) -> tuple[str, ...]:
        """One line for all devices of a kind that miss by the same."""
        over: dict[tuple[str, float, float], list[int]] = {}
        for device, (size, limit) in enumerate(zip(totals, self._limits, strict=True)):
            if size > limit:
                kind = self.instance.cluster.devices[device].kind
                over.setdefault((kind, size, limit), []).append(device)
        return tuple(
            f"device{'s' if len(found) > 1 else ''} {ranges(found)} ({kind}) "
            f"need{'' if len(found) > 1 else 's'} {format_bytes(size)}, "
            f"{format_bytes(size - limit)} over the limit of {format_bytes(limit)}"
            for (kind, size, limit), found in over.items()
        )

    def _breakdown(self, plan: Plan, run: _Run, step_time: float) -> tuple[StageEstimate, ...]:
        count, costs = plan.micro_batches, run.costs
        busy = {
            mesh: sum(
                count * (cost.forward + cost.backward) + cost.exposed_reduce + cost.optimizer
                for stage, cost in zip(plan.stages, costs, strict=True)
                if stage.mesh == mesh
            )
            for mesh in run.lanes
        }
        parts = self._parts(plan, costs)
        return tuple(
            StageEstimate(
                forward=cost.forward,
                backward=cost.backward,
                reduce=cost.exposed_reduce,
                optimizer=cost.optimizer,
                idle=max(0.0, 1.0 - busy[stage.mesh] / step_time),
                in_flight=schedules.in_flight(plan.schedule, index, len(plan.stages), count),
                memory=part,
            )
            for index, (stage, cost, part) in enumerate(zip(plan.stages, costs, parts, strict=True))
        )


def _together(parts: list[MemoryUse], reserve: float) -> MemoryUse:
    """What a device holds for all stages of its mesh; one of them runs at a time."""
    if len(parts) == 1:
        return replace(parts[0], reserve=reserve)
    totals = {
        name: sum(getattr(part, name) for part in parts)
        for name in ("params", "gradients", "optimizer", "activations", "logits")
    }
    return MemoryUse(**totals, transient=max(p.transient for p in parts), reserve=reserve)


def _totals(memory: tuple[MemoryUse, ...]) -> tuple[float, ...]:
    """Bytes of each device; each distinct use is summed once."""
    known = {id(use): use for use in memory}
    totals = {key: use.total for key, use in known.items()}
    return tuple(totals[id(use)] for use in memory)


def estimate(instance: Instance, plan: Plan, cost: CostModel | None = None) -> Estimate:
    """The estimate of a plan.

    Args:
        instance: The question.
        plan: The plan; it must be legal for the instance.
        cost: The cost model, `AnalyticCost` by default.

    Raises:
        InputError: If the plan is not legal.
    """
    check(instance, plan)
    return Estimator(instance, cost or AnalyticCost()).estimate(plan)


def timeline(instance: Instance, plan: Plan, cost: CostModel | None = None) -> Timeline:
    """The predicted events of one step of a legal plan."""
    return Estimator(instance, cost or AnalyticCost()).timeline(plan)
