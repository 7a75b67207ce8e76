"""What ranks send is what the estimate counts, by kind, to the byte."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from rlplace.plan.types import GroupChoice, Instance, Mesh, Stage
from rlplace.plan.uniform import make_plan
from rlplace.runtime.jobs import Job
from rlplace.runtime.measure import Measurement
from rlplace.runtime.options import Options
from rlplace.runtime.pool import Pool
from rlplace.runtime.validate import stand_in_cluster
from rlplace.simulate.traffic import traffic
from tests.runtime.reference import MODELS, graph_of

pytestmark = pytest.mark.dist

#: Model, meshes (devices, dp_replicate, dp_shard, cp, tp), layout, ZeRO level, recompute, slices.
CASES: dict[str, tuple[Any, ...]] = {
    "shard": ("gpt", [(2, 1, 1, 1, 2)], "shard", 0, "none"),
    "sequence": ("llama", [(2, 1, 1, 1, 2)], "sequence", 0, "none"),
    "shard, redone": ("llama", [(2, 1, 1, 1, 2)], "shard", 0, "full"),
    "sequence, redone": ("llama", [(2, 1, 1, 1, 2)], "sequence", 0, "full"),
    "sequence, joined": ("llama", [(2, 1, 1, 1, 2)], "sequence", 0, "joined"),
    "context": ("gpt-untied", [(2, 1, 1, 2, 1)], "replicate", 0, "none"),
    "context x shard": ("gpt-untied", [(4, 1, 1, 2, 2)], "shard", 0, "none"),
    "context x sequence": ("llama", [(4, 1, 1, 2, 2)], "sequence", 0, "none"),
    "expert": ("mixtral", [(2, 1, 1, 1, 2)], "expert", 0, "none"),
    "zero0": ("gpt-untied", [(2, 1, 2, 1, 1)], "replicate", 0, "none"),
    "zero0, tied": ("gpt", [(2, 1, 2, 1, 1)], "replicate", 0, "none"),
    "zero1": ("gpt-untied", [(2, 1, 2, 1, 1)], "replicate", 1, "none"),
    "zero2": ("gpt-untied", [(2, 1, 2, 1, 1)], "replicate", 2, "none"),
    "zero3": ("gpt-untied", [(2, 1, 2, 1, 1)], "replicate", 3, "full"),
    "zero3, slices": ("gpt-untied", [(2, 1, 2, 1, 1)], "replicate", 3, "none", 4),
    "zero3, slices x tp": ("llama", [(4, 1, 2, 1, 2)], "shard", 3, "none", 2),
    "zero2, replicas of shards": ("llama", [(4, 2, 2, 1, 1)], "replicate", 2, "none"),
    "zero1 x tp": ("llama", [(4, 1, 2, 1, 2)], "shard", 1, "none"),
    "pp": ("llama", [(1, 1, 1, 1, 1)] * 2, "replicate", 0, "none"),
    "pp, tied": ("gpt", [(1, 1, 1, 1, 1)] * 2, "replicate", 0, "none"),
    "pp x dp, tied, zero1": ("gpt", [(2, 1, 2, 1, 1)] * 2, "replicate", 1, "none"),
    "dp1 then dp2": ("gpt-untied", [(1, 1, 1, 1, 1), (2, 1, 2, 1, 1)], "replicate", 0, "none"),
    "tp1 then tp2": ("gpt-untied", [(1, 1, 1, 1, 1), (2, 1, 1, 1, 2)], "shard", 0, "none"),
}
BATCH, MICRO_BATCHES = 8, 2


def job(name: str) -> tuple[Instance, Job]:
    model, shapes, layout, zero, recompute, *slices = CASES[name]
    graph = graph_of(model)
    instance = Instance(graph, stand_in_cluster(4), BATCH, precision="fp32")
    stages, device = [], 0
    for index, (size, *degrees) in enumerate(shapes):
        mesh = Mesh(tuple(range(device, device + size)), *degrees)
        device += size
        span = range(
            index * len(graph.groups) // len(shapes), (index + 1) * len(graph.groups) // len(shapes)
        )
        choices = []
        for group in span:
            layouts = graph.structure(group).layouts_with("tp", mesh.tp)
            names = [own.name for own in layouts]
            first = group == span.start or recompute != "joined"
            mode = "full" if first and recompute == "joined" else recompute
            chosen = layout if layout in names else "shard" if "shard" in names else "replicate"
            own = next(found for found in layouts if found.name == chosen)
            able = instance.slice_options(own.work, zero, mode, tuple(slices))
            choices.append(GroupChoice(chosen, zero, mode, slices=able[0]))  # type: ignore[arg-type]  # of a table
        stages.append(Stage(span.start, span.stop, mesh, tuple(choices)))
    plan = make_plan(instance, tuple(stages), MICRO_BATCHES, "1f1b")
    options = Options(steps=1, warmup=0)
    return instance, Job(plan, graph, *MODELS[model], options)


@functools.cache
def measured() -> dict[str, Measurement]:
    with Pool(4, timeout=30) as pool:
        return dict(zip(CASES, pool.run([job(name)[1] for name in CASES], limit=280), strict=True))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", CASES)
def test_ranks_send_what_the_estimate_counts(name: str) -> None:
    instance, own = job(name)
    sent = {kind: size for kind, size in measured()[name].traffic.items() if size}
    counted = traffic(instance, own.plan)
    assert sent.keys() == counted.keys()
    # Of the loss: sums of two numbers, which each rank of tp sends.
    padding = 0.001 if CASES[name][3] or " x " in name else 0.0
    for kind, size in counted.items():
        assert sent[kind] == pytest.approx(size, rel=padding, abs=0.5), kind
