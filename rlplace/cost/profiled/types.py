"""Measured tables: the time and memory of each layer of a model, by device kind, tp and samples."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

from rlplace.errors import InputError
from rlplace.graph.types import Affine


@dataclass(frozen=True, slots=True)
class LayerPoint:
    """One measurement of a layer, on one device of its tp group.

    Args:
        samples: Samples of the micro-batch.
        forward: Seconds of its forward, tensor-parallel collectives included.
        backward: Seconds of its backward, likewise, nothing recomputed.
        saved: Bytes that it keeps for the backward pass.
        transient: Bytes that come and go in its backward pass.
    """

    samples: float
    forward: float
    backward: float
    saved: float = 0.0
    transient: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerTable:
    """A layer on one kind of device at one tp degree.

    Args:
        points: Measurements by ascending samples, at least one.
        optimizer: Seconds of its optimizer step.
    """

    points: tuple[LayerPoint, ...]
    optimizer: float = 0.0

    def at(self, samples: float) -> LayerPoint:
        """The layer for any number of samples.

        Between two points along a straight line; outside them along the line through the two
        nearest, but never above what is proportional to the nearest beyond the last, nor below it
        before the first (a smaller batch is never used better). One point alone scales.
        """
        places = [point.samples for point in self.points]
        after = bisect_left(places, samples)
        if after < len(places) and places[after] == samples:
            return self.points[after]
        nearest = self.points[min(after, len(places) - 1)]
        share = samples / nearest.samples
        if len(places) == 1:
            return _combined(nearest, nearest, share, 0.0)
        upper = min(max(after, 1), len(places) - 1)
        first, second = self.points[upper - 1], self.points[upper]
        weight = (samples - first.samples) / (second.samples - first.samples)
        line = _combined(first, second, 1.0 - weight, weight)
        if after == 0:
            return _each(max, line, _combined(nearest, nearest, share, 0.0))
        if after == len(places):
            return _each(min, line, _combined(nearest, nearest, share, 0.0))
        return line


def _combined(a: LayerPoint, b: LayerPoint, of_a: float, of_b: float) -> LayerPoint:
    return LayerPoint(
        *(of_a * getattr(a, f.name) + of_b * getattr(b, f.name) for f in fields(LayerPoint))
    )


def _each(rule: Callable[[float, float], float], a: LayerPoint, b: LayerPoint) -> LayerPoint:
    return LayerPoint(*(rule(getattr(a, f.name), getattr(b, f.name)) for f in fields(LayerPoint)))


@dataclass(frozen=True)
class Profile:
    """A model as a chain of measured layers.

    Args:
        name: Name of the model.
        layers: Name of each layer in the order of the model; layers of one name share a table.
        tables: By (kind, layer, tp).
        params: Trainable elements of a layer on one device, by (layer, tp).
        outputs: Float elements that a layer hands on, whole.
        tokens_per_sample: Length of the sequence.
    """

    name: str
    layers: tuple[str, ...]
    tables: Mapping[tuple[str, str, int], LayerTable]
    params: Mapping[tuple[str, int], int]
    outputs: Mapping[str, Affine] = field(default_factory=dict)
    tokens_per_sample: int = 1

    def degrees(self, layer: str) -> tuple[int, ...]:
        """Tp degrees at which a layer was measured, on any kind."""
        return tuple(sorted({tp for _, name, tp in self.tables if name == layer}))

    def table(self, kind: str, layer: str, tp: int) -> LayerTable:
        """The table of a layer.

        Raises:
            InputError: If it was not measured there; what was is named.
        """
        found = self.tables.get((kind, layer, tp))
        if found is None:
            rule = f"the profile of {self.name} has no such measurement"
            known = sorted((k, degree) for k, name, degree in self.tables if name == layer)
            raise InputError("layer, kind, tp", (layer, kind, tp), rule, known or self.layers)
        return found
