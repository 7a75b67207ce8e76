"""Estimates from the published profiles of other planners, beside what was measured.

Reads ../shared/data/profiles and says so where it is absent. Run from the root of the repository:

    python -m benchmarks.profiles [--rows]

- Sailor: its measured plans, with its layer profiles and network fits loaded; beside it the errors
  of Sailor's own simulator on the same rows. `left_out` says which rows are not scored, and why.
- Aceso: GPT on V100, with its op profile loaded. The plan of 350M on one GPU is published, and is
  estimated exactly; those of the larger models are not, so that the best plan of a small sweep
  (equal meshes; degrees, micro-batch, stages balanced by time, as few layers recomputed as fit)
  stands beside the measured time of the best that Aceso found: above it, as far as Aceso's plans
  are finer (degrees and recomputation op by op).
- Galvatron: its published plan of llama2-7b on 8 GPUs with its own profile loaded, beside the cost
  that Galvatron gives its best plan at that memory.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from rlplace.bench.profiles import ACESO, MEGATRON, galvatron_llama, v100s
from rlplace.cost.profiled import (
    Profile,
    ProfiledCost,
    profile_graph,
    read_aceso,
    read_sailor,
    read_sailor_network,
    sailor_cluster,
)
from rlplace.plan.frameworks import Framework
from rlplace.plan.types import GroupChoice, Instance, Mesh, Plan, Stage
from rlplace.plan.uniform import make_plan
from rlplace.simulate.estimate import Estimator
from rlplace.simulate.types import Estimate
from rlplace.units import GIB, MIB

DATA = Path(__file__).parents[2] / "shared" / "data" / "profiles"

#: Sailor trains with DeepSpeed's pipeline engine: each tp rank sends its part of an activation, and
#: the compute stream waits for every send and receive, one at a time, as far as NCCL's buffer does
#: not take the message (4 MiB, the default of NCCL_BUFFSIZE). To reduce gradients it copies them
#: into one fp32 buffer, for which no block of an activation is large enough.
DEEPSPEED = Framework(
    "megatron-deepspeed",
    overlap_reduce=0.0,
    parts=True,
    sends="in turn",
    buffer=4 * MIB,
    flattens=True,
)

#: Plans whose published time is not one of them. GPT-Neo N2 D1 ran one micro-batch of one sample,
#: warm-up and all; N4 D4 lists 26 of 34 layers; RTX N3 D1 has one replica, but the gradient
#: reduction, time and memory of N6 D2 to the last digit. In OPT N4 D4 only the time of the
#: reduction is suspect, which is not compared.
LEFT_OUT = frozenset({("GPT-NEO", "N2_D1"), ("GPT-NEO", "N4_D4"), ("mit", "N3_D1")})


@dataclass(frozen=True)
class Row:
    """A plan: what was found elsewhere, what we estimate, what a peer estimates.

    Args:
        group: Rows that are summed up together.
        name: The plan.
        reference: Seconds (or bytes) found elsewhere.
        ours: Our estimate.
        peer: The peer's, None where there is none.
    """

    group: str
    name: str
    reference: float
    ours: float
    peer: float | None = None

    @property
    def error(self) -> float:
        """Ours over the reference, less one."""
        return self.ours / self.reference - 1.0

    @property
    def peer_error(self) -> float:
        """The peer's likewise; NaN without one."""
        return float("nan") if self.peer is None else self.peer / self.reference - 1.0


# --- Sailor


def sailor_rows(folder: Path) -> Iterator[Row]:
    """Times and memory of Sailor's measured plans."""
    network = read_sailor_network(folder)
    profiles: dict[str, Profile] = {}
    with (folder / "measured_plans.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        model = row["model"]
        if model not in profiles:
            profiles[model] = read_sailor(folder, model)
        profile = profiles[model]
        stages, nodes = _sailor_stages(row)
        if stages[-1].stop != len(profile.layers):
            continue  # a layer list that stops early
        batch = int(row["global_batch"])
        instance = Instance(
            profile_graph(profile),
            sailor_cluster(folder, nodes),
            batch,
            "fp32",
            framework=DEEPSPEED,
        )
        plan = make_plan(instance, stages, batch // (int(row["dp"]) * int(row["micro_batch"])))
        found = Estimator(instance, ProfiledCost(profile, network)).estimate(plan)
        yield from sailor_row(row, found)


def sailor_row(row: Mapping[str, str], found: Estimate) -> Iterator[Row]:
    """What of a measured plan is scored: its time, and its memory on GH200.

    The memory is what the driver's tool shows, what the allocator keeps included. On the mixed
    cluster it cannot be what the plans took: with tp 2 it is less than half of the states and
    activations in Sailor's own table of layers, and the runtime's share of 5.06 GB, which Sailor
    found on GH200, is more than what the other plans show beside their activations.
    """
    where, name = f"{row['cluster']}, {row['model']}", plan_name(row["file"])
    if not left_out(row["file"]):
        peer = float(row["sailor_pred_s"])
        real = float(row["real_s"])
        yield Row(f"Sailor time, {where}", name, real, found.step_time, peer)
    if row["cluster"] == "GH200":
        most = max(use.total + use.cached for use in found.memory)
        peer = float(row["sailor_pred_mem_bytes"])
        yield Row(f"Sailor memory, {where}", name, float(row["max_mem_bytes"]), most, peer)


def plan_name(file: str) -> str:
    """``N16_D4`` of ``clariden/OPT-350/N16/plan_config_N16_D4.json``."""
    return file.split("plan_config_")[1].removesuffix(".json")


def left_out(file: str) -> bool:
    """Whether the time of a plan is not scored; see `LEFT_OUT`."""
    return any((part, plan_name(file)) in LEFT_OUT for part in file.split("/"))


def _sailor_stages(row: dict[str, str]) -> tuple[tuple[Stage, ...], list[tuple[str, int]]]:
    """Stages, and the nodes of their devices: one tp group of a replica on each."""
    stages: list[Stage] = []
    nodes: list[tuple[str, int]] = []
    rank = 0
    for span, text in zip(row["layers"].split("|"), row["stages"].split("|"), strict=True):
        first, last = map(int, span.split("-"))
        kinds: list[str] = []
        for part in text.split("+"):
            count, _, rest = part.rpartition("*")
            kinds += [rest.split("/")[0].strip()] * int(count or 1)
        tp = int(row["tp"])
        nodes += [(kind, tp) for kind in kinds]
        devices = tuple(range(rank, rank + tp * len(kinds)))
        rank += len(devices)
        choice = GroupChoice("shard" if tp > 1 else "replicate")
        mesh = Mesh(devices, len(kinds), 1, 1, tp)
        stages.append(Stage(first, last + 1, mesh, (choice,) * (last + 1 - first)))
    return tuple(stages), nodes


# --- Aceso


def aceso_rows(folder: Path) -> Iterator[Row]:
    """Times of GPT on V100, global batch 1024."""
    with (folder / "ref_perf_model_time_large_gpt.csv").open() as file:
        table = {line[0]: line[1:] for line in csv.reader(file)}
    for size, actual, peer in zip(table["size"], table["actual"], table["predict"], strict=True):
        layers, devices = ACESO[size]
        profile = read_aceso(folder, size, layers)
        graph = profile_graph(profile)
        instance = Instance(graph, v100s(devices), 1024, "fp16-mixed", framework=MEGATRON)
        estimator = Estimator(instance, ProfiledCost(profile))
        if devices == 1:
            plans = [_plan(instance, profile, (1, 1, 8), {*range(1, len(profile.layers) - 1)})]
            group = "Aceso time, published plan"
        else:
            plans = list(swept(estimator, profile, 28000 * MIB))
            group = "Aceso time, best of a sweep"
        best = min(estimator.estimate(plan).step_time for plan in plans)
        yield Row(group, f"GPT {size} on {devices}", float(actual), best, float(peer))


# --- Galvatron


def galvatron_rows(folder: Path) -> Iterator[Row]:
    """Step times of llama2-7b on 8 GPUs, 2048 tokens, global batch 16."""
    instance, cost = galvatron_llama(folder, 40)
    found = Estimator(instance, cost).estimate(llama_plan(instance))
    yield Row("Galvatron cost, published plan", "36 GB", 1.086, found.step_time)


def llama_plan(instance: Instance) -> Plan:
    """The plan that Galvatron publishes: ZeRO-3 over 8, the first 20 of 32 layers recomputed."""
    kept = GroupChoice("replicate", 3)
    choices = (replace(kept, recompute="full"),) * 20 + (kept,) * 13
    return make_plan(instance, (Stage(0, 33, Mesh(tuple(range(8)), 1, 8), choices),), 1)


# --- a small sweep


def swept(estimator: Estimator, profile: Profile, limit: float) -> Iterator[Plan]:
    """Plans with equal meshes that fit: all degrees and micro-batches.

    Stages are balanced by time, and redo as few layers as their own memory asks for, first the
    attention, which keeps the scores.
    """
    instance = estimator.instance
    devices = len(instance.cluster.devices)
    for tp in instance.graph.tp_degrees(min(devices, 8)):
        for pp in (2**power for power in range(6)):
            for size in (1, 2, 4, 8):
                whole = devices % (pp * tp) == 0 and devices // (pp * tp) * size <= 1024
                if whole and pp <= len(profile.layers):
                    plan = _thrifty(estimator, profile, (pp, tp, size), limit)
                    if plan is not None:
                        yield plan


def _thrifty(
    estimator: Estimator, profile: Profile, shape: tuple[int, int, int], limit: float
) -> Plan | None:
    """The plan of a shape (pp, tp, samples) that redoes little, or None if none fits."""
    redone: set[int] = set()
    kind = estimator.instance.cluster.kinds[0].name
    for _ in range(20):
        plan = _plan(estimator.instance, profile, shape, redone)
        peaks = estimator.estimate(plan).peak_memory
        over = [peaks[stage.mesh.devices[0]] - limit for stage in plan.stages]
        if max(over) <= 0.0:
            return plan
        for index, (stage, excess) in enumerate(zip(plan.stages, over, strict=True)):
            if excess <= 0.0:
                continue
            order = sorted(range(stage.start, stage.stop), key=lambda at: profile.layers[at])
            left = [at for at in order if at not in redone and 0 < at < len(profile.layers) - 1]
            if not left:
                return None
            kept = profile.table(kind, profile.layers[left[0]], shape[1]).at(shape[2]).saved
            redone |= {*left[: int(excess / (kept * (len(plan.stages) - index))) + 1]}
    return None


def _plan(
    instance: Instance, profile: Profile, shape: tuple[int, int, int], redone: set[int]
) -> Plan:
    """A plan of equal meshes, balanced by time."""
    pp, tp, size = shape
    kind = instance.cluster.kinds[0].name
    points = [profile.table(kind, layer, tp).at(size) for layer in profile.layers]
    loads = [p.forward * (2 if i in redone else 1) + p.backward for i, p in enumerate(points)]
    share = len(instance.cluster.devices) // pp
    stages = []
    for stage, (start, stop) in enumerate(pairwise(_balanced(np.array(loads), pp))):
        ranks = tuple(range(stage * share, (stage + 1) * share))
        choice = GroupChoice("shard" if tp > 1 else "replicate")
        again = replace(choice, recompute="full")
        choices = tuple(again if layer in redone else choice for layer in range(start, stop))
        stages.append(Stage(start, stop, Mesh(ranks, share // tp, 1, 1, tp), choices))
    return make_plan(instance, tuple(stages), instance.global_batch // (size * share // tp))


def _balanced(loads: np.ndarray, parts: int) -> list[int]:
    """Borders of contiguous parts whose largest sum is least (dynamic program)."""
    count, sums = len(loads), np.concatenate([[0.0], np.cumsum(loads)])
    best = np.full((parts + 1, count + 1), np.inf)
    best[0, 0] = 0.0
    cut = np.zeros((parts + 1, count + 1), int)
    for part in range(1, parts + 1):
        for stop in range(part, count + 1):
            worst = np.maximum(best[part - 1, :stop], sums[stop] - sums[:stop])
            cut[part, stop] = int(np.argmin(worst))
            best[part, stop] = worst[cut[part, stop]]
    bounds = [count]
    for part in range(parts, 0, -1):
        bounds.append(int(cut[part, bounds[-1]]))
    return bounds[::-1]


def summary(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A line for each group: n, mean and largest |error|, bias, the peer's mean and largest."""
    lines: list[tuple[str, ...]] = []
    for group in dict.fromkeys(row.group for row in rows):
        own = [row for row in rows if row.group == group]
        errors = np.array([row.error for row in own])
        peers = np.abs([row.peer_error for row in own if row.peer is not None])
        lines.append(
            (
                group,
                str(len(own)),
                f"{np.abs(errors).mean():.1%}",
                f"{np.abs(errors).max():.1%}",
                f"{errors.mean():+.1%}",
                f"{peers.mean():.1%}" if len(peers) else "-",
                f"{peers.max():.1%}" if len(peers) else "-",
            )
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", action="store_true", help="print every row too")
    args = parser.parse_args()
    console = Console()
    rows: list[Row] = []
    for name, read in (
        ("sailor", sailor_rows),
        ("aceso", aceso_rows),
        ("galvatron", galvatron_rows),
    ):
        if (DATA / name).exists():
            rows += read(DATA / name)
        else:
            console.print(f"{DATA / name} is absent: skipped")
    if args.rows:
        listed = Table("group", "plan", "found", "ours", "error", "peer's error")
        for row in rows:
            unit = GIB if "memory" in row.group else 1.0
            figures = (f"{row.reference / unit:.3f}", f"{row.ours / unit:.3f}")
            listed.add_row(
                row.group, row.name, *figures, f"{row.error:+.1%}", f"{row.peer_error:+.1%}"
            )
        console.print(listed)
    table = Table("group", "n", "mean |error|", "max", "bias", "peer's mean", "peer's max")
    for line in summary(rows):
        table.add_row(*line)
    console.print(table)


if __name__ == "__main__":
    main()
