"""What this machine is: N CPU ranks, measured with all of them busy at once. Nothing is cached."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from pydantic import TypeAdapter

import rlplace
from rlplace.cluster.figures import RankFigures, cpu_cluster
from rlplace.cluster.machine import busy, cpu_quota, pressure, usable_cores, used_seconds
from rlplace.cluster.types import Discovery
from rlplace.errors import InputError, RankFailedError

__all__ = ["busy", "discover", "usable_cores"]

#: Ranks on one machine beyond which gloo's start-up takes longer than the measurement.
MAX_RANKS = 64

#: A machine on which others use more than this share of the cores is called busy.
BUSY_SHARE = 0.07

#: Share of the asked seconds that is measured; the rest goes into starting torch.
MEASURED_SHARE = 0.4

#: Seconds that ranks may take beyond the asked ones, for their start on a slow or busy machine.
GRACE = 90.0

_FIGURES = TypeAdapter(RankFigures)


def discover(ranks: int = 2, *, seconds: float = 8.0) -> Discovery:
    """Measure this machine as a cluster of CPU ranks.

    Ranks are pinned to the cores in turn; `Device.core` says which devices share one. The rates
    of the kind ``cpu`` are those of one core at full speed while all cores are busy. There is a
    curve for each of gloo's collectives at every group size that divides `ranks` (bytes are those
    of the whole tensor; p2p, one way, only between two). A curve contains the sharing of cores,
    as it was measured with all groups communicating at once.

    Args:
        ranks: Number of ranks, at most 64; there may be more than cores.
        seconds: About how long it may take.

    Returns:
        The cluster, how long it took, and notes on how far to trust it.

    Raises:
        InputError: If an argument is out of range.
        RankFailedError: If a rank dies or does not finish in time.
    """
    if not 1 <= ranks <= MAX_RANKS:
        nearest = min(max(ranks, 1), MAX_RANKS)
        raise InputError("ranks", ranks, f"must be 1 to {MAX_RANKS}", nearest)
    if not 1.0 <= seconds <= 600.0:
        raise InputError("seconds", seconds, "must be 1 to 600", min(max(seconds, 1.0), 600.0))
    start = time.perf_counter()
    cores = usable_cores()
    memory = psutil.virtual_memory().available
    before = busy(0.3)
    figures, others = _measure(ranks, cores, seconds)
    cluster = cpu_cluster(figures, len(cores), memory)
    elapsed = time.perf_counter() - start
    return Discovery(cluster, elapsed, _notes(ranks, len(cores), before, others))


def _measure(ranks: int, cores: Sequence[int], seconds: float) -> tuple[list[RankFigures], float]:
    """Figures of each rank, and the share of the cores that others used meanwhile."""
    used, own, start = used_seconds(), _children_seconds(), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="rlplace-") as folder:
        outputs = [Path(folder) / f"rank{rank}" for rank in range(ranks)]
        _run_ranks(outputs, cores, seconds)
        texts = [output.with_suffix(".out").read_text(encoding="utf-8") for output in outputs]
    foreign = (used_seconds() - used) - (_children_seconds() - own)
    share = foreign / ((time.perf_counter() - start) * len(cores))
    return [_FIGURES.validate_json(text.splitlines()[-1]) for text in texts], min(
        1.0, max(0.0, share)
    )


def _children_seconds() -> float:
    """CPU seconds of the children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _run_ranks(outputs: Sequence[Path], cores: Sequence[int], seconds: float) -> None:
    """Run one worker a rank, to its end; its output goes to ``OUTPUT.out`` and ``OUTPUT.err``.

    Raises:
        RankFailedError: If one fails or the time is up; the others are ended.
    """
    environment = _environment(len(outputs))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, output in enumerate(outputs):
            command = [sys.executable, "-m", "rlplace.cluster.bench_worker"]
            command += ["--core", str(cores[rank % len(cores)])]
            command += ["--budget", str(seconds * MEASURED_SHARE)]
            with output.with_suffix(".out").open("wb") as out:
                with output.with_suffix(".err").open("wb") as err:
                    process = subprocess.Popen(
                        command, stdout=out, stderr=err, env=environment | {"RANK": str(rank)}
                    )
            processes.append(process)
        _wait(processes, outputs, time.monotonic() + seconds + GRACE)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], outputs: Sequence[Path], deadline: float
) -> None:
    """Wait until all have ended well, or raise at the first that has not."""
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            running = [rank for rank, p in enumerate(processes) if p.poll() is None]
            raise RankFailedError(f"ranks {running} of discover did not finish in time")
        _raise_failed(processes, outputs)
        time.sleep(0.05)
    _raise_failed(processes, outputs)


def _raise_failed(processes: Sequence[subprocess.Popen[bytes]], outputs: Sequence[Path]) -> None:
    """Raise if a rank failed, with the words of the one that failed first."""
    if all(process.poll() in (None, 0) for process in processes):
        return
    # The others notice a lost peer within a moment; one that a signal ended is the cause.
    time.sleep(0.3)
    failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
    first = min(failed, key=lambda rank: (processes[rank].returncode > 0, rank))
    said = outputs[first].with_suffix(".err").read_text(encoding="utf-8", errors="replace")
    raise RankFailedError(
        f"rank {first} of discover ended with {processes[first].returncode} "
        f"(failed: {failed}):\n{said[-2000:]}"
    )


def _environment(ranks: int) -> dict[str, str]:
    """Variables of all ranks: the rendezvous, one thread, the package that is running."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    home = str(Path(rlplace.__file__).parents[1])
    path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
    return dict(os.environ) | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
    }


def _notes(ranks: int, cores: int, before: float, others: float) -> tuple[str, ...]:
    """What a person should know about the figures."""
    notes = [
        f"{ranks} ranks on {cores} cores, {ranks / cores:.3g} a core, one thread each",
        f"others used {before:.0%} of the cores before and {others:.0%} during the measurement",
    ]
    if max(before, others) > BUSY_SHARE:
        notes.append("the machine was busy: links look slower than they are, repeat when idle")
    if (quota := cpu_quota()) is not None and quota < min(ranks, cores):
        notes.append(f"a quota of {quota:.3g} cores is in force: matmul rates are those without it")
    if (waiting := pressure()) is not None:
        notes.append(f"cpu pressure (avg10) at the end: {waiting:.0f} %")
    return tuple(notes)
