"""The batches of a training, one step ahead, so that all ranks know together when they end."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from rlplace.runtime.checkpoint import Stateful


class Feed:
    """Batches for some steps.

    Args:
        data: Batches.
        accumulate: How many a step takes; the last step may have fewer.
        steps: How many steps at most; None for all that there is.
    """

    def __init__(self, data: Iterable[Any], accumulate: int, steps: int | None) -> None:
        self._data, self._stream = data, iter(data)
        self._accumulate, self._left = accumulate, steps
        self._state: dict[str, Any] = {}
        self._made = 0
        #: Those of the next step; none at the end.
        self.batches: list[Any] = []

    def advance(self) -> bool:
        """Go on to the next step; whether there is one."""
        if self._left is not None:
            self._left -= 1
        over = self._left is not None and self._left < 0
        if isinstance(self._data, Stateful):
            # Before the batches that are fetched ahead.
            self._state = {"data": self._data.state_dict(), "made": self._made}
        self._made += 1
        self.batches = [] if over else list(islice(self._stream, self._accumulate))
        return bool(self.batches)

    def skip(self, steps: int) -> int:
        """Leave out the batches of steps that were made before, this one's first.

        Returns:
            How many steps the data does not reach.
        """
        while steps and self.batches:
            self.advance()
            steps -= 1
        return steps

    @property
    def stateful(self) -> bool:
        """Whether the data knows itself how far it has come."""
        return isinstance(self._data, Stateful)

    def state_dict(self) -> dict[str, Any]:
        """The state of the data behind the last step."""
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the data was."""
        assert isinstance(self._data, Stateful)
        self._data.load_state_dict(state_dict["data"])
        self._stream = iter(self._data)
        if self._left is not None:
            self._left += self._made - state_dict["made"]
        self._made = state_dict["made"]
        self.advance()
