"""Discovery on real ranks, and what happens when a rank fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from rlplace.cluster import discover as module
from rlplace.cluster.discover import discover, usable_cores
from rlplace.cluster.load import load_cluster, save_cluster
from rlplace.errors import InputError, RankFailedError


@pytest.fixture
def no_rank_left() -> Iterator[None]:
    before = {child.pid for child in psutil.Process().children()}
    yield
    assert {child.pid for child in psutil.Process().children()} <= before


@pytest.mark.dist
@pytest.mark.usefixtures("no_rank_left")
def test_two_ranks_for_real(tmp_path: Path) -> None:
    found = discover(2, seconds=3.0)
    cluster = found.cluster
    kind = cluster.kinds[0]
    cores = len(usable_cores())
    assert [device.core for device in cluster.devices] == [0, 1 % cores]
    assert kind.name == "cpu"
    assert set(kind.peak_flops) == {"fp32"}
    assert kind.peak_flops["fp32"] > 1e8
    assert kind.bandwidth > 1e7
    assert 0 < kind.max_efficiency <= 1
    assert 0 < kind.memory_efficiency <= 1
    assert 0 < kind.launch_overhead < 1e-2
    assert 0 < kind.reserve < kind.memory
    curves = {(curve.kind, curve.ranks): curve for curve in cluster.curves}
    assert set(curves) == {(k, 2) for k in ("p2p", "all_reduce", "all_gather", "reduce_scatter")}
    for curve in curves.values():
        assert curve.latency >= 0
        assert curve.seconds_per_byte > 0
        assert 0 < curve.seconds(1e3) < curve.seconds(64e6), "a curve rises"
    assert found.seconds > 0
    assert any("2 ranks on" in note for note in found.notes)
    save_cluster(cluster, tmp_path / "cpu.yaml")
    assert load_cluster(tmp_path / "cpu.yaml") == cluster


@pytest.mark.dist
@pytest.mark.usefixtures("no_rank_left")
def test_a_rank_that_is_killed_is_reported() -> None:
    before = {child.pid for child in psutil.Process().children()}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(discover, 2, seconds=3.0)
        ranks: list[psutil.Process] = []
        while len(ranks) < 2 and not running.done():
            ranks = [child for child in psutil.Process().children() if child.pid not in before]
            time.sleep(0.05)
        ranks[1].kill()
        with pytest.raises(RankFailedError, match="rank 1 of discover ended with -9"):
            running.result(timeout=60)


@pytest.mark.usefixtures("no_rank_left")
def test_a_rank_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('no torch today')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RankFailedError, match="no torch today"):
        discover(2, seconds=1.0)


@pytest.mark.usefixtures("no_rank_left")
def test_the_time_limit_ends_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE", -1.0)
    with pytest.raises(RankFailedError, match="did not finish in time"):
        discover(2, seconds=1.0)


@pytest.mark.parametrize(
    ("ranks", "seconds", "field"), [(0, 8.0, "ranks"), (65, 8.0, "ranks"), (2, 0.0, "seconds")]
)
def test_bad_arguments(ranks: int, seconds: float, field: str) -> None:
    with pytest.raises(InputError) as caught:
        discover(ranks, seconds=seconds)
    assert caught.value.field == field
    assert caught.value.nearest is not None
