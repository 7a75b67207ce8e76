"""How many of all model types of transformers can be captured, grouped and sharded.

Every type that an auto class knows is built tiny from its config alone, with random weights, and
run on the CPU, forward and backward. What runs is captured; what cannot be captured is given to
plain `torch.export`, so that its own limits are told apart from ours. Each type has a process of
its own and a time limit; results go to a JSON Lines file as they come, and a further call goes on
from there. The order is random, so that a part of the types is a fair sample of all.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import re
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from _tiny_types import Tiny, Unbuildable, model_types, tiny_model
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table

STEPS = ("eager", "exported", "captured", "grouped", "sharded")
_DEGREES = (2,)
#: Wall time that a type may take beside others, over its CPU time.
_PATIENCE = 20


def examine(model_type: str) -> dict[str, Any]:
    """How far one type comes: the last step reached, and why no further."""
    found: dict[str, Any] = {"type": model_type, "reached": [], "error": "", "trace": ""}
    started = time.perf_counter()
    try:
        tiny = tiny_model(model_type)
    except Unbuildable as error:
        return found | {"error": str(error), "failed": "eager"}
    found |= {"class": tiny.name, "loss": tiny.loss, "inputs": sorted(tiny.inputs)}
    found |= {"sizes": tiny.sizes, "reached": ["eager"], "eager_seconds": _since(started)}
    started = time.perf_counter()
    _through(tiny, found)
    if "exported" not in found["reached"] and "labels" in tiny.inputs:
        # A loss that looks at the values of its labels does not export; the model may.
        found |= {"reached": ["eager"], "loss": "mean of outputs", "loss_error": found["error"]}
        found |= {"error": "", "export_error": ""}
        _through(tiny.without_labels(), found)
    return found | {"seconds": _since(started)}


def _through(tiny: Tiny, found: dict[str, Any]) -> None:
    try:
        _capture(tiny, found)
    except Exception as error:
        found |= {"error": _line(error), "trace": traceback.format_exc()[-6000:]}
        if "exported" not in found["reached"]:
            _export(tiny, found)


def _capture(tiny: Tiny, found: dict[str, Any]) -> None:
    """Through rlplace; the step that raises is `found["failed"]`."""
    from rlplace.graph.capture import capture

    found["failed"] = "captured"
    try:
        graph = capture(tiny.module, kwargs=tiny.inputs, name=found["type"], degrees=_DEGREES)
    except Exception as error:
        if not _in_export(error):
            found["reached"] += ["exported", "captured"]
            found["failed"] = "grouped"
        raise
    found["reached"] += ["exported", "captured", "grouped"]
    found["failed"] = "sharded"
    ops = Counter(op for group in graph.groups for op in group.ops)
    if max(ops.values()) > 1:
        raise ValueError("an op is in two groups")
    params = list(tiny.module.parameters())
    found["numel"] = sum(p.numel() for p in params)
    found["with_gradient"] = sum(p.numel() for p in params if p.grad is not None)
    found |= {"groups": len(graph.groups), "ops": len(ops), "structures": len(graph.structures)}
    found |= {"params": graph.params, "flops": graph.model_flops(1)}
    ways = [s for s in graph.structures if len(s.layouts_at(_DEGREES[0])) > 1]
    found["sharded_structures"] = len(ways)
    if not ways:
        raise ValueError("no group has a sharded layout")
    found["reached"].append("sharded")
    found["failed"] = ""


def _in_export(error: BaseException) -> bool:
    """Whether an error comes from capture's export, not from what is done with the program."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.name in ("export", "export_program") for frame in frames)


def _export(tiny: Tiny, found: dict[str, Any]) -> None:
    """Whether `torch.export` takes the module as it is."""
    try:
        torch.export.export(tiny.module, (), tiny.inputs, strict=False)
        found["reached"].append("exported")
    except Exception as error:
        found |= {"failed": "exported", "export_error": _line(error)}


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"


def _since(started: float) -> float:
    return round(time.perf_counter() - started, 2)


def _child(model_type: str, pipe: Connection, limit: float) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))
    torch.set_num_threads(1)
    pipe.send(examine(model_type))


def in_a_process(model_type: str, limit: float) -> dict[str, Any]:
    """`examine` in a fork of this process, ended after `limit` seconds of CPU time."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child: Any = context.Process(target=_child, args=(model_type, theirs, limit), daemon=True)
    child.start()
    theirs.close()
    empty = {"type": model_type, "reached": [], "failed": "process", "trace": ""}
    try:
        if not ours.poll(_PATIENCE * limit):
            return empty | {"error": f"took more than {_PATIENCE * limit:.0f} s of wall time"}
        found: dict[str, Any] = ours.recv()
        return found
    except EOFError:
        child.join()
        late = child.exitcode == -signal.SIGXCPU
        text = f"more than {limit:.0f} s" if late else f"the process ended with {child.exitcode}"
        return empty | {"error": text}
    finally:
        child.kill()
        child.join()


def examine_all(types: list[str], path: Path, limit: float, quiet: bool) -> list[dict[str, Any]]:
    """All results, those of the file first; two types at once."""
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    known = {result["type"] for result in done}
    left = [name for name in types if name not in known]
    columns = (SpinnerColumn(), "{task.description}", MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=Console(stderr=True), disable=quiet) as progress,
        ThreadPoolExecutor(2) as pool,
        path.open("a") as file,
    ):
        task = progress.add_task("model types", total=len(left))
        futures = {pool.submit(in_a_process, name, limit): name for name in left}
        for future in as_completed(futures):
            done.append(future.result())
            file.write(json.dumps(done[-1]) + "\n")
            file.flush()
            progress.update(task, advance=1, description=f"{futures[future]}")
    wanted = set(types)
    return [result for result in done if result["type"] in wanted]


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, shares and the reasons of the rest."""
    counts = {step: sum(step in r["reached"] for r in results) for step in STEPS}
    exported = counts["exported"] or 1
    reasons: dict[str, dict[str, list[str]]] = {}
    for result in results:
        if result.get("failed"):
            text = result.get("export_error") or result["error"]
            reasons.setdefault(result["failed"], {}).setdefault(kind_of(text), []).append(
                result["type"]
            )
    return {
        "types": len(results),
        "counts": counts,
        "share_of_types": {step: n / max(len(results), 1) for step, n in counts.items()},
        "share_of_exported": {step: counts[step] / exported for step in STEPS[2:]},
        "parameters_differ": [
            r["type"]
            for r in results
            # The forward may use more than its loss depends on, and not all that there is.
            if "params" in r and not r["with_gradient"] <= r["params"] <= r["numel"]
        ],
        "own_loss": sum(r.get("loss") == "own" for r in results),
        "reasons": reasons,
    }


def kind_of(error: str) -> str:
    """An error without the names and numbers of one model."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\([^)]*\)", "…", error)
    text = re.sub(r"\b[us]\d+\b|\d+", "#", text)
    return text[:110]


def render(found: dict[str, Any]) -> Iterator[Any]:
    """Tables of `summary`."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("step", "types", "% of all", "% of exported"):
        table.add_column(name, justify="left" if name == "step" else "right")
    for step in STEPS:
        of_exported = found["share_of_exported"].get(step)
        table.add_row(
            {"eager": "run eagerly"}.get(step, step),
            str(found["counts"][step]),
            f"{found['share_of_types'][step]:.1%}",
            "" if of_exported is None else f"{of_exported:.1%}",
        )
    yield table
    for step, kinds in found["reasons"].items():
        reasons = Table(header_style="bold", box=None, pad_edge=False, title_justify="left")
        reasons.add_column(f"not {step}", overflow="fold")
        reasons.add_column("types", justify="right")
        reasons.add_column("for example", overflow="fold")
        ordered = sorted(kinds.items(), key=lambda item: -len(item[1]))
        for kind, types in ordered[:15]:
            reasons.add_row(kind, str(len(types)), ", ".join(types[:4]))
        rest = sum(len(types) for _, types in ordered[15:])
        if rest:
            reasons.add_row(f"{len(ordered) - 15} other reasons", str(rest), "")
        yield ""
        yield reasons


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="these types only")
    parser.add_argument("--limit", type=int, help="so many types of the random order")
    parser.add_argument("--seconds", type=float, default=60.0, help="CPU time limit of one type")
    parser.add_argument("--out", type=Path, default=Path("build/model_types.jsonl"))
    parser.add_argument(
        "--again", action="append", default=[], help="forget the results that failed here"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # theirs is untyped
    torch.set_num_threads(1)
    examine("llama")  # imports, once before the forks, all that they need
    types = sorted(model_types())
    random.Random(0).shuffle(types)
    types = options.only or types[: options.limit]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.again and options.out.exists():
        kept = [
            line
            for line in options.out.read_text().splitlines()
            if json.loads(line).get("failed") not in options.again
        ]
        options.out.write_text("".join(f"{line}\n" for line in kept))
    found = summary(examine_all(types, options.out, options.seconds, options.json))
    console = Console()
    if options.json:
        print(json.dumps(found, indent=1))
        return
    console.print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    console.print(f"{found['types']} of {len(model_types())} model types\n")
    for part in render(found):
        console.print(part)


if __name__ == "__main__":
    main()
