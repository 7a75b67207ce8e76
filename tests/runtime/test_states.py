"""States on gloo ranks: mixed precision, clipping, states on the host, bytes and traffic."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch

from rlplace.cost.memory import states
from rlplace.graph.library import build, spec
from rlplace.graph.types import OpGraph
from rlplace.plan.types import GroupChoice, Instance, Mesh, Plan, Stage
from rlplace.plan.uniform import make_plan
from rlplace.runtime.jobs import Job
from rlplace.runtime.launch import launch_many
from rlplace.runtime.measure import Measurement
from rlplace.runtime.options import Options
from rlplace.runtime.validate import stand_in_cluster

pytestmark = pytest.mark.dist

ARGS = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "ffn": 64,
    "vocab": 96,
    "seq_len": 12,
    "tie_embeddings": False,
}
BATCH, STEPS, CLIP = 4, 3, 0.05


@dataclass(frozen=True)
class Case:
    """A plan of two ranks that hold states in some way, or of one.

    Args:
        zero: ZeRO level over two ranks; None is one rank.
        precision: As in the plan; ``float64`` runs fp32 in that dtype.
        clip: Whether gradients are clipped.
        offload: Whether states are on the host.
        micro_batches: As in the plan.
    """

    zero: int | None
    precision: str = "float64"
    clip: bool = False
    offload: bool = False
    micro_batches: int = 2

    def plan(self) -> Plan:
        graph, dp = graph_of(), 1 if self.zero is None else 2
        choice = GroupChoice("replicate", self.zero or 0, offload=self.offload)
        mesh = Mesh(tuple(range(dp)), 1, dp)
        stage = Stage(0, len(graph.groups), mesh, (choice,) * len(graph.groups))
        return make_plan(self.instance(), (stage,), self.micro_batches, "1f1b")

    def instance(self) -> Instance:
        precision = "fp32" if self.precision == "float64" else self.precision
        return Instance(graph_of(), stand_in_cluster(2), BATCH, precision=precision)

    def job(self) -> Job:
        options = Options(
            steps=STEPS,
            warmup=0,
            collect=True,
            dtype="float64" if self.precision == "float64" else None,
            clip=CLIP if self.clip else None,
        )
        return Job(self.plan(), graph_of(), "gpt", ARGS, options)


CASES = {
    **{f"clip, zero{zero}": Case(zero, clip=True) for zero in range(4)},
    **{f"offload, zero{zero}": Case(zero, offload=True) for zero in range(4)},
    **{
        f"{name}, zero{zero}": Case(zero, name, micro_batches=1)
        for name in ("fp32", "bf16-mixed", "bf16-mixed-fp32grad")
        for zero in range(4)
    },
    "bf16-mixed, one rank": Case(None, "bf16-mixed"),
    "bf16-mixed-fp32grad, one rank": Case(None, "bf16-mixed-fp32grad"),
    "bf16, one rank": Case(None, "bf16"),
}


@functools.cache
def graph_of() -> OpGraph:
    return build("gpt", **ARGS)  # type: ignore[arg-type]


@functools.cache
def measured() -> dict[str, Measurement]:
    results = launch_many([case.job() for case in CASES.values()], timeout=30, limit=200)
    return dict(zip(CASES, results, strict=True))


@functools.cache
def expected(
    precision: str, clip: bool, chunks: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights and gradients after the steps of one process with its own master copies."""
    wanted = spec("gpt", **ARGS)
    torch.manual_seed(0)
    plain = precision in ("float64", "fp32", "bf16")
    dtype = {"float64": torch.float64, "fp32": torch.float32}.get(precision, torch.bfloat16)
    wide = precision.endswith("fp32grad")
    module = wanted.make().train().to(dtype)
    params = list(module.parameters())
    steps = params if plain else [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer = torch.optim.AdamW(steps, lr=1e-3, fused=True)
    for step in range(STEPS):
        batch = wanted.example(BATCH, step)
        assert isinstance(batch, dict)
        sums = [torch.zeros_like(p, dtype=torch.float32 if wide else dtype) for p in params]
        for chunk in range(chunks):
            rows = slice(chunk * BATCH // chunks, (chunk + 1) * BATCH // chunks)
            loss = module(**{key: value[rows] for key, value in batch.items()})
            grads = torch.autograd.grad(loss / chunks, params)
            for total, grad in zip(sums, grads, strict=True):
                total += grad
        for own, total in zip(steps, sums, strict=True):
            own.grad = total.to(own.dtype)
        if clip:
            torch.nn.utils.clip_grad_norm_(steps, CLIP)
        optimizer.step()
        with torch.no_grad():
            for param, own in zip(params, steps, strict=True):
                param.copy_(own)
    names = [name for name, _ in module.named_parameters()]
    gradients = [own.grad for own in steps]
    return (
        dict(zip(names, (p.detach() for p in params), strict=True)),
        {n: g for n, g in zip(names, gradients, strict=True) if g is not None},
    )


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str) -> None:
    case, found = CASES[name], measured()[name].tensors
    chunks = case.micro_batches * (1 if case.zero is None else 2)
    weights, gradients = expected(case.precision, case.clip, chunks)
    tolerance = {"float64": 1e-9, "fp32": 1e-5}.get(case.precision, 0.0)
    for key, wanted in weights.items():
        error = float((found[f"weight/{key}"] - wanted).abs().max())
        assert error <= tolerance, key
    for key, wanted in gradients.items():
        gap = (found[f"gradient/{key}"].double() - wanted.double()).abs()
        rounding = 2**-8 * float(wanted.abs().max()) if "fp32grad" in name else tolerance
        assert float(gap.max()) <= rounding, key


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith(("fp32", "bf16-mixed"))])
def test_bytes_of_states_are_those_of_the_formula(name: str) -> None:
    case, use = CASES[name], measured()[name].memory[0]
    plan, instance = case.plan(), case.instance()
    (stage,) = plan.stages
    found = [
        states(instance, layout.work, choice, stage.mesh)
        for group, choice in zip(instance.graph.groups, stage.choices, strict=True)
        for layout in instance.graph.structure(group.index).layouts_at(1)
        if layout.name == "replicate"
    ]
    # Beside them: buffers, the counters of the optimizer, and the padding of flat shards.
    assert use.params == pytest.approx(sum(one.params for one in found), rel=0.03)
    assert use.gradients == pytest.approx(sum(one.gradients for one in found), rel=0.03)
    assert use.optimizer == pytest.approx(sum(one.optimizer for one in found), rel=0.03)


def test_offloaded_states_are_not_on_the_device() -> None:
    for zero in range(4):
        assert measured()[f"offload, zero{zero}"].memory[0].optimizer == 0.0


@pytest.mark.parametrize("zero", range(4))
def test_traffic_is_that_of_the_formula(zero: int) -> None:
    """`rlplace.cost.analytic` counts the same: whole tensors, of which each rank gives its part."""
    case = CASES[f"offload, zero{zero}"]
    traffic = measured()[f"offload, zero{zero}"].traffic
    graph = graph_of()
    works = [graph.structure(group.index).layouts_at(1)[0].work for group in graph.groups]
    whole = 8 * sum(work.params for work in works)
    ranks, runs = 2, case.micro_batches
    wanted = {
        0: {"all_reduce": ranks * whole},
        1: {"reduce_scatter": ranks * whole, "all_gather": whole},
        2: {"reduce_scatter": ranks * whole * runs, "all_gather": whole},
        3: {"reduce_scatter": ranks * whole * runs, "all_gather": 2 * whole * runs},
    }[zero]
    for kind in ("all_reduce", "reduce_scatter", "all_gather"):
        assert traffic.get(kind, 0) == pytest.approx(wanted.get(kind, 0), rel=0.03), kind
