"""Measured plans, and what a fit of constants to them found."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rlplace.errors import InputError
from rlplace.plan.types import Instance, Plan


@dataclass(frozen=True)
class Measured:
    """A plan that was run.

    Args:
        instance: What it was run for; its cluster and framework hold the constants to start from.
        plan: The plan.
        step_time: Measured seconds of a step; None if only memory is known.
        peak_memory: Measured bytes of the device that holds most; None if only time is known.
        name: For people.
    """

    instance: Instance
    plan: Plan
    step_time: float | None
    peak_memory: float | None = None
    name: str = ""

    def __post_init__(self) -> None:
        given = {"step_time": self.step_time, "peak_memory": self.peak_memory}
        if all(value is None for value in given.values()):
            raise InputError("measured", self.name, "has neither a step_time nor a peak_memory")
        for what, value in given.items():
            if value is not None and not value > 0.0:
                raise InputError(what, value, "a measurement is above zero")


#: (step time, peak memory) of each row.
Predict = Callable[[Sequence[Measured]], Sequence[tuple[float, float]]]
#: Told after every evaluation: how many there were, median |error| of the best so far.
Progress = Callable[[int, float], None]


@dataclass(frozen=True, slots=True)
class Residual:
    """One measured figure beside its predictions.

    Args:
        name: Name of the row.
        quantity: What was measured.
        measured: Seconds or bytes.
        before: Predicted with the constants that the fit started from.
        after: Predicted with the fitted ones.
    """

    name: str
    quantity: Literal["step_time", "peak_memory"]
    measured: float
    before: float
    after: float


@dataclass(frozen=True)
class Calibration:
    """What a fit found.

    Args:
        constants: Fitted values by name.
        errors: Standard error of each, as a share of the value (of its range, if not a factor).
        before: The values of all names that were asked for, before the fit.
        undetermined: Names that were left as they were, and why.
        fitted: Residuals of the rows of the fit.
        held_out: Residuals of the others.
        band: Measured over predicted step time, 10th and 90th percentile.
        band_rows: Which rows the band is of.
        frameworks: Names of the frameworks of the rows, whose estimates the band is of.
        date: Day of the fit.
        interrupted: Whether the user stopped it; the constants are the best until then.
    """

    constants: dict[str, float]
    errors: dict[str, float]
    before: dict[str, float]
    undetermined: dict[str, str]
    fitted: tuple[Residual, ...]
    held_out: tuple[Residual, ...] = ()
    band: tuple[float, float] = (1.0, 1.0)
    band_rows: Literal["held out", "fitted"] = "fitted"
    frameworks: tuple[str, ...] = ()
    date: str = field(default_factory=lambda: datetime.date.today().isoformat())
    interrupted: bool = False


def percentile_error(
    rows: Sequence[Residual], percent: float = 50.0, *, before: bool = False
) -> float:
    """A percentile of |predicted / measured - 1|; NaN without rows."""
    if not rows:
        return float("nan")
    misses = [abs((row.before if before else row.after) / row.measured - 1.0) for row in rows]
    return float(np.percentile(misses, percent))


def split(rows: Sequence[Measured], share: float, seed: int = 0) -> tuple[list[Measured], ...]:
    """Rows to fit and rows to hold out, drawn by chance; both keep their order."""
    order = np.random.default_rng(seed).permutation(len(rows))
    out = {int(index) for index in order[: round(share * len(rows))]}
    fitted = [row for index, row in enumerate(rows) if index not in out]
    return fitted, [row for index, row in enumerate(rows) if index in out]
