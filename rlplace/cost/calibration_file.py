"""Calibrated constants as a JSON file: by device kind, link family and framework, with provenance.

The file that travels with rlplace, `configs/calibration.json`, has this form; the catalogue and
`rlplace.plan.frameworks` read it::

    {"format": 1,
     "kinds": {"H100-80": {"max_efficiency": 0.71}},
     "links": {"ib": {"latency": 1.8e-05}},
     "frameworks": {"nanotron": {"launch": 1.1e-05, "band": [0.93, 1.12]}},
     "fits": [{"date": "2026-01-31", "rows": 120, "note": "which rows", ...}]}
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rlplace.cost.constants import split_name
from rlplace.cost.measured import Calibration, percentile_error
from rlplace.errors import InputError

FORMAT = 1
_SECTIONS = {"kind": "kinds", "link": "links", "framework": "frameworks"}
_DIGITS = 4


def provenance(calibration: Calibration, note: str = "") -> dict[str, Any]:
    """What a fit was made of and how well it holds, as plain data.

    Args:
        calibration: The fit.
        note: Which rows, in words.
    """
    found: dict[str, Any] = {
        "date": calibration.date,
        "note": note,
        "rows": len(calibration.fitted),
        "constants": {name: _rounded(value) for name, value in calibration.constants.items()},
        "before": {name: _rounded(value) for name, value in calibration.before.items()},
        "standard_errors": {name: _rounded(value) for name, value in calibration.errors.items()},
        "undetermined": calibration.undetermined,
        "median_error_before": percentile_error(calibration.fitted, before=True),
        "median_error": percentile_error(calibration.fitted),
        "rows_held_out": len(calibration.held_out),
        "median_error_held_out": percentile_error(calibration.held_out),
        "p90_error_held_out": percentile_error(calibration.held_out, 90.0),
        "band": [_rounded(value) for value in calibration.band],
        "band_of": f"{calibration.band_rows} rows",
        "interrupted": calibration.interrupted,
    }
    return {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in found.items()
    }


def save(calibration: Calibration, path: str | Path, note: str = "") -> None:
    """Add a fit to a file, which is made where there is none; replaced in one step.

    Constants of the same name are overwritten, the provenance is appended.

    Args:
        calibration: The fit.
        path: The file.
        note: Which rows it was fitted on, in words.

    Raises:
        InputError: If there is a file and it is not a calibration file.
    """
    target = Path(path)
    content: dict[str, Any] = _read(target) if target.exists() else {"format": FORMAT}
    for section in _SECTIONS.values():
        content.setdefault(section, {})
    for name, value in calibration.constants.items():
        part, owner, field = split_name(name)
        content[_SECTIONS[part]].setdefault(owner, {})[field] = _rounded(value)
    for name in filter(None, calibration.frameworks):
        band = [_rounded(value) for value in calibration.band]
        content["frameworks"].setdefault(name, {})["band"] = band
    content.setdefault("fits", []).append(provenance(calibration, note))
    scratch = target.with_name(target.name + ".part")
    scratch.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    scratch.replace(target)


def load(path: str | Path) -> dict[str, float]:
    """The constants of a file, by the names that `rlplace.cost.constants.apply` takes.

    Raises:
        InputError: If there is no such file, or it is not a calibration file.
    """
    content = _read(Path(path))
    return {
        f"{part}.{owner}.{field}": value
        for part, section in _SECTIONS.items()
        for owner, fields in content.get(section, {}).items()
        for field, value in fields.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        rule = f"cannot be read ({error.strerror})"
        raise InputError("calibration file", str(path), rule) from error
    except ValueError as error:
        raise InputError("calibration file", str(path), f"is not JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        rule = f"is not a calibration file of format {FORMAT}"
        raise InputError("calibration file", str(path), rule, FORMAT)
    return content


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
