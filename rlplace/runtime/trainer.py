"""Trains a module by a plan, step by step, on the ranks that torchrun started."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from rlplace.errors import InputError, RankFailedError
from rlplace.graph.program import Program
from rlplace.graph.tracing.twins import Loss
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Plan
from rlplace.runtime.assemble import Assembly, OptimizerFactory, assemble, optimizer_factory
from rlplace.runtime.checkpoint import Checkpointer, Position
from rlplace.runtime.feed import Feed
from rlplace.runtime.gather import full_tensors
from rlplace.runtime.interrupts import polite_stop
from rlplace.runtime.measure import Measurement
from rlplace.runtime.model import Batch, Model, batched_inputs, call, cast, load_model, user_inputs
from rlplace.runtime.notebook import Notebook
from rlplace.runtime.optimizers import check_optimizer
from rlplace.runtime.options import Options
from rlplace.runtime.replan import Replan, adapted
from rlplace.runtime.reports import Callback, StepReport, Word, exchange
from rlplace.runtime.trained import Settings
from rlplace.runtime.validate import validate
from rlplace.runtime.world import World, join

#: From an optimizer to what changes its learning rate.
SchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler | ReduceLROnPlateau]


class Trainer:
    """A module in training by a plan. Every rank makes one, and calls the same methods.

    Start it under torchrun, with at least as many ranks as the plan uses. Every rank makes the
    whole module with the same seed and keeps its own part of it. Batch norm takes its statistics
    from each micro-batch of each replica, as plain data parallel training does.

    The first ``warmup + steps`` steps (of the options) are measured, see `measurement`.

    Args:
        plan: Made for the graph of this module.
        model_fn: Makes the module. Without `loss`, the first thing that `forward` returns is the
            mean loss; the mean must be over as many items in every sample (no ignored labels).
        example: A batch of at least 2 samples, with which the module is captured; by default what
            the library gives for `plan.source`, or else the first batch.
        loss: A loss outside of the module: ``loss(output, *targets)`` gives the mean over the
            batch. A batch is then a pair (inputs, targets).
        optimizer: ``adamw``, ``sgd``, ``sgd-momentum`` or a function from a list of parameters to
            an optimizer; by default the plan's.
        groups: From a name and a parameter to the optimizer's settings for it
            (``{"weight_decay": 0.0}``); such an optimizer is made from parameter groups.
        scheduler: A function from that optimizer to a scheduler of `torch.optim.lr_scheduler`,
            which steps once a step (`ReduceLROnPlateau` with the loss).
        clip: Largest global 2-norm of the gradients; by default that of the options.
        accumulate: Batches of which `fit` makes one step.
        options: Learning rate, seed, and how many steps are measured.
        graph: The graph of the plan, if it is at hand; otherwise the module is captured.
        program: The exported module, if it is at hand.
        device: ``cpu`` (gloo, every rank pinned to a core) or ``cuda`` (NCCL).
        timeout: Seconds after which a rank gives up waiting for another.
        world: Ranks that were joined before; by default `join(device, timeout)`.
        callbacks: Told of every step on this rank.
        on_phase: Called on this rank with the kind of every event (``F``, ``reduce``) that begins,
            and, in the thread that writes it, with each part of a ``checkpoint N``, where N
            is the number of steps in it.
        replan: Makes another plan where this one needs more ranks than there are
            (`rlplace.replanner`), so that a job goes on with fewer nodes.

    Raises:
        InputError: If the plan is for another graph, more ranks, or a batch of another size;
            before any collective.
        RankFailedError: If a rank failed; names it and the cause.
    """

    def __init__(
        self,
        plan: Plan,
        model_fn: Callable[[], nn.Module],
        *,
        example: Any = None,
        loss: Loss | None = None,
        optimizer: str | OptimizerFactory | None = None,
        groups: Settings | None = None,
        scheduler: SchedulerFactory | None = None,
        clip: float | None = None,
        accumulate: int = 1,
        options: Options | None = None,
        graph: OpGraph | None = None,
        program: Program | None = None,
        device: str = "cpu",
        timeout: float = 600.0,
        world: World | None = None,
        callbacks: Sequence[Callback] = (),
        on_phase: Callable[[str], None] | None = None,
        replan: Replan | None = None,
    ) -> None:
        self.world = world or join(device, timeout)
        self._keeper: Checkpointer | None = None
        with self._closing_on_error():
            self.plan = plan = adapted(self.world, plan, replan)
        self.options = options or Options()
        self.accumulate, self.callbacks = accumulate, list(callbacks)
        #: Steps so far, and batches taken by `fit`.
        self.steps = self.taken = 0
        #: Whether the last `fit` was ended by Ctrl-C.
        self.interrupted = False
        self.scheduler: LRScheduler | ReduceLROnPlateau | None = None
        self._model_fn, self._loss, self._make_scheduler = model_fn, loss, scheduler
        self._settings, self._on_phase = groups, on_phase
        self._graph, self._program = graph, program
        self._dtype = self.options.dtype_for(plan)
        self._assembly: Assembly | None = None
        self._notebook: Notebook | None = None
        self._made = 0  # steps of an earlier start that the data has yet to be led past

        def prepare() -> Model | None:
            if accumulate < 1:
                raise InputError("accumulate", accumulate, "must be at least 1", 1)
            if clip is not None:
                self.options = replace(self.options, clip=clip)
            self._make_optimizer = optimizer_factory(optimizer or plan.optimizer, self.options.lr)
            known = example is not None or bool(plan.source)
            return self._make_model(example) if known else None

        with self._closing_on_error():
            model = self.world.together(prepare)
            if model is not None:
                self._assemble(model)

    @property
    def assembly(self) -> Assembly:
        """What this rank runs.

        Raises:
            InputError: Before the first batch, where no example was given.
        """
        if self._assembly is None:
            rule = "is needed to capture the module before the first batch"
            raise InputError("example", None, rule)
        return self._assembly

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None and self._keeper is not None:
            with self._closing_on_error(), self._guarded():
                self._keeper.finish(Position(self.steps, self.taken))
        self.close()

    def close(self) -> None:
        """Leave the process group, if this trainer made it."""
        if self._keeper is not None:
            self._keeper.wait()
        self.world.close()

    def step(self, *batches: Any) -> StepReport:
        """Make one optimizer step.

        Args:
            batches: The same on every rank, each of the plan's global batch or smaller; the
                gradients of several are averaged over all their samples.
        """
        self._start(batches[0])
        with self._guarded():
            return self._step(batches, lambda: (False, False))[0]

    def fit(self, data: Iterable[Any], steps: int | None = None) -> list[StepReport]:
        """Train on data, `accumulate` batches a step.

        All ranks stop together when one of them has no more data. Ctrl-C lets the step that runs
        finish (`interrupted`); a second one interrupts.

        Args:
            data: Batches, the same on every rank.
            steps: How many to make; by default until the data ends.

        Raises:
            InputError: If there is no data at all.
            RankFailedError: If a rank failed; names it and the cause.
        """
        feed = Feed(data, self.accumulate, steps)
        if not self.world.together(feed.advance):
            raise InputError("data", "empty", "must yield a batch for every step")
        self._start(feed.batches[0])
        if not self.world.together(lambda: self._catch_up(feed)):
            return []
        reports: list[StepReport] = []
        for callback in self.callbacks:
            callback.begin(steps)
        try:
            with self._guarded(), polite_stop() as asked:
                going = True
                while going:
                    self.taken += len(feed.batches)
                    report, said = self._step(feed.batches, lambda: (asked(), not feed.advance()))
                    reports.append(report)
                    self.interrupted = bool(said.stop)
                    going = not (said.stop or said.over)
        finally:
            for callback in self.callbacks:
                callback.end()
        return reports

    def save(self, path: str | Path | None = None) -> Path:
        """Write a checkpoint now; it is whole when this returns. Every rank calls it.

        Args:
            path: Folder that all ranks share and that gets it, as ``step-N``; nothing in it is
                removed. By default the folder of the options, where as many stay as they say.

        Returns:
            The checkpoint, which `load` takes.

        Raises:
            InputError: If there is no folder, or nothing to save before the first batch.
            RankFailedError: If a rank could not write (a full disk); training may go on.
        """
        keeper, position = self._saves(), Position(self.steps, self.taken)
        with self._guarded(InputError):
            return keeper.save_now(position, None if path is None else Path(path))

    def load(self, path: str | Path | None = None) -> None:
        """Be where a checkpoint was, of this plan or another. Every rank calls it.

        Weights, optimizer, learning rate scheduler and `steps` are those of then. The next `fit`
        leads its data to where that of then was; a loop of one's own does so itself.

        Args:
            path: A checkpoint, or a folder of which the last good one is taken; by default the
                folder of the options.

        Raises:
            InputError: If there is no folder, it has no good checkpoint, or that is of another
                model, optimizer or global batch.
        """
        keeper = self._saves()
        with self._guarded(InputError):
            self._go_on_from(keeper.load(None if path is None else Path(path)))

    def _saves(self) -> Checkpointer:
        """What saves and restores, from the moment on when there is something to save."""
        _ = self.assembly
        assert self._keeper is not None
        return self._keeper

    def _catch_up(self, feed: Feed) -> bool:
        """Lead the data to where a checkpoint was; whether there is any left."""
        assert self._keeper is not None
        if feed.stateful and self._keeper.attach("data", feed):
            self._made = 0
        self._made = feed.skip(self._made)
        return bool(feed.batches)

    def measurement(self) -> Measurement:
        """What was measured; every rank calls this, and all get the same.

        Rank 0 alone has `tensors`, where the options ask for them.
        """
        self._saves().wait()  # so that its events are among those of the timeline
        assert self._notebook is not None
        with self._guarded():
            result = self._notebook.measurement(self.world, self.plan, self.assembly)
            if self.options.collect:
                result.tensors.update(full_tensors(self.world, self.assembly))
        return result

    def _make_model(self, example: Any) -> Model:
        """The module, captured where need be, and found to fit the plan."""
        if example is None:
            example = library_example(self.plan, self.options.seed)
        model = load_model(
            self.plan,
            self._model_fn,
            cast(call(example, self._loss), self._dtype),
            dtype=self._dtype,
            seed=self.options.seed,
            loss=self._loss,
            graph=self._graph,
            program=self._program,
        )
        validate(self.plan, model.graph, model.program, self.world.size)
        check_optimizer(self.plan, model.graph, self._make_optimizer, self._settings is not None)
        return model

    def _start(self, first: Any) -> None:
        """Capture the module with the first batch, if that is still to be done."""
        if self._assembly is None:
            with self._closing_on_error():
                self._assemble(self.world.together(lambda: self._make_model(first)))

    def _assemble(self, model: Model) -> None:
        with self._guarded():
            self._inputs, self._batched = model.program, batched_inputs(model.program)
            self._tokens = model.graph.tokens_per_sample
            options = self.options
            self.world.begin(self._phase)
            self._assembly = assembly = assemble(
                self.world,
                self.plan,
                model,
                self._make_optimizer,
                options.overlap,
                options.bucket_bytes,
                options.seed,
                self._settings,
            )
            if self._on_phase is not None:
                assembly.recorder.on_phase = self._on_phase
            if assembly.interpreter is not None:
                assembly.interpreter.clip = options.clip
            if self._make_scheduler is not None and assembly.optimizer is not None:
                self.scheduler = self._make_scheduler(assembly.optimizer)
            self._notebook = Notebook(assembly, options.warmup, options.steps, self.world.device)
            self._keeper = Checkpointer(
                options.checkpoint,
                self.world,
                self.plan,
                assembly,
                lambda step: assembly.recorder.on_phase(f"checkpoint {step}"),
            )
            self._go_on_from(self._keeper.resume())

    def _go_on_from(self, start: Position) -> None:
        """Be where a checkpoint was."""
        self.steps, self.taken, self._made = start.step, start.batches, start.step
        if self.scheduler is not None and self._keeper is not None:
            self._keeper.attach("scheduler", self.scheduler)

    def _step(
        self, batches: Sequence[Any], ending: Callable[[], tuple[bool, bool]]
    ) -> tuple[StepReport, Word]:
        """One step, and the word of all ranks after it.

        Args:
            batches: Of this step.
            ending: Asked after it: whether this rank wants to stop, and has no more data.
        """
        assert self._notebook is not None
        inputs = [self._on_device(batch) for batch in batches]
        samples = sum(self._samples(one) for one in inputs)
        with self._notebook.open() as page:
            if self._notebook.noting:
                dist.barrier()  # so that all ranks start the clock together
            page.start = time.perf_counter()
            share = self._run(inputs)
            if self.world.device.type == "cuda":
                torch.cuda.synchronize(self.world.device)
            page.end = time.perf_counter()
            page.loss = share
        stop, over = ending()
        own = Word(share or 0.0, page.end - page.start, self._lr(), self._norm(), stop, over)
        said = exchange(self.world, own)
        self._schedule(said.loss)
        self.steps += 1
        report = StepReport(
            self.steps,
            said.loss,
            said.seconds,
            said.lr if math.isfinite(said.lr) else math.nan,
            said.norm if said.norm != -math.inf else None,
            samples,
            samples * self._tokens / said.seconds,
            self._notebook.peak(),
        )
        for callback in self.callbacks:
            callback.step(report)
        assert self._keeper is not None
        self._keeper.after_step(Position(self.steps, self.taken))
        return report, said

    def _run(self, inputs: Sequence[dict[str, Any]]) -> float | None:
        """The work of this rank; gives its share of the loss, on one rank of each last replica."""
        assembly = self.assembly
        if assembly.interpreter is None:
            return None
        math_only = self.plan.attention == "math"
        with sdpa_kernel(SDPBackend.MATH) if math_only else contextlib.nullcontext():
            loss = assembly.interpreter.step(*inputs)
        counts = self.world.rank in self.plan.stages[-1].mesh.firsts
        return float(loss) if counts and loss is not None else None

    def _phase(self) -> str:
        """What this rank does just now."""
        phase = self._assembly.recorder.phase if self._assembly is not None else "assembly"
        return f"{phase} of step {self.steps + 1}"

    def _lr(self) -> float:
        optimizer = self.assembly.optimizer
        return float(optimizer.param_groups[0]["lr"]) if optimizer is not None else -math.inf

    def _norm(self) -> float:
        interpreter = self.assembly.interpreter
        norm = interpreter.norm if interpreter is not None else None
        return -math.inf if norm is None else norm

    def _schedule(self, loss: float) -> None:
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss)
        elif self.scheduler is not None:
            self.scheduler.step()

    def _samples(self, inputs: dict[str, Any]) -> int:
        sizes = [inputs[name].shape[0] for name in self._batched]
        return int(sizes[0]) if sizes else self.plan.global_batch

    def _on_device(self, batch: Any) -> dict[str, Any]:
        """A batch as user inputs on this rank's device."""
        wanted = cast(call(batch, self._loss), self._dtype)
        values = user_inputs(self._inputs, wanted, self.plan.global_batch)
        return {
            name: value.to(self.world.device) if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }

    @contextlib.contextmanager
    def _guarded(self, *mistakes: type[Exception]) -> Iterator[None]:
        """Around what the other ranks wait for: tell them what went wrong.

        Args:
            mistakes: What every rank refuses alike, so that nobody has to be told.
        """
        try:
            yield
        except RankFailedError:
            raise
        except mistakes:
            raise
        except Exception as error:
            raise self.world.fail(error) from error

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


def library_example(plan: Plan, seed: int) -> Batch:
    """What the library gives for the model of a plan.

    Raises:
        InputError: If the plan does not say which library model it is for.
    """
    if not plan.source:
        raise InputError("example", None, "give data or an example batch for your own module")
    from rlplace.graph.library import spec

    return spec(**plan.source).example(plan.global_batch, seed)  # type: ignore[arg-type]
