"""What one rank notes of the steps that are measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from rlplace.plan.orders import format_orders
from rlplace.plan.types import Plan
from rlplace.runtime.assemble import Assembly
from rlplace.runtime.gather import Notes, measurement, traffic_of
from rlplace.runtime.measure import Measurement
from rlplace.runtime.memory import ActivationTracker, LiveTracker, resident_peak, tensor_bytes
from rlplace.runtime.phases import Counted, Use, optimizer_states, peak_use
from rlplace.runtime.world import World


@dataclass
class Page:
    """One step: the clock at its start and its end (s), and this rank's share of the loss."""

    start: float = 0.0
    end: float = 0.0
    loss: float | None = None


class Notebook:
    """Notes the first steps of a training; memory is counted in the very first.

    Later steps are not noted, and run without what noting costs.

    Args:
        assembly: What this rank runs.
        warmup: Steps that do not count as step times.
        steps: Steps after them.
        device: Where this rank computes.
    """

    def __init__(self, assembly: Assembly, warmup: int, steps: int, device: torch.device) -> None:
        self._assembly, self._warmup, self._device = assembly, warmup, device
        self._left = warmup + steps
        self._notes = Notes([], [], [], [], Use(), 0, {})
        self._before = resident_peak()
        self._tracker = ActivationTracker(
            [*assembly.params().values(), *assembly.buffers().values()]
        )
        recorder = assembly.recorder
        self._live = LiveTracker(lambda: recorder.kind, lambda: recorder.doing)
        self._states = tensor_bytes(optimizer_states(assembly))

    @property
    def noting(self) -> bool:
        """Whether the next step is noted."""
        return self._left > 0

    @contextmanager
    def open(self) -> Iterator[Page]:
        """A page for a step, which goes on inside."""
        page = Page()
        if not self.noting:
            yield page
            return
        first, recorder = not self._notes.starts, self._assembly.recorder
        recorder.events, recorder.active = [], True
        if first:
            self._track(self._tracker, self._live)
        yield page
        recorder.active = False
        self._left -= 1
        self._notes.starts.append(page.start)
        self._notes.ends.append(page.end)
        self._notes.events.append(recorder.events)
        if page.loss is not None:
            self._notes.losses.append(page.loss)
        self._notes.traffic = traffic_of(self._assembly)
        if first:
            self._track(None, None)
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """Peak bytes of this rank so far."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resident_peak()

    def measurement(self, world: World, plan: Plan, assembly: Assembly) -> Measurement:
        """All ranks' notes together; every rank calls this."""
        notes = self._notes
        made = tensor_bytes(optimizer_states(assembly)) - self._states
        counted = Counted(self._tracker.peak, self._live.peaks, made)
        notes.use = peak_use(assembly, counted, world.device)
        notes.beside = list(assembly.recorder.beside)
        notes.resident = resident_peak() - self._before
        if assembly.interpreter is not None:
            notes.executed = format_orders([assembly.interpreter.executed])
        return measurement(world, plan, notes, min(self._warmup, max(0, len(notes.starts) - 1)))

    def _track(self, tracker: ActivationTracker | None, live: LiveTracker | None) -> None:
        if self._assembly.interpreter is not None:
            self._assembly.interpreter.track(tracker, live)
