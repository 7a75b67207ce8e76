"""Pictures and traces of a timeline: the same writer for predicted and measured ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplace.simulate.types import Timeline

COLOURS = {
    "F": "#4c78a8",
    "B": "#f58518",
    "W": "#ffbf79",
    "reduce": "#54a24b",
    "optimizer": "#b279a2",
    "send": "#9d9d9d",
    "wait": "#e8e8e8",
    "checkpoint": "#e45756",
}
#: What goes on beside compute: how far from the middle of the row its strip is.
_STRIPS = {"send": 0.4, "checkpoint": -0.4}
_NAMES = {
    "F": "forward",
    "B": "backward",
    "W": "parameter gradients",
    "reduce": "gradient reduction",
}
#: Events that are actions of a schedule, with a stage and a micro-batch.
_ACTIONS = ("F", "B", "W")


@dataclass(frozen=True)
class Bar:
    """One bar of a picture: its row (device), its span in milliseconds, and its label.

    What may run beside compute is a strip: a send below, the writing of a checkpoint above.
    """

    row: int
    start: float
    width: float
    kind: str
    label: str

    @property
    def height(self) -> float:
        """Of a row's height."""
        return 0.15 if self.kind in _STRIPS else 0.8

    @property
    def middle(self) -> float:
        """Where it is, in rows."""
        return self.row + _STRIPS.get(self.kind, 0.0)


def bars(timeline: Timeline) -> list[Bar]:
    """The bars of a timeline; events of no length are left out."""
    found = []
    for event in timeline.events:
        if event.end > event.start:
            label = str(event.micro_batch) if event.kind in _ACTIONS else ""
            width = (event.end - event.start) * 1e3
            found.append(Bar(event.device, event.start * 1e3, width, event.kind, label))
    return found


def draw(timelines: Sequence[Timeline], path: str | Path) -> Path:
    """Draw timelines one below the other on one time axis, as PNG, SVG or PDF by the suffix."""
    from matplotlib.figure import Figure

    rows = [max((event.device for event in t.events), default=0) + 1 for t in timelines]
    figure = Figure(figsize=(11, 1.3 * len(timelines) + 0.42 * sum(rows)), layout="constrained")
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    longest = max(timeline.seconds for timeline in timelines) * 1e3
    for axis, timeline, count in zip(axes, timelines, rows, strict=True):
        for bar in bars(timeline):
            axis.barh(
                bar.middle,
                bar.width,
                left=bar.start,
                height=bar.height,
                color=COLOURS.get(bar.kind, "#777777"),
                edgecolor="white",
                linewidth=0.6,
            )
            if bar.label and bar.width > 0.02 * longest:
                middle = bar.start + bar.width / 2
                axis.text(middle, bar.row, bar.label, ha="center", va="center", fontsize=7)
        axis.set_yticks(range(count), [f"rank {index}" for index in range(count)])
        axis.invert_yaxis()
        axis.set_title(
            f"{timeline.title}: {timeline.seconds * 1e3:.1f} ms", loc="left", fontsize=10
        )
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("milliseconds")
    used = {event.kind for timeline in timelines for event in timeline.events}
    handles = [
        axes[0].barh(0, 0, color=colour, label=_NAMES.get(kind, kind))
        for kind, colour in COLOURS.items()
        if kind in used
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=130)
    return Path(path)


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline in the Trace Event Format that Perfetto and chrome://tracing read."""
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [
            {
                "name": f"{event.stage}{event.kind}{event.micro_batch}"
                if event.kind in _ACTIONS
                else event.kind,
                "cat": event.kind,
                "ph": "X",
                "ts": event.start * 1e6,
                "dur": (event.end - event.start) * 1e6,
                "pid": 0,
                "tid": event.device,
            }
            for event in timeline.events
        ],
    }


def save_trace(timeline: Timeline, path: str | Path) -> Path:
    """Write `chrome_trace` as JSON."""
    target = Path(path)
    target.write_text(json.dumps(chrome_trace(timeline)))
    return target
