"""Hybrid strategies of Galvatron (arXiv 2211.13878), as it counts them.

A tree over the devices: the pipeline splits them first, then each level of the tree is given to
data parallelism (dp), sharded data parallelism (sdp, ZeRO-3) or tensor parallelism (tp), each of
which has at most one level. A strategy is the degrees in their order, the outermost first; so
2 / 4 / 8 / 16 devices have 4 / 13 / 34 / 73 strategies, and 4 / 11 / 22 / 37 without those that mix
dp and sdp, which the paper prunes for sdp alone. Recompute doubles them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

import numpy as np

from rlplace.plan.types import Mesh

Paradigm = Literal["dp", "sdp", "tp"]
#: In the order of the axes of a `Mesh`, the outermost first.
_PARADIGMS: tuple[Paradigm, ...] = get_args(Paradigm)


@dataclass(frozen=True, slots=True)
class Strategy:
    """How one layer runs.

    Args:
        pp: Pipeline stages.
        levels: (paradigm, degree) inside a stage, outermost first; degrees of at least 2.
        recompute: Whether its forward runs again in the backward pass.
    """

    pp: int
    levels: tuple[tuple[Paradigm, int], ...] = ()
    recompute: bool = False

    def degree(self, paradigm: Paradigm) -> int:
        """Degree of a paradigm, 1 where it has no level."""
        return dict(self.levels).get(paradigm, 1)

    def mesh(self, devices: tuple[int, ...]) -> Mesh:
        """The mesh of a stage on `devices`, of which the outermost level cuts the largest runs.

        dp is `Mesh.dp_replicate` and sdp `Mesh.dp_shard`; where another level is outside of tp, the
        devices of the mesh are in another order.
        """
        order = [name for name, _ in self.levels]
        grid = np.array(devices).reshape([degree for _, degree in self.levels])
        axes = [order.index(axis) for axis in _PARADIGMS if axis in order]
        placed = tuple(int(device) for device in grid.transpose(axes).ravel())
        return Mesh(placed, self.degree("dp"), self.degree("sdp"), 1, self.degree("tp"))


def strategies(
    devices: int, *, mixed: bool = False, recompute: bool = False
) -> tuple[Strategy, ...]:
    """All strategies on so many devices, any number of stages that divides them.

    Args:
        devices: Devices of the cluster.
        mixed: Whether dp and sdp may be in one strategy.
        recompute: Whether each is offered with recompute too.
    """
    modes = (False, True) if recompute else (False,)
    return tuple(
        Strategy(pp, levels, mode)
        for pp in _divisors(devices)
        for levels in _levels(devices // pp, _PARADIGMS)
        if mixed or not {"dp", "sdp"} <= {name for name, _ in levels}
        for mode in modes
    )


def data_meshes(devices: tuple[int, ...], degrees: tuple[int, ...]) -> tuple[Mesh, ...]:
    """The meshes of one stage on which strategies can be said side by side.

    Layers of one stage share its mesh. On one whose replicas are all `Mesh.dp_shard`, a layer under
    dp has ZeRO-0 and one under sdp ZeRO-3, so dp and sdp of the same degrees are one mesh.

    Args:
        devices: Of the stage.
        degrees: Tp degrees that are offered.
    """
    found = (
        strategy.mesh(devices)
        for strategy in strategies(len(devices))
        if strategy.pp == 1 and strategy.degree("dp") == 1
    )
    return tuple(mesh for mesh in found if mesh.tp in degrees)


def _levels(
    devices: int, paradigms: tuple[Paradigm, ...]
) -> Iterator[tuple[tuple[Paradigm, int], ...]]:
    """Ordered degrees of different paradigms with `devices` as product."""
    if devices == 1:
        yield ()
        return
    for paradigm, degree in product(paradigms, _divisors(devices)[1:]):
        rest = tuple(other for other in paradigms if other != paradigm)
        for inner in _levels(devices // degree, rest):
            yield ((paradigm, degree), *inner)


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)
