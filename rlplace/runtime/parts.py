"""What a stage runs: pieces with their tensors, in order, on the values of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlplace.graph.program import Piece
from rlplace.graph.sharding.axis import Axis, use_axis

Values = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A piece with the tensors that it runs on.

    Args:
        piece: The nodes of one group, or the prologue.
        states: Parameters, buffers and constants, in the order of `Piece.states`.
        recompute: Run the forward again in the backward pass instead of keeping what it saves.
        written: Positions of `states` that the piece writes into (running statistics).
        drop: Values that nothing reads after this part.
        axis: The tp axis of its collectives.
    """

    piece: Piece
    states: tuple[torch.Tensor, ...]
    recompute: bool = False
    written: tuple[int, ...] = ()
    drop: tuple[str, ...] = ()
    axis: Axis | None = None

    def __call__(self, values: Values, hold: Callable[[torch.Tensor], object]) -> None:
        """Run on the values of a micro-batch and add what the piece makes.

        Args:
            values: User inputs and tensors by name; changed in place.
            hold: Called with every tensor that recompute keeps.
        """
        names = (*self.piece.inputs, *self.piece.reads)
        arguments = [values[name] for name in names]
        if self.recompute and torch.is_grad_enabled():
            kept = [hold(value) for value in arguments if isinstance(value, torch.Tensor)]
            results = checkpoint(self._twice(kept), *arguments, use_reentrant=False)
        else:
            results = self._run(self.states, arguments)
        for name in self.drop:
            values.pop(name, None)
        values.update(zip(self.piece.writes, results, strict=True))

    def _twice(self, kept: list[object]) -> Callable[..., Any]:
        """The piece as a function whose second run leaves the running statistics alone."""
        runs = 0

        def run(*arguments: Any) -> Any:
            nonlocal runs
            states = list(self.states)
            if runs:
                kept.clear()
                for position in self.written:
                    states[position] = states[position].clone()
            runs += 1
            return self._run(states, arguments)

        return run

    def _run(self, states: Sequence[torch.Tensor], arguments: Sequence[Any]) -> Any:
        if self.axis is None:
            return self.piece.module(*states, *arguments)
        with use_axis(self.axis):
            return self.piece.module(*states, *arguments)


class StageModule(nn.Module):
    """One stage of a plan.

    Its parameters and buffers have the fully qualified names that they have in the user's module,
    so that state dicts of all stages together are the state dict of the module.

    Args:
        parts: The prologue first, then the groups in order.
        sizes: Numbers that earlier stages work out, at this stage's batch.
        gives: Tensors that the next stage reads or relays, or the loss.
    """

    def __init__(
        self, parts: Sequence[Part], sizes: Mapping[str, int], gives: Sequence[str]
    ) -> None:
        super().__init__()
        self._parts = tuple(parts)
        self._sizes = dict(sizes)
        self._gives = tuple(gives)
        self.hold: Callable[[torch.Tensor], object] = hold_nothing
        for part in parts:
            for (_, name), tensor in zip(part.piece.states, part.states, strict=True):
                _attach(self, name, tensor)

    def forward(self, inputs: Values, received: Values) -> Values:
        """Run a micro-batch.

        Args:
            inputs: The user's tensors by placeholder, this replica's samples.
            received: What the stage before gave.

        Returns:
            The tensors of `gives`.
        """
        values = {**self._sizes, **inputs, **received}
        for part in self._parts:
            part(values, self.hold)
        return {name: values[name] for name in self._gives}


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
