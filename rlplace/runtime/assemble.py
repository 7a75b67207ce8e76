"""From a plan and a model to what one rank runs: its stages, borders, reducer and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rlplace.errors import InputError, nearest_names
from rlplace.graph.types import Placement
from rlplace.plan.schedules import actions, lanes
from rlplace.plan.types import Mesh, Plan
from rlplace.runtime.boundary import TensorSpec, borders, specs, stage_of
from rlplace.runtime.local import CountedAxis, LocalStates
from rlplace.runtime.measure import Recorder
from rlplace.runtime.model import Model, batched_inputs
from rlplace.runtime.reduce import Reducer, Tied
from rlplace.runtime.shard import GroupAxis
from rlplace.runtime.split import StageModule, split
from rlplace.runtime.step import Border, Interpreter
from rlplace.runtime.transfer import Channel, check_cuttable, messages
from rlplace.runtime.world import World

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class Assembly:
    """What one rank runs; ranks without a stage have no interpreter.

    Args:
        recorder: Notes the events of this rank.
        replica: Index among the replicas of its lane.
        seed: What it adds to the seed of dropout: the same on all ranks of a tp group only.
        stages: Its stages by index.
        interpreter: Runs its actions.
        reducer: Sums its gradients.
        optimizer: Of its trained parameters.
        channels: Of its borders, both directions.
        axis: Its tp axis, if it has one.
        placements: How its states are held on that axis.
    """

    recorder: Recorder
    replica: int = 0
    seed: int = 0
    stages: dict[int, StageModule] = field(default_factory=dict)
    interpreter: Interpreter | None = None
    reducer: Reducer | None = None
    optimizer: torch.optim.Optimizer | None = None
    channels: list[Channel] = field(default_factory=list)
    axis: CountedAxis | None = None
    placements: dict[str, Placement] = field(default_factory=dict)

    def params(self) -> dict[str, nn.Parameter]:
        """Parameters of this rank by fully qualified name."""
        return {n: p for stage in self.stages.values() for n, p in stage.named_parameters()}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Buffers of this rank by fully qualified name."""
        return {n: b for stage in self.stages.values() for n, b in stage.named_buffers()}


def assemble(
    world: World,
    plan: Plan,
    model: Model,
    make_optimizer: OptimizerFactory,
    overlap: bool,
    bucket_bytes: int,
) -> Assembly:
    """Make this rank's part of a plan that was found valid. Every rank calls this.

    Args:
        world: The ranks.
        plan: The plan.
        model: The module with its program and groups.
        make_optimizer: From parameters to an optimizer.
        overlap: Reduce gradients while backward runs.
        bucket_bytes: Gradients that are reduced together.
    """
    replicas, axes = _groups(world, plan)
    tied = {name: world.group(ranks) for name, ranks in shared_params(plan, model)}
    assembly = Assembly(Recorder(world.rank, world.device))
    mesh = next((mesh for mesh in lanes(plan) if world.rank in mesh.devices), None)
    if mesh is None:
        return assembly
    assembly.seed = 1 + min(mesh.devices) + mesh.devices.index(world.rank) // mesh.tp
    assembly.replica = mesh.devices.index(world.rank) // mesh.tp
    if world.rank in axes:
        assembly.axis = CountedAxis(GroupAxis(axes[world.rank]))
    states = LocalStates(model.states(), world.device, assembly.axis)
    assembly.stages = {
        index: split(
            model.program, model.graph, plan, index, states, str(world.device), assembly.axis
        )
        for index, stage in enumerate(plan.stages)
        if stage.mesh == mesh
    }
    assembly.placements = states.placements
    connections = _connections(world, plan, model)
    assembly.channels = [c for b in connections.values() for c in (b.forward, b.backward)]
    order, uses = _backward_order(assembly.stages)
    params = assembly.params()
    ties = [
        _tie(params[name], name, group, states, assembly.axis)
        for name, group in tied.items()
        if name in params
    ]
    assembly.reducer = Reducer(
        [params[name] for name in order],
        [uses[name] for name in order],
        replicas.get(world.rank),
        ties,
        overlap=overlap,
        bucket_bytes=bucket_bytes,
    )
    trained = [param for param in params.values() if param.requires_grad]
    assembly.optimizer = make_optimizer(trained) if trained else None
    assembly.interpreter = Interpreter(
        plan,
        assembly.replica,
        actions(plan)[lanes(plan).index(mesh)],
        assembly.stages,
        connections,
        batched_inputs(model.program),
        assembly.reducer,
        assembly.optimizer,
        assembly.recorder,
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
        "adamw": lambda params: torch.optim.AdamW(params, lr=lr),
        "sgd": lambda params: torch.optim.SGD(params, lr=lr),
        "sgd-momentum": lambda params: torch.optim.SGD(params, lr=lr, momentum=0.9),
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


def _groups(world: World, plan: Plan) -> tuple[dict[int, Any], dict[int, Any]]:
    """The dp and the tp group of each rank; every rank makes all groups, in the same order."""
    replicas: dict[int, Any] = {}
    axes: dict[int, Any] = {}
    for mesh in lanes(plan):
        for members in mesh.dp_groups() if mesh.dp > 1 else ():
            replicas.update(dict.fromkeys(members, world.group(members)))
        for members in mesh.tp_groups() if mesh.tp > 1 else ():
            axes.update(dict.fromkeys(members, world.group(members)))
    world.direction(backward=True)
    return replicas, axes


def _connections(world: World, plan: Plan, model: Model) -> dict[int, Border]:
    """The borders that this rank's stages touch, by the index of the later stage."""
    crossing = borders(model.program, stage_of(model.graph, plan), len(plan.stages))
    found: dict[int, Border] = {}
    tag = 0
    every = [_tensors(plan, model, border, nodes) for border, nodes in enumerate(crossing)]
    each = sum(2 * sum(_count(plan, i, t, b) for b in (False, True)) for i, t in enumerate(every))
    bounded = len(lanes(plan)) == len(plan.stages)
    for index, tensors in enumerate(every):
        earlier, later = plan.stages[index].mesh, plan.stages[index + 1].mesh
        pair = []
        for backward, ends in ((False, (earlier, later)), (True, (later, earlier))):
            pair.append(
                Channel(
                    tensors,
                    *ends,
                    plan.micro_batch,
                    backward,
                    rank=world.rank,
                    device=world.device,
                    group=world.direction(backward),
                    tags=(tag, each),
                    bounded=bounded,
                )
            )
            tag += _count(plan, index, tensors, backward)
        if world.rank in (*earlier.devices, *later.devices):
            found[index + 1] = Border(*pair)
    return found


def _count(plan: Plan, border: int, tensors: Sequence[TensorSpec], backward: bool) -> int:
    ends = (plan.stages[border].mesh, plan.stages[border + 1].mesh)
    sender, receiver = ends[::-1] if backward else ends
    return len(messages(tensors, sender, receiver, plan.micro_batch, backward))


def _tensors(plan: Plan, model: Model, border: int, nodes: list[Any]) -> tuple[TensorSpec, ...]:
    tensors = specs(model.program, nodes)
    if plan.stages[border].mesh.dp != plan.stages[border + 1].mesh.dp:
        check_cuttable(tensors, border)
    return tensors


def _backward_order(stages: dict[int, StageModule]) -> tuple[list[str], dict[str, int]]:
    """Trained parameters, last used first, and how many of the stages use each."""
    uses: dict[str, int] = {}
    for index in sorted(stages, reverse=True):
        for name, param in reversed(list(stages[index].named_parameters())):
            if param.requires_grad:
                uses[name] = uses.get(name, 0) + 1
    return list(uses), uses


def _tie(
    param: nn.Parameter, name: str, group: Any, states: LocalStates, axis: CountedAxis | None
) -> Tied:
    placement = states.placements[name]
    if axis is None:
        return Tied(param, group, states.shape(name), placement)
    return Tied(param, group, states.shape(name), placement, axis.rank, axis.size)
