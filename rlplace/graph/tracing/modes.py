"""How `torch.export` is made to run here: quickly, quietly, and with nothing but real ops.

Two kinds of region do not reach the graph. *Checkpoint* regions of the model are traced as if they
were not there, for the plan decides anew what is recomputed. *Autocast* regions are traced in the
module's own dtype, for the precision of the instance decides what a float weighs; sizes are
counted in elements, which autocast does not change.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import io
import logging
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils.checkpoint import CheckpointFunction

_SYMBOLS = "torch.fx.experimental.symbolic_shapes"
_AUTOCAST = ("__init__", "__enter__", "__exit__")


@dataclass(frozen=True)
class Guard:
    """A condition on sizes that a trace relies on, and the stack that asked for it."""

    condition: str
    stack: traceback.StackSummary


@contextlib.contextmanager
def lean_tracing() -> Iterator[None]:
    """Without a stack trace a node, the garbage collector, and Python code of each graph made."""
    collects, quiet = gc.isenabled(), fx.config.do_not_emit_stack_traces
    gc.disable()
    fx.config.do_not_emit_stack_traces = True
    try:
        with _use_lazy_graph_module(True):
            yield
    finally:
        fx.config.do_not_emit_stack_traces = quiet
        if collects:
            gc.enable()


@contextlib.contextmanager
def transparent_regions() -> Iterator[set[str]]:
    """Trace through checkpoint and autocast regions.

    Yields:
        Names of the user's `torch.autograd.Function` classes that the trace comes across: export
        keeps the ops of their forward and forgets their backward.
    """
    functions: set[str] = set()
    function: Any = torch.autograd.Function
    original, inherited = vars(function).get("apply"), function.apply.__func__

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            run, _preserve, *inputs = args
            return run(*inputs)
        if not cls.__module__.startswith("torch."):
            functions.add(cls.__qualname__)
        return inherited(cls, *args, **kwargs)

    methods = {name: getattr(torch.autocast, name) for name in _AUTOCAST}
    for name in methods:
        setattr(torch.autocast, name, _nothing)
    function.apply = classmethod(apply)
    try:
        yield functions
    finally:
        if original is None:
            del function.apply
        else:
            function.apply = original
        for name, method in methods.items():
            setattr(torch.autocast, name, method)


def _nothing(*_: Any, **__: Any) -> None:
    """What entering, leaving and making an autocast region does."""


@contextlib.contextmanager
def symbolic_lengths() -> Iterator[None]:
    """``len(tensor)`` is the size that it has in the trace, not a number that fixes it."""
    plain = builtins.len

    def symbolic(value: Any) -> Any:
        sized = isinstance(value, torch.Tensor) and value.ndim > 0
        return value.shape[0] if sized else plain(value)

    builtins.len = symbolic
    try:
        yield
    finally:
        builtins.len = plain


@contextlib.contextmanager
def quiet_tracing() -> Iterator[None]:
    """Without torch's own logs and the warnings that its tracing makes of a model's habits.

    Nor with the half-made graph that torch prints where a trace fails.
    """
    logger = logging.getLogger("torch")
    level, printed = logger.level, io.StringIO()
    logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(printed), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"The tensor attributes? ")
            warnings.filterwarnings("ignore", message=r".*torch\.jit\.script")
            yield
        sys.stderr.write(printed.getvalue())
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def watched_guards() -> Iterator[list[Guard]]:
    """Yields a list that every condition on sizes is added to, in order."""
    found: list[Guard] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            head, added, _ = record.getMessage().partition(" [guard added]")
            if added:
                stack = traceback.extract_stack(limit=200)
                found.append(Guard(head.removeprefix("eval "), stack))

    logger = logging.getLogger(_SYMBOLS)
    before = logger.handlers, logger.level, logger.propagate
    logger.handlers, logger.propagate = [Keep()], False
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.handlers, level, logger.propagate = before
        logger.setLevel(level)
