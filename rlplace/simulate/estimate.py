"""A plan's step time, memory and breakdown: stage costs through the event simulator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from rlplace.cost.analytic import AnalyticCost
from rlplace.cost.collectives import point_to_point
from rlplace.cost.exchanges import crossing_samples
from rlplace.cost.memory import StateBytes
from rlplace.cost.types import CostModel
from rlplace.plan import schedules
from rlplace.plan.check import check
from rlplace.plan.types import Instance, Mesh, Plan, Stage
from rlplace.simulate.events import predicted_events
from rlplace.simulate.flow import Flow, flow
from rlplace.simulate.orders import Ints, Orders
from rlplace.simulate.peaks import lane_use
from rlplace.simulate.stages import StageCost, boundaries, stage_cost, tied_states, users
from rlplace.simulate.timeline import (
    AT_ONCE,
    BEGIN,
    BESIDE,
    END,
    IN_TURN,
    LAST,
    REDUCED,
    Durations,
    Floats,
    Times,
    simulate,
)
from rlplace.simulate.types import (
    CriticalPath,
    Estimate,
    MemoryUse,
    StageEstimate,
    Timeline,
)
from rlplace.units import format_bytes, ranges

#: `Framework.sends` as the simulator has them.
_SENDS = {"beside": BESIDE, "at once": AT_ONCE, "in turn": IN_TURN}


@dataclass(frozen=True, slots=True)
class _Run:
    """A simulated step: costs by stage, the lane of each stage, and what happens when."""

    costs: list[StageCost]
    lanes: tuple[Mesh, ...]
    owner: tuple[int, ...]
    flow: Flow
    times: Times


@dataclass(frozen=True, slots=True)
class _Alike:
    """Devices of a mesh that are of one kind, with its limit and reserve in bytes."""

    kind: str
    limit: float
    reserve: float
    devices: tuple[int, ...]


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
    _kinds: dict[Mesh, tuple[_Alike, ...]] = field(default_factory=dict)
    _replicas: dict[tuple[Stage, int, str, int], StageCost] = field(default_factory=dict)
    _as_kinds: dict[tuple[Mesh, str], Instance] = field(default_factory=dict)

    def __post_init__(self) -> None:
        instance = self.instance
        cluster, dtype = instance.cluster, instance.bytes.compute
        self._reads = boundaries(instance.graph)
        self._pinned = {
            device.index: (device.node, device.core)
            for device in cluster.devices
            if device.core is not None
        }
        peak = {kind.name: kind.peak_flops[dtype] for kind in cluster.kinds}
        self._peak = sum(peak[device.kind] for device in cluster.devices)
        self._flops = instance.graph.model_flops(instance.global_batch)

    def estimate(self, plan: Plan) -> Estimate:
        """The estimate of a legal plan (legality is not checked here)."""
        self.evaluations += 1
        run = self._run(plan)
        execution = self.instance.execution
        step_time = run.times.seconds + execution.step_overhead
        parts = self._parts(plan, run)
        used = [
            (alike, use.within(alike.reserve, execution.fragmentation, execution.cached), phase)
            for alike, use, phase in self._used(plan, run, parts)
        ]
        memory, phases, totals = self._by_device(used)
        reasons = _reasons([(alike, use.total) for alike, use, _ in used])
        samples = self.instance.global_batch
        return Estimate(
            step_time=step_time,
            band=(step_time * execution.band[0], step_time * execution.band[1]),
            peak_memory=totals,
            feasible=not reasons,
            reasons=reasons,
            stages=_breakdown(run, parts, plan.micro_batches),
            memory=memory,
            tokens_per_s=samples * self.instance.graph.tokens_per_sample / step_time,
            mfu=self._flops / step_time / self._peak,
            peak_phase=phases,
            critical=_critical(run, plan.micro_batches),
        )

    def timeline(self, plan: Plan) -> Timeline:
        """The predicted events of one step, for pictures and traces."""
        run = self._run(plan)
        meshes = [stage.mesh for stage in plan.stages]
        transfer = [self._transfer(plan, cut) for cut in range(1, len(meshes))]
        events = predicted_events(run.flow.order, run.times, meshes, transfer)
        return Timeline(tuple(events), "predicted")

    def _run(self, plan: Plan) -> _Run:
        """Simulate one step."""
        costs = [self._stage(stage, plan.micro_batches) for stage in plan.stages]
        lanes = schedules.lanes(plan)
        number = {mesh: index for index, mesh in enumerate(lanes)}
        owner = tuple(number[stage.mesh] for stage in plan.stages)
        found = flow(plan.schedule, owner, plan.micro_batches, plan.orders)
        durations = self._durations(plan, costs, lanes, owner, found.order)
        return _Run(costs, lanes, owner, found, simulate(found.order, durations))

    def _stage(self, stage: Stage, micro_batches: int) -> StageCost:
        key = (stage, micro_batches)
        if key not in self._stages:
            self._stages[key] = (
                self._slowest(stage, micro_batches)
                if stage.shares
                else stage_cost(self.instance, stage, micro_batches, self.cost, self._reads)
            )
        return self._stages[key]

    def _used(
        self, plan: Plan, run: _Run, parts: list[MemoryUse]
    ) -> Iterator[tuple[_Alike, MemoryUse, str]]:
        """Peak and its phase of all devices, of those that are alike at once."""
        for lane, (mesh, (use, phase)) in enumerate(zip(run.lanes, _uses(run, parts), strict=True)):
            if any(stage.shares for stage in plan.stages if stage.mesh == mesh):
                yield from self._unequal(plan, run, lane)
            else:
                yield from ((alike, use, phase) for alike in self._alike(mesh))

    def _unequal(self, plan: Plan, run: _Run, lane: int) -> Iterator[tuple[_Alike, MemoryUse, str]]:
        """What each device of a lane holds whose replicas have different samples."""
        mesh, cluster = run.lanes[lane], self.instance.cluster
        per_replica = mesh.cp * mesh.tp
        for place, device in enumerate(mesh.devices):
            costs = [
                self.replica(stage, plan.micro_batches, place // per_replica, device)
                if stage.mesh == mesh
                else cost
                for stage, cost in zip(plan.stages, run.costs, strict=True)
            ]
            own = replace(run, costs=costs)
            use, phase = _uses(own, self._parts(plan, own))[lane]
            kind = cluster.kind(device)
            reserve = kind.reserve + self.instance.execution.reserve
            yield (
                _Alike(kind.name, self.instance.memory_limit(device), reserve, (device,)),
                use,
                phase,
            )

    def _slowest(self, stage: Stage, micro_batches: int) -> StageCost:
        """The cost of the replica that takes longest with its samples on its devices."""
        per_replica = stage.mesh.cp * stage.mesh.tp
        every = [
            self.replica(stage, micro_batches, place // per_replica, device)
            for place, device in enumerate(stage.mesh.devices)
        ]
        return max(every, key=lambda cost: cost.forward + cost.backward)

    def replica(self, stage: Stage, micro_batches: int, replica: int, device: int) -> StageCost:
        """The cost of a stage if all its replicas were as one of them, on one of its devices.

        So its collectives are those of the whole mesh, and its compute is its own.

        Args:
            stage: The stage.
            micro_batches: Of a step.
            replica: Which of the replicas has the samples.
            device: Of the mesh; all are of its kind.
        """
        kind = self.instance.cluster.devices[device].kind
        samples = stage.samples(self.instance.global_batch // micro_batches)[replica]
        key = (stage, micro_batches, kind, samples)
        if key not in self._replicas:
            self._replicas[key] = stage_cost(
                self._as_kind(stage.mesh, kind),
                stage,
                micro_batches,
                self.cost,
                self._reads,
                samples,
            )
        return self._replicas[key]

    def _as_kind(self, mesh: Mesh, kind: str) -> Instance:
        """The instance with all devices of a mesh of one kind."""
        if (mesh, kind) not in self._as_kinds:
            cluster = self.instance.cluster
            devices = tuple(
                replace(device, kind=kind) if device.index in mesh.devices else device
                for device in cluster.devices
            )
            made = replace(self.instance, cluster=replace(cluster, devices=devices))
            self._as_kinds[mesh, kind] = made
        return self._as_kinds[mesh, kind]

    def _durations(
        self,
        plan: Plan,
        costs: list[StageCost],
        lanes: tuple[Mesh, ...],
        owner: tuple[int, ...],
        order: Orders,
    ) -> Durations:
        """Seconds of everything in the plan, for the simulator."""
        forward, backward, weight = np.array(
            [(cost.forward, cost.backward, cost.weight_backward) for cost in costs]
        ).T
        buckets = [bucket for cost in costs for bucket in cost.buckets]
        counts = [len(cost.buckets) for cost in costs]
        ready = np.array([(b.ready, b.ready_apart) for b in buckets]).reshape(-1, 2)
        joint = self._joint(plan, lanes, owner)
        return Durations(
            seconds=np.concatenate([forward, backward, backward - weight, weight]),
            transfer=np.array([self._transfer(plan, cut) for cut in range(1, len(costs))]),
            sends=np.array([self._sends(plan, cut) for cut in range(1, len(costs))], np.int64),
            optimizer=np.bincount(owner, weights=[cost.optimizer for cost in costs]).astype(float),
            bucket_first=np.cumsum([0, *counts]),
            bucket_seconds=np.array([bucket.seconds for bucket in buckets]),
            bucket_ready=np.where(np.repeat(order.split, counts), ready[:, 1], ready[:, 0]),
            late=np.array([cost.late_reduce for cost in costs]),
            joint_one=np.array([pair[0] for pair, _ in joint], np.int64),
            joint_other=np.array([pair[1] for pair, _ in joint], np.int64),
            joint_seconds=np.array([seconds for _, seconds in joint]),
            cores=self._cores(lanes),
        )

    def _transfer(self, plan: Plan, cut: int) -> float:
        """Seconds of one micro-batch from stage `cut - 1` to stage `cut`."""
        before, after = plan.stages[cut - 1], plan.stages[cut]
        if before.mesh == after.mesh:
            return 0.0
        floats, other = self.instance.graph.crossings[after.start]
        size = crossing_samples(before, after, plan.micro_batch)
        return self.cost.transfer(self.instance, before.mesh, after.mesh, floats(size), other(size))

    def _sends(self, plan: Plan, cut: int) -> int:
        """Whether, and how, a micro-batch on its way over a cut blocks its stages."""
        execution = self.instance.execution
        if execution.sends == "beside":
            return BESIDE
        before, after = plan.stages[cut - 1].mesh, plan.stages[cut].mesh
        floats, other = self.instance.graph.crossings[plan.stages[cut].start]
        size = plan.micro_batch
        whole = floats(size) * self.instance.bytes.activation + other(size)
        ranks = max(before.dp, after.dp) * (after.tp if execution.parts else 1)
        return _SENDS[execution.sends] if whole / ranks > execution.buffer else BESIDE

    def _cores(self, lanes: tuple[Mesh, ...]) -> Ints:
        """One number for all lanes that share a core, directly or through others."""
        label = list(range(len(lanes)))
        if self._pinned:
            owner: dict[tuple[int, int], int] = {}
            for index, mesh in enumerate(lanes):
                for core in {self._pinned[d] for d in mesh.devices if d in self._pinned}:
                    other, mine = label[owner.setdefault(core, index)], label[index]
                    label = [other if value == mine else value for value in label]
        return np.array(label, np.int64)

    def _joint(
        self, plan: Plan, lanes: tuple[Mesh, ...], owner: tuple[int, ...]
    ) -> list[tuple[tuple[int, int], float]]:
        """Pairs of lanes that sum the gradient of a parameter that both hold, and the seconds."""
        found = []
        for name, elements in self.instance.graph.tied:
            having = [
                lane
                for lane, stage in zip(owner, plan.stages, strict=True)
                if users(self.instance.graph, stage, name)
            ]
            size = float(elements * self.instance.bytes.gradient)
            for pair in pairwise(dict.fromkeys(having)):
                first, second = (lanes[lane].devices[:1] for lane in pair)
                way = point_to_point(self.instance.cluster, first, second, size)
                found.append((pair, 2 * way))
        return found

    def _alike(self, mesh: Mesh) -> tuple[_Alike, ...]:
        if mesh not in self._kinds:
            cluster = self.instance.cluster
            found: dict[str, list[int]] = {}
            for device in mesh.devices:
                found.setdefault(cluster.devices[device].kind, []).append(device)
            self._kinds[mesh] = tuple(
                _Alike(
                    kind,
                    self.instance.memory_limit(own[0]),
                    cluster.kind(own[0]).reserve + self.instance.execution.reserve,
                    tuple(own),
                )
                for kind, own in found.items()
            )
        return self._kinds[mesh]

    def _by_device(
        self, used: list[tuple[_Alike, MemoryUse, str]]
    ) -> tuple[tuple[MemoryUse, ...], tuple[str, ...], tuple[float, ...]]:
        """Use, phase and total by device; equal devices share an object: there may be thousands."""
        count = len(self.instance.cluster.devices)
        memory, phases, totals = [MemoryUse()] * count, [""] * count, [0.0] * count
        for alike, use, phase in used:
            total = use.total
            for device in alike.devices:
                memory[device], phases[device], totals[device] = use, phase, total
        return tuple(memory), tuple(phases), tuple(totals)

    def _parts(self, plan: Plan, run: _Run) -> list[MemoryUse]:
        """Each stage's part of what a device of its mesh holds.

        A tied parameter that an earlier stage of the same mesh holds is that one's part: a V
        schedule, whose first and last stage share a mesh, needs no copy.
        """
        found = []
        for index, (stage, cost, held) in enumerate(
            zip(plan.stages, run.costs, run.flow.held, strict=True)
        ):
            shared = self._shared(plan, index)
            found.append(
                MemoryUse(
                    params=cost.params - sum(states.params for states in shared),
                    gradients=cost.gradients - sum(states.gradients for states in shared),
                    optimizer=cost.optimizer_states - sum(states.optimizer for states in shared),
                    activations=held * (cost.saved - cost.saved_logits),
                    logits=held * cost.saved_logits + cost.transient_logits,
                    transient=cost.transient - cost.transient_logits,
                    reserve=self._alike(stage.mesh)[0].reserve,
                )
            )
        return found

    def _shared(self, plan: Plan, index: int) -> list[StateBytes]:
        """States of a stage that an earlier stage of its mesh holds."""
        graph, stage = self.instance.graph, plan.stages[index]
        found = []
        for tied in graph.tied:
            own = users(graph, stage, tied[0])
            before = (other for other in plan.stages[:index] if other.mesh == stage.mesh)
            if own and any(users(graph, other, tied[0]) for other in before):
                choice = stage.choices[own[0].index - stage.start]
                found.append(tied_states(self.instance, own[0], choice, stage.mesh, tied))
        return found


def _uses(run: _Run, parts: list[MemoryUse]) -> list[tuple[MemoryUse, str]]:
    """Peak and its phase, by lane."""
    own: list[list[MemoryUse]] = [[] for _ in run.lanes]
    for lane, part in zip(run.owner, parts, strict=True):
        own[lane].append(part)
    return [lane_use(own[i], moments, run.costs) for i, moments in enumerate(run.flow.peaks)]


def _reasons(used: Sequence[tuple[_Alike, float]]) -> tuple[str, ...]:
    """One line for all devices of a kind that miss by the same."""
    over: dict[tuple[str, float, float], list[int]] = {}
    for alike, size in used:
        if size > alike.limit:
            over.setdefault((alike.kind, size, alike.limit), []).extend(alike.devices)
    return tuple(
        f"device{'s' if len(found) > 1 else ''} {ranges(sorted(found))} ({kind}) "
        f"need{'' if len(found) > 1 else 's'} {format_bytes(size)}, "
        f"{format_bytes(size - limit)} over the limit of {format_bytes(limit)}"
        for (kind, size, limit), found in sorted(over.items(), key=lambda item: min(item[1]))
    )


def _compute(run: _Run, micro_batches: int) -> Floats:
    """Seconds of all actions of each lane."""
    each = [micro_batches * (cost.forward + cost.backward) for cost in run.costs]
    return np.bincount(run.owner, weights=each).astype(float)


def _critical(run: _Run, micro_batches: int) -> CriticalPath:
    tails = run.times.tails
    lane = int(tails[END].argmax())
    compute = float(_compute(run, micro_batches)[lane])
    last, begin, end = (float(tails[at, lane]) for at in (LAST, BEGIN, END))
    return CriticalPath(compute, last - compute, begin - last, end - begin)


def _breakdown(run: _Run, parts: list[MemoryUse], micro_batches: int) -> tuple[StageEstimate, ...]:
    tails = run.times.tails
    reduce = tails[REDUCED] - tails[LAST]
    busy = _compute(run, micro_batches) + reduce + tails[END] - tails[BEGIN]
    idle = np.maximum(0.0, 1.0 - busy / run.times.seconds)
    return tuple(
        StageEstimate(
            forward=cost.forward,
            backward=cost.backward,
            reduce=float(reduce[lane]),
            optimizer=cost.optimizer,
            idle=float(idle[lane]),
            in_flight=held,
            memory=part,
            weight_backward=cost.weight_backward,
        )
        for cost, lane, held, part in zip(run.costs, run.owner, run.flow.held, parts, strict=True)
    )


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
