"""Bytes that tensors hold while a step runs; the allocator of a CPU does not tell."""

from __future__ import annotations

import resource
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Held:
    """A claim on the storage of a tensor; it ends with this object."""

    def __init__(self, tensor: torch.Tensor, tracker: ActivationTracker) -> None:
        self.tensor = tensor
        self._tracker = tracker
        tracker.claim(tensor)

    def __del__(self) -> None:
        self._tracker.release(self.tensor)


class ActivationTracker:
    """Counts the storages that autograd keeps for backward, each once, and their peak.

    Args:
        known: Tensors that are counted elsewhere: parameters and buffers.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        self._known = {_key(tensor) for tensor in known}
        self._claims: dict[int, int] = {}
        self.current = 0
        self.peak = 0

    def claim(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor, if nobody has claimed it yet."""
        key = _key(tensor)
        if key in self._known:
            return
        self._claims[key] = self._claims.get(key, 0) + 1
        if self._claims[key] == 1:
            self.current += tensor.untyped_storage().nbytes()
            self.peak = max(self.peak, self.current)

    def release(self, tensor: torch.Tensor) -> None:
        """End a claim."""
        key = _key(tensor)
        if key not in self._claims:
            return
        self._claims[key] -= 1
        if not self._claims[key]:
            del self._claims[key]
            self.current -= tensor.untyped_storage().nbytes()

    def hold(self, tensor: torch.Tensor) -> Held:
        """A claim that lasts as long as the object that is returned."""
        return Held(tensor.detach(), self)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Claim every tensor that autograd saves inside."""
        with torch.autograd.graph.saved_tensors_hooks(self.hold, lambda held: held.tensor):
            yield


class Peak(NamedTuple):
    """The most bytes at a time, and what went on then."""

    bytes: int
    words: str


class LiveTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that ops make while it is entered, as long as they live, and their peak.

    What was there before is not counted, and neither is what an op uses inside.

    Args:
        kind: Says what kind of phase goes on; asked after every op.
        words: Says in words which one; asked where more is held than before.
    """

    def __init__(self, kind: Callable[[], str] = str, words: Callable[[], str] = str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind, self._words = kind, words
        self._sizes: dict[int, int] = {}
        self.current = 0
        #: The most that was held in each kind of phase, and in which one that was.
        self.peaks: dict[str, Peak] = {}

    @property
    def peak(self) -> int:
        """The most that was held."""
        return max((peak.bytes for peak in self.peaks.values()), default=0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op and count what it makes."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, 0)
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, leaf.untyped_storage().nbytes())
        self.note()
        return made

    def note(self) -> None:
        """Note what is held now, in the phase that goes on."""
        kind = self._kind()
        if kind not in self.peaks or self.current > self.peaks[kind].bytes:
            self.peaks[kind] = Peak(self.current, self._words())

    def _see(self, tensor: torch.Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = size
            self.current += size
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.current -= self._sizes.pop(key)


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages of some tensors."""
    found = {_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(found.values())


def resident_peak() -> int:
    """Largest resident set of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _key(tensor: torch.Tensor) -> int:
    # Not where it is, for the memory of lent weights comes and goes.
    key: int = tensor.untyped_storage()._cdata
    return key
