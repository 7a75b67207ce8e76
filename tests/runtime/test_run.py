"""Every kind of plan computes what one process computes: losses, gradients, weights, buffers.

Models run in float64; what is left are their losses, which the library computes in float32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import pytest
import torch

from rlplace.graph.library import Argument, build, spec
from rlplace.graph.types import OpGraph
from rlplace.plan.types import GroupChoice, Instance, Mesh, Plan, Recompute, Stage
from rlplace.plan.uniform import make_plan
from rlplace.runtime.jobs import Job
from rlplace.runtime.launch import launch_many
from rlplace.runtime.measure import Measurement
from rlplace.runtime.model import cast
from rlplace.runtime.trainer import Options
from rlplace.runtime.validate import stand_in_cluster

pytestmark = pytest.mark.dist

BATCH, STEPS, TOLERANCE = 8, 2, 1e-5
LAYERS = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "vocab": 96, "seq_len": 12}
MODELS: dict[str, tuple[str, dict[str, Argument]]] = {
    "gpt": ("gpt", {**LAYERS}),
    "gpt-untied": ("gpt", {**LAYERS, "tie_embeddings": False}),
    "llama": ("llama", {**LAYERS, "kv_heads": 2}),
    "resnet": ("resnet", {"depths": "1,1", "widths": "16,32", "stem": 8, "image": 32}),
    "t5": ("t5", {**LAYERS, "head_dim": 8}),
    "unet": ("unet-tiny", {}),
    "dlrm": ("dlrm-tiny", {}),
    "whisper": ("whisper-tiny", {}),
    "gcn": ("gcn-tiny", {}),
}


@dataclass(frozen=True)
class Case:
    """A plan of a model.

    Args:
        model: Key of `MODELS`.
        meshes: (dp, tp) of each stage, on devices in order.
        micro_batches, schedule, recompute: As in the plan.
        cuts: Where the stages after the first begin, as shares of the groups; even by default.
        zero: ZeRO level.
        shard: Size of the dp_shard axis, where there are so many replicas.
        rounds: How often the stages go over the meshes (virtual stages).
        options: What differs from the default options.
        exact: Whether the order of sums is that of one process too.
    """

    model: str
    meshes: tuple[tuple[int, int], ...]
    micro_batches: int = 1
    schedule: str = "1f1b"
    recompute: Recompute = "none"
    cuts: tuple[float, ...] = ()
    zero: int = 0
    shard: int = 1
    rounds: int = 1
    options: tuple[tuple[str, int], ...] = ()
    exact: bool = False

    @property
    def ranks(self) -> int:
        return sum(dp * tp for dp, tp in self.meshes)

    @property
    def start(self) -> int:
        """Ranks of the launch that it is part of."""
        return 2 if self.ranks <= 2 else 4

    def plan(self) -> Plan:
        graph, count = graph_of(self.model), len(self.meshes) * self.rounds
        shares = self.cuts or tuple(index / count for index in range(1, count))
        bounds = [0, *(round(share * len(graph.groups)) for share in shares), len(graph.groups)]
        meshes, device = [], 0
        for dp, tp in self.meshes:
            shard = min(dp, self.shard)
            devices = tuple(range(device, device + dp * tp))
            meshes.append(Mesh(devices, dp // shard, shard, tp=tp))
            device += dp * tp
        stages = []
        for index in range(count):
            mesh = meshes[index % len(meshes)]
            groups = range(bounds[index], bounds[index + 1])
            layouts = [graph.structure(group).layouts_at(mesh.tp)[-1].name for group in groups]
            choices = tuple(GroupChoice(name, self.zero, self.recompute) for name in layouts)
            stages.append(Stage(groups.start, groups.stop, mesh, choices))
        instance = Instance(graph, stand_in_cluster(4), BATCH, precision="fp32")
        return make_plan(instance, tuple(stages), self.micro_batches, self.schedule)

    def job(self) -> Job:
        name, args = MODELS[self.model]
        options = Options(steps=STEPS, warmup=0, collect=True, dtype="float64")
        options = replace(options, **dict(self.options))  # type: ignore[arg-type]
        return Job(self.plan(), graph_of(self.model), name, args, options)


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
    "interleaved": Case("gpt-untied", ((1, 1), (1, 1)), 4, rounds=2, exact=True),
    "interleaved, tied, gpipe": Case("gpt", ((1, 1), (1, 1)), 4, "gpipe", rounds=2),
    "interleaved t5, three rounds": Case("t5", ((1, 1), (1, 1)), 2, rounds=3),
    "dp4": Case("gpt", ((4, 1),), 2, recompute="full"),
}


@functools.cache
def graph_of(model: str) -> OpGraph:
    name, args = MODELS[model]
    return build(name, **args)  # type: ignore[arg-type]


@functools.cache
def measured(ranks: int) -> dict[str, Measurement]:
    """All cases that need so many ranks, in one launch."""
    names = [name for name, case in CASES.items() if case.start == ranks]
    results = launch_many([CASES[name].job() for name in names], timeout=30, limit=250)
    return dict(zip(names, results, strict=True))


@functools.cache
def expected(model: str, chunks: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and gradients, weights and buffers after the steps, of one process.

    It takes the samples in as many chunks as the plan has micro-batches on replicas.
    """
    name, args = MODELS[model]
    wanted = spec(name, **args)  # type: ignore[arg-type]
    torch.manual_seed(0)
    module = wanted.make().train().to(torch.float64)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = cast(wanted.example(BATCH, step), torch.float64)
        assert isinstance(batch, dict)
        total = 0.0
        for chunk in range(chunks):
            rows = slice(chunk * BATCH // chunks, (chunk + 1) * BATCH // chunks)
            loss = module(**{key: value[rows] for key, value in batch.items()}) / chunks
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    tensors = {f"weight/{key}": value.detach() for key, value in module.named_parameters()}
    if model == "resnet":
        tensors |= {f"buffer/{key}": value for key, value in module.named_buffers()}
    for key, value in module.named_parameters():
        if value.grad is not None:
            tensors[f"gradient/{key}"] = value.grad
    return losses, tensors


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str) -> None:
    case = CASES[name]
    found = measured(case.start)[name]
    dp = case.meshes[-1][0]
    losses, tensors = expected(case.model, case.micro_batches * dp)
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
