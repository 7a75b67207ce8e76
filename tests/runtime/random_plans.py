"""Random plans of the small models: anything that `rlplace.plan.check.check` accepts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import numpy as np

from rlplace.errors import InputError
from rlplace.graph.neighbours import disagreement
from rlplace.graph.types import Layout, OpGraph
from rlplace.plan.check import check, legal_micro_batches
from rlplace.plan.degrees import usable_degrees
from rlplace.plan.orders import dependencies
from rlplace.plan.schedules import lanes
from rlplace.plan.types import Action, GroupChoice, Instance, Mesh, Plan, Stage, redoes_attention
from rlplace.plan.uniform import make_plan
from rlplace.runtime.options import Options
from rlplace.runtime.validate import stand_in_cluster
from tests.runtime.reference import COUPLED, MODELS, graph_of

#: Models of the test, tied and not, chains and others, dense and sparse.
DRAWN = ("gpt", "gpt-untied", "llama", "qwen", "bert", "t5", "mixtral", "resnet", "unet", "dlrm")
STEPS = 3
_BATCHES = (4, 6, 8, 12)
_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "explicit")
_MODES = ("none", "full", "attention", "ops", "joined")
_SLICES = (1, 2, 4, 8)
_TRIES = 500
#: Layouts that cut activations between groups.
_CUT = ("sequence", "expert-sequence", "shard-through")


@dataclass(frozen=True)
class Drawn:
    """A plan that is legal, and how it is to be run.

    Args:
        model: Key of `MODELS`.
        plan: The plan.
        options: Of the run.
    """

    model: str
    plan: Plan
    options: Options


def draw(model: str, ranks: int, rng: np.random.Generator) -> Drawn:
    """A random legal plan of a model on at most `ranks` ranks."""
    assert model in MODELS
    graph = graph_of(model)
    for _ in range(_TRIES):
        instance = Instance(
            graph,
            stand_in_cluster(ranks),
            int(rng.choice(_BATCHES)),
            precision="fp32",
            attention=str(rng.choice(("flash", "math"))),
            loss_chunks=int(rng.choice((1, 1, 1, 1, 1, 2))),
        )
        try:
            plan = _plan(instance, ranks, rng)
            with warnings.catch_warnings():  # of modes that are legal but of no use
                warnings.simplefilter("ignore")
                check(instance, plan)
        except InputError:
            continue
        unlike = {(stage.mesh.dp, stage.shares) for stage in plan.stages}
        if model in COUPLED and (len(unlike) > 1 or any(shares for _, shares in unlike)):
            continue  # stages would take statistics of other samples than one process
        options = Options(
            steps=STEPS,
            warmup=0,
            collect=True,
            dtype="float32" if rng.random() < 0.2 else "float64",
            overlap=bool(rng.random() < 0.8),
            bucket_bytes=int(rng.choice((2_000, 20_000, 25_000_000))),
        )
        return Drawn(model, plan, options)
    raise AssertionError(f"no legal plan of {model} on {ranks} ranks in {_TRIES} tries")


def _plan(instance: Instance, ranks: int, rng: np.random.Generator) -> Plan:
    groups = len(instance.graph.groups)
    schedule = str(rng.choice(_SCHEDULES))
    count = int(rng.choice(legal_micro_batches(instance.global_batch, 1)))
    lanes_of = np.arange(1 if schedule != "zb-h1" else 2, ranks + 1)
    # Fewer lanes leave more devices to each: meshes of several are what is rare otherwise.
    pp = int(rng.choice(lanes_of, p=(1 / lanes_of) / (1 / lanes_of).sum()))
    owner = _owner(schedule, pp, rng)
    if len(owner) > groups:
        raise InputError("stages", len(owner), "more than groups")
    meshes = _meshes(instance, ranks, 1 + max(owner), instance.global_batch // count, rng)
    cuts = np.sort(rng.choice(np.arange(1, groups), len(owner) - 1, replace=False))
    bounds = [0, *(int(cut) for cut in cuts), groups]
    style = _Style.draw(rng)
    stages = []
    for index, lane in enumerate(owner):
        span = range(bounds[index], bounds[index + 1])
        choices = _choices(instance.graph, span, meshes[lane], style, rng)
        shares = _shares(instance.global_batch // count, meshes[lane].dp, rng)
        stages.append(Stage(span.start, span.stop, meshes[lane], choices, shares))
    orders = explicit(owner, count, rng) if schedule == "explicit" else ()
    named = "1f1b" if schedule == "explicit" else schedule
    plan = make_plan(instance, tuple(stages), count, named)
    return replace(plan, schedule=schedule, orders=orders)


def _owner(schedule: str, pp: int, rng: np.random.Generator) -> tuple[int, ...]:
    """The lane of each stage."""
    if schedule == "zb-v":
        return (*range(pp), *reversed(range(pp)))
    if schedule == "zb-h1":
        return tuple(range(pp))
    if schedule == "explicit":
        more = rng.integers(0, pp, int(rng.integers(0, 3)))
        lane_of = rng.permutation([*range(pp), *more])
        number: dict[int, int] = {}
        return tuple(number.setdefault(int(lane), len(number)) for lane in lane_of)
    rounds = int(rng.choice((1, 2, 3))) if pp > 1 else 1
    return tuple(range(pp)) * rounds


def _meshes(
    instance: Instance, ranks: int, count: int, micro_batch: int, rng: np.random.Generator
) -> list[Mesh]:
    """Disjoint meshes of random devices in random order; some ranks may be idle."""
    devices = [int(device) for device in rng.permutation(ranks)]
    used = ranks if rng.random() < 0.7 else int(rng.integers(count, ranks + 1))
    cuts = np.sort(rng.choice(np.arange(1, used), count - 1, replace=False))
    bounds = [0, *(int(cut) for cut in cuts), used]
    found = []
    for start, stop in pairwise(bounds):
        shapes = [
            shape
            for shape in _shapes(stop - start)
            if micro_batch >= shape[0] * shape[1] and shape[3] in usable_degrees(instance.graph)
        ]
        if not shapes:
            raise InputError("mesh", stop - start, "no shape")
        replicate, shard, cp, tp = shapes[int(rng.integers(len(shapes)))]
        found.append(Mesh(tuple(devices[start:stop]), replicate, shard, cp, tp))
    return found


def _shares(samples: int, dp: int, rng: np.random.Generator) -> tuple[int, ...]:
    """Random shares of a micro-batch, or none, which is equal ones."""
    if dp == 1 or (samples % dp == 0 and rng.random() < 0.6):
        return ()
    cuts = np.sort(rng.choice(np.arange(1, samples), dp - 1, replace=False))
    return tuple(int(share) for share in np.diff([0, *cuts, samples]))


def _shapes(size: int) -> list[tuple[int, int, int, int]]:
    """All degrees (dp_replicate, dp_shard, cp, tp) whose product is `size`."""
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    shapes = ((a, b, c, d) for a in divisors for b in divisors for c in divisors for d in divisors)
    return [shape for shape in shapes if prod(shape) == size]


@dataclass(frozen=True)
class _Style:
    """How the choices of a plan's groups are drawn.

    Args:
        zeros: Levels to choose from.
        modes: Recompute modes to choose from.
        cut: Chance that a group takes a layout that cuts activations, where there is one.
        offload: Chance that a group is offloaded.
    """

    zeros: tuple[int, ...]
    modes: tuple[str, ...]
    cut: float
    offload: float

    @staticmethod
    def draw(rng: np.random.Generator) -> _Style:
        zeros = tuple(int(level) for level in rng.integers(0, 4, int(rng.integers(1, 4))))
        modes = tuple(str(mode) for mode in rng.choice(_MODES, int(rng.integers(1, 3))))
        cut, offload = float(rng.choice((0.0, 0.5, 1.0))), float(rng.choice((0.0, 0.0, 0.3)))
        return _Style(zeros, modes, cut, offload)


def _choices(
    graph: OpGraph,
    span: range,
    mesh: Mesh,
    style: _Style,
    rng: np.random.Generator,
) -> tuple[GroupChoice, ...]:
    """A choice for each group; a mode that it cannot have becomes ``none``."""
    names = _layouts(graph, span, mesh.tp, style.cut, rng)
    found: list[GroupChoice] = []
    for group, name in zip(span, names, strict=True):
        mode = str(rng.choice(style.modes))
        if mode == "joined" and not (found and found[-1].recompute in ("full", "joined")):
            mode = "full"
        if mode == "attention" and not redoes_attention(graph.structure(group).work):
            mode = "none"
        zero = int(rng.choice(style.zeros))
        offload = bool(rng.random() < style.offload)
        choice = GroupChoice(name, zero, mode, offload)  # type: ignore[arg-type]  # one of _MODES
        found.append(_sliced(graph, group, mesh, choice, rng))
    return tuple(found)


def _sliced(
    graph: OpGraph, group: int, mesh: Mesh, choice: GroupChoice, rng: np.random.Generator
) -> GroupChoice:
    """The choice with a random number of slices, where weights can be cut."""
    if choice.zero != 3 or choice.recompute != "none" or mesh.shards == 1:
        return choice
    own = replace(choice, slices=int(rng.choice(_SLICES)))
    layouts = graph.structure(group).layouts_with("tp", mesh.tp)
    (work,) = (layout.work for layout in layouts if layout.name == choice.layout)
    return own if any(map(own.cuts, work.weights)) else choice


def _layouts(
    graph: OpGraph, span: range, tp: int, cut: float, rng: np.random.Generator
) -> list[str]:
    """Random layouts, group after group, each read as it is handed on."""
    found: dict[int, Layout] = {}
    for group in span:
        offered = list(graph.structure(group).layouts_with("tp", tp))
        order = [offered[int(i)] for i in rng.permutation(len(offered))]
        if rng.random() < cut:
            order.sort(key=lambda layout: not (layout.reads or layout.writes))
        for layout in order:
            found[group] = layout
            if disagreement(graph, found) is None:
                break
        else:
            raise InputError("layout", group, "none fits")
    return [found[group].name for group in span]


def explicit(
    owner: Sequence[int], micro_batches: int, rng: np.random.Generator
) -> tuple[tuple[Action, ...], ...]:
    """Random action lists that can be run: any order in which no action is before what it needs."""
    stages = len(owner)
    split = rng.random() < 0.5
    left = [
        Action(stage, kind, index)
        for stage in range(stages)
        for index in range(micro_batches)
        for kind in (("F", "B", "W") if split and rng.random() < 0.7 else ("F", "B"))
    ]
    orders: list[list[Action]] = [[] for _ in range(1 + max(owner))]
    done: set[Action] = set()
    while left:
        ready = [a for a in left if all(need in done for need in dependencies(a, stages))]
        action = ready[int(rng.integers(len(ready)))]
        left.remove(action)
        done.add(action)
        orders[owner[action.stage]].append(action)
    return tuple(map(tuple, orders))


def features(drawn: Drawn) -> set[str]:
    """What a plan makes use of, in words that a summary counts."""
    plan = drawn.plan
    meshes = lanes(plan)
    choices = [choice for stage in plan.stages for choice in stage.choices]
    found = {f"model {drawn.model}", f"schedule {plan.schedule}", f"dtype {drawn.options.dtype}"}
    found |= {f"recompute {choice.recompute}" for choice in choices}
    for stage in plan.stages:
        if stage.mesh.tp > 1:
            found |= {f"layout {choice.layout}" for choice in stage.choices}
        if stage.mesh.shards > 1:
            found |= {f"zero {choice.zero}" for choice in stage.choices}
            if any(choice.offload for choice in stage.choices):
                found.add("offload of shards")
            found |= {f"slices {c.slices}" for c in stage.choices if c.slices > 1}
    wide = max(mesh.dp for mesh in meshes)
    facts = {
        "offload": any(choice.offload for choice in choices),
        "levels mixed on a mesh": any(
            len({choice.zero for choice in stage.choices}) > 1 and stage.mesh.shards > 1
            for stage in plan.stages
        ),
        "dp_replicate x dp_shard": any(m.dp_replicate > 1 and m.dp_shard > 1 for m in meshes),
        "cp": any(mesh.cp > 1 for mesh in meshes),
        "cp beside tp": any(min(mesh.cp, mesh.tp) > 1 for mesh in meshes),
        "tp": any(mesh.tp > 1 for mesh in meshes),
        "dp": wide > 1,
        "three replicas": any(mesh.dp == 3 for mesh in meshes),
        "pp": len(meshes) > 1,
        "several stages on a mesh": len(plan.stages) > len(meshes),
        "meshes of different shape": len({(m.dp, m.cp, m.tp) for m in meshes}) > 1,
        "devices out of order": any(mesh.devices != tuple(sorted(mesh.devices)) for mesh in meshes),
        "split backward": any(a.kind == "W" for lane in plan.orders for a in lane),
        "loss chunks": plan.loss_chunks > 1,
        "math attention": plan.attention == "math",
        "shares": any(stage.shares for stage in plan.stages),
        "cut activations between stages": len(meshes) > 1
        and any(
            stage.mesh.cp > 1 or any(choice.layout in _CUT for choice in stage.choices)
            for stage in plan.stages
        ),
        "micro-batches": plan.micro_batches > 1,
    }
    return found | {name for name, present in facts.items() if present}


def exact(drawn: Drawn) -> bool:
    """Whether even the order of all sums is that of one process: pipelines of single devices.

    Tied parameters, and tensors that several groups read, add gradients in the order in which
    they come.
    """
    plan = drawn.plan
    single = all(len(stage.mesh.devices) == 1 for stage in plan.stages)
    chain = drawn.model in ("gpt-untied", "llama", "resnet")
    in_order = all(
        [a.micro_batch for a in lane if (a.stage, a.kind) == (stage, kind)]
        == sorted(a.micro_batch for a in lane if (a.stage, a.kind) == (stage, kind))
        for lane in plan.orders
        for stage in range(len(plan.stages))
        for kind in "BW"
    )
    double = drawn.options.dtype == "float64"
    return single and chain and in_order and double and plan.loss_chunks == 1
