"""Checkpoints handed from plan to plan without a step between: what is restored is what was saved.

Once with fp32 masters of bf16 weights, groups of settings and a scheduler that cycles rates and
momenta; once with frozen parameters and states on the host.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlplace.graph.library import spec
from rlplace.runtime import manifest
from rlplace.runtime.restore import read_items

pytestmark = pytest.mark.dist

SCRIPT = """
import json
import sys

import torch

from rlplace.graph.capture import capture
from rlplace.graph.program import export_program
from rlplace.plan.types import Instance
from rlplace.plan.uniform import uniform_plan
from rlplace.runtime.precision import PRECISIONS
from rlplace.runtime.trainer import Trainer
from rlplace.runtime.validate import stand_in_cluster
from rlplace.runtime.weight_slices import WeightSlice
from rlplace.runtime.world import join
from tests.runtime.test_restore import BATCH, FAMILIES, PLANS, batch, cycle, make, settings

folder = sys.argv[1]
world = join("cpu", 60)
world.owned = False
found = {}


def noted(trainer):
    # What the optimizer of this rank does with each parameter.
    assembly = trainer.assembly
    if assembly.optimizer is None:
        return {}
    names = {id(param): WeightSlice.of(key).name for key, param in assembly.params().items()}
    groups = {id(p): group for group in assembly.optimizer.param_groups for p in group["params"]}
    runs = {names[id(run.param)]: groups[id(run.stepped)] for run in assembly.reducer.runs}
    return {
        name: [group["lr"], list(group["betas"]), group["weight_decay"], group["eps"]]
        for name, group in runs.items()
    }


for family, (precision, frozen, more) in FAMILIES.items():
    graph = capture(make(frozen), (), batch(0))
    program = export_program(make(frozen).to(PRECISIONS[precision].weight), (), batch(0))

    def make_own(frozen=frozen):
        return make(frozen)

    def trainer(name):
        ranks, degrees = PLANS[name]
        instance = Instance(graph, stand_in_cluster(ranks), BATCH, precision=precision)
        plan = uniform_plan(instance, **degrees)
        more["example"] = batch(0)
        return Trainer(plan, make_own, graph=graph, program=program, world=world, **more)

    def losses(made, start, stop):
        return [made.step(batch(index)).loss for index in range(start, stop)]

    def note(name, made):
        found[f"{family}, {name}, steps"] = losses(made, 2, 4)

    with trainer("pp2") as whole:
        losses(whole, 0, 2)
        last = whole.save(f"{folder}/{family}/first")
        found[f"{family}, settings"] = noted(whole)
        found[f"{family}, whole"] = losses(whole, 2, 4)
    for name in (*PLANS, "pp2"):
        with trainer(name) as made:
            made.load(last)
            found[f"{family}, {name}, settings"] = noted(made)
            last = made.save(f"{folder}/{family}/{name}")
            note(name, made)
with open(f"{folder}/{world.rank}.json", "w") as stream:
    json.dump(found, stream)
"""

ARGS = {"layers": 2, "hidden": 16, "heads": 2, "ffn": 32, "vocab": 32, "seq_len": 8}
BATCH = 4
#: Ranks and degrees.
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {"pp": 2, "micro_batches": 2}),
    "tp2": (2, {"tp": 2, "micro_batches": 2}),
    "dp2, ZeRO-3, offload": (2, {"dp_shard": 2, "zero": 3, "offload": True}),
    "dp2, slices": (2, {"dp_shard": 2, "zero": 3, "slices": 4}),
    "dp2, ZeRO-1": (2, {"dp_shard": 2, "zero": 1}),
    "single": (1, {"micro_batches": 2}),
}


def make(frozen: bool) -> nn.Module:
    """A tiny GPT with tied embeddings; the first layer may be frozen."""
    module: nn.Module = spec("gpt", **ARGS).make().train()
    for name, param in module.named_parameters():
        param.requires_grad_(not frozen or ".0." not in name)
    return module


def batch(index: int) -> dict[str, torch.Tensor]:
    """Batch of an index."""
    made = spec("gpt", **ARGS).example(BATCH, index)
    assert isinstance(made, dict)
    return made


def settings(name: str, param: nn.Parameter) -> dict[str, float]:
    """Vectors do not decay and are more cautious."""
    return {"weight_decay": 0.0, "eps": 1e-6} if param.ndim == 1 else {"weight_decay": 0.1}


def cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Changes rates and momenta at every step."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=10)


#: Precision, whether a layer is frozen, and what else the trainer is given.
FAMILIES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "bf16": ("bf16-mixed", False, {"groups": settings, "scheduler": cycle, "clip": 1.0}),
    "frozen": ("fp32", True, {}),
}
#: Relative, of losses under another plan: of bf16's rounding, and of fp32's.
CLOSE = {"bf16": 2e-2, "frozen": 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks of the script have left what they found."""
    made = tmp_path_factory.mktemp("restore")
    script = made / "train.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n{SCRIPT}"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(script), str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return made


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    """What each rank noted."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_every_plan_restores_and_saves_is_what_was_saved_first(
    folder: Path, family: str
) -> None:
    items = {
        path.name: dict(read_items(good))
        for path in (folder / family).iterdir()
        if (good := manifest.latest_good(path)) is not None
    }
    assert items.keys() == {"first", *PLANS}
    first = items.pop("first")
    kinds = {name.partition("/")[0] for name in first}
    assert kinds >= {"weight", "exp_avg", "exp_avg_sq", "step"}
    assert {one.dtype for name, one in first.items() if name.startswith("weight/")} == {
        torch.float32
    }
    for name, own in items.items():
        assert own.keys() == first.keys(), name
        for item, tensor in own.items():
            assert torch.equal(tensor, first[item]), (name, item)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_keeps_its_settings(found: list[dict[str, Any]], family: str) -> None:
    wanted = {name: own for rank in found for name, own in rank[f"{family}, settings"].items()}
    assert len({str(own) for own in wanted.values()}) == (2 if family == "bf16" else 1)
    for plan in PLANS:
        got = [own for rank in found for own in rank[f"{family}, {plan}, settings"].items()]
        assert {name for name, _ in got} == wanted.keys(), plan
        for name, own in got:
            assert own == wanted[name], (plan, name)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_goes_on(found: list[dict[str, Any]], family: str) -> None:
    for rank in found:
        whole = rank[f"{family}, whole"]
        assert rank[f"{family}, pp2, steps"] == whole
        for plan in PLANS:
            assert rank[f"{family}, {plan}, steps"] == pytest.approx(whole, rel=CLOSE[family])
