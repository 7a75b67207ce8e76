"""What a stage runs: pieces with their tensors, in order, on the values of a micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from rlplace.graph.program import Piece
from rlplace.runtime.aside import parameters_apart
from rlplace.runtime.axes import ALONE, Axes, converted
from rlplace.runtime.boundary import Form, Size
from rlplace.runtime.draws import Stream, drawing, seed_of
from rlplace.runtime.keeping import keeping
from rlplace.runtime.lending import Lender

Values = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A piece with the tensors that it runs on.

    Args:
        piece: The nodes of one group, or the prologue.
        states: Parameters, buffers and constants, in the order of `Piece.states`.
        takes: Values that it reads, in the order of the piece's inputs and reads.
        device: Where it runs.
        written: Positions of `states` that the piece writes into (running statistics).
        axes: The axes of its collectives.
        draws: The number by which its random numbers differ from those of other parts; None where
            it draws none.
        stream: Of a group that is several parts, its random numbers.
        goes_on: Whether it is a later one of them, and draws what comes next.
    """

    piece: Piece
    states: tuple[torch.Tensor, ...]
    takes: tuple[str, ...]
    device: torch.device
    written: tuple[int, ...] = ()
    axes: Axes = ALONE
    draws: int | None = None
    stream: Stream | None = None
    goes_on: bool = False

    @property
    def gives(self) -> tuple[str, ...]:
        """Values that it makes."""
        return self.piece.writes

    def run(self, values: Values, moment: int, again: bool) -> None:
        """Add what the piece makes.

        Args:
            values: User inputs and tensors by name; changed in place.
            moment: Seed of the step and the samples.
            again: Whether this is a second run, which leaves the running statistics alone.
        """
        states = list(self.states)
        for position in self.written if again else ():
            states[position] = states[position].clone()
        with self._surroundings(moment):
            results = self.piece.module(*states, *(values[name] for name in self.takes))
        values.update(zip(self.gives, results, strict=True))

    @contextlib.contextmanager
    def _surroundings(self, moment: int) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.axes.used())
            if self.draws is not None:
                seed = seed_of(moment, self.draws)
                own = drawing(seed, self.device, self.stream, goes_on=self.goes_on)
                stack.enter_context(own)
            yield


@dataclass(frozen=True)
class Conversion:
    """A value from one placement to another, for readers that do not take it as it is held.

    Args:
        source, target: Names of the value and of its other form.
        held, wanted: Their forms.
        axes: On which they are.
    """

    source: str
    target: str
    held: Form
    wanted: Form
    axes: Axes

    @property
    def takes(self) -> tuple[str, ...]:
        """The value."""
        return (self.source,)

    @property
    def gives(self) -> tuple[str, ...]:
        """Its other form."""
        return (self.target,)

    def run(self, values: Values, moment: int, again: bool) -> None:
        """Add the other form."""
        with self.axes.used():
            values[self.target] = converted(values[self.source], self.held, self.wanted)


Step = Part | Conversion


@dataclass(frozen=True)
class Region:
    """Steps that run one after the other, and that are redone as one where they are.

    Args:
        steps: In order.
        takes: Values of others that they read.
        gives: What they make and others read.
        drop: Values that nothing reads after this region.
        redone: Run the forward again in the backward pass instead of keeping what it saves:
            everything, or all ops but matmuls and attention.
    """

    steps: tuple[Step, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    drop: tuple[str, ...] = ()
    redone: Literal["full", "ops"] | None = None

    def __call__(self, values: Values, hold: Callable[[torch.Tensor], object], moment: int) -> None:
        """Run on the values of a micro-batch and add what the steps make.

        Args:
            values: User inputs and tensors by name; changed in place.
            hold: Called with every tensor that recompute keeps.
            moment: Seed of the step and the samples.
        """
        arguments = [values[name] for name in self.takes]
        if self.redone is not None and torch.is_grad_enabled():
            kept = [hold(value) for value in arguments if isinstance(value, torch.Tensor)]
            contexts = partial(keeping, hold) if self.redone == "ops" else noop_context_fn
            results = checkpoint(
                self._twice(kept, moment),
                *arguments,
                use_reentrant=False,
                preserve_rng_state=False,  # each part seeds its generator itself
                context_fn=contexts,
            )
        else:
            results = self._run(arguments, moment, again=False)
        for name in self.drop:
            values.pop(name, None)
        values.update(zip(self.gives, results, strict=True))

    def _twice(self, kept: list[object], moment: int) -> Callable[..., Any]:
        """The steps as a function that knows its second run."""
        runs = 0

        def run(*arguments: Any) -> Any:
            nonlocal runs
            runs += 1
            if runs > 1:
                kept.clear()
            return self._run(arguments, moment, again=runs > 1)

        return run

    def _run(self, arguments: Sequence[Any], moment: int, again: bool) -> list[Any]:
        values = dict(zip(self.takes, arguments, strict=True))
        for step in self.steps:
            step.run(values, moment, again)
        return [values[name] for name in self.gives]


class StageModule(nn.Module):
    """One stage of a plan.

    Its parameters and buffers have the fully qualified names that they have in the user's module,
    so that state dicts of all stages together are the state dict of the module.

    Args:
        regions: The prologue first, then the groups in order.
        sizes: Numbers that earlier stages work out, as lines in the samples of a micro-batch.
        gives: Tensors that the next stage reads or relays, or the loss: under which name the
            values have them.
    """

    def __init__(
        self, regions: Sequence[Region], sizes: Mapping[str, Size], gives: Mapping[str, str]
    ) -> None:
        super().__init__()
        self._regions = tuple(regions)
        self._sizes = dict(sizes)
        self._gives = dict(gives)
        self.hold: Callable[[torch.Tensor], object] = hold_nothing
        self.lender = Lender([()] * len(self._regions))
        for part in self.parts:
            for (_, name), tensor in zip(part.piece.states, part.states, strict=True):
                _attach(self, name, tensor)

    @property
    def parts(self) -> list[Part]:
        """Its parts, in order."""
        steps = (step for region in self._regions for step in region.steps)
        return [step for step in steps if isinstance(step, Part)]

    @property
    def states_of_steps(self) -> list[tuple[torch.Tensor, ...]]:
        """Parameters, buffers and constants of each region; between them weights are lent."""
        return [
            tuple(state for step in region.steps if isinstance(step, Part) for state in step.states)
            for region in self._regions
        ]

    @property
    def put_aside(self) -> set[str]:
        """Parameters whose gradients can be put aside (`rlplace.runtime.aside`)."""
        return {name for part in self.parts for name in parameters_apart(part.piece)}

    def forward(self, inputs: Values, received: Values, samples: int, moment: int = 0) -> Values:
        """Run a micro-batch.

        Args:
            inputs: The user's tensors by placeholder, this replica's samples.
            received: What the stage before gave.
            samples: How many this replica has.
            moment: Seed of the step and the samples (`rlplace.runtime.draws`).

        Returns:
            The tensors of `gives`.
        """
        sizes = {name: size(samples) for name, size in self._sizes.items()}
        values = {**sizes, **inputs, **received}
        for index, region in enumerate(self._regions):
            self.lender.before(index)
            region(values, self.hold, moment)
            self.lender.after(index, values, region.gives)
        return {name: values[held] for name, held in self._gives.items()}


def hold_nothing(tensor: torch.Tensor) -> None:
    """What `StageModule.hold` is while nobody counts memory."""


def _attach(root: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Register a tensor under a dotted name."""
    *path, last = name.split(".")
    module = root
    for step in path:
        if not isinstance(getattr(module, step, None), nn.Module):
            module.add_module(step, nn.Module())
        module = module.get_submodule(step)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(last, tensor)
    elif last not in module._buffers:
        module.register_buffer(last, tensor)
