"""Checkpoints while training goes on: copied to the host, then written by a thread."""

from __future__ import annotations

import shutil
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from rlplace.errors import InputError, RankFailedError
from rlplace.plan.files import dump_plan
from rlplace.plan.types import Plan
from rlplace.runtime import manifest
from rlplace.runtime.assemble import Assembly
from rlplace.runtime.holdings import Piece, pieces
from rlplace.runtime.restore import dump_holdings, fill, parse_holdings
from rlplace.runtime.storage import Reader, write
from rlplace.runtime.weight_slices import WeightSlice
from rlplace.runtime.world import World, is_echo

_OBJECTS = "objects.pt"


@runtime_checkable
class Stateful(Protocol):
    """What has a state of its own: a learning rate scheduler, a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """Its state, of plain data and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state over."""


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often a run is saved.

    Args:
        folder: On a file system that all ranks share.
        every: Steps between two checkpoints; 0 for none but those that are asked for.
        keep: How many stay.
        resume: Go on from the last good checkpoint, if there is one.
    """

    folder: str
    every: int = 100
    keep: int = 3
    resume: bool = True

    def __post_init__(self) -> None:
        for name, value, least in (("every", self.every, 0), ("keep", self.keep, 1)):
            if value < least:
                raise InputError(f"checkpoint.{name}", value, f"must be at least {least}", least)


@dataclass(frozen=True)
class Position:
    """How far a run has come.

    Args:
        step: Optimizer steps done.
        batches: Global batches taken from the data.
    """

    step: int = 0
    batches: int = 0


@dataclass(frozen=True)
class _Settings:
    """What a parameter group is set to, learning rate among it, and the names of its parameters."""

    names: list[str]
    values: dict[str, Any]


@dataclass(frozen=True)
class _Part:
    """What a rank says when its files are written: them, optimizer settings, other objects."""

    files: list[manifest.FileNote]
    settings: list[_Settings]
    objects: dict[str, Any]


class Checkpointer:
    """Saves and restores the state of a run. Every rank makes one and calls the same methods.

    A checkpoint that cannot be written costs a warning, not the run.

    Args:
        options: Where and how often; None for never.
        world: The ranks.
        plan: The plan that they run.
        assembly: What this rank runs.
        on_write: Called with the step in the middle of writing, in the thread that writes.
    """

    def __init__(
        self,
        options: Checkpoints | None,
        world: World,
        plan: Plan,
        assembly: Assembly,
        on_write: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._options = options
        self._root = Path(options.folder) if options is not None else Path()
        self._world, self._plan, self._assembly = world, plan, assembly
        self._objects: dict[str, Stateful] = {}
        self._unclaimed: dict[str, Any] = {}
        self._on_write = on_write
        self._group = _group(world) if options is not None else None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        #: The last step that this run has saved or started from; None before.
        self.good: int | None = None
        self._last = 0

    def attach(self, name: str, one: Stateful) -> bool:
        """Save something else too, which has the same state on every rank.

        Returns:
            Whether the checkpoint that was taken over had a state for it, which it has now.
        """
        self._objects[name] = one
        if name not in self._unclaimed:
            return False
        one.load_state_dict(self._unclaimed.pop(name))
        return True

    def resume(self) -> Position:
        """Take over the last good checkpoint; the start of a run if there is none.

        Raises:
            InputError: If it is of another model, optimizer or global batch.
        """
        name = self._world.from_first(self._newest) if self._options is not None else ""
        return self._restore(self._root / name) if name else Position()

    def load(self, path: Path | None) -> Position:
        """Take over a checkpoint, or the last good one of a folder of them; see `Trainer.load`."""
        root = self._folder(path)
        self.wait()
        self._world.together(lambda: _refuse_other(root))
        chosen = self._world.from_first(lambda: str(_good(root)))
        return self._restore(Path(chosen))

    def _restore(self, folder: Path) -> Position:
        content = self._world.together(lambda: self._fill(folder))
        if self._assembly.reducer is not None:
            self._assembly.reducer.refresh()
        if self._assembly.interpreter is not None:
            self._assembly.interpreter.steps = content["step"]
        self.good = self._last = content["step"]
        return Position(content["step"], content["batches"])

    def after_step(self, position: Position) -> None:
        """Save, if it is time to."""
        every = self._options.every if self._options is not None else 0
        if every and position.step % every == 0:
            self.save(position)

    def finish(self, position: Position) -> None:
        """Save the end of a run, and wait until it is written."""
        if self._options is not None and position.step != self._last:
            self.save(position)
        self.wait()

    def save(self, position: Position) -> None:
        """Copy the state to the host, and let a thread write it."""
        assert self._options is not None
        self.wait()
        self._last = position.step
        self._begin(position, self._root, self._options.keep)

    def save_now(self, position: Position, path: Path | None) -> Path:
        """Save, and wait until it is written; see `Trainer.save`."""
        root = self._folder(path)
        self.wait()
        keep = self._options.keep if path is None and self._options is not None else None
        self._begin(position, root, keep)
        failure = self._end()
        if failure is not None and is_echo(failure):
            raise failure
        self._world.together(lambda: _refuse_unwritten(failure))
        if path is None:
            self._last = position.step
        return manifest.target(root, position.step)

    def wait(self) -> None:
        """Wait for what is being written, and warn if that failed."""
        failure = self._end()
        if failure is not None and self._world.rank == 0:
            last = "there is none" if self.good is None else f"the last one is of step {self.good}"
            warnings.warn(f"checkpoint not written, {last}: {_cause(failure)}", stacklevel=2)

    def _begin(self, position: Position, root: Path, keep: int | None) -> None:
        if self._group is None:
            self._group = _group(self._world)
        own = list(_snapshot(self._assembly))
        objects = {name: one.state_dict() for name, one in self._objects.items()}
        arguments = (position, root, keep, own, objects, _settings(self._assembly))

        def work() -> None:
            with self._assembly.recorder.aside("checkpoint"):
                self._write(*arguments)

        self._thread = threading.Thread(target=work)  # the interpreter waits for it
        self._thread.start()

    def _end(self) -> BaseException | None:
        """Wait for what is being written; gives what went wrong."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        return failure

    def _folder(self, path: Path | None) -> Path:
        """A folder that was asked for, or that of the options.

        Raises:
            InputError: If there is neither.
        """
        if path is None and self._options is None:
            rule = "give a folder, here or in Options(checkpoint=Checkpoints(folder))"
            raise InputError("path", None, rule)
        return self._root if path is None else path

    def _newest(self) -> str:
        self._root.mkdir(parents=True, exist_ok=True)
        manifest.remove_scratch(self._root)
        resume = self._options is not None and self._options.resume
        folder = manifest.latest_good(self._root) if resume else None
        return folder.name if folder is not None else ""

    def _fill(self, folder: Path) -> dict[str, Any]:
        content = manifest.read_manifest(folder)
        for field, value, saved in (
            ("plan.graph", self._plan.graph, content["graph"]),
            ("plan.global_batch", self._plan.global_batch, content["global_batch"]),
        ):
            if value != saved:
                raise InputError(field, value, f"the checkpoint {folder} has another one", saved)
        own = list(pieces(self._assembly, every_state=True))
        with torch.no_grad():
            fill(own, Reader(folder), parse_holdings(content["holdings"]))
        saved = torch.load(folder / _OBJECTS, weights_only=True)
        _take_settings(self._assembly, saved["settings"])
        self._unclaimed = saved["objects"]
        return content

    def _write(
        self,
        position: Position,
        root: Path,
        keep: int | None,
        own: list[Piece],
        objects: dict[str, Any],
        settings: list[_Settings],
    ) -> None:
        part = manifest.scratch(root, position.step)
        try:
            holdings = write(part, own, self._group, lambda: self._on_write(position.step))
            files = [manifest.note(path) for path in part.glob(f"__{self._world.rank}_*")]
            every: list[Any] | None = [None] * self._world.size if self._world.rank == 0 else None
            dist.gather_object(_Part(files, settings, objects), every, group=self._group)
            if every is not None:
                _save_objects(part / _OBJECTS, every)
                files = [one for told in every for one in told.files]
                files += [manifest.note(part / name) for name in (".metadata", _OBJECTS)]
                content = self._content(position, dump_holdings(holdings.values()))
                manifest.commit(root, position.step, files, content)
                if keep is not None:
                    manifest.prune(root, position.step, keep)
            self.good = position.step
        except (OSError, RuntimeError, CheckpointException) as error:
            self._failure = error
            if self._world.rank == 0:
                shutil.rmtree(part, ignore_errors=True)

    def _content(self, position: Position, holdings: list[Any]) -> dict[str, Any]:
        """What a manifest says beside its files."""
        return {
            "batches": position.batches,
            "graph": self._plan.graph,
            "global_batch": self._plan.global_batch,
            "plan": dump_plan(self._plan),
            "holdings": holdings,
        }


def _group(world: World) -> Any:
    """All ranks, for what the writing thread has to say while training goes on."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=world.timeout))


def _snapshot(assembly: Assembly) -> Iterable[Piece]:
    """What a rank holds, in memory of its own on the host; running statistics are replica 0's."""
    for piece in pieces(assembly, every_state=True):  # also of a run that has made no step
        if assembly.replica == 0 or not piece.holding.item.startswith("buffer/"):
            copy = piece.tensor.detach().to("cpu", copy=True)
            yield Piece(piece.holding, piece.rank, piece.start, copy)


def _settings(assembly: Assembly) -> list[_Settings]:
    """What the optimizer of this rank is set to, by parameter group."""
    if assembly.optimizer is None or assembly.reducer is None:
        return []
    names = {id(param): WeightSlice.of(key).name for key, param in assembly.params().items()}
    inside: dict[int, list[str]] = defaultdict(list)
    for run in assembly.reducer.runs:
        inside[id(run.stepped)].append(names[id(run.param)])
    return [
        _Settings(
            [name for param in group["params"] for name in inside[id(param)]],
            {name: value for name, value in group.items() if name != "params"},
        )
        for group in assembly.optimizer.param_groups
    ]


def _save_objects(path: Path, every: Iterable[_Part]) -> None:
    """Save what the ranks have beside tensors; an object is alike on all ranks that have it."""
    objects: dict[str, Any] = {}
    settings: list[tuple[list[str], dict[str, Any]]] = []
    for part in every:
        objects = part.objects | objects
        settings += [(one.names, one.values) for one in part.settings]
    torch.save({"objects": objects, "settings": settings}, path)


def _take_settings(assembly: Assembly, saved: Iterable[tuple[list[str], dict[str, Any]]]) -> None:
    """Give every parameter group the settings that its parameters had, as torch does."""
    known = {name: values for names, values in saved for name in names}
    own = assembly.optimizer.param_groups if assembly.optimizer is not None else []
    for group, settings in zip(own, _settings(assembly), strict=True):
        found = [known[name] for name in settings.names if name in known]
        group.update(found[0] if found else {})


def _refuse_other(path: Path) -> None:
    """Refuse a path that is neither a checkpoint nor a folder of some."""
    if not manifest.is_checkpoint(path) and not manifest.found(path):
        rule = "is neither a checkpoint (step-N) nor a folder that holds one"
        raise InputError("path", str(path), rule)


def _good(path: Path) -> Path:
    """The checkpoint at a path, or the last good one in that folder."""
    if manifest.is_checkpoint(path):
        fault = manifest.fault_of(path)
        if fault is not None:
            raise InputError("path", str(path), f"the checkpoint is damaged: {fault}")
        return path
    good = manifest.latest_good(path)
    if good is None:
        raise InputError("path", str(path), "every checkpoint in it is damaged")
    return good


def _refuse_unwritten(failure: BaseException | None) -> None:
    if failure is not None:
        raise RankFailedError(f"checkpoint not written: {_cause(failure)}") from failure


def _cause(error: BaseException) -> str:
    """Which rank failed to write, and why."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    failures = sorted(error.failures.items())
    return "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in failures)
