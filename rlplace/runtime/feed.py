"""The batches of a training, one step ahead, so that all ranks know together when they end."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any


class Feed:
    """Batches for some steps.

    Args:
        data: Batches.
        accumulate: How many a step takes; the last step may have fewer.
        steps: How many steps at most; None for all that there is.
    """

    def __init__(self, data: Iterable[Any], accumulate: int, steps: int | None) -> None:
        self._stream, self._accumulate, self._left = iter(data), accumulate, steps
        #: Those of the next step; none at the end.
        self.batches: list[Any] = []

    def advance(self) -> bool:
        """Go on to the next step; whether there is one."""
        if self._left is not None:
            self._left -= 1
        over = self._left is not None and self._left < 0
        self.batches = [] if over else list(islice(self._stream, self._accumulate))
        return bool(self.batches)
