"""How well estimates agree with what this machine does: plans measured on gloo ranks, predicted.

Plans of six families run on 2 and 4 ranks: as the machine is, over links whose speed `tc tbf`
limits (two network namespaces), and with a rank that has a share of a core (a control group); the
last two need root and are skipped, with a word, without it. The machine is described by
`rlplace.discover`; a few named constants are fitted to six plans, and the others are predicted.
The speed of a virtual machine drifts, so a reference runs before and after every step, and times
are those at its usual pace; every plan is measured twice, minutes apart.

    python benchmarks/fidelity_local.py                        # measure and predict
    python benchmarks/fidelity_local.py --measure out/local.json
    python benchmarks/fidelity_local.py --predict out/local.json --json out/scores.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script or as a module

import torch
from rich.console import Console

from benchmarks.fidelity_local_parts.cases import FAMILIES, cases
from benchmarks.fidelity_local_parts.places import unable
from benchmarks.fidelity_local_parts.predict import rows
from benchmarks.fidelity_local_parts.records import Log, Setting, join, load
from benchmarks.fidelity_local_parts.report import plan_table, score, score_table
from benchmarks.fidelity_local_parts.runs import measure
from rlplace.cluster.discover import busy, discover
from rlplace.cluster.dump import dump_cluster

SETTINGS: dict[str, Setting] = {
    "as it is": Setting(),
    "1 Gb/s link": Setting(nodes=2, bandwidth=125e6),
    "half a core": Setting(slow=(1, 0.5), ranks=(2,)),
}

#: Share of the cores that strangers may use.
QUIET = 0.07


def measured(wanted: argparse.Namespace, console: Console) -> Log:
    """Measure all settings that can be, as often as wanted; the file grows after every launch."""
    settings = {name: SETTINGS[name] for name in wanted.setting or SETTINGS}
    for name, setting in list(settings.items()):
        if why := unable(links=bool(setting.nodes), quota=setting.slow is not None):
            console.print(f"{name}: skipped, {why}")
            del settings[name]
    clusters = {count: dump_cluster(discover(count, seconds=16.0).cluster) for count in (2, 4)}
    about = (
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, gloo, "
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
    )
    log = Log(about, settings, clusters)
    for repeat in range(wanted.repeats):
        for name, setting in settings.items():
            for ranks in setting.ranks:
                for family in wanted.family or FAMILIES:
                    own = cases([family], [ranks])
                    wait_for_quiet(wanted.wait)
                    found = measure(
                        name, setting, own[:: -1 if repeat % 2 else 1], wanted.steps, console.print
                    )
                    log = join([log, Log(about, settings, clusters, tuple(found))])
                    if wanted.measure:
                        log.save(wanted.measure)
    return log


def wait_for_quiet(limit: float) -> None:
    """Wait until strangers leave the cores alone, at most `limit` seconds."""
    until = time.monotonic() + limit
    while time.monotonic() < until and busy(2.0) > QUIET:
        time.sleep(min(5.0, limit))


def report(log: Log, console: Console, *, plans: bool) -> dict[str, object]:
    """Print the predictions of a log, and give the scores."""
    found, fits = rows(log)
    console.print(log.machine, highlight=False)
    for name, fit in fits.items():
        values = {key: f"{value:.4g}" for key, value in fit.constants.items()}
        console.print(f"{name}: fitted {values}, left {fit.undetermined}", highlight=False)
    scores = {name: score(own) for name, own in found.items()}
    if plans:
        for name, own in found.items():
            console.print(plan_table(name, own))
    console.print(score_table(scores))
    return {name: asdict(own) for name, own in scores.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, predict, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--measure", type=Path, help="keep what is measured in this file")
    parser.add_argument("--predict", type=Path, action="append", help="read it; measure nothing")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="only this")
    parser.add_argument("--setting", action="append", choices=SETTINGS, help="only this")
    parser.add_argument("--steps", type=int, default=8, help="counted steps of a run")
    parser.add_argument("--repeats", type=int, default=2, help="runs of a plan")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds to wait for idle cores")
    parser.add_argument("--json", type=Path, help="write the scores to this file")
    parser.add_argument("--brief", action="store_true", help="no line for each plan")
    wanted = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that contexts clean up
    console = Console(width=120)
    if wanted.predict:
        log = join([load(path) for path in wanted.predict])
    else:
        wait_for_quiet(wanted.wait)
        if (load_now := busy()) > QUIET:
            console.print(f"warning: {load_now:.0%} of the cores are busy; times will be off")
        log = measured(wanted, console)
    scores = report(log, console, plans=not wanted.brief)
    if wanted.json:
        wanted.json.parent.mkdir(parents=True, exist_ok=True)
        wanted.json.write_text(json.dumps({"machine": log.machine, "scores": scores}, indent=1))


if __name__ == "__main__":
    main()
