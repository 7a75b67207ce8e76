"""Every way to run a group, each with the least that it costs, as arrays.

A *way* is a layout on a kind of device, a split of the batch with a ZeRO level, and what is redone
and offloaded, of all that the instance lets a planner choose.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlplace.graph.types import Structure
from rlplace.simulate.bounds.frame import Frame
from rlplace.simulate.bounds.least import Least
from rlplace.simulate.bounds.splits import Floats, Ints


@dataclass(frozen=True, slots=True)
class Ways:
    """The ways of a structure: O choices of recompute and offload, L layouts on kinds, P splits.

    Args:
        kind: Index of the kind (L,).
        devices: Devices of the mesh (L, P).
        step: Seconds of a device for a step, without what hides behind its backward (O, L, P).
        tail: Seconds of a device for all forwards, then all of its reduction (O, L, P).
        forward: Seconds of the forward of one micro-batch (L, P).
        through: The same, and of the part of the backward that the stage before waits for (L, P).
        held: Bytes that a device holds of states and of one micro-batch (O, L, P).
    """

    kind: Ints
    devices: Floats
    step: Floats
    tail: Floats
    forward: Floats
    through: Floats
    held: Floats


def ways_of(frame: Frame, structure: Structure, tied: int) -> Ways:
    """The ways of a structure.

    Args:
        frame: The instance.
        structure: What is run.
        tied: Elements of tied parameters among its own. They are not counted in memory, where
            several uses may be held once.
    """
    choices = tuple(frame.choices(structure))
    least = [
        Least(frame, layout, index, tied, choices)
        for layout in frame.layouts(structure)
        for index in range(len(frame.instance.cluster.kinds))
    ]
    step, tail, held = (
        np.array([[getattr(own, name)(choice) for own in least] for choice in choices])
        for name in ("step", "tail", "held")
    )
    return Ways(
        kind=np.array([own.index for own in least], np.int64),
        devices=np.array([own.layout.degree * frame.cut.replicas for own in least], float),
        step=step,
        tail=tail,
        forward=np.array([own.forward for own in least]),
        through=np.array([own.through for own in least]),
        held=held,
    )
