"""What a run measured: step times, memory of each rank, losses, one step as a timeline."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlplace.errors import InputError
from rlplace.simulate.peaks import kind_name, phase_name
from rlplace.simulate.types import Event, MemoryUse, Timeline

FORMAT = 1


@dataclass(frozen=True)
class Measurement:
    """What a run of a plan measured.

    Args:
        step_times: Seconds of each measured step, from the first rank's start to the last rank's
            end.
        warmup: Steps before them that are not counted.
        losses: Mean loss of the global batch of every step, warm-up included.
        memory: Peak bytes of each rank, by cause; idle ranks have zeros.
        resident_growth: By how many bytes the resident set of each rank grew in the run; for
            information (the allocator keeps what it once had).
        timeline: One measured step.
        traffic: Bytes that one step gives to each kind of communication, over all ranks.
        device: ``cpu`` or ``cuda``.
        graph: Fingerprint of the graph.
        executed: The actions that each rank ran in a step, as text (`rlplace.plan.orders`).
        peak_phase: What each rank did when it held most, as in `Estimate.peak_phase`.
        phase_peaks: Peak bytes of each rank by kind of phase: ``forward``, ``backward``,
            ``reduce``, ``optimizer``, and while it sends or waits.
        rank_traffic: `traffic` by rank.
        tensors: Full gradients and weights by name (``gradient/NAME``, ``weight/NAME``), where
            asked for; not saved.
    """

    step_times: tuple[float, ...]
    warmup: int
    losses: tuple[float, ...]
    memory: tuple[MemoryUse, ...]
    resident_growth: tuple[int, ...] = ()
    timeline: Timeline = field(default_factory=lambda: Timeline(()))
    traffic: dict[str, int] = field(default_factory=dict)
    device: str = "cpu"
    graph: str = ""
    executed: tuple[str, ...] = ()
    peak_phase: tuple[str, ...] = ()
    phase_peaks: tuple[dict[str, float], ...] = ()
    rank_traffic: tuple[dict[str, int], ...] = ()
    tensors: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def step_time(self) -> float:
        """Median of the step times (s)."""
        return float(np.median(self.step_times))

    @property
    def spread(self) -> float:
        """Interquartile range of the step times (s)."""
        low, high = np.percentile(self.step_times, [25, 75])
        return float(high - low)

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """Peak bytes of each rank."""
        return tuple(use.total for use in self.memory)

    def save(self, path: str | Path) -> None:
        """Write everything but `tensors` as JSON."""
        content = {"format": FORMAT} | asdict(replace(self, tensors={}))
        del content["tensors"]
        target = Path(path)
        scratch = target.with_name(target.name + ".part")
        scratch.write_text(json.dumps(content, indent=1) + "\n")
        scratch.replace(target)

    @staticmethod
    def load(path: str | Path) -> Measurement:
        """Read a measurement from JSON.

        Raises:
            InputError: If there is no such file, or it is not a measurement of this format.
        """
        try:
            content = json.loads(Path(path).read_text())
        except OSError as error:
            raise InputError("measurement file", str(path), "cannot be read") from error
        except json.JSONDecodeError as error:
            rule = f"is not JSON (line {error.lineno}); the file may be cut off"
            raise InputError("measurement file", str(path), rule) from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            rule = f"is not a measurement of format {FORMAT}"
            raise InputError("measurement file", str(path), rule, FORMAT)
        return _parse(content)


def _parse(content: dict[str, Any]) -> Measurement:
    line = content["timeline"]
    return Measurement(
        step_times=tuple(content["step_times"]),
        warmup=content["warmup"],
        losses=tuple(content["losses"]),
        memory=tuple(MemoryUse(**use) for use in content["memory"]),
        resident_growth=tuple(content["resident_growth"]),
        timeline=Timeline(tuple(Event(**event) for event in line["events"]), line["title"]),
        traffic=content["traffic"],
        device=content["device"],
        graph=content["graph"],
        peak_phase=tuple(content.get("peak_phase", ())),
        phase_peaks=tuple(content.get("phase_peaks", ())),
        rank_traffic=tuple(content.get("rank_traffic", ())),
        executed=tuple(content.get("executed", ())),
    )


class Recorder:
    """Notes the events of a step on one rank, where it is switched on.

    Args:
        rank: The rank.
        device: Where it computes; a GPU is waited for at the end of each event.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self.active = False
        self.events: list[Event] = []
        #: What other threads did beside the steps, all that is over.
        self.beside: list[Event] = []
        self._last = ("start", -1, -1)
        #: Called with the kind of every event when it begins.
        self.on_phase: Callable[[str], None] = lambda kind: None

    @property
    def phase(self) -> str:
        """What runs just now: the kind of the last event that began."""
        return self._last[0]

    @property
    def kind(self) -> str:
        """The same as a word."""
        return kind_name(self._last[0])

    @property
    def doing(self) -> str:
        """The same in words, with stage and micro-batch."""
        return phase_name(*self._last)

    @contextmanager
    def event(self, kind: str, stage: int = -1, micro_batch: int = -1) -> Iterator[None]:
        """Note what runs inside; `time.perf_counter` is one clock for all processes of a host."""
        self._last = (kind, stage, micro_batch)
        self.on_phase(kind)
        if not self.active:
            yield
            return
        start = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        event = Event(self._rank, kind, stage, micro_batch, start, time.perf_counter())
        self.events.append(event)

    @contextmanager
    def aside(self, kind: str) -> Iterator[None]:
        """Note what a thread runs inside, beside the steps."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.beside.append(Event(self._rank, kind, -1, -1, start, time.perf_counter()))


def within(events: Iterable[Event], start: float, end: float) -> list[Event]:
    """The parts of events that lie between two moments."""
    return [
        replace(e, start=max(e.start, start), end=min(e.end, end))
        for e in events
        if e.start < end and e.end > start
    ]


def merge(events: list[Event], origin: float, title: str = "") -> Timeline:
    """Events of all ranks in order, in seconds since `origin`."""
    moved = [
        Event(e.device, e.kind, e.stage, e.micro_batch, e.start - origin, e.end - origin)
        for e in events
    ]
    return Timeline(tuple(sorted(moved, key=lambda e: (e.start, e.device, e.end))), title)
