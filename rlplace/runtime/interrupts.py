"""Ctrl-C as a wish: the step is finished, and all ranks stop together."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def polite_stop() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether Ctrl-C was pressed inside; the second one interrupts.

    torchrun hands a Ctrl-C on to its ranks. Signals reach the main thread alone, so in any other
    nothing is caught.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def note(number: int, frame: FrameType | None) -> None:
        asked.set()
        signal.signal(number, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
