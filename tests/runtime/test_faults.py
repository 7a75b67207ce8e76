from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlplace.errors import RankFailedError
from rlplace.runtime import manifest
from rlplace.runtime.checkpoint import Checkpoints
from rlplace.runtime.jobs import PAUSE, Fault, Job
from rlplace.runtime.pool import Pool
from tests.runtime.test_run import Case

pytestmark = pytest.mark.dist

STEPS, TIMEOUT = 6, 5.0
CASE = Case("llama", ((1, 1), (1, 1)), 2)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2, timeout=TIMEOUT) as made:
        yield made


def job(folder: Path, fault: Fault | None = None) -> Job:
    plain = CASE.job()
    options = replace(plain.options, steps=STEPS, checkpoint=Checkpoints(str(folder), every=2))
    return replace(plain, options=options, fault=fault)


@pytest.mark.parametrize(
    ("fault", "good"),
    [
        (Fault(1, 5, "kill", "F"), {2, 4}),  # whether 4 was written by then is a race
        (Fault(0, 5, "stop", "B"), {2, 4}),
        (Fault(1, 5, "kill", "optimizer"), {2, 4}),
        (Fault(1, 3, "kill", "checkpoint"), {2}),
        (Fault(0, 3, "stop", "checkpoint"), {2}),
    ],
    ids=lambda one: f"{one.kind} {one.phase}" if isinstance(one, Fault) else "",
)
def test_a_lost_rank_is_named_and_training_goes_on_from_the_last_checkpoint(
    tmp_path: Path, pool: Pool, fault: Fault, good: set[int]
) -> None:
    (whole,) = pool.run([job(tmp_path / "whole")], limit=60)
    with pytest.raises(RankFailedError) as caught:
        pool.run([job(tmp_path / "run", fault)], limit=60)
    assert f"rank {fault.rank} failed: no sign of life" in str(caught.value)
    assert f"rank {fault.rank} was ended by SIGKILL" in str(caught.value)  # by another if stopped
    last = manifest.latest_good(tmp_path / "run")
    assert last is not None
    step = manifest.read_manifest(last)["step"]
    assert step in good
    (rest,) = pool.run([job(tmp_path / "run")], limit=60)
    assert rest.losses == whole.losses[step:]


def test_a_rank_that_pauses_for_less_than_the_time_out_is_waited_for(
    tmp_path: Path, pool: Pool
) -> None:
    assert PAUSE < TIMEOUT
    (whole,) = pool.run([job(tmp_path / "whole")], limit=60)
    (run,) = pool.run([job(tmp_path / "run", Fault(1, 3, "pause", "B"))], limit=60)
    assert run.losses == whole.losses
    assert max(run.step_times) >= PAUSE - 1.0 > max(whole.step_times)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of so many bytes; skips where this user may not."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(size: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no file system can be mounted: {done.stderr.strip()}")
        return place

    yield mount
    subprocess.run(["umount", str(place)], capture_output=True, check=False)


def test_a_disk_that_is_full_keeps_the_last_checkpoint(
    tmp_path: Path, pool: Pool, small_disk: Callable[[int], Path]
) -> None:
    (whole,) = pool.run([job(tmp_path / "whole")], limit=60)
    last = manifest.latest_good(tmp_path / "whole")
    assert last is not None
    size = sum(path.stat().st_size for path in last.iterdir())
    disk = small_disk(size + size // 2)  # for one and a half
    (run,) = pool.run([job(disk)], limit=60)
    assert run.losses == whole.losses
    assert [folder.name for folder in disk.iterdir()] == ["step-00000002"]
    (rest,) = pool.run([job(disk)], limit=60)
    assert rest.losses == whole.losses[2:]


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(tmp_path: Path, pool: Pool) -> None:
    (whole,) = pool.run([job(tmp_path / "whole")], limit=60)
    (run,) = pool.run([job(tmp_path / "run", Fault(1, 3, "full", "checkpoint"))], limit=60)
    assert run.losses == whole.losses
    assert [folder.name for folder in (tmp_path / "run").iterdir()] == ["step-00000002"]
