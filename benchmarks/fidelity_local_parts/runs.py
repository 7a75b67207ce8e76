"""Measures cases on ranks of this machine; ends what it started."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import fmean

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its stubs

from benchmarks.fidelity_local_parts.cases import FAMILIES, Case
from benchmarks.fidelity_local_parts.places import Places, places
from benchmarks.fidelity_local_parts.records import Record, Run, Setting
from rlplace.cluster.machine import usable_cores, used_seconds
from rlplace.errors import RankFailedError
from rlplace.plan.files import dump_plan
from rlplace.runtime.jobs import Job, read_codes, read_error, read_result, write_jobs
from rlplace.runtime.measure import Measurement
from rlplace.runtime.options import Options
from rlplace.simulate.types import Timeline

#: Seconds that a rank waits for another, and that one launch may take.
_TIMEOUT, _LIMIT = 120.0, 1500.0
_ROOT = Path(__file__).resolve().parents[2]
_WORKER = "benchmarks.fidelity_local_parts.worker"

#: Told what is done.
Progress = Callable[[str], None]


def measure(
    name: str, setting: Setting, cases: Sequence[Case], steps: int, progress: Progress
) -> list[Record]:
    """Run cases of one setting once; families and ranks in launches of their own.

    Args:
        name: Of the setting.
        setting: What is limited.
        cases: The plans.
        steps: Counted steps of each.
        progress: Told of every plan.

    Raises:
        RankFailedError: If a rank fails or takes too long.
    """
    groups: dict[tuple[int, str], list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.ranks, case.family].append(case)
    found: list[Record] = []
    for (ranks, family), own in groups.items():
        graph = FAMILIES[family].graph()
        plans = [case.plan(graph) for case in own]
        jobs = [Job(plan, graph, options=Options(steps=steps, warmup=2)) for plan in plans]
        with places(
            ranks, nodes=setting.nodes, bandwidth=setting.bandwidth, slow=setting.slow
        ) as where:
            runs = launch(jobs, ranks, where)
        for case, plan, run in zip(own, plans, runs, strict=True):
            progress(f"{name}: {case.name} {1e3 * sorted(run.step_times)[steps // 2]:.0f} ms")
            found.append(Record(name, family, ranks, case.layout, dump_plan(plan), (run,)))
    return found


def launch(jobs: Sequence[Job], ranks: int, where: Places) -> list[Run]:
    """Run jobs one after the other in one start of the ranks.

    Raises:
        RankFailedError: If a rank fails or takes too long.
    """
    used, own, start = used_seconds(), _children_seconds(), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=f"rlplace-local-{os.getpid()}-") as name:
        folder = Path(name)
        write_jobs(folder, jobs, _TIMEOUT)
        (folder / "places").write_bytes(pickle.dumps(where.ranks))
        _run_ranks(folder, ranks, where.address)
        foreign = (used_seconds() - used) - (_children_seconds() - own)
        others = foreign / (time.perf_counter() - start) / len(usable_cores())
        return [
            _run(
                read_result(folder, index),
                json.loads((folder / f"paces-{index}.json").read_text()),
                max(0.0, others),
            )
            for index in range(len(jobs))
        ]


def _run(measured: Measurement, paces: list[list[float]], others: float) -> Run:
    """A run from its measurement and the reference after each step on each rank."""
    means = [fmean(each) for each in zip(*paces, strict=True)]
    return Run(
        measured.step_times,
        tuple(means[measured.warmup - 1 :]),
        measured.memory,
        computing(measured.timeline),
        others,
    )


def computing(line: Timeline) -> float:
    """Share of a step in which the busiest rank computes, collectives in its passes included."""
    busy: dict[int, float] = defaultdict(float)
    for event in line.events:
        if event.kind in ("F", "B", "optimizer"):
            busy[event.device] += event.end - event.start
    return min(1.0, max(busy.values(), default=0.0) / line.seconds) if line.events else 1.0


def _run_ranks(folder: Path, ranks: int, address: str) -> None:
    """Start the ranks in a process group of their own, and wait for their end."""
    store = TCPStore(address, 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    with (folder / "stderr").open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", _WORKER, str(folder), str(ranks)],
            env=_environment(address, store.port),
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stream,
            start_new_session=True,
        )
    try:
        code = process.wait(_LIMIT)
    except subprocess.TimeoutExpired as error:
        raise RankFailedError(f"the ranks did not end within {_LIMIT:.0f} s") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code:
        raise RankFailedError(_cause(folder))


def _environment(address: str, port: int) -> dict[str, str]:
    """What torchrun would set, but for the ranks; the store is this process's own."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _cause(folder: Path) -> str:
    """What the ranks said when they failed."""
    codes = read_codes(folder)
    said = [(rank, read_error(folder, rank)) for rank in codes]
    words = [
        f"rank {rank}: {error['message']} (job {error['job']})" for rank, error in said if error
    ]
    return "; ".join(words) or f"the ranks ended with {codes}: {_tail(folder)}"


def _tail(folder: Path) -> str:
    texts = [path.read_text(errors="replace")[-1500:] for path in sorted(folder.glob("stderr*"))]
    return "\n".join(texts)


def _children_seconds() -> float:
    """CPU seconds of the children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
