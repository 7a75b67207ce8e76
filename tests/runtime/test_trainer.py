"""A trainer driven from a script of one's own, on two ranks of torchrun."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.dist

SCRIPT = """
import json
import math
import os
import resource
import signal
import sys
import threading
from pathlib import Path

import torch
from torch import nn

from rlplace.errors import InputError, RankFailedError
from rlplace.graph.capture import capture
from rlplace.plan.types import Instance
from rlplace.plan.uniform import uniform_plan
from rlplace.report.timeline_view import chrome_trace
from rlplace.runtime.checkpoint import Checkpoints
from rlplace.runtime.options import Options
from rlplace.runtime.trainer import Trainer
from rlplace.runtime.validate import stand_in_cluster
from rlplace.runtime.world import join
from tests.runtime.test_trainer import CLIP, DATA, OTHERS, RAGGED, Net, halves, settings

loss = nn.MSELoss()
graph = capture(Net(), (DATA[0][0],), loss=loss, targets=DATA[0][1])
instance = Instance(graph, stand_in_cluster(2), 8, precision="fp32")
plan = uniform_plan(instance, pp=2)
MICRO_BATCHES = plan.micro_batches
world = join("cpu", 30)
world.owned = False
found = {}


def trainer(**more):
    more = {"options": Options(steps=4, warmup=1), "plan": plan} | more
    return Trainer(model_fn=Net, loss=loss, graph=graph, world=world, **more)


def losses(made, start, stop):
    return [made.step(batch).loss for batch in DATA[start:stop]]


class Stopper:
    steps = []
    def begin(self, steps):
        self.total = steps
    def step(self, report):
        self.steps.append(report.step)
        if world.rank == 1 and report.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
    def end(self):
        self.ended = True


class Begun:
    # Lets the writing of a checkpoint last until the step after it has begun.
    forwards = 0
    moved = threading.Condition()
    def __call__(self, phase):
        kind, _, steps = phase.partition(" ")
        with self.moved:
            if kind == "F":
                self.forwards += 1
                self.moved.notify_all()
            if kind == "checkpoint" and int(steps) < 5:
                self.moved.wait_for(lambda: self.forwards > int(steps) * MICRO_BATCHES, 60)


with trainer(accumulate=2, scheduler=halves) as one:
    reports = one.fit(DATA)
    found["losses"] = [report.loss for report in reports]
    found["lr"] = [report.lr for report in reports]
    found["samples"] = [report.samples for report in reports]
    found["taken"] = one.taken
    found["step"] = one.step(*DATA[:2]).step
    measured = one.measurement()
    found["measured"] = [len(measured.step_times), list(measured.losses)]

with trainer() as two:
    found["uneven"] = len(two.fit(DATA[: 3 + world.rank]))
    found["again"] = [report.step for report in two.fit(DATA, 2)]

with trainer(clip=CLIP, groups=settings) as clipped:
    reports = clipped.fit(DATA)
    found["clipped"] = [[report.loss, report.grad_norm] for report in reports]

for worst in (math.inf, math.nan):
    inputs, targets = DATA[0][0], DATA[0][1].clone()
    targets[0, 0] = worst
    options = Options(steps=1, warmup=0, collect=True)
    with trainer(example=DATA[0], clip=CLIP, options=options) as broken:
        norm = broken.step((inputs, targets)).grad_norm
        tensors = broken.measurement().tensors
        broken_at = {name: int(one.isnan().sum()) for name, one in tensors.items()}
        found[f"norm of {worst}"] = [str(norm), broken_at]

with trainer(accumulate=2) as ragged:
    reports = ragged.fit(RAGGED)
    found["ragged"] = [[report.loss, report.samples] for report in reports]

listener = Stopper()
with trainer(callbacks=[listener], scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau) as three:
    three.fit(DATA, 6)
    found["interrupted"] = [three.interrupted, listener.steps, listener.total, listener.ended]

root, exact = f"{sys.argv[1]}/saved", {"scheduler": halves, "clip": CLIP, "groups": settings}
with trainer(example=DATA[0], **exact) as saver:
    fresh = saver.save(root)
    before = losses(saver, 0, 2)
    path = saver.save(root)
    found["then"] = losses(saver, 2, 4)
    saver.load(path)
    found["restored"] = [saver.steps, losses(saver, 2, 4), saver.steps]
    saver.load(fresh)
    found["from the start"] = [before, losses(saver, 0, 2)]
    saver.load(root)
    found["newest"] = saver.steps
for name, degrees in OTHERS.items():
    with trainer(plan=uniform_plan(instance, **degrees), example=DATA[0], **exact) as other:
        other.load(path)
        found[name] = losses(other, 2, 4)
        found[f"{name}, back"] = str(other.save(f"{root}-{name}"))
with trainer(example=DATA[0], **exact) as back:
    for name in OTHERS:
        back.load(found[f"{name}, back"])
        found[f"{name}, back"] = losses(back, 4, 6)
    back.load(path)
    found["on"] = losses(back, 2, 6)
kept = Options(checkpoint=Checkpoints(f"{root}-kept", every=0, keep=2))
with trainer(example=DATA[0], options=kept) as keeper:
    for batch in DATA[:3]:
        keeper.step(batch)
        keeper.save()
    keeper.step(DATA[3])
    keeper.load()
    found["kept"] = [keeper.steps, sorted(path.name for path in Path(f"{root}-kept").iterdir())]
    (path.parent / "step-00000007").mkdir(exist_ok=True)
    for name, place in {"damaged": "step-00000007", "no checkpoint": "nowhere"}.items():
        try:
            keeper.load(path.parent / place)
        except (InputError, RankFailedError) as error:
            found[name] = str(error)
    found["after mistakes"] = keeper.step(DATA[4]).step
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank:  # the kernel refuses longer files, as a full disk does
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        keeper.save()
    except RankFailedError as error:
        found["full disk"] = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    keeper.step(DATA[5])
    found["after a full disk"] = int(keeper.save().name[-1])

writes = Checkpoints(f"{root}-timed", every=1)
options, begun = Options(steps=4, warmup=1, checkpoint=writes), Begun()
with trainer(options=options, on_phase=begun) as timed:
    timed.fit(DATA[:5])
    line = timed.measurement().timeline
    found["beside"] = [[e.device, e.start, e.end] for e in line.events if e.kind == "checkpoint"]
    found["line"] = [line.seconds, len(chrome_trace(line)["traceEvents"]), len(line.events)]

for name, call in {
    "no folder": lambda: trainer(example=DATA[0]).save(),
    "no folder to load": lambda: trainer(example=DATA[0]).load(),
    "too early": lambda: trainer().save(root),
    "empty": lambda: trainer().fit([]),
    "accumulate": lambda: trainer(accumulate=0),
    "pair": lambda: trainer().fit([DATA[0][0]]),
    "optimizer": lambda: trainer(optimizer="adam"),
}.items():
    try:
        call()
    except InputError as error:
        found[name] = str(error)
with open(f"{sys.argv[1]}/{world.rank}.json", "w") as stream:
    json.dump(found, stream)
"""


class Net(nn.Module):
    """Four layers without a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layers(x)
        return made


_DRAWS = torch.Generator().manual_seed(1)
#: An odd number, so that the last accumulated step has one batch.
DATA = [
    (torch.randn(8, 8, generator=_DRAWS), torch.randn(8, 8, generator=_DRAWS)) for _ in range(7)
]


#: Batches of 8, 3, 8 and 8 samples.
RAGGED = [DATA[0], tuple(part[:3] for part in DATA[1]), *DATA[2:4]]
CLIP = 0.3
#: Other plans that take a checkpoint over, as degrees.
OTHERS: dict[str, dict[str, int]] = {"tp2": {"tp": 2}, "ZeRO-3": {"zero": 3}, "dp2": {}}


def settings(name: str, param: nn.Parameter) -> dict[str, float]:
    """Biases learn slower, and do not decay."""
    return {"lr": 1e-4, "weight_decay": 0.0} if name.endswith("bias") else {"weight_decay": 0.5}


def halves(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    """Halves the learning rate at every step."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two ranks of the script have found."""
    folder = tmp_path_factory.mktemp("trainer")
    script = folder / "train.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n{SCRIPT}"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(script), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_steps_are_those_of_one_process(found: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    net, loss = Net(), nn.MSELoss()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    schedule = halves(optimizer)
    losses, rates = [], []
    for batches in (DATA[:2], DATA[2:4], DATA[4:6], DATA[6:]):
        optimizer.zero_grad()
        mean = torch.stack([loss(net(inputs), targets) for inputs, targets in batches]).mean()
        torch.autograd.backward(mean)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        losses.append(mean.item())
    for rank in found:
        assert rank["losses"] == pytest.approx(losses, rel=1e-5)
        assert rank["lr"] == pytest.approx(rates)
        assert rank["samples"] == [16, 16, 16, 8]
        assert (rank["taken"], rank["step"]) == (7, 5)


def test_clipping_and_groups_are_those_of_one_process(found: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    net, loss = Net(), nn.MSELoss()
    groups = [
        {"params": [param], **settings(name, param)} for name, param in net.named_parameters()
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    expected = []
    for inputs, targets in DATA:
        optimizer.zero_grad()
        mean = loss(net(inputs), targets)
        torch.autograd.backward(mean)
        norm = nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        expected.append([mean.item(), norm.item()])
    assert min(norm for _, norm in expected) > CLIP
    for rank in found:
        for got, wanted in zip(rank["clipped"], expected, strict=True):
            assert got == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("worst", [float("inf"), float("nan")])
def test_a_norm_that_is_not_finite_is_that_of_one_process(
    found: list[dict[str, Any]], worst: float
) -> None:
    torch.manual_seed(0)
    net, loss = Net(), nn.MSELoss()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    inputs, targets = DATA[0][0], DATA[0][1].clone()
    targets[0, 0] = worst
    torch.autograd.backward(loss(net(inputs), targets))
    norm = nn.utils.clip_grad_norm_(net.parameters(), CLIP)
    optimizer.step()
    wanted = {f"weight/{name}": int(p.isnan().sum()) for name, p in net.named_parameters()}
    assert any(wanted.values())
    for rank in found:
        assert rank[f"norm of {worst}"][0] == str(float(norm))
    assert {n: found[0][f"norm of {worst}"][1][n] for n in wanted} == wanted


def test_every_sample_of_a_step_counts_the_same(found: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    net, loss = Net(), nn.MSELoss()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    expected = []
    for pair in (RAGGED[:2], RAGGED[2:]):
        inputs, targets = (torch.cat(parts) for parts in zip(*pair, strict=True))
        optimizer.zero_grad()
        mean = loss(net(inputs), targets)
        torch.autograd.backward(mean)
        optimizer.step()
        expected.append([mean.item(), len(inputs)])
    assert [samples for _, samples in expected] == [11, 16]
    for rank in found:
        for got, wanted in zip(rank["ragged"], expected, strict=True):
            assert got == pytest.approx(wanted, rel=1e-5)


def test_the_first_steps_are_measured(found: list[dict[str, Any]]) -> None:
    for rank in found:
        times, losses = rank["measured"]
        assert times == 4
        assert losses[:4] == pytest.approx(rank["losses"])
        assert len(losses) == 5


def test_ranks_with_less_data_end_the_others(found: list[dict[str, Any]]) -> None:
    assert [rank["uneven"] for rank in found] == [3, 3]
    assert [rank["again"] for rank in found] == [[4, 5], [4, 5]]


def test_ctrl_c_on_one_rank_ends_all_after_one_step(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["interrupted"] == [True, [1, 2, 3], 6, True]


def test_a_loop_of_ones_own_goes_back_to_what_it_saved(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["restored"] == [2, rank["then"], 4]
        assert rank["from the start"][0] == rank["from the start"][1]
        assert rank["newest"] == 2
        assert rank["kept"] == [3, ["step-00000002", "step-00000003"]]
        assert rank["after mistakes"] == 4
        assert rank["after a full disk"] == 5


def test_the_writing_of_a_checkpoint_is_on_the_timeline(found: list[dict[str, Any]]) -> None:
    for rank in found:
        seconds, traced, events = rank["line"]
        assert sorted(device for device, _, _ in rank["beside"]) == [0, 1]
        assert all(0.0 <= start < end <= seconds for _, start, end in rank["beside"])
        assert traced == events


@pytest.mark.parametrize("name", OTHERS)
def test_another_plan_goes_on_from_what_was_saved_and_back(
    found: list[dict[str, Any]], name: str
) -> None:
    for rank in found:
        assert rank["on"][:2] == rank["then"]
        assert rank[name] == pytest.approx(rank["then"], rel=1e-5)
        assert rank[f"{name}, back"] == pytest.approx(rank["on"][2:], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no folder", "path=None: give a folder"),
        ("no folder to load", "path=None: give a folder"),
        ("too early", "example=None"),
        ("no checkpoint", "nowhere': is neither a checkpoint"),
        ("full disk", "checkpoint not written: rank 1: OSError: .*File too large"),
        ("damaged", "the checkpoint is damaged: manifest.json is missing"),
        ("empty", "data='empty': must yield a batch"),
        ("accumulate", "accumulate=0: must be at least 1"),
        ("pair", r"a batch is a pair \(inputs, targets\)"),
        ("optimizer", "nearest legal: adamw"),
    ],
)
def test_mistakes_are_refused_on_every_rank(
    found: list[dict[str, Any]], name: str, message: str
) -> None:
    for rank in found:
        assert re.search(message, rank[name])
