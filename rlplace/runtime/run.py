"""`rlplace.run`: train and measure a plan in one call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from rlplace.graph.program import Program
from rlplace.graph.tracing.twins import Loss
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Plan
from rlplace.runtime.assemble import OptimizerFactory
from rlplace.runtime.measure import Measurement
from rlplace.runtime.model import peek, repeated
from rlplace.runtime.options import Options
from rlplace.runtime.reports import StepReport
from rlplace.runtime.trainer import Trainer, library_example
from rlplace.runtime.world import World, join


def run(
    plan: Plan,
    model_fn: Callable[[], nn.Module],
    data: Iterable[Any] | None = None,
    loss: Loss | None = None,
    optimizer: str | OptimizerFactory | None = None,
    *,
    example: Any = None,
    options: Options | None = None,
    graph: OpGraph | None = None,
    program: Program | None = None,
    device: str = "cpu",
    timeout: float = 600.0,
    world: World | None = None,
    on_step: Callable[[int, float], None] | None = None,
    **more: Any,
) -> Measurement:
    """Train a module by a plan and measure the steps. Every rank calls this.

    Args:
        plan: As for `Trainer`, like all that is not named here.
        model_fn: Makes the module.
        data: Batches of the plan's global batch, the same on every rank; by default the example,
            repeated to the global batch.
        loss: A loss outside of the module.
        optimizer: By default the plan's.
        example: A batch of at least 2 samples; by default the first one of `data`, or what the
            library gives for `plan.source`.
        options: Steps, seed, learning rate.
        graph: The graph of the plan, if it is at hand.
        program: The exported module, if it is at hand.
        device: ``cpu`` or ``cuda``.
        timeout: Seconds after which a rank gives up waiting for another.
        world: Ranks that were joined before.
        on_step: Called on every rank after each step, with its index and its seconds.
        more: The rest.

    Returns:
        The same on every rank, but for `tensors`, which rank 0 alone has.

    Raises:
        InputError: If the plan is for another graph, more ranks, or a batch of another size;
            before any collective.
        RankFailedError: If a rank failed; names it and the cause.
    """
    options = options or Options()
    world = world or join(device, timeout)

    def first() -> tuple[Any, Iterable[Any]]:
        if data is not None:
            found, stream = peek(data)
            return (found if example is None else example), stream
        sample = library_example(plan, options.seed) if example is None else example
        return sample, itertools.repeat(repeated(sample, plan.global_batch))

    try:
        sample, stream = world.together(first)
    except BaseException:
        world.close()
        raise
    with Trainer(
        plan,
        model_fn,
        example=sample,
        loss=loss,
        optimizer=optimizer,
        options=options,
        graph=graph,
        program=program,
        world=world,
        **more,
    ) as trainer:
        if on_step is not None:
            trainer.callbacks.append(_Told(on_step))
        trainer.fit(stream, options.warmup + options.steps)
        return trainer.measurement()


class _Told:
    """Passes steps on to a plain function."""

    def __init__(self, tell: Callable[[int, float], None]) -> None:
        self._tell = tell

    def begin(self, steps: int | None) -> None:
        """Nothing to tell yet."""

    def step(self, report: StepReport) -> None:
        """Tell index and seconds."""
        self._tell(report.step - 1, report.seconds)

    def end(self) -> None:
        """Nothing more to tell."""
