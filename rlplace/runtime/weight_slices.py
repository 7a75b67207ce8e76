"""Names of slices of parameters: the one place that knows them.

A slice is a parameter of its own inside a stage (`rlplace.runtime.sliced`); for all that looks at
a run from outside there is the whole parameter alone.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_KEY = re.compile(r"(?P<name>.*)\[(?P<index>\d+)/(?P<count>\d+)\]")


@dataclass(frozen=True)
class WeightSlice:
    """An equal run of the rows of a parameter, as the tp axis of this rank holds that.

    Args:
        name: Fully qualified name of the parameter.
        index, count: Which of how many slices; one, where it is whole.
    """

    name: str
    index: int = 0
    count: int = 1

    @staticmethod
    def of(key: str) -> WeightSlice:
        """What a stage has under a name."""
        found = _KEY.fullmatch(key)
        if found is None:
            return WeightSlice(key)
        return WeightSlice(found["name"], int(found["index"]), int(found["count"]))

    @property
    def key(self) -> str:
        """Under which name a stage has it."""
        return self.name if self.count == 1 else f"{self.name}[{self.index}/{self.count}]"

    def take(self, whole: Tensor) -> Tensor:
        """The slice, in memory of its own."""
        return whole if self.count == 1 else whole.chunk(self.count)[self.index].clone()

    def start(self, slice_: Tensor) -> int:
        """Where the slice begins in the whole parameter, flattened."""
        return self.index * slice_.numel()


def joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors by the name of the parameter, from those of all its slices by their names."""
    found: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    for key, tensor in tensors.items():
        one = WeightSlice.of(key)
        found[one.name].append((one.index, tensor))
    return {
        name: torch.cat([tensor for _, tensor in sorted(own, key=lambda pair: pair[0])])
        if len(own) > 1
        else own[0][1]
        for name, own in found.items()
    }
