"""Fit a handful of named constants to measurements, by robust least squares.

What is fitted is ln(predicted / measured), so that a miss by a third counts the same for a short
step and for a long one, under a soft-L1 loss (scipy's `least_squares`), so that a sick run counts
little. Constants that are factors are fitted by their logarithm. What the measurements cannot tell
is left as it was, and named: a fit makes up no constant.

How a plan is predicted is handed in (`Predict`), for the simulator lies above this room;
`rlplace.simulate.predict.predict` is the usual one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from rlplace.cost.constants import (
    Range,
    apply_all,
    check_names,
    constants_of,
    range_of,
)
from rlplace.cost.measured import Calibration, Measured, Predict, Progress, Residual
from rlplace.errors import InputError

Floats = npt.NDArray[np.float64]

#: Misses beyond this (of a logarithm) count linearly.
_SOFT = 0.1
#: Relative step of the derivatives: large enough to see past the kinks of a maximum.
_STEP = 0.01
#: A constant is not determined where a change by a factor e moves no prediction by this share ...
_INSENSITIVE = 0.01
#: ... or where its standard error is this large, with measurements no better than `_NOISE`.
_VAGUE, _NOISE = 0.7, 0.02
#: Share of its range within which a constant counts as driven to the end of it.
_EDGE = 5e-3
#: Step of the scan before the fit, of the logarithm of a constant: a factor of 3.
_SCAN = 1.1
#: Steps of the solver.
_MAX_STEPS = 40


def fit(
    measured: Sequence[Measured],
    names: Sequence[str],
    predict: Predict,
    *,
    held_out: Sequence[Measured] = (),
    progress: Progress | None = None,
) -> Calibration:
    """Fit constants to measurements.

    Ctrl-C ends the fit early: the best constants so far are returned.

    Args:
        measured: The rows to fit.
        names: The constants, as `rlplace.cost.constants` names them.
        predict: Predicts rows.
        held_out: Rows that are only predicted, for the error band.
        progress: Told how far it is.

    Raises:
        InputError: If no row has one of the constants, with the nearest name; if there are fewer
            measured figures than constants; if a constant has nowhere to start.
    """
    known: dict[str, float] = {}
    for row in measured:
        for name, value in constants_of(row.instance).items():
            known.setdefault(name, value)
    check_names(names, known)
    before = {name: known[name] for name in dict.fromkeys(names)}
    ranges = {name: range_of(name, value) for name, value in before.items()}
    problem = _Problem(measured, predict, ranges, progress)
    if problem.figures < len(before):
        rule = f"fewer than the {len(before)} constants to fit"
        raise InputError("measurements", problem.figures, rule, len(before))
    interrupted = False
    try:
        values, undetermined, errors = _determine(problem, before)
    except KeyboardInterrupt:
        interrupted = True
        values, undetermined, errors = before | problem.best, dict[str, str](), dict[str, float]()
    constants = {name: values[name] for name in before if name not in undetermined}
    fitted = _residuals(measured, predict, constants)
    others = _residuals(held_out, predict, constants)
    band = _band(others) or _band(fitted)
    return Calibration(
        constants=constants,
        errors=errors,
        before=before,
        undetermined=undetermined,
        fitted=fitted,
        held_out=others,
        band=band or (1.0, 1.0),
        band_rows="held out" if _band(others) else "fitted",
        frameworks=tuple(sorted({row.instance.execution.name for row in measured})),
        interrupted=interrupted,
    )


class _Problem:
    """Residuals and their derivatives; a row is predicted again only where it has the constant."""

    def __init__(
        self,
        rows: Sequence[Measured],
        predict: Predict,
        ranges: Mapping[str, Range],
        progress: Progress | None,
    ) -> None:
        self.rows, self.predict, self.ranges = rows, predict, ranges
        self.progress = progress
        self.evaluations, self.best_cost, self._median = 0, float("inf"), float("nan")
        self.best: dict[str, float] = {}
        owned: dict[int, set[str]] = {}
        for row in rows:
            if id(row.instance) not in owned:
                owned[id(row.instance)] = set(constants_of(row.instance))
        self.concerned = {
            name: [i for i, row in enumerate(rows) if name in owned[id(row.instance)]]
            for name in ranges
        }
        # Where each row's figures lie in the vector of residuals.
        self.places: list[list[int]] = []
        self.figures = 0
        for row in rows:
            count = (row.step_time is not None) + (row.peak_memory is not None)
            self.places.append([*range(self.figures, self.figures + count)])
            self.figures += count

    def residuals(self, values: Mapping[str, float]) -> Floats:
        """ln(predicted / measured) of every figure."""
        found = self._of(range(len(self.rows)), values)
        cost = float(np.sum(np.sqrt(1.0 + (found / _SOFT) ** 2) - 1.0))
        if cost < self.best_cost:
            self.best_cost, self.best = cost, dict(values)
            self._median = float(np.median(np.abs(np.expm1(found))))
        self._tell()
        return found

    def derivatives(self, values: Mapping[str, float], names: Sequence[str], at: Floats) -> Floats:
        """Of the residuals, by the number that each name is fitted by."""
        found = np.zeros((self.figures, len(names)))
        for column, name in enumerate(names):
            limits = self.ranges[name]
            number = limits.encode(values[name])
            forward = number + _STEP
            if forward > limits.encode(limits.high):
                forward = number - _STEP
            changed = {**values, name: limits.decode(forward)}
            rows = self.concerned[name]
            places = [place for row in rows for place in self.places[row]]
            step = limits.encode(changed[name]) - number
            found[places, column] = (self._of(rows, changed) - at[places]) / step
            self._tell()
        return found

    def _of(self, indices: Sequence[int], values: Mapping[str, float]) -> Floats:
        chosen = [self.rows[index] for index in indices]
        predicted = self.predict(with_constants(chosen, values))
        found: list[float] = []
        for row, (seconds, size) in zip(chosen, predicted, strict=True):
            if row.step_time is not None:
                found.append(np.log(seconds / row.step_time))
            if row.peak_memory is not None:
                found.append(np.log(size / row.peak_memory))
        return np.array(found)

    def _tell(self) -> None:
        self.evaluations += 1
        if self.progress is not None:
            self.progress(self.evaluations, self._median)


def with_constants(rows: Sequence[Measured], values: Mapping[str, float]) -> list[Measured]:
    """The rows, with other constants in their instances."""
    instances = apply_all([row.instance for row in rows], values)
    return [
        Measured(instance, row.plan, row.step_time, row.peak_memory, row.name)
        for instance, row in zip(instances, rows, strict=True)
    ]


def _determine(
    problem: _Problem, before: dict[str, float]
) -> tuple[dict[str, float], dict[str, str], dict[str, float]]:
    """Values, names that cannot be determined, standard errors.

    Fits, sets what the rows do not tell back to where it was, and fits the rest again, the vaguest
    first.
    """
    values, undetermined = _scanned(problem, before), dict[str, str]()
    while True:
        names = [name for name in before if name not in undetermined]
        values = {name: values[name] if name in names else before[name] for name in before}
        if not names:
            return values, undetermined, {}
        values |= _solve(problem, values, names)
        at = problem.residuals(values)
        slopes = problem.derivatives(values, names, at)
        found = _unmoving(names, slopes) or _at_limit(problem.ranges, values, names)
        if not found:
            errors = dict(zip(names, _errors(slopes, at).tolist(), strict=True))
            found = _vaguest(errors)
        if not found:
            return values, undetermined, errors
        undetermined |= found


def _scanned(problem: _Problem, before: Mapping[str, float]) -> dict[str, float]:
    """Better values to start from, found by a few large steps of each constant in turn.

    Where a step time is the longer of two, what the shorter depends on has no derivative at all.
    """
    values = {name: problem.ranges[name].start(value) for name, value in before.items()}
    problem.residuals(before)
    for name in values:
        limits = problem.ranges[name]
        here = limits.encode(values[name])
        step = _SCAN if limits.logarithmic else _SCAN / 4.0
        for number in (here - step, here + step, here + 2.0 * step):
            inside = min(max(number, limits.encode(limits.low)), limits.encode(limits.high))
            problem.residuals({**values, name: limits.decode(inside)})
        values = dict(problem.best)
    return values


def _solve(
    problem: _Problem, values: Mapping[str, float], names: Sequence[str]
) -> dict[str, float]:
    """The best values of some names; all others as they are."""
    ranges = [problem.ranges[name] for name in names]
    low = np.array([limits.encode(limits.low) for limits in ranges])
    high = np.array([limits.encode(limits.high) for limits in ranges])
    margin = 1e-3 * (high - low)
    start = np.array([r.encode(r.start(values[n])) for r, n in zip(ranges, names, strict=True)])
    last: dict[bytes, Floats] = {}

    def decoded(numbers: Floats) -> dict[str, float]:
        own = {n: r.decode(float(x)) for n, r, x in zip(names, ranges, numbers, strict=True)}
        return {**values, **own}

    def residuals(numbers: Floats) -> Floats:
        found = problem.residuals(decoded(numbers))
        last.clear()
        last[numbers.tobytes()] = found
        return found

    def derivatives(numbers: Floats) -> Floats:
        at = last.get(numbers.tobytes())
        at = residuals(numbers) if at is None else at
        return problem.derivatives(decoded(numbers), names, at)

    result = least_squares(
        residuals,
        np.clip(start, low + margin, high - margin),
        jac=derivatives,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=_SOFT,
        xtol=1e-4,
        ftol=1e-5,
        gtol=1e-8,
        max_nfev=_MAX_STEPS,
    )
    found = decoded(result.x)
    return {name: found[name] for name in names}


def _errors(slopes: Floats, residuals: Floats) -> Floats:
    """Standard errors of the numbers that are fitted; outliers weigh as little as in the fit."""
    spread = max(1.4826 * float(np.median(np.abs(residuals))), _NOISE)
    weights = 1.0 / np.sqrt(1.0 + (residuals / _SOFT) ** 2)
    normal = slopes.T @ (slopes * weights[:, None])
    # The ridge keeps what the rows do not tell finite: a huge error, not none.
    ridge = 1e-10 * np.trace(normal) * np.eye(len(normal))
    errors: Floats = spread * np.sqrt(np.diag(np.linalg.inv(normal + ridge)))
    return errors


def _unmoving(names: Sequence[str], slopes: Floats) -> dict[str, str]:
    """The names that move no prediction."""
    moves = np.abs(slopes).max(axis=0, initial=0.0)
    reason = f"no prediction moves by {_INSENSITIVE:.0%} where it changes by a factor of 2.7"
    return {name: reason for name, most in zip(names, moves, strict=True) if most < _INSENSITIVE}


def _at_limit(
    ranges: Mapping[str, Range], values: Mapping[str, float], names: Sequence[str]
) -> dict[str, str]:
    """The first name that the fit drives to an end of its range."""
    for name in names:
        limits = ranges[name]
        low, high = limits.encode(limits.low), limits.encode(limits.high)
        place = (limits.encode(values[name]) - low) / (high - low)
        if not _EDGE < place < 1.0 - _EDGE:
            return {name: f"the fit runs into its limit of {values[name]:.3g}"}
    return {}


def _vaguest(errors: Mapping[str, float]) -> dict[str, str]:
    """The name with the largest standard error, if that is too large."""
    worst = max(errors, key=lambda name: errors[name])
    if errors[worst] <= _VAGUE:
        return {}
    cause = "other constants explain the same" if len(errors) > 1 else "too few rows"
    return {
        worst: f"its standard error is a factor of {np.exp(min(errors[worst], 9.0)):.1f}: {cause}"
    }


def _residuals(
    rows: Sequence[Measured], predict: Predict, constants: Mapping[str, float]
) -> tuple[Residual, ...]:
    before, after = predict(rows), predict(with_constants(rows, constants))
    found = []
    for row, old, new in zip(rows, before, after, strict=True):
        if row.step_time is not None:
            found.append(Residual(row.name, "step_time", row.step_time, old[0], new[0]))
        if row.peak_memory is not None:
            found.append(Residual(row.name, "peak_memory", row.peak_memory, old[1], new[1]))
    return tuple(found)


def _band(rows: Sequence[Residual]) -> tuple[float, float] | None:
    ratios = [row.measured / row.after for row in rows if row.quantity == "step_time"]
    if not ratios:
        return None
    low, high = np.percentile(ratios, [10, 90])
    return float(low), float(high)
