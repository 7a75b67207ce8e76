"""The ranks of a measurement: `python -m benchmarks.fidelity_local_parts.worker FOLDER COUNT`.

They go to their places, run the jobs of the folder one after the other, and time the reference
after each step.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.fidelity_local_parts.pace import reference
from benchmarks.fidelity_local_parts.places import Place
from rlplace.graph.program import Program
from rlplace.runtime.jobs import Job, read_jobs, write_codes, write_error, write_result
from rlplace.runtime.ranks import die_with_parent, fork_ranks
from rlplace.runtime.worker import export_all, program_key, run_job
from rlplace.runtime.world import join


def main(folder: Path, count: int) -> int:
    """Run the jobs of a folder on `count` ranks; 0 if all went well."""
    die_with_parent()
    jobs, timeout = read_jobs(folder)
    ranks: tuple[Place, ...] = pickle.loads((folder / "places").read_bytes())
    programs = export_all(jobs)
    codes = fork_ranks(count, folder, lambda: _rank(folder, jobs, timeout, programs, ranks))
    write_codes(folder, codes)
    return int(any(codes.values()) or len(codes) < count)


def _rank(
    folder: Path,
    jobs: Sequence[Job],
    timeout: float,
    programs: Mapping[str, Program],
    ranks: Sequence[Place],
) -> int:
    rank, index = int(os.environ["RANK"]), 0
    try:
        ranks[rank].enter()
        world = join(jobs[0].device, timeout)
        world.owned = False
        for index, job in enumerate(jobs):
            own: list[float] = []
            measurement = run_job(
                world, job, programs[program_key(job)], lambda *_, own=own: own.append(reference())
            )
            every: list[Any] = [None] * world.size
            dist.all_gather_object(every, own)
            if rank == 0:
                write_result(folder, index, measurement)
                (folder / f"paces-{index}.json").write_text(json.dumps(every))
        dist.destroy_process_group()
    except Exception as error:
        write_error(folder, rank, index, error)
        raise
    return 0


if __name__ == "__main__":
    status = main(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(status)
