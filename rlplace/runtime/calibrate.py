"""Calibrate on runs that rlplace measured, listed in a file, or on figures from elsewhere.

The file is a JSON list; each entry names a plan (as `rlplace plan` saves it), where it ran, and
what was measured: a file of `rlplace run`, or seconds (and bytes) by hand::

    [{"plan": "plan.json", "cluster": "cluster.yaml", "measurement": "run.json"},
     {"plan": "other.json", "cluster": "4x8xH100-80", "step_time": 1.23, "framework": "nanotron"}]

Paths are relative to the file. The model is the library's, by the name in the plan.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rlplace.cluster.types import Cluster
from rlplace.cost import calibration_file
from rlplace.cost.calibrate import fit
from rlplace.cost.measured import Calibration, Measured, split
from rlplace.errors import InputError, nearest_names
from rlplace.graph import library
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Instance, Plan
from rlplace.runtime.measure import Measurement
from rlplace.simulate.predict import predict

_KEYS = ("plan", "cluster", "measurement", "step_time", "peak_memory", "framework", "name")
#: With fewer rows than this none is held out.
_FEW = 8


def calibrate(
    measurements: Sequence[Measured] | str | Path | Iterable[str | Path],
    names: Sequence[str],
    *,
    out: str | Path | None = None,
    note: str = "",
    hold_out: float = 0.25,
    seed: int = 0,
    show: bool = False,
) -> Calibration:
    """Fit named constants to measured plans, and keep them in a file.

    Args:
        measurements: The rows, or one or several files that list them (see this module).
        names: Constants, as ``kind.H100-80.max_efficiency``; see `rlplace.cost.constants`.
        out: File to add the fit to; see `rlplace.cost.calibration_file`.
        note: What the rows are, for that file.
        hold_out: Share of the rows that is not fitted and gives the error band; with few rows
            none is held out, and the band says that it is of fitted rows.
        seed: Which rows are held out.
        show: Whether to show how far the fit is. Ctrl-C keeps the best constants so far.

    Raises:
        InputError: If a file is not such a list, a constant is unknown, or there are too few rows.
    """
    rows = _rows(measurements)
    fitted, others = split(rows, hold_out if len(rows) >= _FEW else 0.0, seed)
    run = partial(fit, fitted, names, predict, held_out=others)
    found = _shown(run) if show else run()
    if out is not None:
        calibration_file.save(found, out, note)
    return found


def read_measured(path: str | Path) -> list[Measured]:
    """The rows that a file lists.

    Raises:
        InputError: If it is not such a list, or a plan or a measurement is not one.
    """
    source = Path(path)
    try:
        entries = json.loads(source.read_text())
    except OSError as error:
        raise InputError("measurements", str(path), f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise InputError("measurements", str(path), f"is not JSON ({error})") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InputError("measurements", str(path), "is not a list of runs")
    graphs: dict[str, OpGraph] = {}
    return [
        _measured(entry, source.parent, f"{source.name}[{index}]", graphs)
        for index, entry in enumerate(entries)
    ]


def _rows(measurements: Sequence[Measured] | str | Path | Iterable[str | Path]) -> list[Measured]:
    given = [measurements] if isinstance(measurements, str | Path) else list(measurements)
    rows: list[Measured] = []
    for item in given:
        rows += [item] if isinstance(item, Measured) else read_measured(item)
    return rows


def _measured(
    entry: dict[str, Any], folder: Path, where: str, graphs: dict[str, OpGraph]
) -> Measured:
    for key in entry:
        if key not in _KEYS:
            rule = f"a run has {', '.join(_KEYS)}"
            raise InputError(f"{where}: field", key, rule, nearest_names(key, _KEYS))
    for key in ("plan", "cluster"):
        if not isinstance(entry.get(key), str):
            raise InputError(f"{where}: {key}", entry.get(key), "a run names its plan and cluster")
    plan = Plan.load(folder / entry["plan"])
    text = entry["cluster"]
    file = folder / text
    cluster = Cluster.load(file) if file.suffix in (".yaml", ".yml") else Cluster.parse(text)
    instance = _instance(plan, cluster, entry.get("framework", "torch"), where, graphs)
    seconds, size = entry.get("step_time"), entry.get("peak_memory")
    if "measurement" in entry:
        run = Measurement.load(folder / entry["measurement"])
        seconds = seconds or run.step_time
    return Measured(instance, plan, seconds, size, entry.get("name", where))


def _instance(
    plan: Plan, cluster: Cluster, framework: str, where: str, graphs: dict[str, OpGraph]
) -> Instance:
    """The question that a plan answers, on a cluster with as many devices at least."""
    if not plan.source:
        rule = "the plan does not say which model of the library it is for"
        raise InputError(f"{where}: plan", plan.graph_name, rule)
    if plan.graph not in graphs:
        graphs[plan.graph] = library.build(**plan.source)  # type: ignore[arg-type]  # JSON values
    if max(plan.devices) >= len(cluster.devices):
        rule = f"has {len(cluster.devices)} devices; the plan uses {max(plan.devices) + 1}"
        raise InputError(f"{where}: cluster", cluster.name, rule)
    return Instance(
        graphs[plan.graph],
        cluster,
        plan.global_batch,
        plan.precision,
        plan.optimizer,
        plan.attention,
        loss_chunks=plan.loss_chunks,
        fused=plan.fused,
        framework=framework,
    )


def _shown(run: Callable[..., Calibration]) -> Calibration:
    """A fit with a line that says how far it is."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("calibrating")

        def tell(evaluations: int, median: float) -> None:
            text = f"calibrating: evaluation {evaluations}, median error {median:.1%}"
            bar.update(task, description=text)

        return run(progress=tell)
