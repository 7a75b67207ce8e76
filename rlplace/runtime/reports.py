"""What a trainer says after each step, to all who listen."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from rlplace.runtime.world import World


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, the same on every rank but for `memory`.

    Args:
        step: Steps of this training so far, this one included.
        loss: Mean over all samples of the step, before its update.
        seconds: Of the slowest rank.
        lr: Learning rate of the first parameter group; nan where nothing is trained.
        grad_norm: Global 2-norm of the gradients before clipping, as it is: infinite or NaN where
            they are; None where they are not clipped.
        samples: Samples of the step.
        tokens_per_s: Tokens a second, or samples where a sample is one item.
        memory: Peak bytes of this rank so far: of the GPU's allocator, or its resident set.
    """

    step: int
    loss: float
    seconds: float
    lr: float
    grad_norm: float | None
    samples: int
    tokens_per_s: float
    memory: int


class Callback(Protocol):
    """Listens to a trainer, on the rank where it was given; it must not use a collective."""

    def begin(self, steps: int | None) -> None:
        """`fit` starts, with so many steps before it if that is known."""

    def step(self, report: StepReport) -> None:
        """A step is over."""

    def end(self) -> None:
        """`fit` ends, for whatever reason."""


@dataclass(frozen=True)
class Word:
    """What one rank tells the others at the end of a step, as numbers.

    Args:
        loss: Its share of the mean loss.
        seconds: Of its step.
        lr: Its learning rate; -inf where it trains nothing.
        norm: The norm of all gradients; -inf where it does not know.
        stop: Whether it wants to stop (1) or not (0).
        over: Whether it has no next batch (1) or has one (0).
    """

    loss: float
    seconds: float
    lr: float = -math.inf
    norm: float = -math.inf
    stop: float = 0.0
    over: float = 0.0


def exchange(world: World, own: Word) -> Word:
    """The sum of the losses, and of all else the largest, or NaN. Every rank calls this."""
    mine = torch.tensor(astuple(own), dtype=torch.float64, device=world.device)
    every = mine.new_empty(world.size * len(mine))
    dist.all_gather_single(every, mine)
    rows = every.view(world.size, -1)
    losses: list[float] = rows[:, 0].tolist()
    others: list[float] = rows[:, 1:].amax(0).tolist()
    return Word(math.fsum(losses), *others)
