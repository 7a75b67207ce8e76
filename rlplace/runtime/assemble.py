"""From a plan and a model to what one rank runs: its stages, borders, reducer and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rlplace.errors import InputError, nearest_names
from rlplace.graph.types import Placement
from rlplace.plan.schedules import actions, lanes
from rlplace.plan.types import Mesh, Plan
from rlplace.runtime.axes import Axes
from rlplace.runtime.buckets import Replicas
from rlplace.runtime.connections import connections, crossings
from rlplace.runtime.fragments import Fragment, Held, fragments, make_states
from rlplace.runtime.local import CountedAxis, LocalStates
from rlplace.runtime.measure import Recorder
from rlplace.runtime.model import Model, batched_inputs
from rlplace.runtime.parts import StageModule
from rlplace.runtime.reduce import Reducer
from rlplace.runtime.shard import GroupAxis
from rlplace.runtime.split import split
from rlplace.runtime.step import Interpreter, Lane
from rlplace.runtime.ties import Tied
from rlplace.runtime.trained import Ranked, Settings, trained
from rlplace.runtime.transfer import Channel
from rlplace.runtime.weight_slices import WeightSlice
from rlplace.runtime.world import World

#: From parameters, or groups of them with settings of their own, to an optimizer.
OptimizerFactory = Callable[[Any], torch.optim.Optimizer]


@dataclass
class Assembly:
    """What one rank runs; ranks without a stage have no interpreter.

    Args:
        recorder: Notes the events of this rank.
        replica: Index among the replicas of its lane.
        stages: Its stages by index.
        interpreter: Runs its actions.
        reducer: Sums its gradients.
        optimizer: Of its trained parameters.
        channels: Of its borders, both directions.
        axes: Its tp and cp axes.
        placements: How its states are held on tp.
        shapes: Whole shapes of its states.
        tp: Its coordinate on the tp axis, and the size of that.
    """

    recorder: Recorder
    replica: int = 0
    stages: dict[int, StageModule] = field(default_factory=dict)
    interpreter: Interpreter | None = None
    reducer: Reducer | None = None
    optimizer: torch.optim.Optimizer | None = None
    channels: list[Channel] = field(default_factory=list)
    axes: Axes = field(default_factory=Axes)
    placements: dict[str, Placement] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tp: tuple[int, int] = (0, 1)

    def params(self) -> dict[str, nn.Parameter]:
        """Parameters of this rank by fully qualified name, slices by key (`WeightSlice`)."""
        return {n: p for stage in self.stages.values() for n, p in stage.named_parameters()}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Buffers of this rank by fully qualified name."""
        return {n: b for stage in self.stages.values() for n, b in stage.named_buffers()}

    def fragments(self, *, every_state: bool = False) -> list[Fragment]:
        """What this rank's optimizer steps, as views; no collective.

        Gradients, frozen parameters and buffers are not among it. After something was written
        into them, all ranks call `Reducer.refresh`.

        Args:
            every_state: Before the first step an optimizer has no states yet: make them, so that
                they can be filled. Otherwise there are those which it has.
        """
        if self.reducer is None:
            return []
        if every_state and self.optimizer is not None:
            make_states(self.optimizer)
        held = {id(param): self._held(key, param) for key, param in self.params().items()}
        return fragments(self.reducer.runs, held, self.optimizer)

    def _held(self, key: str, param: nn.Parameter) -> Held:
        own = WeightSlice.of(key)
        name = own.name
        return Held(name, self.shapes[name], self.placements[name], *self.tp, own.start(param))


def assemble(
    world: World,
    plan: Plan,
    model: Model,
    make_optimizer: OptimizerFactory,
    overlap: bool,
    bucket_bytes: int,
    seed: int = 0,
    settings: Settings | None = None,
) -> Assembly:
    """Make this rank's part of a plan that was found valid. Every rank calls this.

    Args:
        world: The ranks.
        plan: The plan.
        model: The module with its program and groups.
        make_optimizer: From parameters to an optimizer.
        overlap: Reduce gradients while backward runs.
        bucket_bytes: Gradients that are reduced together.
        seed: Of dropout.
        settings: From a name and a parameter to the optimizer's settings for it; the optimizer is
            then made from parameter groups.
    """
    groups = _groups(world, plan)
    everyone = world.group(plan.devices, "norm") if len(plan.devices) > 1 else None
    shared = dict(shared_params(plan, model))
    tied = {name: world.group(ranks) for name, ranks in shared.items()}
    assembly = Assembly(Recorder(world.rank, world.device))
    mesh = next((mesh for mesh in lanes(plan) if world.rank in mesh.devices), None)
    if mesh is None:
        return assembly
    replicas, *inner = groups[world.rank]
    assembly.replica = mesh.devices.index(world.rank) // (mesh.cp * mesh.tp)
    assembly.axes = Axes(*(CountedAxis(GroupAxis(g)) if g is not None else None for g in inner))
    states = LocalStates(model.states(), world.device, assembly.axes.tp)
    assembly.placements = states.placements
    assembly.stages = _stages(world, plan, model, mesh, states, assembly.axes)
    assembly.shapes = {name: states.shape(name) for name in states.placements}
    borders = connections(world, plan, crossings(model.program, model.graph, plan))
    assembly.channels = [c for b in borders.values() for c in (b.forward, b.backward)]
    params = assembly.params()
    assembly.tp = (mesh.devices.index(world.rank) % mesh.tp, mesh.tp)
    place = Ranked(
        mesh,
        assembly.tp[0],
        frozenset(name for name, ranks in shared.items() if min(ranks) not in mesh.devices),
    )
    assembly.reducer = Reducer(
        trained(assembly.stages, plan, model, place, states.placements, settings),
        replicas,
        [_tie(params[n], n, tied[n], states, place) for n in tied if n in params],
        steps={index: len(stage.states_of_steps) for index, stage in assembly.stages.items()},
        precision=plan.precision,
        overlap=overlap,
        bucket_bytes=bucket_bytes,
        everyone=everyone,
    )
    for index, stage in assembly.stages.items():
        stage.lender = assembly.reducer.lenders[index]
    if assembly.reducer.trained:
        own = assembly.reducer
        assembly.optimizer = make_optimizer(own.param_groups if settings else own.trained)
    assembly.interpreter = Interpreter(
        Lane(
            plan,
            actions(plan),
            lanes(plan).index(mesh),
            assembly.replica,
            batched_inputs(model.program),
        ),
        assembly.stages,
        borders,
        assembly.reducer,
        assembly.optimizer,
        assembly.recorder,
        seed,
    )
    return assembly


def optimizer_factory(name: str | OptimizerFactory, lr: float) -> OptimizerFactory:
    """A function from parameters to an optimizer.

    Args:
        name: ``adamw``, ``sgd``, ``sgd-momentum``, or such a function itself.
        lr: Learning rate of the named ones.

    Raises:
        InputError: If the name is unknown.
    """
    if not isinstance(name, str):
        return name
    known: dict[str, OptimizerFactory] = {
        "adamw": lambda params: torch.optim.AdamW(params, lr=lr, fused=True),
        "sgd": lambda params: torch.optim.SGD(params, lr=lr, fused=True),
        "sgd-momentum": lambda params: torch.optim.SGD(params, lr=lr, momentum=0.9, fused=True),
    }
    if name not in known:
        rule = f"the runtime has {', '.join(known)}; pass a function for any other"
        raise InputError("optimizer", name, rule, nearest_names(name, known))
    return known[name]


def shared_params(plan: Plan, model: Model) -> list[tuple[str, tuple[int, ...]]]:
    """Trained parameters that several meshes hold, with all ranks that do, sorted by name."""
    owners: dict[str, list[Mesh]] = {}
    for stage in plan.stages:
        for group in model.graph.groups[stage.start : stage.stop]:
            for name in group.params:
                if name in model.program.trainable and stage.mesh not in owners.get(name, []):
                    owners.setdefault(name, []).append(stage.mesh)
    return [
        (name, tuple(sorted(device for mesh in meshes for device in mesh.devices)))
        for name, meshes in sorted(owners.items())
        if len(meshes) > 1
    ]


def _groups(world: World, plan: Plan) -> dict[int, tuple[Replicas, Any, Any]]:
    """The dp groups and the cp and tp group of each rank; all ranks make all, in one order."""
    found: dict[int, tuple[Replicas, Any, Any]] = {}
    for mesh in lanes(plan):
        every = _members(world, mesh.dp_groups())
        context, tensor = (_members(world, g) for g in (mesh.cp_groups(), mesh.tp_groups()))
        runs = [members for dp in mesh.dp_groups() for members in _runs(dp, mesh.shards)]
        shards = _members(world, runs)
        columns = [dp[i :: mesh.shards] for dp in mesh.dp_groups() for i in range(mesh.shards)]
        replicate = _members(world, columns)
        level = max(c.zero for stage in plan.stages if stage.mesh == mesh for c in stage.choices)
        gathers = _members(world, runs, "gather") if level == 3 else {}
        scatters = _members(world, runs, "scatter") if level >= 2 else {}
        for rank in mesh.devices:
            kinds = (every, shards, replicate, gathers, scatters)
            replicas = Replicas(*(kind.get(rank) for kind in kinds))
            found[rank] = replicas, context.get(rank), tensor.get(rank)
    world.direction(down=True)
    return found


def _members(world: World, runs: Iterable[tuple[int, ...]], purpose: str = "") -> dict[int, Any]:
    """The process group of each rank, for runs of more than one."""
    return {rank: world.group(run, purpose) for run in runs if len(run) > 1 for rank in run}


def _runs(ranks: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    """Ranks in runs of `size`."""
    return [ranks[start : start + size] for start in range(0, len(ranks), size)]


def _stages(
    world: World,
    plan: Plan,
    model: Model,
    mesh: Mesh,
    states: LocalStates,
    axes: Axes,
) -> dict[int, StageModule]:
    own = [index for index, stage in enumerate(plan.stages) if stage.mesh == mesh]
    device = str(world.device)
    return {i: split(model.program, model.graph, plan, i, states, device, axes) for i in own}


def _tie(param: nn.Parameter, name: str, group: Any, states: LocalStates, place: Ranked) -> Tied:
    shape, placement = states.shape(name), states.placements[name]
    return Tied(param, group, shape, placement, place.tp_rank, place.mesh.tp)
