"""Plans whose bytes are counted: before they run, and while they do."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from rlplace.graph.program import Program
from rlplace.graph.types import OpGraph
from rlplace.plan.types import GroupChoice, Instance, Mesh, Recompute, Stage, redoes_attention
from rlplace.plan.uniform import make_plan
from rlplace.runtime.jobs import Job
from rlplace.runtime.options import Options
from rlplace.runtime.validate import stand_in_cluster
from rlplace.runtime.worker import export_all
from tests.runtime.reference import MODELS, graph_of

BATCH, MICRO_BATCHES = 8, 2


@dataclass(frozen=True)
class Case:
    """A plan of a model.

    Args:
        model: Key of `MODELS`.
        degrees: (dp_replicate, dp_shard, cp, tp) of the mesh of each stage.
        layouts: Of each stage, or of all; groups that do not have it are sharded if they can be.
        zero: ZeRO level.
        recompute: Of all groups; with ``joined`` the first of a stage is ``full``.
        shares: Samples of each replica of a micro-batch, of each stage; equal by default.
        rounds: How often the stages go over the meshes.
        slices: Of the weights of groups that can have so many.
    """

    model: str
    degrees: tuple[tuple[int, int, int, int], ...]
    layouts: tuple[str, ...] = ("replicate",)
    zero: int = 0
    recompute: Recompute = "none"
    shares: tuple[tuple[int, ...], ...] = ()
    rounds: int = 1
    slices: int = 1

    def stages(self) -> tuple[Stage, ...]:
        graph = graph_of(self.model)
        count = len(self.degrees) * self.rounds
        bounds = [index * len(graph.groups) // count for index in range(count + 1)]
        meshes, device = [], 0
        for degrees in self.degrees:
            size = degrees[0] * degrees[1] * degrees[2] * degrees[3]
            meshes.append(Mesh(tuple(range(device, device + size)), *degrees))
            device += size
        found = []
        for index in range(count):
            span = range(bounds[index], bounds[index + 1])
            mesh = meshes[index % len(meshes)]
            choices = tuple(
                self._choice(graph, group, group == span.start, index, mesh.tp) for group in span
            )
            shares = self.shares[index] if self.shares else ()
            found.append(Stage(span.start, span.stop, mesh, choices, shares))
        return tuple(found)

    def _choice(
        self, graph: OpGraph, group: int, first: bool, stage: int, degree: int
    ) -> GroupChoice:
        legal = {own.name: own for own in graph.structure(group).layouts_with("tp", degree)}
        layout = self.layouts[stage % len(self.layouts)]
        chosen = layout if layout in legal else "shard" if "shard" in legal else "replicate"
        mode = self.recompute
        if mode == "joined" and first:
            mode = "full"
        if mode == "attention" and not redoes_attention(graph.structure(group).work):
            mode = "none"
        work = legal[chosen].work
        (slices, *_) = question(self.model).slice_options(work, self.zero, mode, (self.slices,))
        return GroupChoice(chosen, self.zero, mode, slices=slices)


ONE, DP, SHARDED, CP, TP = (1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)
SEQUENCE, SHARD = ("sequence",), ("shard",)
CASES = {
    "shard": Case("gpt", (TP,), SHARD),
    "sequence": Case("llama", (TP,), SEQUENCE),
    "shard, redone": Case("llama", (TP,), SHARD, recompute="full"),
    "shard, ops": Case("llama", (TP,), SHARD, recompute="ops"),
    "shard, attention": Case("gpt", (TP,), SHARD, recompute="attention"),
    "shard, joined": Case("gpt", (TP,), SHARD, recompute="joined"),
    "sequence, redone": Case("llama", (TP,), SEQUENCE, recompute="full"),
    "sequence, joined": Case("llama", (TP,), SEQUENCE, recompute="joined"),
    "sequence, redone, pp": Case("llama", (TP, TP), SEQUENCE, recompute="full"),
    "shard, ops, pp": Case("gpt-untied", (TP, TP), SHARD, recompute="ops"),
    "context": Case("gpt-untied", (CP,)),
    "context, redone": Case("gpt-untied", (CP,), recompute="full"),
    "context x shard": Case("gpt-untied", ((1, 1, 2, 2),), SHARD),
    "context x sequence": Case("llama", ((1, 1, 2, 2),), SEQUENCE),
    "expert": Case("mixtral", (TP,), ("expert",)),
    "expert, redone": Case("mixtral", (TP,), ("expert",), recompute="full"),
    "zero0": Case("gpt-untied", (SHARDED,)),
    "zero0, tied": Case("gpt", (SHARDED,)),
    "zero1": Case("gpt-untied", (SHARDED,), zero=1),
    "zero2": Case("gpt-untied", (SHARDED,), zero=2),
    "zero3": Case("gpt-untied", (SHARDED,), zero=3, recompute="full"),
    "zero3, slices": Case("gpt-untied", (SHARDED,), zero=3, slices=4),
    "zero3, slices x tp": Case("llama", ((1, 2, 1, 2),), SHARD, zero=3, slices=2),
    "zero2, replicas of shards": Case("llama", ((2, 2, 1, 1),), zero=2),
    "zero1 x tp": Case("llama", ((1, 2, 1, 2),), SHARD, zero=1),
    "pp": Case("llama", (ONE, ONE)),
    "pp, tied": Case("gpt", (ONE, ONE)),
    "pp x dp, tied, zero1": Case("gpt", (SHARDED, SHARDED), zero=1),
    "dp1 then dp2": Case("gpt-untied", (ONE, SHARDED)),
    "tp1 then tp2": Case("gpt-untied", (ONE, TP), SHARD),
    "cut over tp": Case("llama", (TP, TP), SEQUENCE),
    "cut, then whole": Case("llama", (TP, ONE), SEQUENCE),
    "whole, then cut": Case("gpt-untied", (ONE, TP), SEQUENCE),
    "cut, then two replicas": Case("llama", (TP, DP), SEQUENCE),
    "shard, then sequence": Case("llama", (TP, TP), ("shard", "sequence")),
    "cut over cp": Case("gpt-untied", (CP, CP)),
    "cut over cp, then tp": Case("llama", (CP, TP), SEQUENCE),
    "cut, relayed": Case("t5", (TP, TP), SEQUENCE, rounds=2),
    "relayed": Case("t5", (ONE, ONE, ONE)),
    "skips, relayed by replicas": Case("unet", (ONE, DP, ONE)),
    "shares": Case("gpt-untied", (DP,), shares=((3, 1),)),
    "shares, zero3": Case("llama", (SHARDED,), zero=3, shares=((3, 1),)),
    "shares x tp": Case("llama", ((2, 1, 1, 2),), SEQUENCE, shares=((1, 3),), recompute="full"),
    "shares of two stages": Case("llama", (DP, DP), shares=((3, 1), (1, 3))),
    "shares, cut": Case("llama", (DP, TP), SEQUENCE, shares=((3, 1), ())),
}


def question(model: str) -> Instance:
    """What is asked of a model."""
    return Instance(graph_of(model), stand_in_cluster(4), BATCH, precision="fp32")


def job(name: str) -> tuple[Instance, Job]:
    """The question, and a step of the plan as a job."""
    case = CASES[name]
    graph, instance = graph_of(case.model), question(case.model)
    schedule = "interleaved" if case.rounds > 1 else "1f1b"
    plan = make_plan(instance, case.stages(), MICRO_BATCHES, schedule)
    if case.recompute == "attention":
        instance = replace(instance, attention="math")
        plan = replace(plan, attention="math")
    options = Options(steps=1, warmup=0)
    return instance, Job(plan, graph, *MODELS[case.model], options)


@functools.cache
def program_of(model: str) -> Program:
    """The exported model that the jobs of a model run."""
    (name,) = [name for name, case in CASES.items() if case.model == model][:1]
    (program,) = export_all([job(name)[1]]).values()
    return program
