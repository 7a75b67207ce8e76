"""The command line: ``rlplace discover | show | plan | run | launch | calibrate | ...``.

Exit codes: 0 done (a plan fits), 1 bad input or a failed run, 2 nothing fits.
"""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro
from rich.console import Console

from rlplace.commands.bench import bench
from rlplace.commands.launch import show_launch
from rlplace.commands.run import run
from rlplace.errors import InfeasibleError, InputError, RlplaceError

if TYPE_CHECKING:
    from rlplace.cluster.types import Cluster
    from rlplace.graph.types import OpGraph
    from rlplace.plan.types import Instance

OK, BAD_INPUT, NOTHING_FITS = 0, 1, 2
#: Planners that choose schedules.
_SCHEDULING = ("overlap", "portfolio")


def discover(
    *,
    ranks: int = 2,
    out: Path | None = None,
    seconds: float = 8.0,
    json: bool = False,
) -> int:
    """Measure this machine as a cluster of CPU ranks: compute, memory and gloo collectives.

    Args:
        ranks: CPU ranks; all of them are busy at once while it measures.
        out: Write the cluster here as YAML, for `rlplace plan`.
        seconds: About how long the measurement may take.
        json: Print one JSON object.
    """
    from rlplace.cluster.discover import discover as measure
    from rlplace.cluster.load import save_cluster
    from rlplace.report.cluster_view import cluster_data, render_discovery

    with _status(f"measuring {ranks} ranks", quiet=json):
        found = measure(ranks, seconds=seconds)
    if out is not None:
        save_cluster(found.cluster, out)
    _print(cluster_data(found) if json else render_discovery(found))
    return OK


def show(
    model: tyro.conf.Positional[str],
    *,
    seq_len: int | None = None,
    granularity: str = "fine",
    precision: str = "bf16-mixed",
    all: bool = False,
    picture: Path | None = None,
    json: bool = False,
) -> int:
    """Show what a model is made of: its groups, their cost, and how each of them can be sharded.

    Args:
        model: A library name, or your own function, as for `rlplace plan`.
        seq_len: Tokens of a sample, for library models that have them.
        granularity: fine (at most 200 groups), coarse (at most 100), or a number of groups.
        precision: Of the bytes that are saved for the backward pass; as for `rlplace plan`.
        all: Every group, also where layers are equal.
        picture: Draw the groups here, coloured by cost (PNG, SVG or PDF).
        json: Print one JSON object.
    """
    from rlplace.report.graph_drawing import check_suffix, draw_graph
    from rlplace.report.graph_picture import picture as place_boxes
    from rlplace.report.graph_view import graph_data, group_rows, render_graph

    if picture is not None:
        check_suffix(picture)
    with _status(f"capturing {model} (once; then it is cached)", quiet=json):
        graph = _graph(model, seq_len, granularity)
    if picture is not None:
        draw_graph(place_boxes(graph, precision, fold=not all), picture)
    rows = group_rows(graph, precision, fold=not all)
    _print((graph_data if json else render_graph)(graph, precision, rows))
    return OK


def plan(
    model: tyro.conf.Positional[str],
    cluster: tyro.conf.Positional[str],
    *,
    global_batch: int,
    seq_len: int | None = None,
    granularity: str = "fine",
    precision: str | None = None,
    optimizer: str = "adamw",
    attention: str = "flash",
    tp: int | None = None,
    loss_chunks: int = 1,
    fused: bool = False,
    framework: str = "torch",
    offload: bool = False,
    slices: int = 1,
    schedules: tuple[str, ...] = ("1f1b",),
    runnable: bool = False,
    time_limit: float = 0.5,
    policy: Path | None = None,
    planner: str | None = None,
    rules: Path | None = None,
    seed: int = 0,
    out: Path | None = None,
    picture: Path | None = None,
    explain: bool = False,
    json: bool = False,
) -> int:
    """Place and shard a model over a cluster.

    Args:
        model: A library name (llama-3-8b, gpt2-demo), your own function as file.py:function that
            returns (module, example inputs), or an ONNX file (net.onnx).
        cluster: A YAML file, or the short form: 8xA100-80, 4x8xH100-80:ib3200.
        global_batch: Samples of one optimizer step.
        seq_len: Tokens of a sample, for library models that have them.
        granularity: fine (at most 200 groups; what `rlplace run` takes), coarse (whole layers, at
            most 100), or a number of groups.
        precision: fp32, bf16-mixed, fp16-mixed, bf16-mixed-fp32grad, bf16 or fp8-mixed; by default
            the first of bf16-mixed, fp16-mixed, fp32 that every device kind has.
        optimizer: adamw, adamw-8bit, sgd or sgd-momentum.
        attention: flash, or math (keeps score matrices in memory).
        tp: Tensor-parallel degree of every stage; by default the search chooses.
        loss_chunks: Chunks of tokens through which the loss goes (bounds its class scores).
        fused: Memory-bound ops are fused as by torch.compile.
        framework: Trainer whose constants the estimate takes: torch, megatron, nanotron, ...
        offload: Optimizer states may be kept in the memory of the host.
        slices: Slices into which weights that are gathered (ZeRO-3) may be cut.
        schedules: Schedules that the planner `overlap` may choose: 1f1b, interleaved, zb-h1, ...
        runnable: Refuse what `rlplace run` does not execute: fp16, fp8, fused kernels.
        time_limit: Seconds that the search may take.
        policy: Folder of a policy instead of the shipped one.
        rules: A YAML file: what groups may do, as in `rlplace.commands.rules`.
        planner: One planner alone, as overlap (give it a time limit of 10) or megatron.
        seed: Seed of the search.
        out: Write the plan here as JSON, for `rlplace run`.
        picture: Draw the predicted timeline here (PNG, SVG or PDF).
        explain: Say where the time goes, what the pipeline and the links cost, and what fills the
            memory.
        json: Print one JSON object.
    """
    from dataclasses import replace

    from rlplace.api import place
    from rlplace.commands.clusters import named_cluster
    from rlplace.commands.rules import load_rules
    from rlplace.report.explain import explain as why
    from rlplace.report.plan_view import (
        infeasible_data,
        plan_data,
        render_alternatives,
        render_plan,
    )

    with _status(f"capturing {model} (once; then it is cached)", quiet=json):
        graph = _graph(model, seq_len, granularity, tp)
    instance = _instance(
        graph, named_cluster(cluster), global_batch, precision, optimizer, attention
    )
    degrees = None if tp is None else (tp,)
    instance = replace(
        instance,
        tp_degrees=degrees,
        loss_chunks=loss_chunks,
        fused=fused,
        framework=framework,
        offload=offload,
        slices=tuple(sorted({1, slices})),
        schedules=schedules,
    )
    _refuse_unused(schedules, planner)
    obeyed = load_rules(rules) if rules is not None else ()
    try:
        placed = place(instance, time_limit, policy, seed, planner, obeyed)
    except InfeasibleError as error:
        if json:
            _print(infeasible_data(instance, str(error)))
            return NOTHING_FITS
        raise
    if runnable:
        from rlplace.runtime.validate import check_supported

        check_supported(placed.plan)
    if out is not None:
        placed.plan.save(out)
    if picture is not None:
        from rlplace.report.timeline_view import draw
        from rlplace.simulate.estimate import timeline

        draw([timeline(instance, placed.plan)], picture)
    reasons = why(instance, placed.plan, placed.estimate) if explain else []
    if json:
        data = plan_data(
            instance,
            placed.plan,
            placed.estimate,
            bound=placed.bound,
            planner=placed.planner,
            plan_seconds=placed.seconds,
            alternatives=placed.alternatives,
        )
        _print(data | {"explanation": reasons} if explain else data)
        return OK
    console = Console()
    for line in _assumptions(instance):
        console.print(line, style="dim")
    console.print(render_plan(instance, placed.plan, placed.estimate, placed.bound))
    console.print()
    console.print(render_alternatives(placed.planner, placed.alternatives))
    if explain:
        console.print()
        for line in reasons:
            console.print(f"- {line}", highlight=False, markup=False)
    return OK


def _refuse_unused(schedules: tuple[str, ...], planner: str | None) -> None:
    """Refuse schedules that the planner would not look at.

    Raises:
        InputError: With a planner that would.
    """
    if set(schedules) - {"1f1b"} and planner not in _SCHEDULING:
        rule = "only these choose schedules beside 1f1b: " + ", ".join(_SCHEDULING)
        raise InputError("planner", planner, rule, _SCHEDULING[0])


def train(
    config: tyro.conf.Positional[Path] = Path("configs/train/small.yaml"),
    *,
    out: Path | None = None,
    track: bool = False,
    json: bool = False,
) -> int:
    """Train a placement policy: imitation of searched plans, then MaskablePPO.

    Interrupt it with Ctrl-C; the same command goes on from the last complete checkpoint.

    Args:
        config: A YAML file; see configs/train/small.yaml for the fields. The shipped configs are
            found from any folder.
        out: Folder of the run; by default the one that the config names.
        track: Log to Weights & Biases (offline where no key is set).
        json: Print one JSON object at the end, and no progress.
    """
    from dataclasses import replace

    from rlplace.policies.config import TrainConfig
    from rlplace.policies.train import train as train_policy
    from rlplace.resources import resource

    shipped = not config.exists() and config.parts[:1] == ("configs",)
    wanted = TrainConfig.load(resource(config.as_posix()) if shipped else config)
    wanted = replace(wanted, folder=str(out or wanted.folder), track=track or wanted.track)
    policy = train_policy(replace(wanted, quiet=json or wanted.quiet))
    _print({"policy": str(policy)} if json else f"the best policy is in {policy}")
    return OK


def evaluate(
    *,
    policy: Path | None = None,
    suite: str = "held-out",
    count: int = 30,
    seed: int = 0,
    steps: int = 1000,
    json: bool = False,
) -> int:
    """Compare the policy with searches on held-out instances, with and without the same polish.

    Gaps are ln(step time / best known), the best of all rows of an instance.

    Args:
        policy: Folder of a policy instead of the shipped one.
        suite: held-out, library or train.
        count: Instances.
        seed: Seed of the suite and of all searches.
        steps: Annealing evaluations of the polish.
        json: Print one JSON object.
    """
    from rlplace.policies.bench import evaluation_data, render_evaluation, run_evaluation

    with _status(f"evaluating on {count} instances", quiet=json) as say:
        found = run_evaluation(policy, suite, count, seed, steps, say)
    _print(evaluation_data(found) if json else render_evaluation(found))
    return OK


def calibrate(
    measurements: tyro.conf.Positional[list[Path]],
    *,
    fit: list[str],
    out: Path | None = None,
    note: str = "",
    hold_out: float = 0.25,
    seed: int = 0,
    json: bool = False,
) -> int:
    """Fit named constants of devices, links and a framework to measured plans.

    Args:
        measurements: Files that list runs: their plans, clusters and measurements (JSON; see
            rlplace.runtime.calibrate).
        fit: Constants, as kind.H100-80.max_efficiency, link.ib.efficiency, framework.torch.launch.
        out: Calibration file to add the fit to.
        note: What the runs are, for that file.
        hold_out: Share of the runs that is only predicted, for the error band.
        seed: Which runs are held out.
        json: Print one JSON object.
    """
    from rlplace.api import calibrate as fit_constants
    from rlplace.cost.calibration_file import provenance
    from rlplace.report.calibration_view import render_calibration

    found = fit_constants(
        measurements, fit, out=out, note=note, hold_out=hold_out, seed=seed, show=not json
    )
    _print(provenance(found, note) if json else render_calibration(found))
    return OK


COMMANDS: dict[str, Callable[..., int]] = {
    "discover": discover,
    "show": show,
    "plan": plan,
    "run": run,
    "launch": show_launch,
    "calibrate": calibrate,
    "train": train,
    "eval": evaluate,
    "bench": bench,
}


def main(arguments: list[str] | None = None) -> None:
    """The entry point: parse, run, turn errors into one line and an exit code."""
    try:
        code = tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="rlplace",
            description="Place and shard PyTorch models over the devices you have.",
            args=arguments,
        )
    except InfeasibleError as error:
        Console(stderr=True).print(f"[bold red]nothing fits[/]: {error}")
        code = NOTHING_FITS
    except RlplaceError as error:
        Console(stderr=True).print(f"[bold red]{type(error).__name__}[/]: {error}")
        code = BAD_INPUT
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        code = 130
    sys.exit(code)


def _graph(
    model: str, seq_len: int | None, granularity: str = "fine", tp: int | None = None
) -> OpGraph:
    from rlplace.graph import library
    from rlplace.graph.formats.read import is_graph_file, read_model
    from rlplace.graph.types import TP_DEGREES
    from rlplace.graph.user_model import capture_user_model, is_user_model

    if is_graph_file(model):
        return read_model(model, seq_len)
    degrees = tuple(sorted({*TP_DEGREES, *((tp,) if tp and tp > 1 else ())}))
    number = int(granularity) if granularity.isdigit() else granularity
    if is_user_model(model):
        return capture_user_model(model, seq_len=seq_len, granularity=number, degrees=degrees)
    if granularity == "fine":
        return library.build(model, seq_len=seq_len, degrees=degrees)
    import torch

    from rlplace.graph.capture import capture

    wanted = library.spec(model, seq_len=seq_len)
    with torch.device("meta"):
        module = wanted.make()
    return capture(
        module,
        kwargs=wanted.example(2),
        name=model,
        tokens_per_sample=wanted.tokens_per_sample,
        granularity=number,
        source=wanted.source,
    )


def _instance(
    graph: OpGraph,
    cluster: Cluster,
    global_batch: int,
    precision: str | None,
    optimizer: str,
    attention: str,
) -> Instance:
    from rlplace.plan.types import Instance, default_precision

    return Instance(
        graph,
        cluster,
        global_batch,
        precision=precision or default_precision(cluster),
        optimizer=optimizer,
        attention=attention,
    )


def _assumptions(instance: Instance) -> list[str]:
    from rlplace.cluster.load import describe_assumptions

    head = f"{instance.precision}, {instance.optimizer}, {instance.attention} attention"
    return [head, *describe_assumptions(instance.cluster)]


def _print(content: Any) -> None:
    """A dict as JSON, anything else by rich."""
    if isinstance(content, dict):
        print(jsonlib.dumps(content, indent=1))
    else:
        Console().print(content)


@contextmanager
def _status(text: str, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr; yields a function that changes its text."""
    if quiet:
        yield lambda _: None
        return
    with Console(stderr=True).status(text) as status:
        yield status.update


if __name__ == "__main__":
    main()
