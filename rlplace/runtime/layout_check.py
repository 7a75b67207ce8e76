"""Are the layouts of a graph right? Ranks run them; what they compute, send and hold is judged.

Ranks take one case after the other. A case that fails ends its ranks, for their collectives no
longer match; new ranks are started for the cases behind it.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from rlplace.graph.types import Layout
from rlplace.runtime.layout_cases import fp64, params_held
from rlplace.runtime.shard_check import Case, Deviation, axis_among, prepare, run_local

#: In fp64 the order of a sum changes the last digits only.
TOLERANCE = 1e-9
_FP64_BYTES = 8
#: Of these, a device gives its share of the whole tensor.
_OF_SHARES = ("all_gather", "all_to_all")


@dataclass(frozen=True)
class Verdict:
    """What a layout did on ranks.

    Args:
        error: Largest relative error of an output, a gradient or a state, on any rank.
        sent: Bytes that a device gave to collectives, by kind; mean of the ranks.
        expected: The same as the layout says it.
        problem: What is wrong, empty if nothing is.
    """

    error: float
    sent: Mapping[str, float]
    expected: Mapping[str, float]
    problem: str = ""


def judge(case: Case, layout: Layout, batch: int, found: Sequence[Deviation] | str) -> Verdict:
    """Compare what the ranks report with the layout.

    Args:
        case: The layout as a case, in fp64.
        layout: What it should send and hold.
        batch: Samples of the case.
        found: From `run_cases`.
    """
    expected = bytes_of(layout, batch)
    if isinstance(found, str):
        return Verdict(float("inf"), {}, expected, found)
    errors = [max(each.outputs, each.gradients, each.states) for each in found]
    sent = _mean_bytes(found)
    calls = [(c.kind, c.phase, c.floats(batch)) for c in layout.collectives]
    problems = []
    if max(errors) > TOLERANCE:
        problems.append(f"relative error {max(errors):.1e}")
    if sent != expected:
        problems.append(f"gave {sent} bytes, not {expected}")
    elif _mean_calls(found) != calls:
        problems.append(f"called {_mean_calls(found)}, not {calls}")
    if (held := params_held(case)) != layout.work.params:
        problems.append(f"holds {held} parameters, not {layout.work.params}")
    return Verdict(max(errors), sent, expected, "; ".join(problems))


def bytes_of(layout: Layout, batch: int) -> dict[str, float]:
    """Bytes in fp64 that a device gives to the collectives of a layout, by kind."""
    total: dict[str, float] = defaultdict(float)
    for collective in layout.collectives:
        shares = layout.degree if collective.kind in _OF_SHARES else 1
        total[collective.kind] += collective.floats(batch) * _FP64_BYTES / shares
    return dict(total)


def _mean_bytes(found: Sequence[Deviation]) -> dict[str, float]:
    """Means over the ranks: how many rows go to an expert, and back, depends on the data."""
    total: dict[str, float] = defaultdict(float)
    for each in found:
        for (kind, _), given in zip(each.sent, each.given, strict=True):
            total[kind] += given
    return {kind: given / len(found) for kind, given in total.items()}


def _mean_calls(found: Sequence[Deviation]) -> list[tuple[str, str, float]]:
    """Kind, phase and elements of each; what all ranks call alike."""
    kinds = {(each.forward, *(kind for kind, _ in each.sent)) for each in found}
    if len(kinds) > 1:
        return []
    phases = ["forward" if i < found[0].forward else "backward" for i in range(len(found[0].sent))]
    columns = zip(*(each.sent for each in found), strict=True)
    means = [sum(n for _, n in column) / len(found) for column in columns]
    return [
        (kind, phase, mean)
        for (kind, _), phase, mean in zip(found[0].sent, phases, means, strict=True)
    ]


def run_cases(
    cases: Iterable[Case],
    ranks: int,
    *,
    patience: float = 60.0,
    progress: Callable[[int], object] = lambda done: None,
) -> list[list[Deviation] | str]:
    """Run cases in fp64 on gloo ranks of this machine, in one launch if none of them fails.

    Args:
        cases: Each runs on ``ranks / degree`` axes at once; its degree divides `ranks`.
        ranks: Number of ranks.
        patience: Seconds that may pass without a result; then the case that is running fails.
        progress: Called with the number of cases that have run.

    Returns:
        For each case what every rank reports, or why it failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = 0
        with fp64():
            for count, case in enumerate(cases, 1):
                torch.save(prepare(case), folder / f"case{count - 1}.pt")
        found: list[list[Deviation] | str] = []
        while len(found) < count:
            launch = _Launch(folder, len(found), count, ranks)
            found += launch.run(patience, progress)
    return found


@dataclass(frozen=True)
class _Launch:
    """Ranks that run the cases from `start` to `stop`."""

    folder: Path
    start: int
    stop: int
    ranks: int

    def run(
        self, patience: float, progress: Callable[[int], object]
    ) -> list[list[Deviation] | str]:
        """Results up to the end, or up to the first case that fails."""
        store = self.folder / f"store{self.start}"
        arguments = (self.ranks, str(self.folder), str(store), self.start, self.stop, patience)
        started = spawn(_run_rank, arguments, self.ranks, join=False)  # type: ignore[no-untyped-call]
        done, since, reason = self.start, time.monotonic(), ""
        try:
            while not started.join(0.2):
                if (now := self._done(done)) > done:
                    done, since = now, time.monotonic()
                    progress(done)
                if time.monotonic() - since > patience:
                    reason = f"no result in {patience:.0f} s"
                    break
        except (ProcessExitedException, ProcessRaisedException) as error:
            reason = str(error)
        finally:
            for process in started.processes:
                process.kill()
                process.join()
        done = self._done(done)
        progress(done)
        found: list[list[Deviation] | str] = [self._reports(i) for i in range(self.start, done)]
        return found if done == self.stop else [*found, self._why(done) or reason or "ranks ended"]

    def _done(self, done: int) -> int:
        """The first case that not every rank has a result of."""
        while done < self.stop and all(self._report(done, r).exists() for r in range(self.ranks)):
            done += 1
        return done

    def _report(self, case: int, rank: int) -> Path:
        return self.folder / f"report{case}.{rank}.pt"

    def _reports(self, case: int) -> list[Deviation]:
        paths = (self._report(case, rank) for rank in range(self.ranks))
        return [torch.load(path, weights_only=False) for path in paths]

    def _why(self, case: int) -> str:
        """The error of the first rank that says one."""
        texts = [path.read_text() for path in sorted(self.folder.glob(f"error{case}.*"))]
        return next((text.strip() for text in texts), "")


def _run_rank(
    rank: int, ranks: int, name: str, store: str, start: int, stop: int, patience: float
) -> None:
    """What a launch starts."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = timedelta(seconds=patience)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=limit
    )
    folder = Path(name)
    degrees = [degree for degree in range(1, ranks + 1) if ranks % degree == 0]
    axes: dict[int, Any] = {degree: axis_among(degree, rank, ranks) for degree in degrees}
    for index in range(start, stop):
        case = torch.load(folder / f"case{index}.pt", weights_only=False)
        dist.barrier()  # no rank is ahead of the case that fails
        try:
            report = run_local(case, axes[case.degree])
        except Exception:
            (folder / f"error{index}.{rank}").write_text(traceback.format_exc(limit=-3))
            raise
        torch.save(report, folder / f"part{index}.{rank}")
        (folder / f"part{index}.{rank}").rename(folder / f"report{index}.{rank}.pt")
    dist.destroy_process_group()
