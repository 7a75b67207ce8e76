"""HOW LONG, HOW MUCH: the protocol between the rooms that plan and the models that cost."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from rlplace.graph.types import Structure
from rlplace.plan.types import GroupChoice, Instance, Mesh


@dataclass(frozen=True, slots=True)
class GroupCost:
    """One group with one choice on one mesh, on its heaviest device.

    Args:
        forward: Seconds of one micro-batch, exposed collectives included.
        backward: The same, recompute included.
        reduce: Seconds of gradient reduction, once a step.
        hidden: The part of `reduce` that may hide behind backward (share, 0 to 1).
        optimizer: Seconds of the optimizer step, parameter gathers after it included.
        static: Bytes of parameters, gradients and optimizer states.
        saved: Bytes kept for the backward pass of each micro-batch in flight.
        transient: Bytes that come and go while the group runs.
        logits: The part of `saved` that is class scores; of `transient`, where the group's forward
            runs again in the backward pass.
        weight_backward: The part of `backward` that makes gradients of parameters only, which
            zero-bubble schedules delay.
        skipped: The part of `backward` that falls away where the group is the last of those that
            are redone as one: the last matmul, if recompute stops early.
        optimizer_transient: Bytes that come and go while the optimizer steps.
        redone: The part of `transient` that is saved again for the backward pass; of groups that
            are redone as one it adds up.
    """

    forward: float
    backward: float
    reduce: float
    hidden: float
    optimizer: float
    static: float
    saved: float
    transient: float
    logits: float = 0.0
    weight_backward: float = 0.0
    skipped: float = 0.0
    optimizer_transient: float = 0.0
    redone: float = 0.0


class CostModel(Protocol):
    """What an estimate needs to know. Implementations are pure and may cache."""

    def group(
        self,
        instance: Instance,
        structure: Structure,
        choice: GroupChoice,
        mesh: Mesh,
        samples: float,
        boundary: float,
    ) -> GroupCost:
        """Cost of a group.

        Args:
            instance: The question.
            structure: The group's description.
            choice: How it runs.
            mesh: Where it runs.
            samples: Samples of a micro-batch on one dp replica.
            boundary: Bytes of the group's inputs on one replica, for one micro-batch: what full
                recompute keeps.
        """
        ...

    def transfer(
        self, instance: Instance, source: Mesh, target: Mesh, floats: float, other: float
    ) -> float:
        """Seconds to move a whole micro-batch's tensors from one stage's mesh to the next.

        Args:
            instance: The question.
            source: The sending mesh.
            target: The receiving mesh.
            floats: Float elements of the whole micro-batch, over all replicas.
            other: Bytes of other dtypes.
        """
        ...

    def looks(self, instance: Instance, mesh: Mesh) -> Hashable:
        """All that `group` depends on of a mesh: equal for those on which all groups cost alike."""
        ...

    def knows(
        self, instance: Instance, structure: Structure, choice: GroupChoice, mesh: Mesh
    ) -> bool:
        """Whether `group` has an answer; a formula has, a profile where it was measured."""
        ...
