"""A strategy: how one node runs on the devices of a tp axis."""

from __future__ import annotations

from dataclasses import dataclass

from rlplace.graph.types import Partial, Placement, Replicate, Shard


@dataclass(frozen=True, slots=True)
class Copied:
    """A replicated value read by an op that works on a shard: its gradient is a sum."""


#: How an op reads one of its tensor arguments.
Want = Replicate | Copied | Shard

REPLICATE = Replicate()


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run a node.

    Args:
        reads: One for each tensor argument (`tensor_args`), in order.
        output: Placement of the result, of every part of it where it is a tuple. `Partial` is
            reduced at once.
        scattered: Of a `Partial`: its sum is left on the devices in this way, not on all of them.
    """

    reads: tuple[Want, ...]
    output: Placement
    scattered: Shard | None = None

    @property
    def held(self) -> Replicate | Shard:
        """How the result is held."""
        if isinstance(self.output, Partial):
            return self.scattered or REPLICATE
        return self.output

    @property
    def sharded(self) -> bool:
        """Whether the devices share the work."""
        return any(isinstance(each, Shard) for each in (*self.reads, self.output))


def divides(size: int, degree: int, blocks: int = 1) -> bool:
    """Whether a dim of a known size can be cut into equal parts."""
    return size > 0 and size % (degree * blocks) == 0
