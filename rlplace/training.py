"""Training by a plan, with what a user sees of it: a progress bar, and Weights & Biases."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from rlplace.plan.types import Plan
from rlplace.report.run_view import StepBar
from rlplace.runtime.measure import Measurement
from rlplace.runtime.options import Options
from rlplace.runtime.reports import Callback
from rlplace.runtime.run import run as run_plan
from rlplace.runtime.trainer import Trainer as PlainTrainer


class Trainer(PlainTrainer):
    """A module in training by a plan; see `rlplace.runtime.trainer.Trainer`.

    Args:
        plan: Made for the graph of the module.
        model_fn: Makes the module.
        track: Log every step to Weights & Biases, on rank 0 (offline where no key is set); a
            folder says where wandb writes.
        progress: A bar on the stderr of rank 0; by default where that is a terminal.
        options: All that the plain trainer takes.
    """

    def __init__(
        self,
        plan: Plan,
        model_fn: Callable[[], nn.Module],
        *,
        track: bool | str | Path = False,
        progress: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(plan, model_fn, **options)
        self._open = contextlib.ExitStack()
        self.callbacks += self._open.enter_context(
            listeners(plan, self.options, track, progress, first=self.world.rank == 0)
        )

    def close(self) -> None:
        """Leave the process group, if this trainer made it, and end the logs."""
        super().close()
        if hasattr(self, "_open"):
            self._open.close()


def run(
    plan: Plan,
    model_fn: Callable[[], nn.Module],
    *args: Any,
    track: bool | str | Path = False,
    progress: bool | None = None,
    **more: Any,
) -> Measurement:
    """Train a module by a plan and measure the steps; see `rlplace.runtime.run.run`.

    Args:
        plan: Made for the graph of the module.
        model_fn: Makes the module.
        args: Data, loss and optimizer.
        track: As for `Trainer`.
        progress: As for `Trainer`.
        more: The rest.
    """
    options = more.get("options") or Options()
    first = os.environ.get("RANK", "0") == "0"
    with listeners(plan, options, track, progress, first) as callbacks:
        return run_plan(plan, model_fn, *args, callbacks=callbacks, **more)


@contextlib.contextmanager
def listeners(
    plan: Plan, options: Options, track: bool | str | Path, progress: bool | None, first: bool
) -> Iterator[list[Callback]]:
    """What listens to a trainer on this rank; rank 0 (`first`) alone has any."""
    found: list[Callback] = []
    with contextlib.ExitStack() as stack:
        if first and (sys.stderr.isatty() if progress is None else progress):
            found.append(StepBar())
        if first and track:
            from rlplace.policies.tracking import StepTracker

            folder = Path("runs") if track is True else Path(track)
            config = {
                "graph": plan.graph_name,
                "stages": len(plan.stages),
                "devices": len(plan.devices),
                "micro_batches": plan.micro_batches,
                "global_batch": plan.global_batch,
                "schedule": plan.schedule,
                "precision": plan.precision,
                "options": asdict(options),
            }
            tracker = StepTracker(folder, plan.graph_name or "run", config)
            stack.callback(tracker.finish)
            found.append(tracker)
        yield found
