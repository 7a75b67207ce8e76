"""Runs plans on ranks of this machine that are started for them; see `rlplace.runtime.pool`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlplace.graph.types import OpGraph
from rlplace.plan.types import Plan
from rlplace.runtime.jobs import Argument, Job
from rlplace.runtime.measure import Measurement
from rlplace.runtime.options import Options
from rlplace.runtime.pool import Pool, Progress


def launch(
    plan: Plan,
    model: str = "",
    args: Mapping[str, Argument] | None = None,
    *,
    graph: OpGraph | None = None,
    options: Options | None = None,
    device: str = "cpu",
    timeout: float = 60.0,
    limit: float = 3600.0,
    progress: Progress | None = None,
) -> Measurement:
    """Run a plan on ranks of this machine.

    Args:
        plan: The plan; as many ranks are started as it uses.
        model: Name in the library; by default the plan's source.
        args: Arguments of the library.
        graph: The plan's graph, if it is at hand.
        options: Steps, seed, learning rate.
        device: ``cpu`` or ``cuda``.
        timeout: Seconds after which a rank gives up waiting for another.
        limit: Seconds after which all ranks are ended.
        progress: Called after every step.

    Raises:
        InputError: If the plan is for another graph.
        RankFailedError: If a rank failed; names it and the cause.
    """
    job = Job(plan, graph, model, args or {}, options or Options(), device=device)
    return launch_many([job], timeout=timeout, limit=limit, progress=progress)[0]


def launch_many(
    jobs: Sequence[Job],
    *,
    ranks: int | None = None,
    timeout: float = 60.0,
    limit: float = 3600.0,
    progress: Progress | None = None,
) -> list[Measurement]:
    """Run several jobs, one after the other, in one start of the ranks.

    Args:
        jobs: All for the same device.
        ranks: Ranks to start; by default as many as the largest plan needs.
        timeout: Seconds after which a rank gives up waiting for another.
        limit: Seconds after which all ranks are ended.
        progress: Called after every step.

    Raises:
        InputError: If a plan is for another graph or needs more ranks.
        RankFailedError: If a rank failed; names it, the job and the cause.
    """
    if not jobs:
        return []
    count = ranks or max(job.ranks for job in jobs)
    with Pool(count, device=jobs[0].device, timeout=timeout) as pool:
        return pool.run(jobs, limit=limit, progress=progress)
