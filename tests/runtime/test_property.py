"""Random legal plans compute what one process computes: losses, gradients, weights after AdamW.

Plans are drawn from all that `check` accepts. One that the ranks refuse by name is counted, and
another is drawn. A plan that fails is printed as JSON; `RLPLACE_PLAN=FILE` runs that one alone, and
`RLPLACE_SEED=N` draws others. `make nightly` runs many (`RLPLACE_PLANS=N`).
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from rlplace.errors import RankFailedError
from rlplace.plan.files import dump_plan, parse_plan
from rlplace.runtime.jobs import Job
from rlplace.runtime.measure import Measurement
from rlplace.runtime.options import Options
from rlplace.runtime.pool import Pool
from tests.runtime.random_plans import DRAWN, STEPS, Drawn, draw, exact, features
from tests.runtime.reference import MODELS, STEPPED_BY_SGD, even, expected, graph_of

pytestmark = pytest.mark.dist

SEED = int(os.environ.get("RLPLACE_SEED", "0"))
PLANS = int(os.environ.get("RLPLACE_PLANS", "20"))
#: Largest error of a gradient over the largest gradient, and of a loss over the loss, by dtype.
#: The library's losses and norms are float32.
TOLERANCE = {"float64": 1e-5, "float32": 2e-3}
#: Of a weight over the largest step that AdamW may have taken, which divides a gradient near zero
#: by hardly more than its rounding.
WEIGHTS = {"float64": 1e-2, "float32": 1.0}
#: All that ranks may refuse of what `check` accepts (docs/runtime.md).
REFUSED = ("plan.loss_chunks: ",)
#: Share of the plans on 2, 3 and 4 ranks.
SHARES = {2: 0.35, 3: 0.25, 4: 0.4}


@dataclass
class Tally:
    """What was run.

    Args:
        ran: Plans that ran, by feature.
        refused: Reasons of plans that were refused.
        worst: Largest error over the tolerance.
        plans: Plans that ran.
        exact: Plans that were equal bit for bit.
    """

    ran: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    worst: float = 0.0
    plans: int = 0
    exact: int = 0

    def __str__(self) -> str:
        lines = [f"seed {SEED}: {self.plans} plans ran, {self.exact} of them bit for bit"]
        lines += [f"worst error {self.worst:.2g} of the tolerance"]
        lines += [f"  {count:4d} {name}" for name, count in sorted(self.ran.items())]
        lines += [f"refused {count:4d} {name}" for name, count in self.refused.most_common()]
        return "\n".join(lines)


@pytest.mark.timeout(60 + 30 * PLANS)
def test_random_plans_compute_what_one_process_computes() -> None:
    tally, failed = Tally(), []
    with Pool(max(SHARES), timeout=20) as pool:
        for drawn in _replayed() or _drawn(tally):
            try:
                found = pool.run([_job(drawn)], limit=90)[0]
                _compare(drawn, found, tally)
            except RankFailedError as error:
                if (reason := refusal(str(error))) is not None:
                    tally.refused[reason] += 1
                    continue
                failed.append(f"{error}\n{_text(drawn)}")
            except AssertionError as error:
                failed.append(f"{error}\n{_text(drawn)}")
            tally.plans += 1
            tally.ran.update(features(drawn))
    print(f"\n{tally}")
    assert not failed, f"{len(failed)} plans failed:\n" + "\n\n".join(failed)
    unknown = [reason for reason in tally.refused if not any(known in reason for known in REFUSED)]
    assert not unknown
    assert tally.plans == PLANS or "RLPLACE_PLAN" in os.environ
    assert tally.exact or "RLPLACE_PLAN" in os.environ


def refusal(message: str) -> str | None:
    """Why ranks refused a plan, without its values; None if that is not what happened."""
    first = message.splitlines()[0]
    if "InputError: " not in first:
        return None
    field, _, rest = first.partition("InputError: ")[2].partition("=")
    return re.sub(r"\[\d+\]", "", field) + ": " + re.sub(r"\d+", "N", rest.partition(": ")[2][:70])


def _drawn(tally: Tally) -> Iterator[Drawn]:
    """Plans, until enough of them have run; those of one model one after the other."""
    rng = np.random.default_rng(SEED)
    for _ in range(8):
        missing = PLANS - tally.plans
        ranks = rng.choice([*SHARES], missing, p=[*SHARES.values()])
        every = [
            draw(DRAWN[(SEED + i) % len(DRAWN)], int(count), rng) for i, count in enumerate(ranks)
        ]
        yield from sorted(every, key=lambda one: (one.model, one.options.dtype or ""))


def _replayed() -> list[Drawn]:
    """The plan that the environment asks for, if it does."""
    if "RLPLACE_PLAN" not in os.environ:
        return []
    content = json.loads(Path(os.environ["RLPLACE_PLAN"]).read_text())
    options = Options(**content["options"])
    return [Drawn(content["model"], parse_plan(content["plan"]), options)]


def _text(drawn: Drawn) -> str:
    """A plan as `_replayed` reads it."""
    content = {"model": drawn.model, "options": asdict(drawn.options)}
    return json.dumps({**content, "plan": dump_plan(drawn.plan)})


def _job(drawn: Drawn) -> Job:
    name, args = MODELS[drawn.model]
    optimizer = "sgd" if drawn.model in STEPPED_BY_SGD else None
    return Job(drawn.plan, graph_of(drawn.model), name, args, drawn.options, optimizer)


def _compare(drawn: Drawn, found: Measurement, tally: Tally) -> None:
    """Compare with one process that takes as many chunks as there are micro-batches on replicas."""
    plan, dtype = drawn.plan, drawn.options.dtype or "float64"
    dp = plan.stages[-1].mesh.dp
    whole = all(plan.micro_batch % stage.mesh.dp == 0 for stage in plan.stages)
    chunks = plan.micro_batches * (dp if whole else 1)
    losses, tensors = expected(drawn.model, even(plan.global_batch, chunks), STEPS, plan.attention)
    same = exact(drawn)
    tally.exact += same
    gradients = [t for key, t in tensors.items() if key.startswith("gradient/")]
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    step = drawn.options.lr * STEPS * WEIGHTS[dtype] / TOLERANCE[dtype]
    errors = {"loss": max(abs(a / b - 1.0) for a, b in zip(found.losses, losses, strict=True))}
    for key, wanted in tensors.items():
        # Running statistics are of a replica's own samples, in the order in which they pass.
        if key.startswith("buffer/") and (dp > 1 or plan.schedule == "explicit"):
            continue
        if same and not torch.equal(found.tensors[key], wanted):
            raise AssertionError(f"{key} is not equal bit for bit")
        scale = step if key.startswith("weight/") else largest
        errors[key] = float((found.tensors[key].double() - wanted).abs().max()) / scale
    tally.worst = max(tally.worst, max(errors.values()) / TOLERANCE[dtype])
    wrong = {key: error for key, error in errors.items() if not error <= TOLERANCE[dtype]}
    first = sorted(wrong.items(), key=lambda item: -item[1])[:6]
    if wrong:
        raise AssertionError(f"{len(wrong)} of {len(errors)} are off: {first}")


def test_a_refusal_is_told_from_a_failure() -> None:
    said = "rank 0 failed: InputError: plan.stages[3].mesh.cp=2: the runtime has none (nearest 1)"
    assert refusal(said) == "plan.stages.mesh.cp: the runtime has none (nearest N)"
    assert refusal("rank 1 failed: RuntimeError: broken") is None
