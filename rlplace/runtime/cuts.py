"""Which parameters of a rank share a bucket."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

BUCKET_BYTES = 25_000_000


@dataclass(frozen=True)
class Trained:
    """A parameter that this rank trains, or holds cut.

    Args:
        param: The parameter, or this rank's shard of it.
        uses: (stage, step of the stage) of each of its uses on this rank.
        zero: ZeRO level.
        offload: Whether the optimizer's states are in the memory of the host.
        settings: Settings of the optimizer for this parameter that differ from its defaults.
        counted: Whether this rank's copy counts in the norm of all gradients; of copies on a tp
            axis or on several meshes one does.
    """

    param: nn.Parameter
    uses: tuple[tuple[int, int], ...] = ((0, 0),)
    zero: int = 0
    offload: bool = False
    settings: tuple[tuple[str, Any], ...] = ()
    counted: bool = True

    @property
    def stages(self) -> tuple[int, ...]:
        """Stages that use it."""
        return tuple(sorted({stage for stage, _ in self.uses}))


def cut(
    params: Sequence[Trained], limit: int, alone: Collection[int], shards: bool
) -> list[list[Trained]]:
    """Runs of parameters that are held alike, each up to about `limit` bytes.

    What is scattered after every backward is of the same stages, and what is lent is used by the
    same steps; its runs have no limit, for one group is whole at a time.

    Args:
        params: The parameters, in the order in which backward completes their gradients.
        limit: Bytes of a bucket.
        alone: Ids of parameters that have a bucket of their own.
        shards: Whether there is more than one device to shard over.

    Returns:
        In the order in which backward completes the runs.
    """
    done: list[list[int]] = []
    opened: dict[Any, list[int]] = {}
    sizes: dict[Any, int] = {}
    for index, one in enumerate(params):
        key = _key(one, id(one.param) in alone, shards)
        if key not in opened:
            opened[key], sizes[key] = [], 0
            done.append(opened[key])
        opened[key].append(index)
        sizes[key] += one.param.numel() * one.param.element_size()
        if sizes[key] >= limit and not (shards and one.zero == 3):
            del opened[key]
    return [[params[index] for index in run] for run in sorted(done, key=lambda run: run[-1])]


def _key(one: Trained, alone: bool, shards: bool) -> tuple[Any, ...]:
    level = one.zero if shards else 0
    together: Any = {2: one.stages, 3: one.uses}.get(level)
    kind = (one.param.dtype, one.param.requires_grad, one.offload, one.settings)
    return (*kind, level, together, id(one.param) if alone else None)
