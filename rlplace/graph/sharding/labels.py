"""Ops in the manner of an einsum: a label for each dim that may be cut over the devices.

Cutting a label cuts every dim that carries it. An output without the label is then a sum over the
devices where the op contracts it, and illegal otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

Labels = tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """Labels of the dims of the arguments and of the output; None for a dim that stays whole.

    Args:
        inputs: One for each tensor argument, in order.
        output: Of the result.
        contracted: Labels that are summed over.
        origins: Labels on which a sharding may start.
        units: Labels whose dims are so many equal units, between which alone they may be cut.
        solid: Labels whose dims are cut in one run, without `Shard.blocks`.
        added: Arguments, by index, that are added to the result: to a sum over the devices once.
    """

    inputs: tuple[Labels, ...]
    output: Labels
    contracted: frozenset[str] = frozenset()
    origins: tuple[str, ...] = ()
    units: Mapping[str, int] = field(default_factory=dict)
    solid: frozenset[str] = frozenset()
    added: frozenset[int] = frozenset()


#: Gives the signature of a call, or None where it has no sharded form.
SignatureRule = Callable[[fx.Node], Signature | None]


def names(prefix: str, count: int) -> tuple[str, ...]:
    """So many labels."""
    return tuple(f"{prefix}{index}" for index in range(count))


def whole(count: int, *dims: int) -> Labels:
    """Labels for all dims but some, which stay whole."""
    kept_whole = {dim % count for dim in dims} if count else set()
    return tuple(None if i in kept_whole else label for i, label in enumerate(names("d", count)))


def aligned(own: Sequence[int], labels: Labels, sizes: Sequence[int]) -> Labels:
    """Labels of a tensor that is broadcast to `sizes`: dims are aligned on the right."""
    start = len(sizes) - len(own)
    pairs = zip(own, sizes[start:], labels[start:], strict=True)
    return tuple(label if size == full else None for size, full, label in pairs)


def passing(
    labels: Labels, count: int = 1, output: Iterable[str | None] | None = None
) -> Signature:
    """All labels of equally shaped arguments pass to the output."""
    return Signature((labels,) * count, labels if output is None else tuple(output))
