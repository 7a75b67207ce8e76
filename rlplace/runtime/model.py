"""The module that every rank makes before the plan cuts it, and the batches that it eats."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rlplace.errors import InputError
from rlplace.graph.library import Spec
from rlplace.graph.program import Program, export_program
from rlplace.graph.tracing.twins import TARGETS, Loss, shallow, with_loss
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Plan


class Call(NamedTuple):
    """Positional and keyword arguments of the module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


#: A call of the module: keyword tensors, or a tuple of positional ones, or both.
Batch = Mapping[str, Any] | tuple[Any, ...] | Call


@dataclass(frozen=True)
class Model:
    """A module with its exported program and its groups."""

    module: nn.Module
    program: Program
    graph: OpGraph

    def states(self) -> dict[str, torch.Tensor]:
        """Every parameter, buffer and constant by fully qualified name."""
        constants = {
            name: value
            for name, value in self.program.exported.constants.items()
            if isinstance(value, torch.Tensor)
        }
        return constants | dict(self.module.named_buffers()) | dict(self.module.named_parameters())


def batched_inputs(program: Program) -> frozenset[str]:
    """User inputs whose dim 0 is the batch."""
    values = {node.name: node.meta.get("val") for node in program.exported.graph.nodes}
    return frozenset(
        name
        for name in program.inputs
        if isinstance(value := values[name], torch.Tensor)
        and value.ndim
        and isinstance(value.shape[0], torch.SymInt)
    )


def user_inputs(program: Program, batch: Batch, samples: int) -> dict[str, Any]:
    """A batch as user inputs by placeholder.

    Args:
        program: The exported model.
        batch: The batch.
        samples: How many it may have at most: the plan's global batch.

    Raises:
        InputError: If the batch does not have the model's inputs, if it is empty or too large, or
            if its inputs have different numbers of samples.
    """
    args, kwargs = call_of(batch)
    try:
        flat = program.unflatten(args, kwargs)
    except ValueError as error:
        raise InputError("data", sorted(kwargs) or len(args), str(error)) from error
    values = dict(zip(program.inputs, flat, strict=True))
    found = {name: values[name].shape[0] for name in sorted(batched_inputs(program))}
    for name, size in found.items():
        if not 1 <= size <= samples:
            rule = f"input {name} must have 1 to {samples} samples, the plan's global batch"
            raise InputError("data", size, rule, max(1, min(size, samples)))
        if size != (first := next(iter(found.values()))):
            rule = f"input {name} must have as many samples as {next(iter(found))}"
            raise InputError("data", size, rule, first)
    return values


def load_model(
    plan: Plan,
    model_fn: Callable[[], nn.Module],
    example: Batch,
    *,
    dtype: torch.dtype,
    seed: int,
    loss: Loss | None = None,
    graph: OpGraph | None = None,
    program: Program | None = None,
) -> Model:
    """Make the module; export and capture what is not at hand.

    Args:
        plan: Names the graph that is wanted.
        model_fn: Makes the module.
        example: A batch of at least 2 samples.
        dtype: Of float parameters and buffers.
        seed: Seed of the parameters.
        loss: Outside of the module; the example then has its targets (`call`).
        graph: The plan's graph, if it is at hand.
        program: The exported module, if it is at hand, with its loss.
    """
    torch.manual_seed(seed)
    module = model_fn().train().to(dtype)
    args, kwargs = call_of(example)
    if graph is None:
        from rlplace.graph.capture import capture

        inputs = {name: value for name, value in kwargs.items() if name != TARGETS or loss is None}
        graph = capture(
            module,
            args,
            inputs,
            loss=loss,
            targets=kwargs[TARGETS] if loss is not None else None,
            name=plan.graph_name,
            source=plan.source,
        )
    if loss is not None:
        module = with_loss(shallow(module), loss)
    return Model(module, program or export_program(module, args, kwargs), graph)


def library_batches(model: Spec, samples: int, seed: int) -> Iterator[Batch]:
    """Random batches of a library model, without end; step i has the seed `seed` + i."""
    return (model.example(samples, step) for step in itertools.count(seed))


def peek(data: Iterable[Batch]) -> tuple[Batch, Iterable[Batch]]:
    """The first batch, and all of them.

    Raises:
        InputError: If there is none.
    """
    stream = iter(data)
    try:
        first = next(stream)
    except StopIteration:
        raise InputError("data", "empty", "must yield a batch for every step") from None
    return first, itertools.chain([first], stream)


def repeated(example: Batch, samples: int) -> Batch:
    """The samples of an example, over and over until there are enough."""
    sizes = [leaf.shape[0] for leaf in pytree.tree_leaves(example) if _has_batch(leaf)]
    size = sizes[0]
    index = torch.arange(samples) % size

    def fill(leaf: Any) -> Any:
        return leaf[index] if _has_batch(leaf) and leaf.shape[0] == size else leaf

    result: Batch = pytree.tree_map(fill, example)
    return result


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with its float tensors in another dtype."""

    def convert(leaf: Any) -> Any:
        floats = isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point
        return leaf.to(dtype) if floats else leaf

    result: Batch = pytree.tree_map(convert, batch)
    return result


def call_of(batch: Batch) -> Call:
    """Positional and keyword arguments of a batch."""
    if isinstance(batch, Call):
        return batch
    return Call(batch, {}) if isinstance(batch, tuple) else Call((), dict(batch))


def call(batch: Any, loss: Loss | None = None) -> Call:
    """What a user's data yields as a call.

    Args:
        batch: A dict of keywords, a tuple or list of positional ones, or one tensor; with a loss
            outside of the module a pair of such inputs and of the loss's targets.
        loss: The loss.

    Raises:
        InputError: If it is none of these.
    """
    if loss is not None:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            rule = "with a loss outside of the module a batch is a pair (inputs, targets)"
            raise InputError("data", type(batch).__name__, rule, "(inputs, targets)")
        args, kwargs = call(batch[0])
        targets = tuple(batch[1]) if isinstance(batch[1], list) else batch[1]
        return Call(args, {**kwargs, TARGETS: targets})
    if isinstance(batch, torch.Tensor):
        return Call((batch,), {})
    if not isinstance(batch, Mapping | tuple | list):
        rule = "a batch is a dict of keyword tensors, or a tuple of positional ones"
        raise InputError("data", type(batch).__name__, rule)
    return call_of(tuple(batch) if isinstance(batch, list) else batch)


def _has_batch(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0
