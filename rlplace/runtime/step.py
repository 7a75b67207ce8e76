"""One optimizer step on one rank: the actions of its lane, in order.

The loss of a micro-batch on a replica counts with its part of the rows of the batch, so that
gradients, summed over micro-batches and replicas, are those of the mean loss of the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from rlplace.plan.orders import split_actions
from rlplace.plan.schedules import Orders
from rlplace.plan.types import Action, Plan
from rlplace.runtime.aside import Aside, putting
from rlplace.runtime.connections import Border
from rlplace.runtime.deliveries import mail
from rlplace.runtime.draws import seed_of
from rlplace.runtime.ends import entering, leaving, run_backward
from rlplace.runtime.measure import Recorder
from rlplace.runtime.memory import ActivationTracker, LiveTracker
from rlplace.runtime.parts import StageModule, hold_nothing
from rlplace.runtime.reduce import Phase, Reducer
from rlplace.runtime.rows import micro_batch_rows, rows_of
from rlplace.runtime.transfer import Receipt
from rlplace.simulate.peaks import OPTIMIZER, REDUCE


@dataclass(frozen=True)
class Lane:
    """What one rank has to do in a step.

    Args:
        plan: The plan.
        orders: The actions of every lane.
        index: Its lane.
        replica: Its index among the dp replicas of its lane.
        batched: User inputs (placeholders) whose dim 0 is the batch.
    """

    plan: Plan
    orders: Orders
    index: int
    replica: int
    batched: frozenset[str]

    @property
    def actions(self) -> tuple[Action, ...]:
        """Its own actions."""
        return self.orders[self.index]


@dataclass
class Flight:
    """A micro-batch between its forward and the end of its backward on one stage.

    Args:
        back: Gradients of what its forward read of the stage before, once they are made.
        edges: Where the gradients of what it gave go.
        seeds: The gradient of its loss, on the last stage.
        aside: Gradients of parameters that a ``W`` makes; None where its ``B`` makes them.
    """

    back: dict[str, torch.Tensor] = field(default_factory=dict)
    edges: dict[str, GradientEdge] = field(default_factory=dict)
    seeds: dict[str, torch.Tensor] = field(default_factory=dict)
    aside: Aside | None = None


class Interpreter:
    """Runs the actions of one rank.

    Args:
        lane: What it has to do.
        stages: Its stages by index.
        borders: Borders that its stages touch, by the index of the later stage.
        reducer: Sums the gradients of its parameters.
        optimizer: Of its parameters; None where it has none that are trained.
        recorder: Notes the events.
        seed: Of dropout (`rlplace.runtime.draws`).
    """

    def __init__(
        self,
        lane: Lane,
        stages: Mapping[int, StageModule],
        borders: Mapping[int, Border],
        reducer: Reducer,
        optimizer: torch.optim.Optimizer | None,
        recorder: Recorder,
        seed: int = 0,
    ) -> None:
        self._lane, self._plan, self._actions = lane, lane.plan, lane.actions
        self._stages, self._borders = stages, borders
        self._reducer, self._optimizer, self._recorder = reducer, optimizer, recorder
        self._seed = seed
        self.steps = 0
        #: Largest global norm of the gradients, if they are clipped; and what it was.
        self.clip: float | None = None
        self.norm: float | None = None
        self._last = len(lane.plan.stages) - 1
        self._mail = mail(lane.orders, lane.index)
        self._split = split_actions([lane.actions])
        self._final = completions(lane.actions, {i: _params(s) for i, s in stages.items()})
        self._posted: dict[int, Receipt] = {}
        self._turn: dict[int, int] = {}
        self._flights: dict[tuple[int, int], Flight] = {}
        self._rows = self._total = lane.plan.global_batch
        self._batch, self._batches = 0, 1
        self._loss = torch.zeros(())
        self._tracker: ActivationTracker | None = None
        self._live: LiveTracker | None = None
        self.executed: list[Action] = []

    def track(self, tracker: ActivationTracker | None, live: LiveTracker | None) -> None:
        """Count memory from now on, or stop counting.

        Args:
            tracker: Counts what is kept for backward.
            live: Counts all that a step makes.
        """
        self._tracker, self._live = tracker, live
        for stage in self._stages.values():
            stage.hold = tracker.hold if tracker is not None else hold_nothing

    def step(self, *batches: Mapping[str, Any]) -> torch.Tensor | None:
        """Run one optimizer step.

        Args:
            batches: User inputs of a batch of at most the global one, by placeholder; several are
                gone through one after the other, and their gradients averaged over all samples.

        Returns:
            This replica's share of the mean loss, on ranks of the last stage.
        """
        self._loss = torch.zeros(())
        self._batches, self._total = len(batches), sum(map(self._size, batches))
        self.steps += 1
        self._reducer.start()
        with self._live or contextlib.nullcontext():
            for self._batch, batch in enumerate(batches):
                self._run_batch(batch)
            with self._recorder.event(REDUCE):
                self._reducer.finish()
                if self.clip is not None:
                    self.norm = self._reducer.clip(self.clip)
                if self._live is not None:
                    self._live.note()  # it may run no op at all
            if self._optimizer is not None:
                with self._recorder.event(OPTIMIZER):
                    self._reducer.update(self._optimizer)
        return self._loss if self._last in self._stages else None

    def _run_batch(self, batch: Mapping[str, Any]) -> None:
        self._rows = self._size(batch)
        self._turn = dict.fromkeys(self._mail.incoming, 0)
        self.executed = []
        for position, action in enumerate(self._actions):
            self._post(position)
            self._post(position + 1)
            rows = self._own_rows(action)
            if not rows:
                self._idle(position, action)
            elif action.kind == "F":
                self._forward(position, action, _samples(batch, self._lane.batched, rows))
            elif action.kind == "B":
                self._backward(position, action)
            else:
                self._make_weight_gradients(position, action)
        for border in self._borders.values():
            border.forward.settle()
            border.backward.settle()
        assert tuple(self.executed) == self._actions, "the actions of the plan, in their order"

    def _idle(self, position: int, action: Action) -> None:
        """An action without samples: collectives of other replicas, which need this one, alone."""
        if action.kind == "F":
            self._reducer.idle_forward(action.stage)
        else:
            final = self._finals(position)
            self._reducer.idle_backward(action.stage, final, self._phase(action))
        self.executed.append(action)

    def _phase(self, action: Action) -> Phase:
        """Which part of a backward an action is."""
        if action.kind == "W":
            return "weights"
        return "inputs" if (action.stage, action.micro_batch) in self._split else "all"

    def _own_rows(self, action: Action) -> range:
        """Rows of the batch that this rank has of an action's micro-batch."""
        return rows_of(self._plan, action.stage, self._lane.replica, action.micro_batch, self._rows)

    def _weight(self, rows: range) -> float:
        """What the loss of some rows counts."""
        return len(rows) / self._total

    def _size(self, batch: Mapping[str, Any]) -> int:
        """Samples of a batch."""
        sizes = [value.shape[0] for name, value in batch.items() if name in self._lane.batched]
        return sizes[0] if sizes else self._plan.global_batch

    def _finals(self, position: int) -> frozenset[int]:
        """Parameters that get their last gradient of this step in an action."""
        last = self._batch + 1 == self._batches
        return self._final.get(position, frozenset()) if last else frozenset()

    def _forward(self, position: int, action: Action, inputs: dict[str, Any]) -> None:
        key = action.stage, action.micro_batch
        received, back = entering(self._arrived(position, action), self._trained(action.stage))
        stage, rows = self._stages[action.stage], self._own_rows(action)
        flight = Flight(back, aside=Aside(stage.hold) if key in self._split else None)
        with self._recorder.event("F", *key), putting(flight.aside):
            given = self._run(stage, inputs, received, rows)
        self.executed.append(Action(action.stage, "F", action.micro_batch))
        self._flights[key] = flight
        flight.edges = leaving(given)
        if action.stage == self._last:
            weight = self._weight(rows)
            flight.seeds = {name: torch.full_like(loss, weight) for name, loss in given.items()}
            (loss,) = given.values()
            self._loss = self._loss + loss.detach() * weight
        else:
            self._send(action, given)

    def _trained(self, stage: int) -> list[str]:
        """Tensors that a stage gets and sends a gradient back for."""
        if not stage:
            return []
        crossing = self._borders[stage].forward.crossing
        return [spec.name for spec in crossing.tensors if spec.grad]

    def _run(
        self, stage: StageModule, inputs: dict[str, Any], received: dict[str, Any], rows: range
    ) -> dict[str, torch.Tensor]:
        row = self._batch * self._plan.global_batch + rows.start
        moment = seed_of(self._seed, self.steps, row)
        watching = self._tracker.watching() if self._tracker else contextlib.nullcontext()
        with watching:
            given: dict[str, torch.Tensor] = stage(inputs, received, len(rows), moment)
        return given

    def _backward(self, position: int, action: Action) -> None:
        key = action.stage, action.micro_batch
        flight = self._flights.pop(key)
        seeds = flight.seeds or self._arrived(position, action)
        final = self._finals(position)
        with (
            self._recorder.event("B", *key),
            putting(flight.aside),
            self._reducer.backward(action.stage, final, self._phase(action)),
        ):
            run_backward(flight.edges, seeds)
        self.executed.append(Action(action.stage, "B", action.micro_batch))
        if action.stage:
            self._send(action, flight.back)
        if flight.aside is not None:
            self._flights[key] = Flight(aside=flight.aside)

    def _make_weight_gradients(self, position: int, action: Action) -> None:
        flight = self._flights.pop((action.stage, action.micro_batch))
        assert flight.aside is not None
        final = self._finals(position)
        with (
            self._recorder.event("W", action.stage, action.micro_batch),
            self._reducer.backward(action.stage, final, "weights"),
        ):
            flight.aside.make()
        self.executed.append(Action(action.stage, "W", action.micro_batch))

    def _send(self, action: Action, values: Mapping[str, torch.Tensor]) -> None:
        """Hand on what an action has made."""
        backward = action.kind == "B"
        border = self._borders[action.stage if backward else action.stage + 1]
        rows = micro_batch_rows(self._plan, action.micro_batch, self._rows)
        with self._recorder.event("send", action.stage, action.micro_batch):
            border.channel(backward).send(action.micro_batch, rows, values)

    def _post(self, position: int) -> None:
        """Start receiving what the action at a position waits for, in its sender's order."""
        needed = self._mail.arrivals.get(position)
        if needed is None:
            return
        coming = self._mail.incoming[needed.source]
        turn = self._turn[needed.source]
        while turn < len(coming) and coming[turn].sent <= needed.sent:
            one = coming[turn]
            rows = micro_batch_rows(self._plan, one.micro_batch, self._rows)
            if self._own_rows(self._actions[one.awaited]):
                channel = self._borders[one.border].channel(one.backward)
                self._posted[one.awaited] = channel.post(one.micro_batch, rows)
            turn += 1
        self._turn[needed.source] = turn

    def _arrived(self, position: int, action: Action) -> dict[str, torch.Tensor]:
        if position not in self._posted:
            return {}
        with self._recorder.event("wait", action.stage, action.micro_batch):
            values = self._posted.pop(position).wait()
        for one in self._mail.gone[position]:
            self._borders[one.border].channel(one.backward).settle(one.micro_batch)
        return values


@dataclass(frozen=True)
class Params:
    """Trained parameters of a stage, as their `id`.

    Args:
        apart: Those whose gradients can be put aside.
        direct: The others.
    """

    apart: frozenset[int]
    direct: frozenset[int]


def completions(
    actions: Sequence[Action], stages: Mapping[int, Params]
) -> dict[int, frozenset[int]]:
    """Which parameters get their last gradient in which action, by its position.

    Args:
        actions: Of a lane.
        stages: Its stages.
    """
    split = split_actions([actions])
    found: dict[int, frozenset[int]] = {}
    for index, trained in stages.items():
        last = last_apart = -1
        for position, action in enumerate(actions):
            if action.stage != index or action.kind == "F":
                continue
            if action.kind == "B":
                last = position
            if action.kind == "W" or (index, action.micro_batch) not in split:
                last_apart = position
        found[last] = trained.direct
        found[last_apart] = found.get(last_apart, frozenset()) | trained.apart
    return found


def _params(stage: StageModule) -> Params:
    params = {name: param for name, param in stage.named_parameters() if param.requires_grad}
    apart = {id(param) for name, param in params.items() if name in stage.put_aside}
    return Params(frozenset(apart), frozenset(map(id, params.values())) - apart)


def _samples(batch: Mapping[str, Any], batched: frozenset[str], rows: range) -> dict[str, Any]:
    """Some rows of a batch."""
    return {
        name: value.narrow(0, rows.start, len(rows)) if name in batched else value
        for name, value in batch.items()
    }
