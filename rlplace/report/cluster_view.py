"""A discovered cluster as data and as what the command line prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from rlplace.cluster.types import Discovery
from rlplace.units import format_bytes, format_seconds


def cluster_data(found: Discovery) -> dict[str, Any]:
    """What `rlplace discover --json` prints."""
    return {
        "name": found.cluster.name,
        "fingerprint": found.cluster.fingerprint,
        "seconds": found.seconds,
        "devices": len(found.cluster.devices),
        "kinds": [asdict(kind) for kind in found.cluster.kinds],
        "curves": [asdict(curve) for curve in found.cluster.curves],
        "notes": list(found.notes),
    }


def render_discovery(found: Discovery) -> RenderableType:
    """Devices, rates and collective curves."""
    lines: list[RenderableType] = []
    for kind in found.cluster.kinds:
        rates = ", ".join(
            f"{name} {rate / 1e9:.1f} GFLOP/s" for name, rate in kind.peak_flops.items()
        )
        lines.append(
            f"{len(found.cluster.devices)} x {kind.name}: {rates}, memory "
            f"{format_bytes(kind.memory)} at {kind.bandwidth / 1e9:.1f} GB/s, "
            f"{format_seconds(kind.launch_overhead)} a small op"
        )
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("collective", "ranks", "latency", "bytes/s of the whole tensor"):
        table.add_column(name, justify="left" if name == "collective" else "right")
    for curve in found.cluster.curves:
        rate = f"{1.0 / curve.seconds_per_byte / 1e9:.2f} GB/s" if curve.seconds_per_byte else "-"
        table.add_row(curve.kind, str(curve.ranks), format_seconds(curve.latency), rate)
    return Group(*lines, "", table, "", *found.notes)
