"""The module that every rank makes before the plan cuts it, and the batches that it eats."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rlplace.errors import InputError
from rlplace.graph.program import Program, export_program
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Plan

#: A call of the module: keyword tensors, or a tuple of positional ones.
Batch = Mapping[str, Any] | tuple[Any, ...]


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

    Raises:
        InputError: If the batch does not have the model's inputs, or another size.
    """
    args, kwargs = call_of(batch)
    try:
        flat = program.unflatten(args, kwargs)
    except ValueError as error:
        raise InputError("data", sorted(kwargs) or len(args), str(error)) from error
    values = dict(zip(program.inputs, flat, strict=True))
    for name in sorted(batched_inputs(program)):
        if values[name].shape[0] != samples:
            rule = f"input {name} must have the plan's global batch"
            raise InputError("data", values[name].shape[0], rule, samples)
    return values


def load_model(
    plan: Plan,
    model_fn: Callable[[], nn.Module],
    example: Batch,
    *,
    dtype: torch.dtype,
    seed: int,
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
        graph: The plan's graph, if it is at hand.
        program: The exported module, if it is at hand.
    """
    torch.manual_seed(seed)
    module = model_fn().train().to(dtype)
    args, kwargs = call_of(example)
    if graph is None:
        from rlplace.graph.capture import capture

        graph = capture(module, args, kwargs, name=plan.graph_name, source=plan.source)
    return Model(module, program or export_program(module, args, kwargs), graph)


def batches(data: Iterable[Batch] | None, example: Batch, samples: int) -> Iterator[Batch]:
    """The batches of a run: the user's own, or the example again and again."""
    if data is not None:
        return iter(data)
    return itertools.repeat(repeated(example, samples))


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


def call_of(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a batch."""
    return (batch, {}) if isinstance(batch, tuple) else ((), dict(batch))


def _has_batch(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0
