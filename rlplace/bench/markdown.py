"""The comparison as a page of Markdown: how planners did on each suite, and what they are."""

from __future__ import annotations

import math
import os
import platform
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlplace.bench.standings import Standing
from rlplace.bench.words import words

_NOTES = """\
Gap: step time / best known - 1 in %, median / mean / worst over the problems on which a planner
found a plan that fits; best known is the best that any of them found{optimum}. None: share of the
problems that have such a plan on which it found none. Seconds are CPU seconds a problem, the mean
of the suites."""


def page(
    found: Sequence[Standing], planners: Mapping[str, Callable[..., Any]], command: str
) -> str:
    """The page.

    Args:
        found: Of each planner on each suite.
        planners: By name; those that are told of, in this order.
        command: Writes the page again.
    """
    suites = list(dict.fromkeys(one.suite for one in found))
    optimum = ""
    if any((one.suite, one.planner) == ("tiny", "exhaustive") for one in found):
        optimum = (
            ", on `tiny` that of all plans with equal shares or better wherever `exhaustive` ends"
        )
    machine = f"{os.cpu_count()} {platform.machine()} cores, Python {platform.python_version()}"
    lines = [
        "# Planners side by side",
        "",
        f"Written by this command, on {machine}:",
        "",
        f"    {command}",
        "",
        *textwrap.wrap(_NOTES.format(optimum=optimum), 100, break_on_hyphens=False),
        "",
        *_table(
            ("planner", *(f"{name} ({_problems(found, name)})" for name in suites), "none", "s"),
            [_row(name, suites, found) for name in planners],
        ),
        "",
        "## What they are",
        "",
        "As the docstring of each one's file says, where more is told of it.",
        "",
        *_table(
            ("planner", "what", "decision space"),
            [(f"`{name}`", *_told(name, planner)) for name, planner in planners.items()],
        ),
    ]
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def _problems(found: Sequence[Standing], suite: str) -> int:
    return max(one.problems for one in found if one.suite == suite)


def _row(planner: str, suites: Sequence[str], found: Sequence[Standing]) -> list[str]:
    own = {one.suite: one for one in found if one.planner == planner}
    gaps = [_gaps(own[suite]) if suite in own else "" for suite in suites]
    counts = [(one.infeasible, one.problems) for one in own.values() if one.problems]
    total = sum(problems for _, problems in counts)
    none = sum(share * problems for share, problems in counts) / total if total else math.nan
    seconds = sum(one.cpu_seconds for one in own.values()) / max(len(own), 1)
    return [f"`{planner}`", *gaps, f"{none:.0%}", f"{seconds:.2f}"]


def _gaps(one: Standing) -> str:
    if math.isnan(one.mean):
        return "-"
    return " / ".join(f"{100 * gap:.1f}" for gap in (one.median, one.mean, one.worst))


def _told(name: str, planner: Callable[..., Any]) -> tuple[str, str]:
    own = words(name, planner)
    return own.title, own.space
