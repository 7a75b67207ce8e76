"""What there is to train: a function in a user's file, or a library model with random data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from rlplace.errors import InputError
from rlplace.graph.library import build, spec
from rlplace.graph.types import TP_DEGREES, OpGraph
from rlplace.graph.user_model import capture_user_model, load_factory
from rlplace.plan.types import Plan
from rlplace.runtime.model import library_batches


@dataclass(frozen=True)
class UserTraining:
    """What `rlplace.Trainer` takes; see there.

    Args:
        make: Makes the module.
        graph: Of the module.
        example: A batch.
        data: Batches; None to take the example again and again.
        loss, optimizer, scheduler, groups: Where the file has them.
    """

    make: Callable[[], nn.Module]
    graph: OpGraph
    example: Any
    data: Iterable[Any] | None = None
    loss: Any = None
    optimizer: Any = None
    scheduler: Any = None
    groups: Any = None


def user_training(name: str, plan: Plan, seq_len: int | None = None) -> UserTraining:
    """What a user's file says.

    Args:
        name: As ``train.py:function``, or ``train.py`` for the function ``make``.
        plan: The plan.
        seq_len: Given to the function, where there is one.

    Raises:
        InputError: If the file or the function does not exist, or the function gives something
            else than `rlplace plan` takes.
    """
    graph = captured(name, plan, seq_len)
    factory = load_factory(_named(name))
    given = {} if seq_len is None else {"seq_len": seq_len}
    names = factory.__globals__ if hasattr(factory, "__globals__") else {}
    _, inputs, *more = factory(**given)
    options = more[0] if more else {}
    if options.get("batch_dim") is not None:
        rule = "the runtime cuts every input along dim 0, or not at all"
        raise InputError("batch_dim", options["batch_dim"], rule, 0)
    loss = options.get("loss")
    data = names.get("data")
    return UserTraining(
        lambda: factory(**given)[0],
        graph,
        inputs if loss is None else (inputs, options.get("targets", ())),
        data() if callable(data) else data,
        loss,
        names.get("optimizer"),
        names.get("scheduler"),
        names.get("groups"),
    )


def captured(name: str, plan: Plan, seq_len: int | None = None) -> OpGraph:
    """The graph of a user's function, as `rlplace plan` captures it; from the cache if it can."""
    degrees = tuple(sorted({*TP_DEGREES, *(stage.mesh.tp for stage in plan.stages)} - {1}))
    return capture_user_model(_named(name), seq_len=seq_len, granularity="fine", degrees=degrees)


def library_training(plan: Plan, seed: int) -> UserTraining:
    """The library model of a plan, with random data."""
    graph = library_graph(plan)
    model = spec(**plan.source)  # type: ignore[arg-type]  # a plan's source is checked there
    example = model.example(plan.global_batch, seed)
    return UserTraining(model.make, graph, example, library_batches(model, plan.global_batch, seed))


def library_graph(plan: Plan) -> OpGraph:
    """The graph of the library model of a plan.

    Raises:
        InputError: If the plan does not name one.
    """
    if not plan.source:
        rule = "the plan is for a module of your own: name the function, as train.py:make"
        raise InputError("module", "", rule)
    return build(**plan.source)  # type: ignore[arg-type]  # a plan's source is checked there


def _named(name: str) -> str:
    return name if ":" in name else f"{name}:make"
