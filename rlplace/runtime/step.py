"""One optimizer step on one rank: the actions of its lane, in order.

The loss of every micro-batch on every replica counts with the weight 1 / (micro-batches *
replicas of the last stage), so that gradients, summed over micro-batches and replicas, are those
of the mean loss of the global batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlplace.plan.types import Action, Plan
from rlplace.runtime.connections import Border
from rlplace.runtime.draws import seed_of
from rlplace.runtime.measure import Recorder
from rlplace.runtime.memory import ActivationTracker, LiveTracker
from rlplace.runtime.parts import StageModule, hold_nothing
from rlplace.runtime.reduce import Reducer
from rlplace.runtime.transfer import Receipt


@dataclass
class Flight:
    """A micro-batch between its forward and its backward on one stage."""

    received: dict[str, torch.Tensor]
    given: dict[str, torch.Tensor]
    held: list[object] = field(default_factory=list)


class Interpreter:
    """Runs the actions of one rank.

    Args:
        plan: The plan.
        replica: Index of this rank among the dp replicas of its lane.
        actions: The ordered actions of its lane.
        stages: Its stages by index.
        borders: Borders that its stages touch, by the index of the later stage.
        batched: User inputs (placeholders) whose dim 0 is the batch.
        reducer: Sums the gradients of its parameters.
        optimizer: Of its parameters; None where it has none that are trained.
        recorder: Notes the events.
        seed: Of dropout (`rlplace.runtime.draws`).
    """

    def __init__(
        self,
        plan: Plan,
        replica: int,
        actions: Sequence[Action],
        stages: Mapping[int, StageModule],
        borders: Mapping[int, Border],
        batched: frozenset[str],
        reducer: Reducer,
        optimizer: torch.optim.Optimizer | None,
        recorder: Recorder,
        seed: int = 0,
    ) -> None:
        self._plan, self._replica = plan, replica
        self._actions, self._stages, self._borders = tuple(actions), stages, borders
        self._batched, self._reducer, self._optimizer = batched, reducer, optimizer
        self._recorder, self._seed = recorder, seed
        self.steps = 0
        #: Largest global norm of the gradients, if they are clipped; and what it was.
        self.clip: float | None = None
        self.norm: float | None = None
        self._last = len(plan.stages) - 1
        self._losses = plan.micro_batches * plan.stages[-1].mesh.dp
        self._weight, self._batch, self._ahead = 1.0 / self._losses, 0, 0
        self._final = {stage: max(self._positions(stage)) for stage in stages}
        self._posted: dict[int, Receipt] = {}
        self._flights: dict[tuple[int, int], Flight] = {}
        self._loss: torch.Tensor | None = None
        self._tracker: ActivationTracker | None = None
        self._live: LiveTracker | None = None

    def track(self, tracker: ActivationTracker | None, live: LiveTracker | None) -> None:
        """Count memory from now on, or stop counting.

        Args:
            tracker: Counts what is kept for backward.
            live: Counts all that forward and backward make.
        """
        self._tracker, self._live = tracker, live
        for stage in self._stages.values():
            stage.hold = tracker.hold if tracker is not None else hold_nothing

    def step(self, *batches: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Run one optimizer step.

        Args:
            batches: User inputs of a global batch, by placeholder; several are gone through one
                after the other, and their gradients averaged.

        Returns:
            This replica's share of the mean loss, on ranks of the last stage.
        """
        self._loss = None
        self._weight = 1.0 / self._losses / len(batches)
        self.steps += 1
        self._reducer.start()
        for self._batch, batch in enumerate(batches):
            self._ahead = len(batches) - 1 - self._batch
            with self._live or contextlib.nullcontext():
                self._run_actions(batch)
        with self._recorder.event("reduce"):
            self._reducer.finish()
            if self.clip is not None:
                self.norm = self._reducer.clip(self.clip)
        if self._optimizer is not None:
            with self._recorder.event("optimizer"):
                self._reducer.update(self._optimizer)
        return self._loss

    def _run_actions(self, batch: Mapping[str, torch.Tensor]) -> None:
        for position, action in enumerate(self._actions):
            self._post(position)
            self._post(position + 1)
            if action.kind == "F":
                self._forward(position, action, batch)
            else:
                self._backward(position, action)
        for border in self._borders.values():
            border.forward.settle()
            border.backward.settle()

    def _forward(self, position: int, action: Action, batch: Mapping[str, torch.Tensor]) -> None:
        received = self._arrived(position, action)
        for spec in self._borders[action.stage].forward.tensors if action.stage else ():
            received[spec.name].requires_grad_(spec.grad)
        inputs = self._samples(action, batch)
        with self._recorder.event("F", action.stage, action.micro_batch):
            given = self._run(action, inputs, received)
        flight = Flight(received, given)
        self._flights[action.stage, action.micro_batch] = flight
        if self._tracker is not None:
            ends = (*received.values(), *given.values())
            flight.held = [self._tracker.hold(tensor) for tensor in ends]
        if action.stage == self._last:
            (loss,) = given.values()
            share = loss.detach() * self._weight
            self._loss = share if self._loss is None else self._loss + share
            return
        with self._recorder.event("send", action.stage, action.micro_batch):
            self._borders[action.stage + 1].forward.send(action.micro_batch, given)

    def _run(self, action: Action, inputs: dict[str, Any], received: dict[str, Any]) -> Any:
        row = self._batch * self._plan.global_batch + self._first_row(action)
        moment = seed_of(self._seed, self.steps, row)
        with self._tracker.watching() if self._tracker else contextlib.nullcontext():
            return self._stages[action.stage](inputs, received, moment)

    def _backward(self, position: int, action: Action) -> None:
        arrived = self._arrived(position, action)
        flight = self._flights.pop((action.stage, action.micro_batch))
        if action.stage == self._last:
            (loss,) = flight.given.values()
            arrived = {name: torch.full_like(loss, self._weight) for name in flight.given}
        else:
            # Its gradient is here, so the activation has long arrived: this only frees it.
            self._borders[action.stage + 1].forward.settle(action.micro_batch)
        pairs = [(flight.given[n], g) for n, g in arrived.items() if flight.given[n].requires_grad]
        with self._recorder.event("B", action.stage, action.micro_batch):
            final = self._stages[action.stage].parameters() if self._is_last(position) else ()
            with self._reducer.backward(action.stage, {id(param) for param in final}):
                if pairs:
                    outputs, gradients = zip(*pairs, strict=True)
                    torch.autograd.backward(outputs, gradients)
        if action.stage:
            border = self._borders[action.stage].backward
            with self._recorder.event("send", action.stage, action.micro_batch):
                border.send(action.micro_batch, _gradients(flight.received))

    def _is_last(self, position: int) -> bool:
        return not self._ahead and position == self._final[self._actions[position].stage]

    def _post(self, position: int) -> None:
        """Start receiving what the action at a position waits for."""
        if position in self._posted or position >= len(self._actions):
            return
        action = self._actions[position]
        if action.kind == "F" and action.stage:
            channel = self._borders[action.stage].forward
        elif action.kind == "B" and action.stage < self._last:
            channel = self._borders[action.stage + 1].backward
        else:
            return
        self._posted[position] = channel.post(action.micro_batch)

    def _arrived(self, position: int, action: Action) -> dict[str, torch.Tensor]:
        if position not in self._posted:
            return {}
        with self._recorder.event("wait", action.stage, action.micro_batch):
            return self._posted.pop(position).wait()

    def _samples(
        self, action: Action, batch: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """This replica's samples of a micro-batch."""
        start, count = self._first_row(action), self._count(action)
        return {
            name: value.narrow(0, start, count) if name in self._batched else value
            for name, value in batch.items()
        }

    def _first_row(self, action: Action) -> int:
        """Position, in the global batch, of this replica's samples of a micro-batch."""
        return action.micro_batch * self._plan.micro_batch + self._replica * self._count(action)

    def _count(self, action: Action) -> int:
        """How many they are."""
        return self._plan.micro_batch // self._plan.stages[action.stage].mesh.dp

    def _positions(self, stage: int) -> list[int]:
        found = enumerate(self._actions)
        return [i for i, action in found if action.stage == stage and action.kind == "B"]


def _gradients(received: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of what was received; zero where nothing depends on it."""
    return {
        name: tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
        for name, tensor in received.items()
        if tensor.requires_grad
    }
