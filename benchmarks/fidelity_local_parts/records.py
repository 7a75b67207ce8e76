"""What was measured, as a JSON file, so that it can be predicted again without measuring again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pydantic import TypeAdapter

from rlplace.simulate.types import MemoryUse


@dataclass(frozen=True)
class Setting:
    """What is limited while plans are measured.

    Args:
        nodes: Network namespaces over which the ranks are spread; 0 without.
        bandwidth: Bytes/s that each of them sends.
        slow: The rank that has a quota, and its share of a core.
        ranks: Numbers of ranks that are measured.
    """

    nodes: int = 0
    bandwidth: float = 0.0
    slow: tuple[int, float] | None = None
    ranks: tuple[int, ...] = (2, 4)


@dataclass(frozen=True)
class Run:
    """One run of a plan.

    Args:
        step_times: Seconds of each counted step.
        paces: Seconds of the reference, mean over the ranks: before the first of these steps, and
            after each.
        memory: Peak bytes of each rank, by cause.
        computing: Share of the middle step in which the busiest rank computes.
        others: Share of the cores that strangers used while it and its neighbours ran.
    """

    step_times: tuple[float, ...]
    paces: tuple[float, ...]
    memory: tuple[MemoryUse, ...]
    computing: float
    others: float

    @property
    def pace(self) -> float:
        """Median seconds of the reference."""
        return median(self.paces)

    def step_time(self, usual: float) -> float:
        """Lower quartile over the steps of what each would take at the usual pace.

        Where the machine is quiet that is the median; strangers only ever make a step longer.

        Args:
            usual: Seconds of the reference at that pace.
        """
        around = [fmean(pair) for pair in pairwise(self.paces)]
        scaled = sorted(
            seconds * (1.0 - self.computing + self.computing * usual / pace)
            for seconds, pace in zip(self.step_times, around, strict=True)
        )
        return scaled[len(scaled) // 4]


@dataclass(frozen=True)
class Record:
    """A plan with its runs.

    Args:
        setting: A key of `Log.settings`.
        family, ranks, layout: As in `cases.Case`.
        plan: The plan as JSON data.
        runs: All of them; they lie minutes apart.
    """

    setting: str
    family: str
    ranks: int
    layout: str
    plan: dict[str, Any]
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Log:
    """Everything that was measured.

    Args:
        machine: On what, and when.
        settings: By name.
        clusters: What `discover` found, by the number of ranks, as YAML.
        records: The plans.
    """

    machine: str
    settings: dict[str, Setting]
    clusters: dict[int, str]
    records: tuple[Record, ...] = field(default=())

    def usual_pace(self) -> float:
        """Median seconds of the reference over all runs."""
        return median(run.pace for record in self.records for run in record.runs)

    def save(self, path: Path) -> None:
        """Write it; an existing file is replaced in one step."""
        scratch = path.with_name(path.name + ".part")
        scratch.write_bytes(_LOG.dump_json(self, indent=1))
        scratch.replace(path)


_LOG: TypeAdapter[Log] = TypeAdapter(Log)


def load(path: Path) -> Log:
    """Read a log."""
    return _LOG.validate_json(path.read_bytes())


def join(logs: Sequence[Log]) -> Log:
    """Logs of one machine as one; the runs of a plan come together."""
    found: dict[tuple[str, str, int, str], Record] = {}
    for log in logs:
        for record in log.records:
            key = (record.setting, record.family, record.ranks, record.layout)
            before = found[key].runs if key in found else ()
            found[key] = Record(*key, record.plan, (*before, *record.runs))
    settings: Mapping[str, Setting] = {k: v for log in logs for k, v in log.settings.items()}
    clusters = {count: text for log in logs for count, text in log.clusters.items()}
    return Log(logs[0].machine, dict(settings), clusters, tuple(found.values()))
