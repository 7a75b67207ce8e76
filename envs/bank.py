"""Instances by number: observations carry the number, the policy looks the arrays up."""

from __future__ import annotations

from collections import OrderedDict

from rlplace.envs.types import InstanceView
from rlplace.plan.types import Instance


def instance_key(instance: Instance) -> tuple[object, ...]:
    """What makes two instances the same question; hashable."""
    return (
        instance.graph.fingerprint,
        instance.cluster.fingerprint,
        instance.global_batch,
        instance.precision,
        instance.optimizer,
        instance.attention,
        instance.memory_margin,
        instance.zero_levels,
        instance.recompute_modes,
        instance.tp_degrees,
        instance.loss_chunks,
        instance.fused,
    )


class InstanceBank:
    """Views of instances by number, shared by environments and the policy of one process.

    Numbers count up from 0 in the order in which instances come and are never used twice; an
    instance that is still known keeps its number. Of more than `capacity` the ones not used for
    the longest time are forgotten.

    Args:
        capacity: Instances that are kept.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self.capacity = capacity
        self._numbers: OrderedDict[tuple[object, ...], int] = OrderedDict()
        self._views: dict[int, InstanceView] = {}
        self._next = 0

    def __len__(self) -> int:
        """Instances that are known."""
        return len(self._views)

    def add(self, instance: Instance, view: InstanceView) -> int:
        """The number of an instance."""
        key = instance_key(instance)
        if key in self._numbers:
            self._numbers.move_to_end(key)
            return self._numbers[key]
        number = self._numbers[key] = self._next
        self._views[number] = view
        self._next += 1
        if len(self._numbers) > self.capacity:
            _, oldest = self._numbers.popitem(last=False)
            del self._views[oldest]
        return number

    def view(self, instance: int) -> InstanceView:
        """The constant part of an episode.

        Raises:
            KeyError: If the number was never given out, or its instance has been forgotten.
        """
        number = int(instance)
        if number not in self._views:
            raise KeyError(f"instance {number} is not in the bank; a larger capacity keeps more")
        return self._views[number]
