"""How busy the machine is, and what it allows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlplace.cluster.machine import busy, cpu_quota, pressure, usable_cores, used_seconds


def test_busy_sees_work() -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(busy, 0.4)
        while not running.done():
            sum(range(10000))
    share = running.result()
    assert 0.5 / len(usable_cores()) < share <= 1.0


def test_used_seconds_only_grow() -> None:
    before = used_seconds()
    assert 0 < before <= used_seconds()


def test_pressure_is_a_percentage_or_unknown() -> None:
    waiting = pressure()
    assert waiting is None or 0 <= waiting <= 100


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/box\n", {"box/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/outside\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/box\n", {"box/cpu.max": "max 100000\n"}, None),
        (
            "3:memory:/m\n2:cpu,cpuacct:/box\n",
            {"cpu/box/cpu.cfs_quota_us": "6000\n", "cpu/box/cpu.cfs_period_us": "20000\n"},
            0.3,
        ),
        (
            "2:cpu:/box\n",
            {"cpu/box/cpu.cfs_quota_us": "-1\n", "cpu/box/cpu.cfs_period_us": "100000\n"},
            None,
        ),
        ("", {}, None),
    ],
)
def test_quota_of_a_control_group(
    own: str, files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path, tmp_path / "own") == quota


def test_no_control_groups(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path, tmp_path / "none") is None
