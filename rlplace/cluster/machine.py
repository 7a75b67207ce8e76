"""What the machine that this runs on offers, and how busy it is."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil


def usable_cores() -> list[int]:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(psutil.cpu_count() or 1))


def busy(seconds: float = 0.5) -> float:
    """Share of the usable cores' time that anyone used during the next `seconds`, 0 to 1."""
    used, start = used_seconds(), time.perf_counter()
    time.sleep(seconds)
    elapsed = (time.perf_counter() - start) * len(usable_cores())
    return min(1.0, max(0.0, (used_seconds() - used) / elapsed))


def pressure() -> float | None:
    """Percent of the last 10 s in which some task waited for a core, None where not told."""
    try:
        some = Path("/proc/pressure/cpu").read_text(encoding="ascii").splitlines()[0]
    except (OSError, IndexError):
        return None
    return float(dict(item.split("=") for item in some.split()[1:])["avg10"])


def used_seconds() -> float:
    """Seconds that the usable cores have worked since the machine started."""
    times = psutil.cpu_times(percpu=True)
    chosen = [times[core] for core in usable_cores() if core < len(times)] or times
    return sum(core.user + core.nice + core.system + _interrupted(core) for core in chosen)


def _interrupted(core: Any) -> float:
    """Seconds of interrupts, and those that a hypervisor gave to others (Linux only)."""
    return sum(float(getattr(core, name, 0.0)) for name in ("irq", "softirq", "steal"))


def cpu_quota(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> float | None:
    """Cores' worth of time that a control group allows this process, None without a limit.

    Args:
        root: Where the control groups (version 1 or 2) are mounted.
        own: The file that names the groups of this process.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    quotas = []
    for controllers, path in (line.split(":", 2)[1:] for line in lines):
        # A container sees its own group at the root, whatever its path is called outside.
        for group in (path.lstrip("/"), ""):
            if controllers == "":
                quotas.append(_quota(root / group / "cpu.max"))
            elif "cpu" in controllers.split(","):
                folder = root / "cpu" / group
                quotas.append(_quota(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(*files: Path) -> float | None:
    """Quota over period, which one file or two files hold."""
    try:
        quota, period = " ".join(file.read_text(encoding="ascii") for file in files).split()
    except (OSError, ValueError):
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)
