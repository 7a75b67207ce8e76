"""Which steps of a stage are redone in the backward pass, and what is kept of them.

``full`` redoes a group from its inputs, and with it the groups that are ``joined`` to it. ``ops``
keeps what matmuls and attention give, ``attention`` redoes the core attention alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlplace.graph.program import Piece
from rlplace.plan.types import JOINED
from rlplace.runtime.attention import marked, redoing_attention
from rlplace.runtime.keeping import sparing
from rlplace.runtime.parts import Conversion, Region, Step


@dataclass
class _Run:
    """Steps that become one region."""

    mode: str
    steps: list[Step] = field(default_factory=list)

    @property
    def made(self) -> set[str]:
        return {name for step in self.steps for name in step.gives}

    @property
    def takes(self) -> tuple[str, ...]:
        names = dict.fromkeys(name for step in self.steps for name in step.takes)
        return tuple(name for name in names if name not in self.made)


def prepared(piece: Piece, mode: str) -> Piece:
    """A piece as a recompute mode wants it."""
    if mode == "attention":
        return redoing_attention(piece)
    return sparing(marked(piece)) if mode == "ops" else piece


def regions(steps: Iterable[tuple[Step, str]], gives: Collection[str]) -> list[Region]:
    """The regions of a stage.

    Args:
        steps: In order, with the recompute mode of the group that each is for.
        gives: Values that others need after all of them.
    """
    return _regions(_runs(steps), gives)


def _runs(steps: Iterable[tuple[Step, str]]) -> list[_Run]:
    runs: list[_Run] = []
    for step, mode in steps:
        if mode != JOINED:
            alone = isinstance(step, Conversion)
            runs.append(_Run("none" if alone else mode, [step]))
        elif isinstance(step, Conversion) and step.source not in runs[-1].made:
            runs.insert(-1, _Run("none", [step]))
        else:
            runs[-1].steps.append(step)
    return runs


def _regions(runs: Sequence[_Run], gives: Collection[str]) -> list[Region]:
    later = set(gives)
    found: list[Region] = []
    for run in reversed(runs):
        made = tuple(name for step in run.steps for name in step.gives if name in later)
        drop = tuple(sorted(set(run.takes) - later))
        mode = redone_as(run.mode)
        found.append(Region(tuple(run.steps), run.takes, made, drop, mode))
        later |= set(run.takes)
    return found[::-1]


def redone_as(mode: str) -> Literal["full", "ops"] | None:
    """What of a group's steps is run again as a whole."""
    return "full" if mode == "full" else "ops" if mode == "ops" else None
