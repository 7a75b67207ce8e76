"""The stage-wise builder: micro-batches and device order first, then stages from the last one.

The last stage comes first because then the number of micro-batches in flight of every stage in a
1F1B pipeline is known (stages behind it + 1), and so is its memory. A stage takes the last devices
that remain of the line; which line (order of islands) is part of the first decision. Devices that
no stage takes stay idle at the head of the line. The heuristic score of a candidate is minus the
logarithm of the best completion that `outlook` sees behind it, over the bound of the instance.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace

import numpy as np

from rlplace.envs.bank import instance_key
from rlplace.envs.builders.desk import FINE, Desk, Outlook
from rlplace.envs.builders.options import Options, first_options, stage_options
from rlplace.envs.features import instance_view
from rlplace.envs.types import Candidates, InstanceView
from rlplace.plan.types import GroupChoice, Instance, Mesh, Plan, Stage
from rlplace.plan.uniform import make_plan

#: Instances that a builder remembers, and bytes of their tables.
_KEPT_DESKS, _KEPT_BYTES = 256, 2**30


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """A stage that has been decided: groups [start, stop) on a mesh, and the way they run."""

    start: int
    stop: int
    mesh: Mesh
    way: int


@dataclass(frozen=True)
class Progress:
    """The stages so far, last one first, and what they add up to.

    Args:
        stages: Decided, the last stage of the pipeline first.
        free: Devices that remain, at the head of the line.
        stop: Index of the cut before which groups remain.
        total: Seconds of the stages and transfers of one micro-batch.
        slowest: Seconds of the slowest stage.
        steady: Seconds of the steady state (see `outlook`).
        excess: Of the worst run of stages that begins at the one decided last.
        length: Stages of that run.
        edge: Seconds of the stage decided last.
        tail: Longest tail beyond the backward of the stages so far.
        overflow: Sum of shares by which stages exceed their memory.
    """

    stages: tuple[PlacedStage, ...] = ()
    free: int = 0
    stop: int = 0
    total: float = 0.0
    slowest: float = 0.0
    steady: float = 0.0
    excess: float = 0.0
    length: float = 0.0
    edge: float = 0.0
    tail: float = 0.0
    overflow: float = 0.0


@dataclass(frozen=True)
class StagewiseState:
    """A state of the builder.

    Args:
        desk: What is known about the instance.
        relabel: Global rank that stands for each device (a permutation of symmetric devices).
        outlook: What is ahead, None before the first decision.
        progress: The stages so far.
    """

    desk: Desk
    relabel: tuple[int, ...]
    outlook: Outlook | None = None
    progress: Progress = field(default_factory=Progress)

    @property
    def instance(self) -> Instance:
        """The question."""
        return self.desk.instance


@dataclass
class StagewiseBuilder:
    """See the module docstring; obeys `rlplace.envs.types.Builder`.

    Args:
        refined: First decisions whose outlook is worked out in full; the others keep a rough one.
    """

    refined: int = 1

    def __post_init__(self) -> None:
        self._desks: OrderedDict[tuple[object, ...], Desk] = OrderedDict()
        self._memo: tuple[StagewiseState, Options] | None = None

    def start(self, instance: Instance, rng: np.random.Generator | None = None) -> StagewiseState:
        """The first state; `rng` permutes symmetric devices (None: the given order)."""
        desk = self._desk(instance)
        ranks = tuple(range(len(instance.cluster.devices)))
        relabel = ranks if rng is None else permute_symmetric(instance, rng)
        return StagewiseState(desk, relabel)

    def view(self, state: StagewiseState) -> InstanceView:
        """The constant part; symmetric devices look alike, so a permutation does not show."""
        return instance_view(state.instance, state.desk.bound)

    def candidates(self, state: StagewiseState) -> Candidates:
        """What may be decided next, best heuristic first.

        Raises:
            ValueError: If the state is done.
        """
        return self._options(state).candidates

    def apply(self, state: StagewiseState, index: int) -> StagewiseState:
        """The state after choosing a candidate.

        Raises:
            ValueError: If there is no such candidate or it is masked.
        """
        options = self._options(state)
        if not 0 <= index < len(options.candidates.mask):
            raise ValueError(f"index={index}: there are {len(options.candidates.mask)} candidates")
        if not options.candidates.mask[index]:
            raise ValueError(f"index={index}: the candidate is masked")
        if state.outlook is None:
            count, line = options.first[index]
            outlook = state.desk.outlook(count, line, FINE)
            progress = Progress(free=len(outlook.line.devices), stop=len(outlook.cuts) - 1)
            return replace(state, outlook=outlook, progress=progress)
        return replace(state, progress=_advance(state.outlook, state.progress, options, index))

    def done(self, state: StagewiseState) -> bool:
        """Whether the plan is complete."""
        return state.outlook is not None and state.progress.stop == 0

    def plan(self, state: StagewiseState) -> Plan:
        """The plan of a complete state, the choices inside its stages solved exactly.

        Raises:
            ValueError: If the state is not done.
        """
        if state.outlook is None or state.progress.stop:
            raise ValueError("the state is not done: groups remain to be placed")
        count = state.outlook.micro_batches
        stages = []
        for behind, placed in enumerate(state.progress.stages):
            choices = _choices(state.desk, placed, count, min(count, behind + 1))
            devices = tuple(state.relabel[device] for device in placed.mesh.devices)
            mesh = replace(placed.mesh, devices=devices)
            stages.append(Stage(placed.start, placed.stop, mesh, choices))
        return make_plan(state.instance, tuple(reversed(stages)), count)

    def first_decisions(self, state: StagewiseState) -> tuple[tuple[int, int], ...]:
        """(Micro-batch count, index of the line of devices) of each candidate of a first state."""
        return self._options(state).first

    def stage_decisions(self, state: StagewiseState) -> tuple[tuple[int, Mesh], ...]:
        """(First group, mesh) of each candidate of a state after the first."""
        options, outlook = self._options(state), state.outlook
        assert outlook is not None
        return tuple(
            (int(outlook.cuts[start]), outlook.line.meshes[outlook.usable[mesh]])
            for mesh, start in options.stages
        )

    def _options(self, state: StagewiseState) -> Options:
        if self._memo is not None and self._memo[0] is state:
            return self._memo[1]
        if self.done(state):
            raise ValueError("the state is done: nothing is left to decide")
        if state.outlook is None:
            options = first_options(state.desk, self.refined)
        else:
            options = stage_options(state.desk, state.outlook, state.progress)
        self._memo = (state, options)
        return options

    def _desk(self, instance: Instance) -> Desk:
        key = instance_key(instance)
        if key not in self._desks:
            self._desks[key] = Desk(instance)
            while len(self._desks) > 1 and self._crowded():
                self._desks.popitem(last=False)
        self._desks.move_to_end(key)
        return self._desks[key]

    def _crowded(self) -> bool:
        kept = sum(desk.bytes for desk in self._desks.values())
        return len(self._desks) > _KEPT_DESKS or kept > _KEPT_BYTES


def _choices(desk: Desk, placed: PlacedStage, count: int, held: int) -> tuple[GroupChoice, ...]:
    """The choices inside a stage: the solver's, or those that the outlook counted on if better."""
    solver, span = desk.solver, (placed.start, placed.stop)
    solved = solver.choices(*span, placed.mesh, count, held)
    planned = desk.rates.choices(desk.rates.number(placed.mesh), count, placed.way)
    both = (solved, planned[placed.start : placed.stop])
    return min(both, key=lambda choices: desk.weigh(placed.mesh, choices, *span, count, held))


def permute_symmetric(instance: Instance, rng: np.random.Generator) -> tuple[int, ...]:
    """A random permutation of the devices that maps the cluster onto itself.

    Devices change places inside their node, and nodes of one island with equally many devices
    change places with each other. With pairwise links or shared cores nothing is known to be
    symmetric, and the identity comes back.
    """
    cluster = instance.cluster
    relabel = list(range(len(cluster.devices)))
    if cluster.overrides or any(device.core is not None for device in cluster.devices):
        return tuple(relabel)
    kinds: dict[object, list[list[int]]] = {}
    for node in cluster.nodes:
        members = [device.index for device in cluster.devices if device.node == node.index]
        looks = tuple(cluster.devices[index].kind for index in members)
        if len(set(looks)) == 1:
            kinds.setdefault((looks, node.intra, node.nic), []).append(members)
    for nodes in kinds.values():
        for target, source in zip(nodes, rng.permutation(len(nodes)), strict=True):
            shuffled = rng.permutation(nodes[source])
            for device, other in zip(target, shuffled, strict=True):
                relabel[device] = int(other)
    return tuple(relabel)


def _advance(outlook: Outlook, progress: Progress, options: Options, index: int) -> Progress:
    """The progress with one more stage."""
    mesh_index, start = (int(value) for value in options.stages[index])
    mesh = outlook.line.meshes[outlook.usable[mesh_index]]
    behind = min(len(progress.stages), outlook.table.seconds.shape[1] - 1)
    way = outlook.table.way[outlook.local[mesh_index], behind, start, progress.stop]
    placed = PlacedStage(int(outlook.cuts[start]), int(outlook.cuts[progress.stop]), mesh, int(way))
    first = int(outlook.line.firsts[outlook.usable[mesh_index]])
    sums = (float(value) for value in options.after[index])
    return Progress((*progress.stages, placed), first, start, *sums)
