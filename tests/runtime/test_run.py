"""Every kind of plan computes what one process computes: losses, gradients, weights, buffers.

Models run in float64; what is left are their losses, which the library computes in float32.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from rlplace.graph.neighbours import sequence_layouts
from rlplace.graph.types import OpGraph
from rlplace.plan.orders import format_orders, parse_orders
from rlplace.plan.schedules import actions, lanes
from rlplace.plan.types import (
    GroupChoice,
    Instance,
    Mesh,
    Plan,
    Recompute,
    Stage,
    redoes_attention,
)
from rlplace.plan.uniform import make_plan
from rlplace.report.timeline_view import save_trace
from rlplace.runtime.boundary import AXES, layouts_of
from rlplace.runtime.jobs import Job
from rlplace.runtime.measure import Measurement
from rlplace.runtime.options import Options
from rlplace.runtime.pool import Pool
from rlplace.runtime.rows import rows_of
from rlplace.runtime.validate import stand_in_cluster
from tests.runtime.reference import MODELS, STEPPED_BY_SGD, expected, graph_of

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

BATCH, STEPS, TOLERANCE = 8, 2, 1e-5
RANKS, PER_ORDER = 4, 40


@dataclass(frozen=True)
class Case:
    """A plan of a model.

    Args:
        model: Key of `MODELS`.
        meshes: (dp, tp) of each stage, on devices in order.
        cp: Size of the cp axis of each, one where not given.
        layout: Of all groups that have one of this name; with ``sequence`` or ``expert-sequence``
            sequences are cut between all groups.
        chunks: Of the loss.
        slices: Of the weights of matmuls, in groups that have some which it divides.
        micro_batches, schedule, recompute: As in the plan.
        cuts: Where the stages after the first begin, as shares of the groups; even by default.
        zero: ZeRO level, or levels that the groups have by turns.
        shard: Size of the dp_shard axis, where there are so many replicas.
        rounds: How often the stages go over the meshes (virtual stages).
        owner: Mesh of each stage, where they do not go over the meshes in turn.
        orders: Action lists, a line for each mesh, of the schedule ``explicit``.
        shares: Samples of each replica of a micro-batch, of each mesh; equal by default.
        rows: Samples of each batch.
        options: What differs from the default options.
        exact: Whether the order of sums is that of one process too.
    """

    model: str
    meshes: tuple[tuple[int, int], ...]
    micro_batches: int = 1
    schedule: str = "1f1b"
    recompute: Recompute = "none"
    cuts: tuple[float, ...] = ()
    zero: int | tuple[int, ...] = 0
    shard: int = 1
    rounds: int = 1
    owner: tuple[int, ...] = ()
    orders: str = ""
    shares: tuple[tuple[int, ...], ...] = ()
    rows: int = BATCH
    options: tuple[tuple[str, float], ...] = ()
    exact: bool = False
    cp: tuple[int, ...] = ()
    layout: str = ""
    chunks: int = 1
    slices: int = 1

    @property
    def degrees(self) -> list[tuple[int, int, int]]:
        """(dp, tp, cp) of each mesh."""
        sizes = self.cp or (1,) * len(self.meshes)
        return [(dp, tp, cp) for (dp, tp), cp in zip(self.meshes, sizes, strict=True)]

    def plan(self) -> Plan:
        graph = graph_of(self.model)
        owner = self.owner or tuple(range(len(self.meshes))) * self.rounds
        count = len(owner)
        shares = self.cuts or tuple(index / count for index in range(1, count))
        bounds = [0, *(round(share * len(graph.groups)) for share in shares), len(graph.groups)]
        meshes, device = [], 0
        for dp, tp, cp in self.degrees:
            shard = min(dp, self.shard)
            devices = tuple(range(device, device + dp * tp * cp))
            meshes.append(Mesh(devices, dp // shard, shard, cp, tp))
            device += dp * tp * cp
        stages = []
        for index in range(count):
            mesh = meshes[owner[index]]
            groups = range(bounds[index], bounds[index + 1])
            layouts = [self._layout(graph, group, mesh.tp) for group in groups]
            modes = [self._mode(graph, group, groups.start) for group in groups]
            levels = (self.zero,) if isinstance(self.zero, int) else self.zero
            choices = tuple(
                self._with_slices(
                    graph, group, mesh.tp, GroupChoice(name, levels[group % len(levels)], mode)
                )
                for group, name, mode in zip(groups, layouts, modes, strict=True)
            )
            own = self.shares[owner[index]] if self.shares else ()
            stages.append(Stage(groups.start, groups.stop, mesh, choices, own))
        instance = Instance(
            graph, stand_in_cluster(4), BATCH, precision="fp32", loss_chunks=self.chunks
        )
        plan = make_plan(instance, tuple(stages), self.micro_batches, self.schedule)
        return replace(plan, orders=parse_orders(self.orders))

    def runs(self) -> tuple[tuple[int, int], ...]:
        """Rows of the batch that are run together in the last stage."""
        plan = self.plan()
        last = len(plan.stages) - 1
        every = (
            rows_of(plan, last, replica, index, self.rows)
            for index in range(self.micro_batches)
            for replica in range(plan.stages[-1].mesh.dp)
        )
        return tuple((rows.start, rows.stop) for rows in every if rows)

    def _layout(self, graph: OpGraph, group: int, tp: int) -> str:
        known = graph.structure(group).layouts_with("tp", tp)
        if self.layout in [layout.name for layout in known]:
            return self.layout
        if self.layout.endswith("sequence"):
            return sequence_layouts(graph, tp)[group].name
        return graph.structure(group).layouts_at(tp)[-1].name

    def _mode(self, graph: OpGraph, group: int, start: int) -> Recompute:
        """Of two groups each, the second is redone with the first."""
        if self.recompute == "attention":
            return "attention" if redoes_attention(graph.structure(group).work) else "none"
        if self.recompute != "joined":
            return self.recompute
        place = group - start
        return "joined" if place % 2 else "full"

    def _with_slices(self, graph: OpGraph, group: int, tp: int, choice: GroupChoice) -> GroupChoice:
        own = replace(choice, slices=self.slices)
        layouts = graph.structure(group).layouts_with("tp", tp)
        (work,) = (layout.work for layout in layouts if layout.name == choice.layout)
        can = choice.zero == 3 and any(map(own.cuts, work.weights))
        return own if can else choice

    def job(self) -> Job:
        name, args = MODELS[self.model]
        options = Options(steps=STEPS, warmup=0, collect=True, dtype="float64")
        options = replace(options, **dict(self.options))  # type: ignore[arg-type]
        optimizer = "sgd" if self.model in STEPPED_BY_SGD else None
        graph = graph_of(self.model)
        return Job(self.plan(), graph, name, args, options, optimizer, rows=self.rows)


#: One device a stage, and the stages of a V on them.
PIPE, TURN = ((1, 1), (1, 1)), (0, 1, 1, 0)
BUCKETS = (("bucket_bytes", 2000),)
CLIP = (("clip", 0.1),)
#: Between the sort of the tokens and the second matmul of the experts.
EXPERTS = (4 / 6,)
#: Some backwards have a part of their own for parameters, others have none.
MIXED = """
0F0 1F0 0F1 1F1 3F0 3B0 3F1 3B1 1B0 0B0 3W1 1B1 0B1 1W1 0W1 1W0
2F0 2F1 2B0 2B1 2W1 2W0
"""
THERE_AND_BACK = "0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1"
SHUFFLED = """
0F1 0F0 0F3 0F2 0B0 0B1 0B2 0B3
1F1 1F0 1B0 1F3 1B1 1F2 1B2 1B3
"""

CASES = {
    "single": Case("gpt", ((1, 1),), exact=True),
    "single, micro-batches": Case("gpt", ((1, 1),), 4, exact=True),
    "dp2": Case("gpt", ((2, 1),)),
    "dp2, micro-batches": Case("llama", ((2, 1),), 2),
    "dp2, many buckets": Case("gpt", ((2, 1),), 2, options=(("bucket_bytes", 2000),)),
    "dp2, no overlap": Case("gpt", ((2, 1),), 2, options=(("overlap", False),)),
    "pp2 gpipe": Case("gpt-untied", ((1, 1), (1, 1)), 4, "gpipe", exact=True),
    "pp2 1f1b": Case("gpt-untied", ((1, 1), (1, 1)), 4, exact=True),
    "pp2 tied": Case("gpt", ((1, 1), (1, 1)), 4),
    "pp2 llama": Case("llama", ((1, 1), (1, 1)), 4, exact=True),
    "pp2 uneven": Case("llama", ((1, 1), (1, 1)), 4, cuts=(0.8,), exact=True),
    "pp2 one micro-batch": Case("llama", ((1, 1), (1, 1)), 1, exact=True),
    "pp2 recompute": Case("gpt", ((1, 1), (1, 1)), 2, recompute="full"),
    "dp2 recompute": Case("llama", ((2, 1),), 2, recompute="full"),
    "resnet": Case("resnet", ((1, 1),), 2, exact=True),
    "resnet dp2": Case("resnet", ((2, 1),), 2),
    "resnet pp2": Case("resnet", ((1, 1), (1, 1)), 2, exact=True),
    "resnet pp2 recompute": Case("resnet", ((1, 1), (1, 1)), 2, recompute="full", exact=True),
    "t5 pp2": Case("t5", ((1, 1), (1, 1)), 2),
    "unet pp2": Case("unet", ((1, 1), (1, 1)), 2),
    "unet tp2": Case("unet", ((1, 2),)),
    "dlrm tp2": Case("dlrm", ((1, 2),), 2),
    "whisper pp2": Case("whisper", ((1, 1), (1, 1)), 2),
    "gcn pp2": Case("gcn", ((1, 1), (1, 1)), 2),
    "pp2 x dp2": Case("gpt", ((2, 1), (2, 1)), 2),
    "resnet pp2 x dp2": Case("resnet", ((2, 1), (2, 1)), 2),
    "tp2": Case("gpt", ((1, 2),), 2),
    "tp2 untied": Case("gpt-untied", ((1, 2),), 2),
    "tp2 llama": Case("llama", ((1, 2),), 2),
    "tp2 recompute": Case("llama", ((1, 2),), 2, recompute="full"),
    "tp2 t5": Case("t5", ((1, 2),), 2),
    "tp2 resnet": Case("resnet", ((1, 2),), 2),
    "tp2 x dp2": Case("llama", ((2, 2),), 2),
    "pp2 x tp2": Case("llama", ((1, 2), (1, 2)), 2),
    "pp2 x tp2 tied": Case("gpt", ((1, 2), (1, 2)), 2),
    "tp1 then tp2": Case("gpt", ((1, 1), (1, 2)), 2),
    "tp2 then dp2": Case("gpt", ((1, 2), (2, 1)), 2),
    "pp4": Case("gpt-untied", ((1, 1),) * 4, 8, exact=True),
    "pp4, fewer micro-batches than stages": Case("llama", ((1, 1),) * 4, 2, exact=True),
    "t5 pp4": Case("t5", ((1, 1),) * 4, 4),
    "dp1 then dp2": Case("gpt", ((1, 1), (2, 1)), 2),
    "dp2 then dp1": Case("llama", ((2, 1), (1, 1)), 2),
    "t5 dp1, dp2, dp1": Case("t5", ((1, 1), (2, 1), (1, 1)), 2),
    "zero1": Case("gpt", ((2, 1),), 2, zero=1, shard=2),
    "zero1, many buckets": Case(
        "llama", ((2, 1),), 2, zero=1, shard=2, options=(("bucket_bytes", 3000),)
    ),
    "zero1 x pp2": Case("gpt", ((2, 1), (2, 1)), 2, zero=1, shard=2),
    "zero1 x tp2": Case("llama", ((2, 2),), 2, zero=1, shard=2),
    "zero1, two replicas of the shards": Case("llama", ((4, 1),), 1, zero=1, shard=2),
    "zero2": Case("llama", ((2, 1),), 2, zero=2, shard=2),
    "zero2, no overlap": Case("gpt", ((2, 1),), 2, zero=2, shard=2, options=(("overlap", False),)),
    "zero2 x pp2": Case("gpt", ((2, 1), (2, 1)), 2, zero=2, shard=2),
    "zero3": Case("llama", ((2, 1),), 2, zero=3, shard=2),
    "zero3 tied": Case("gpt", ((2, 1),), 2, zero=3, shard=2),
    "zero3 recompute": Case("llama", ((2, 1),), 2, recompute="full", zero=3, shard=2),
    "zero3 joined": Case("llama", ((2, 1),), 2, recompute="joined", zero=3, shard=2),
    "zero3 ops": Case("llama", ((2, 1),), 2, recompute="ops", zero=3, shard=2),
    "zero3 x cp2": Case("gpt", ((1, 1),), 2, cp=(2,), zero=3),
    "zero3 resnet": Case("resnet", ((2, 1),), 2, zero=3, shard=2),
    "zero3 whisper": Case("whisper", ((2, 1),), 2, zero=3, shard=2),
    "zero0, 1, 2 and 3 by turns": Case("gpt", ((2, 1),), 2, zero=(0, 1, 2, 3), shard=2),
    "zero3 over four": Case("gpt", ((4, 1),), 2, zero=3, shard=4),
    "zero3, two replicas of the shards": Case("llama", ((4, 1),), 2, zero=3, shard=2),
    "zero2, two replicas of the shards": Case("gpt", ((4, 1),), 2, zero=2, shard=2),
    "zero3 x tp2": Case("llama", ((2, 2),), 2, zero=3, shard=2),
    "zero3 x pp2 tied": Case("gpt", ((2, 1), (2, 1)), 4, zero=3, shard=2),
    "zero3 x pp2 interleaved": Case("gpt", ((2, 1), (2, 1)), 4, zero=3, shard=2, rounds=2),
    "zero3 x pp2 recompute": Case(
        "t5", ((2, 1), (2, 1)), 2, recompute="full", zero=(3, 2), shard=2
    ),
    "zero3 dp2, then tp2, tied": Case("gpt", ((2, 1), (1, 2)), 2, zero=(3, 1), shard=2),
    "interleaved": Case("gpt-untied", ((1, 1), (1, 1)), 4, rounds=2, exact=True),
    "interleaved, tied, gpipe": Case("gpt", ((1, 1), (1, 1)), 4, "gpipe", rounds=2),
    "tp2 sequence gpt": Case("gpt", ((1, 2),), 2, layout="sequence"),
    "tp2 sequence llama": Case("llama", ((1, 2),), 2, layout="sequence"),
    "tp2 sequence bert": Case("bert", ((1, 2),), 2, layout="sequence"),
    "tp2 sequence t5": Case("t5", ((1, 2),), 2, layout="sequence"),
    "tp2 sequence mixtral": Case("mixtral", ((1, 2),), 2, layout="sequence"),
    "tp2 sequence recompute": Case("llama", ((1, 2),), 2, recompute="full", layout="sequence"),
    "tp2 sequence joined": Case("llama", ((1, 2),), 2, recompute="joined", layout="sequence"),
    "tp2 expert": Case("mixtral", ((1, 2),), 2, layout="expert"),
    "tp2 expert-sequence": Case("mixtral", ((1, 2),), 2, layout="expert-sequence"),
    "tp2 shard-through": Case("t5", ((1, 2),), 2, layout="shard-through"),
    "tp4 sequence gpt": Case("gpt", ((1, 4),), layout="sequence"),
    "tp4 sequence llama": Case("llama-wide", ((1, 4),), layout="sequence"),
    "tp4 sequence bert": Case("bert", ((1, 4),), layout="sequence"),
    "tp4 sequence t5": Case("t5", ((1, 4),), layout="sequence"),
    "tp4 expert-sequence": Case("mixtral", ((1, 4),), layout="expert-sequence"),
    "tp2 sequence x dp2": Case("llama", ((2, 2),), layout="sequence"),
    "cp2 gpt": Case("gpt", ((1, 1),), 2, cp=(2,)),
    "cp2 llama": Case("llama", ((1, 1),), 2, cp=(2,)),
    "cp2 bert": Case("bert", ((1, 1),), 2, cp=(2,)),
    "cp2 unet, which cuts few groups": Case("unet", ((1, 1),), cp=(2,)),
    "cp2 recompute": Case("llama", ((1, 1),), 2, recompute="full", cp=(2,)),
    "cp2 x dp2": Case("llama", ((2, 1),), 2, cp=(2,)),
    "cp4": Case("gpt", ((1, 1),), cp=(4,)),
    "cp2 x tp2 gpt": Case("gpt", ((1, 2),), 2, cp=(2,)),
    "cp2 x tp2 llama": Case("llama", ((1, 2),), 2, cp=(2,), zero=3, recompute="attention"),
    "cp2 x tp2 sequence gpt, joined": Case(
        "gpt", ((1, 2),), 2, recompute="joined", cp=(2,), layout="sequence"
    ),
    "cp2 x tp2 sequence llama": Case("llama-wide", ((1, 2),), 2, cp=(2,), layout="sequence"),
    "cp2 x tp2 sequence bert": Case("bert", ((1, 2),), 2, cp=(2,), layout="sequence"),
    "cp2 x tp2 sequence t5": Case("t5", ((1, 2),), 2, cp=(2,), layout="sequence"),
    "cp2 x tp2 expert-sequence": Case("mixtral", ((1, 2),), 2, cp=(2,), layout="expert-sequence"),
    "cp2 x tp2 loss in chunks, ops": Case("gpt", ((1, 2),), 2, recompute="ops", cp=(2,), chunks=2),
    "cp2 x tp2, two stages": Case(
        "llama", ((1, 2),), 2, "explicit", owner=(0, 0), orders=THERE_AND_BACK, cp=(2,), rows=5
    ),
    "ops": Case("resnet", ((1, 1),), 2, recompute="ops", exact=True),
    "tp2 ops": Case("llama", ((1, 2),), 2, recompute="ops"),
    "tp2 sequence ops": Case("gpt", ((1, 2),), 2, recompute="ops", layout="sequence"),
    "tp2 expert-sequence ops": Case(
        "mixtral", ((1, 2),), 2, recompute="ops", layout="expert-sequence"
    ),
    "cp2 ops": Case("llama", ((1, 1),), 2, recompute="ops", cp=(2,)),
    "pp2 ops": Case("gpt-untied", ((1, 1), (1, 1)), 2, recompute="ops", exact=True),
    "tp2 attention": Case("llama", ((1, 2),), 2, recompute="attention", layout="sequence"),
    "cp2 attention": Case("gpt", ((1, 1),), 2, recompute="attention", cp=(2,)),
    "loss in chunks": Case("gpt", ((1, 1),), 2, chunks=3),
    "loss in chunks, bert": Case("bert", ((1, 1),), chunks=4, recompute="full"),
    "tp2 loss in chunks": Case("llama", ((1, 2),), 2, chunks=2),
    "tp2 sequence loss in chunks": Case("gpt", ((1, 2),), 2, layout="sequence", chunks=2),
    "cp2 loss in chunks": Case("llama", ((1, 1),), 2, cp=(2,), chunks=3),
    "joined": Case("resnet", ((1, 1),), 2, recompute="joined", exact=True),
    "interleaved t5, three rounds": Case("t5", ((1, 1), (1, 1)), 2, rounds=3),
    "dp4": Case("gpt", ((4, 1),), 2, recompute="full"),
    "interleaved 1f1b": Case("gpt-untied", PIPE, 4, "interleaved", rounds=2, exact=True),
    "interleaved 1f1b, recompute": Case("llama", PIPE, 2, "interleaved", "full", rounds=2),
    "zb-h1": Case("gpt-untied", PIPE, 4, "zb-h1", exact=True),
    "zb-h1, recompute": Case("gpt-untied", PIPE, 4, "zb-h1", "full", exact=True),
    "zb-h1, ops": Case("llama", PIPE, 4, "zb-h1", "ops"),
    "zb-v, attention": Case("llama", PIPE, 4, "zb-v", "attention", owner=TURN),
    "zb-v, joined": Case("llama", PIPE, 4, "zb-v", "joined", owner=TURN),
    "zb-h1, tied": Case("gpt", PIPE, 4, "zb-h1"),
    "zb-h1, one micro-batch": Case("llama", PIPE, 1, "zb-h1", exact=True),
    "zb-h1, resnet": Case("resnet", PIPE, 4, "zb-h1", exact=True),
    "zb-h1, t5": Case("t5", PIPE, 2, "zb-h1"),
    "zb-v": Case("gpt-untied", PIPE, 4, "zb-v", owner=TURN, exact=True),
    "zb-v, recompute": Case("llama", PIPE, 4, "zb-v", "full", owner=TURN, exact=True),
    "zb-v, tied ends on one mesh": Case("gpt", PIPE, 4, "zb-v", owner=TURN),
    "zb-v, one micro-batch": Case("llama", PIPE, 1, "zb-v", owner=TURN, exact=True),
    "zb-v, resnet": Case("resnet", PIPE, 2, "zb-v", "full", owner=TURN, exact=True),
    "explicit, neighbours on one mesh": Case(
        "gpt-untied", PIPE, 2, "explicit", owner=(0, 0, 1, 0), orders=MIXED, exact=True
    ),
    "explicit, backwards in another order": Case(
        "llama", PIPE, 4, "explicit", "full", orders=SHUFFLED
    ),
    "pp4 zb-h1": Case("gpt-untied", ((1, 1),) * 4, 8, "zb-h1", exact=True),
    "pp4 zb-h1, recompute": Case("llama", ((1, 1),) * 4, 8, "zb-h1", "full", exact=True),
    "pp4 zb-h1, fewer micro-batches": Case("llama", ((1, 1),) * 4, 2, "zb-h1", exact=True),
    "pp4 zb-v": Case("t5", ((1, 1),) * 4, 8, "zb-v", owner=(0, 1, 2, 3, 3, 2, 1, 0), exact=False),
    "pp4 interleaved": Case("t5", ((1, 1),) * 4, 4, "interleaved", rounds=2),
    "zb-h1 x tp2": Case("llama", ((1, 2), (1, 2)), 4, "zb-h1"),
    "zb-v x tp2": Case("gpt", ((1, 2), (1, 2)), 4, "zb-v", "full", owner=TURN),
    "zb-h1 x dp2": Case("gpt", ((2, 1), (2, 1)), 2, "zb-h1"),
    "zb-v x zero1": Case(
        "llama", ((2, 1), (2, 1)), 2, "zb-v", owner=TURN, zero=1, shard=2, options=BUCKETS
    ),
    "zb-h1 x zero2": Case("gpt", ((2, 1), (2, 1)), 2, "zb-h1", zero=2, shard=2),
    "zb-v x zero3": Case("llama", ((2, 1), (2, 1)), 2, "zb-v", owner=TURN, zero=3, shard=2),
    "zb-h1 x zero3, recompute": Case("gpt", ((2, 1), (2, 1)), 2, "zb-h1", "full", zero=3, shard=2),
    "zb-v, sequences cut": Case(
        "llama", ((1, 2), (1, 2)), 4, "zb-v", owner=TURN, layout="sequence"
    ),
    "sequences cut, then whole": Case("llama", ((1, 2), (2, 1)), 2, layout="sequence"),
    "sequences whole, then cut": Case("t5", ((2, 1), (1, 2)), 2, layout="sequence"),
    "sequences cut over tp, then cp": Case(
        "gpt-untied", ((1, 2), (1, 1)), 2, layout="sequence", cp=(1, 2)
    ),
    "sequences cut over cp, then tp, short": Case(
        "llama", ((1, 1), (1, 2)), 2, "zb-h1", layout="sequence", cp=(2, 1), rows=5
    ),
    "pp2 x tp2 sequence, recompute": Case(
        "llama", ((1, 2), (1, 2)), 2, recompute="full", layout="sequence"
    ),
    "pp2 x tp2 expert-sequence": Case("mixtral", ((1, 2), (1, 2)), 2, layout="expert-sequence"),
    "experts cut, dp1 then dp2": Case("mixtral", ((1, 1), (2, 1)), 4, "zb-h1", cuts=EXPERTS),
    "experts cut, dp2 then tp2, short": Case(
        "mixtral", ((2, 1), (1, 2)), 2, cuts=EXPERTS, layout="sequence", rows=5
    ),
    "experts cut, cp2 then dp2": Case(
        "mixtral", ((1, 1), (2, 1)), 2, recompute="full", cuts=EXPERTS, cp=(2, 1)
    ),
    "experts in a stage between, shares": Case(
        "mixtral", ((2, 1), (1, 1), (1, 1)), 2, cuts=(3 / 6, 4 / 6), shares=((3, 1), (), ())
    ),
    "pp2 x tp2 shard-through": Case("t5", ((1, 2), (1, 2)), 2, layout="shard-through"),
    "pp2 x cp2": Case("bert", ((1, 1), (1, 1)), 2, cp=(2, 2)),
    "pp2 x cp2, tied, ops": Case("gpt", ((1, 1), (1, 1)), 2, recompute="ops", cp=(2, 2)),
    "cp2, then cp1": Case("llama", ((1, 1), (1, 1)), 2, cp=(2, 1)),
    "zb-h1, loss in chunks": Case("llama", PIPE, 4, "zb-h1", chunks=3),
    "cp2 x zero1": Case("llama", ((1, 1),), 2, cp=(2,), zero=1),
    "cp2 x zero3, ops": Case("gpt", ((1, 1),), 2, cp=(2,), zero=3, recompute="ops"),
    "cp2 x dp2 x zero2": Case("llama", ((2, 1),), 2, cp=(2,), zero=2, shard=2),
    "tp2 sequence x zero3": Case("llama", ((2, 2),), 2, zero=3, shard=2, layout="sequence"),
    "tp2 sequence x zero3, recompute": Case(
        "gpt", ((2, 2),), 2, recompute="joined", zero=3, shard=2, layout="sequence"
    ),
    "loss in chunks x zero3": Case("gpt", ((2, 1),), 2, zero=3, shard=2, chunks=2),
    "cp then dp": Case("llama", ((1, 1), (2, 1)), 4, "zb-h1", cp=(2, 1)),
    "short batch, zero2": Case("gpt", ((2, 1),), 2, zero=2, shard=2, rows=3),
    "short batch, zero3": Case("llama", ((2, 1),), 2, zero=3, shard=2, rows=3, recompute="full"),
    "short batch, zero3 x zb-h1": Case(
        "gpt", ((2, 1), (2, 1)), 2, "zb-h1", zero=3, shard=2, rows=5
    ),
    "shares, zero3": Case("llama", ((2, 1),), 2, zero=3, shard=2, shares=((3, 1),)),
    "zb-h1, dp1 then dp2": Case("gpt-untied", ((1, 1), (2, 1)), 4, "zb-h1", options=BUCKETS),
    "short batch": Case("gpt-untied", PIPE, 4, rows=5, exact=True),
    "short batch, gpipe": Case("gpt-untied", PIPE, 4, "gpipe", rows=3, exact=True),
    "short batch, one row": Case("llama", PIPE, 4, rows=1, exact=True),
    "short batch, dp2": Case("gpt", ((2, 1),), 2, rows=5),
    "short batch, one replica idle": Case("llama", ((2, 1),), 1, rows=3, options=BUCKETS),
    "short batch, zero1": Case("gpt", ((2, 1),), 2, zero=1, shard=2, rows=3),
    "short batch, zb-h1": Case("resnet", PIPE, 4, "zb-h1", rows=5, exact=True),
    "short batch, zb-v": Case("gpt-untied", PIPE, 4, "zb-v", owner=TURN, rows=7, exact=True),
    "short batch, interleaved": Case("t5", PIPE, 2, "interleaved", rounds=2, rows=3),
    "short batch, dp1 then dp2": Case("gpt", ((1, 1), (2, 1)), 2, rows=6),
    "short batch, t5 dp2 then dp1": Case("t5", ((2, 1), (1, 1)), 2, rows=5),
    "short batch, pp2 x dp2": Case("llama", ((2, 1), (2, 1)), 2, rows=3),
    "short batch, pp2 x tp2": Case("llama", ((1, 2), (1, 2)), 2, rows=3),
    "slices": Case("gpt", ((2, 1),), 2, zero=3, shard=2, slices=4),
    "slices llama": Case("llama", ((2, 1),), 2, zero=3, shard=2, slices=2, shares=((3, 1),)),
    "slices bert, no overlap": Case(
        "bert", ((2, 1),), 2, zero=3, shard=2, slices=4, options=(("overlap", False),)
    ),
    "slices mixtral": Case("mixtral", ((2, 1),), 2, zero=3, shard=2, slices=2),
    "slices x cp2": Case("gpt-untied", ((1, 1),), 2, cp=(2,), zero=3, slices=2),
    "slices, short batch": Case("llama", ((2, 1),), 2, zero=3, shard=2, slices=2, rows=3),
    "slices of some levels": Case("qwen", ((2, 1),), 2, zero=(3, 3, 2), shard=2, slices=4),
    "slices x tp2": Case("gpt", ((2, 2),), 2, zero=3, shard=2, slices=2),
    "slices x tp2 sequence": Case(
        "bert", ((2, 2),), 2, zero=3, shard=2, slices=4, layout="sequence"
    ),
    "slices x pp2": Case("llama", ((2, 1), (2, 1)), 4, zero=3, shard=2, slices=4),
    "slices x zb-h1, short batch": Case(
        "bert", ((2, 1), (2, 1)), 2, "zb-h1", zero=3, shard=2, slices=2, rows=5
    ),
    "slices x zb-v": Case(
        "gpt", ((2, 1), (2, 1)), 2, "zb-v", owner=TURN, zero=3, shard=2, slices=2
    ),
    "slices, two replicas of the shards": Case("llama", ((4, 1),), 2, zero=3, shard=2, slices=2),
    "shares": Case("gpt", ((2, 1),), 2, shares=((3, 1),)),
    "shares, zero1": Case("llama", ((2, 1),), 1, zero=1, shard=2, shares=((5, 3),)),
    "shares, short batch": Case("gpt", ((2, 1),), 2, shares=((3, 1),), rows=6),
    "shares of two stages": Case("llama", ((2, 1), (2, 1)), 1, shares=((5, 3), (3, 5))),
    "shares of the first": Case("gpt", ((2, 1), (2, 1)), 2, "zb-h1", shares=((3, 1), (2, 2))),
    "shares of the last": Case("t5", ((1, 1), (2, 1)), 1, shares=((), (5, 3))),
    "shares of three": Case("gpt", ((1, 1), (3, 1)), 1, shares=((), (5, 2, 1)), rows=7),
    "clip, pp2": Case("llama", PIPE, 2, options=CLIP),
    "clip, pp2 tied, zb-h1": Case("gpt", PIPE, 2, "zb-h1", options=CLIP),
    "clip, tp2": Case("gpt", ((1, 2),), 2, options=CLIP),
    "clip, tp2 sequence": Case("llama", ((1, 2),), layout="sequence", options=CLIP),
    "clip, tp2 expert": Case("mixtral", ((1, 2),), layout="expert", options=CLIP),
    "clip, cp2": Case("gpt", ((1, 1),), cp=(2,), options=CLIP),
    "clip, cp2 x zero3": Case("llama", ((1, 1),), 2, cp=(2,), zero=3, options=CLIP),
    "clip, frozen, pp2": Case("whisper", PIPE, 2, options=CLIP),
    "clip, frozen, zero3": Case("whisper", ((2, 1),), zero=3, shard=2, options=CLIP),
    "clip, zero 0 to 3 by turns": Case(
        "gpt", ((2, 1),), 2, zero=(0, 1, 2, 3), shard=2, options=CLIP
    ),
    "clip, tp2 then zero3, tied": Case("gpt", ((1, 2), (2, 1)), 2, zero=3, shard=2, options=CLIP),
    "clip, zero2, two replicas": Case("gpt", ((4, 1),), zero=2, shard=2, options=CLIP),
    "clip, zero3, two replicas": Case("llama", ((4, 1),), zero=3, shard=2, options=CLIP),
    "clip, zero3 x tp2": Case("llama", ((2, 2),), zero=3, shard=2, options=CLIP),
    "clip, zero1 x pp2 tied": Case("gpt", ((2, 1), (2, 1)), 2, zero=1, shard=2, options=CLIP),
}

#: With dropout: all of them draw the masks of the first.
DROPOUT = {
    "dropout": Case("gpt-dropout", ((1, 1),), 4),
    "dropout recompute": Case("gpt-dropout", ((1, 1),), 4, recompute="full"),
    "dropout joined": Case("gpt-dropout", ((1, 1),), 4, recompute="joined"),
    "dropout dp2": Case("gpt-dropout", ((2, 1),), 2),
    "dropout slices": Case("gpt-dropout", ((2, 1),), 2, zero=3, shard=2, slices=2),
    "dropout pp2": Case("gpt-dropout", ((1, 1), (1, 1)), 4),
    "dropout pp2 gpipe, recompute": Case(
        "gpt-dropout", ((1, 1), (1, 1)), 4, "gpipe", recompute="full"
    ),
    "dropout interleaved": Case("gpt-dropout", ((1, 1), (1, 1)), 4, rounds=2),
    "dropout pp2 ops": Case("gpt-dropout", ((1, 1), (1, 1)), 4, recompute="ops"),
    "dropout pp2 attention": Case("gpt-dropout", ((1, 1), (1, 1)), 4, recompute="attention"),
    "dropout zb-h1": Case("gpt-dropout", PIPE, 4, "zb-h1"),
    "dropout zb-h1, recompute": Case("gpt-dropout", PIPE, 4, "zb-h1", "full"),
    "dropout zb-v": Case("gpt-dropout", PIPE, 4, "zb-v", owner=TURN),
    "dropout pp4": Case("gpt-dropout", ((1, 1),) * 4, 4, recompute="full"),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Ranks for all cases, so that a model is exported once; those of a plan are the first ones."""
    with Pool(RANKS, timeout=30) as started:
        yield started


@pytest.fixture(scope="module")
def measured(pool: Pool) -> dict[str, Measurement]:
    """What was measured of all cases."""
    cases = {**CASES, **DROPOUT}
    jobs, found = [case.job() for case in cases.values()], list[Measurement]()
    for start in range(0, len(jobs), PER_ORDER):
        found += pool.run(jobs[start : start + PER_ORDER], limit=250)
    return dict(zip(cases, found, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, measured: dict[str, Measurement]) -> None:
    case, found = CASES[name], measured[name]
    dp = case.meshes[-1][0]
    clip = dict(case.options).get("clip")
    losses, tensors = expected(case.model, case.runs(), STEPS, clip=clip)
    plan = case.plan()
    every = zip(lanes(plan), actions(plan), strict=True)
    wanted_orders = {d: format_orders([own]) for mesh, own in every for d in mesh.devices}
    assert found.executed == tuple(wanted_orders.get(r, "") for r in range(len(found.executed)))
    assert found.losses == pytest.approx(losses, rel=TOLERANCE)
    kinds = ("gradient/", "weight/", *(["buffer/"] if dp == 1 else []))
    largest = max(float(t.abs().max()) for k, t in tensors.items() if k.startswith("gradient/"))
    checked = 0
    for key, wanted in tensors.items():
        if not key.startswith(kinds):
            continue
        checked += 1
        if case.exact:
            assert torch.equal(found.tensors[key], wanted), key
        error = float((found.tensors[key] - wanted).abs().max())
        assert error <= TOLERANCE * max(float(wanted.abs().max()), 1e-3 * largest), key
    frozen = case.model == "whisper"  # the positions of its encoder
    assert checked >= 2 * sum(key.startswith("weight/") for key in tensors) - frozen


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.rows == BATCH])
def test_the_timeline_has_every_action_of_the_plan_in_its_order(
    name: str, measured: dict[str, Measurement], tmp_path: Path
) -> None:
    plan, line = CASES[name].plan(), measured[name].timeline
    for mesh, own in zip(lanes(plan), actions(plan), strict=True):
        for device in mesh.devices:
            events = [event for event in line.events if event.device == device]
            ran = [event for event in events if event.kind in ("F", "B", "W")]
            assert [(e.kind, e.stage, e.micro_batch) for e in ran] == [
                (action.kind, action.stage, action.micro_batch) for action in own
            ]
            assert all(a.end <= b.start for a, b in pairwise(ran))
            last = [event.kind for event in events if event.start >= ran[-1].end]
            assert last[-2:] == ["reduce", "optimizer"]
    assert {event.device for event in line.events} == set(plan.devices)
    trace = json.loads(save_trace(line, tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(trace) == len(line.events)
    assert all(one["ts"] >= 0.0 and one["dur"] >= 0.0 and one["ph"] == "X" for one in trace)


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_draws_the_masks_of_one_process(
    name: str, measured: dict[str, Measurement]
) -> None:
    case, wanted, found = DROPOUT[name], measured["dropout"], measured[name]
    assert wanted.losses[0] != wanted.losses[1]
    assert found.losses == pytest.approx(wanted.losses, rel=1e-12)
    for key, tensor in wanted.tensors.items():
        if case.meshes[0][0] == 1:
            assert torch.equal(found.tensors[key], tensor), key
        elif key.startswith("gradient/"):
            torch.testing.assert_close(found.tensors[key], tensor)


#: One stage each; all that its ranks send each other is the collectives of its layouts.
COUNTED = {
    "shard": Case("gpt", ((1, 2),), 2),
    "resnet": Case("resnet", ((1, 2),), 2),
    "sequence": Case("llama", ((1, 2),), 2, layout="sequence"),
    "sequence t5": Case("t5", ((1, 2),), 2, layout="sequence"),
    "shard-through": Case("t5", ((1, 2),), 2, layout="shard-through"),
    "expert": Case("mixtral", ((1, 2),), 2, layout="expert"),
    "expert-sequence": Case("mixtral", ((1, 2),), 2, layout="expert-sequence"),
    "attention": Case("llama", ((1, 2),), 2, recompute="attention", layout="sequence"),
    "recompute": Case("llama", ((1, 2),), 2, recompute="full", layout="sequence"),
    "joined": Case("llama", ((1, 2),), 2, recompute="joined", layout="sequence"),
    "context": Case("gpt", ((1, 1),), 2, cp=(2,)),
    "context, gathered keys": Case("llama", ((1, 1),), 2, cp=(2,)),
}


@pytest.fixture(scope="module")
def counted(pool: Pool) -> dict[str, Measurement]:
    """What was measured of a step of each, in float32 as the plans say."""
    options = Options(steps=1, warmup=0)
    jobs = [replace(case.job(), options=options) for case in COUNTED.values()]
    return dict(zip(COUNTED, pool.run(jobs, limit=120), strict=True))


def layouts_send(case: Case, forwards: int) -> Counter[str]:
    """Bytes that the ranks give to each collective in a step, with so many forward passes."""
    plan, graph, found = case.plan(), graph_of(case.model), Counter[str]()
    (stage,) = plan.stages
    degree = len(stage.mesh.devices)
    layouts = (own for axis in AXES for own in layouts_of(graph, stage, axis).values())
    for layout in layouts:
        for one in layout.collectives:
            times = forwards if one.phase == "forward" else 1
            shares = degree if one.kind in ("all_gather", "all_to_all") else 1
            floats = one.floats(plan.micro_batch) * plan.micro_batches * times
            found[one.kind] += round(floats * 4 * degree / shares)
    if stage.mesh.cp > 1:
        found["all_reduce"] += 4 * graph.params * degree  # of the gradients
    return found


@pytest.mark.parametrize("name", COUNTED)
def test_ranks_send_what_their_layouts_say(name: str, counted: dict[str, Measurement]) -> None:
    case = COUNTED[name]
    sent = {kind: given for kind, given in counted[name].traffic.items() if given}
    once, twice = layouts_send(case, 1), layouts_send(case, 2)
    if case.recompute in ("none", "attention"):
        assert sent == once
        return
    # A second run ends where nothing that backward needs is left: its last sums are not sent.
    assert sent["all_gather"] == twice["all_gather"]
    assert all(once[kind] <= sent[kind] <= twice[kind] for kind in twice)
