"""What a calibration found, as a table."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from rlplace.cost.measured import Calibration, percentile_error


def render_calibration(found: Calibration) -> Group:
    """The constants before and after, and how well the rows are predicted with them."""
    table = Table("constant", "before", "fitted", "standard error")
    for name, before in found.before.items():
        if name in found.undetermined:
            table.add_row(name, f"{before:.4g}", "-", found.undetermined[name])
        else:
            error = f"{found.errors[name]:.0%}" if name in found.errors else ""
            table.add_row(name, f"{before:.4g}", f"{found.constants[name]:.4g}", error)
    return Group(table, *accuracy(found))


def accuracy(found: Calibration) -> list[str]:
    """One line for the fitted rows, one for those held out, one for the band."""
    lines = []
    for title, rows in (("fitted", found.fitted), ("held out", found.held_out)):
        if rows:
            lines.append(
                f"{title}: {len(rows)} rows, median |error| {percentile_error(rows):.1%} "
                f"(before: {percentile_error(rows, before=True):.1%}), "
                f"90th percentile {percentile_error(rows, 90.0):.1%}"
            )
    low, high = found.band
    lines.append(f"measured / predicted of the {found.band_rows} rows: {low:.2f} to {high:.2f}")
    return lines
