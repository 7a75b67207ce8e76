"""What a launched worker is asked to do, and how it answers: files in a folder of their own."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file, save_file

from rlplace.errors import InputError
from rlplace.graph.types import OpGraph
from rlplace.plan.check import refuse_other
from rlplace.plan.types import Plan
from rlplace.runtime.measure import Measurement
from rlplace.runtime.options import Options

Argument = str | int | float | bool | None


#: Seconds that a rank is stopped in a pause.
PAUSE = 3.0


@dataclass(frozen=True)
class Fault:
    """A failure on purpose, so that a test can see what the other ranks do.

    Args:
        rank: The rank that fails.
        step: After which step, or in which one where a phase is given; the first is 0.
        kind: It is killed, raises, stops for good or for `PAUSE` seconds, or finds its disk full.
        phase: Kind of an event of this step (``F``, ``B``, ``reduce``, ``optimizer``), or
            ``checkpoint``: while it writes what was saved after this step.
    """

    rank: int
    step: int
    kind: Literal["kill", "raise", "stop", "pause", "full"] = "kill"
    phase: str = ""


@dataclass(frozen=True)
class Job:
    """A plan to run on a model of the library.

    Args:
        plan: The plan.
        graph: The graph that it was made for; by default `library.build(model, **args)`.
        model: Name in the library; by default the plan's source.
        args: Arguments of the library.
        options: Steps, seed, learning rate.
        optimizer: Name; by default the plan's.
        device: ``cpu`` or ``cuda``.
        data_seed: Seed of the random data; step i uses `data_seed` + i.
        fault: For tests.
        rows: Samples of each batch; by default the plan's global batch.
    """

    plan: Plan
    graph: OpGraph | None = None
    model: str = ""
    args: Mapping[str, Argument] = field(default_factory=dict)
    options: Options = field(default_factory=Options)
    optimizer: str | None = None
    device: str = "cpu"
    data_seed: int = 0
    fault: Fault | None = None
    rows: int | None = None

    @property
    def source(self) -> dict[str, Argument]:
        """What `library.spec` takes to make the model.

        Raises:
            InputError: If neither the job nor the plan names a model.
        """
        if self.model:
            return {"name": self.model, **self.args}
        if self.plan.source:
            return dict(self.plan.source)
        raise InputError("model", "", "the plan does not name a library model, so the job must")

    @property
    def ranks(self) -> int:
        """Ranks that the plan needs."""
        return max(self.plan.devices, default=0) + 1


def checked(job: Job, ranks: int | None, device: str) -> Job:
    """A job with its graph, which is that of its plan.

    Raises:
        InputError: If it needs more ranks, another device, or is for another graph.
    """
    if ranks is not None and job.ranks > ranks:
        rule = f"the plan uses {job.ranks} ranks"
        raise InputError("ranks", ranks, rule, job.ranks)
    if job.device != device:
        raise InputError("device", job.device, "jobs of one launch have one device", device)
    graph = job.graph
    if graph is None:
        from rlplace.graph.library import build

        graph = build(**job.source)  # type: ignore[arg-type]  # a plan's source is checked there
    refuse_other("graph", job.plan.graph, graph.fingerprint)
    return replace(job, graph=graph)


def write_jobs(folder: Path, jobs: Sequence[Job], timeout: float) -> None:
    """Leave jobs for the workers; the folder is private to this user."""
    (folder / "jobs").write_bytes(pickle.dumps((list(jobs), timeout)))


def read_jobs(folder: Path) -> tuple[list[Job], float]:
    """The jobs, and the seconds that a rank waits for another."""
    content: tuple[list[Job], float] = pickle.loads((folder / "jobs").read_bytes())
    return content


def write_result(folder: Path, index: int, measurement: Measurement) -> None:
    """Leave the measurement of a job for the launcher."""
    if measurement.tensors:
        tensors = {name: t.contiguous().clone() for name, t in measurement.tensors.items()}
        save_file(tensors, folder / f"tensors-{index}.safetensors")
    measurement.save(folder / f"measurement-{index}.json")


def read_result(folder: Path, index: int) -> Measurement:
    """The measurement of a job."""
    measurement = Measurement.load(folder / f"measurement-{index}.json")
    tensors = folder / f"tensors-{index}.safetensors"
    if tensors.exists():
        measurement.tensors.update(load_file(tensors))
    return measurement


def write_error(folder: Path, rank: int, job: int, error: BaseException) -> None:
    """Leave the cause of a failure for the launcher."""
    content: dict[str, Any] = {"job": job, "kind": type(error).__name__, "message": str(error)}
    (folder / f"error-{rank}.json").write_text(json.dumps(content))


def read_error(folder: Path, rank: int) -> dict[str, Any] | None:
    """What a rank said when it failed, if it could."""
    try:
        content: dict[str, Any] = json.loads((folder / f"error-{rank}.json").read_text())
    except (OSError, json.JSONDecodeError):
        return None
    return content


def write_codes(folder: Path, codes: Mapping[int, int]) -> None:
    """Leave the exit code of each rank, in the order in which they ended."""
    (folder / "codes.json").write_text(json.dumps(list(codes.items())))


def read_codes(folder: Path) -> dict[int, int]:
    """Exit code of each rank; empty if the ranks never started."""
    try:
        return dict(json.loads((folder / "codes.json").read_text()))
    except (OSError, json.JSONDecodeError):
        return {}
