"""Tests of Sailor's rule."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from rlplace.cost.given.sailor import (
    SailorStep,
    fits_memory,
    replica_bytes,
    sailor_seconds,
    sailor_step,
)
from rlplace.cost.given.sailor_form import (
    SailorFit,
    SailorInstance,
    SailorModel,
    SailorPlan,
    SailorStage,
    read_sailor_instance,
)
from rlplace.errors import InputError

SHARED = Path(__file__).parents[3] / "shared/data/profiles/sailor"
published = pytest.mark.skipif(not SHARED.exists(), reason="needs the published profiles")

A, V, V4 = ("A100-40", 1), ("V100-16", 1), ("V100-16", 4)

#: Three layers on a fast and a slow kind, tp 1 and 2, micro-batches of a sample.
MODEL = SailorModel(
    name="toy",
    times={
        ("fast", 1, 1): (1.0, 2.0, 3.0),
        ("fast", 1, 2): (0.6, 1.2, 1.8),
        ("slow", 1, 1): (2.0, 4.0, 6.0),
    },
    updates={("fast", 1, 1): 0.5, ("fast", 1, 2): 0.3, ("slow", 1, 1): 0.7},
    params={1: (1e6, 1e6, 2e6), 2: (0.5e6, 0.5e6, 1e6)},
    saved={1: (1e6, 1e6, 1e6), 2: (0.5e6, 0.5e6, 0.5e6)},
    outputs=(0.25e9, 0.5e9, 1.0),
)
#: 4 GB/s between fast devices, 1 GB/s to and between slow ones, whatever the size.
FITS = {
    (a, m, b, n): SailorFit(0.0, 0.0, 4.0 if (a, b) == ("fast", "fast") else 1.0)
    for a in ("fast", "slow")
    for b in ("fast", "slow")
    for m in (1, 2)
    for n in (1, 2)
}
TOY = SailorInstance(
    MODEL, (("fast", 2), ("fast", 2), ("slow", 2)), 12, FITS, {"fast": 4e9, "slow": 4e9}
)


def plan(*stages: tuple[int, int, tuple[tuple[str, int], ...]], micro_batch: int = 1) -> SailorPlan:
    return SailorPlan(micro_batch, tuple(SailorStage(*stage) for stage in stages))


@published
def test_the_values_of_sailors_simulator() -> None:
    opt = read_sailor_instance(SHARED, "OPT-350", {"A100-40": 8, "V100-16": 8}, 1024)
    mixed = plan((0, 26, (A,) * 8 + (V4,) * 2), micro_batch=2)
    assert sailor_seconds(opt, mixed) == pytest.approx(22.990843, abs=1e-6)
    split = plan((0, 7, (V,) * 8), (7, 26, (A,) * 8), micro_batch=2)
    assert sailor_seconds(opt, split) == pytest.approx(22.453885, abs=1e-6)
    neo = read_sailor_instance(SHARED, "GPT-Neo-2.7", {"A100-40": 8, "V100-16": 8}, 2048)
    cuts = (0, 6, 13, 20, 27, 34)
    five = plan(*((a, b, ((A if a else V4),) * 2) for a, b in pairwise(cuts)))
    assert sailor_seconds(neo, five) == pytest.approx(163.745157, abs=1e-6)


def test_a_step_by_hand() -> None:
    # Two stages, each of a fast and a slow replica: 1 GB of layer 0 crosses, at 4 and at 1 GB/s.
    pair = (("fast", 1), ("slow", 1))
    step = sailor_step(TOY, plan((0, 1, pair), (1, 3, pair)))
    # The last stage's gradient is that of its first layer, 2 GB, and counts twice.
    assert step == SailorStep(
        micro_batches=6,
        compute=(2.0, 10.0),
        transfer=(1.0, 4.0),
        update=0.7,
        reduction=2 * (12e6 / 2 / 1e9),
    )
    assert step.seconds == pytest.approx(5 * 14.0 + 17.0 + 0.7 + 0.012)


def test_the_first_of_more_than_three_stages_sends_twice() -> None:
    model = replace(
        MODEL,
        times={("fast", 1, 1): (1.0,) * 4},
        updates={("fast", 1, 1): 0.0},
        params={1: (0.0,) * 4},
        saved={1: (0.0,) * 4},
        outputs=(1e9,) * 4,
    )
    instance = replace(TOY, model=model)
    one = (("fast", 1),)
    three = sailor_step(instance, plan((0, 1, one), (1, 2, one), (2, 4, one)))
    four = sailor_step(instance, plan(*((at, at + 1, one) for at in range(4))))
    assert three.transfer == (1.0, 2.0, 2.0)
    assert four.transfer == (2.0, 2.0, 2.0, 2.0)


def test_memory_counts_the_micro_batches_in_flight() -> None:
    assert replica_bytes(TOY, ("fast", 1), 0, 2, 3) == 24 * 2e6 + 4 * 3 * 2e6 + 2e9
    assert replica_bytes(TOY, ("fast", 2), 0, 2, 3) == 24 * 1e6 + 4 * 3 * 1e6 + 3e9
    two = plan((0, 2, (("fast", 1),)), (2, 3, (("fast", 1),)))
    # The first stage keeps two micro-batches of two layers, the last one of one.
    need = 24 * 2e6 + 4 * 2 * 2e6 + 2e9
    assert fits_memory(replace(TOY, memory={"fast": need, "slow": 0.0}), two)
    tight = replace(TOY, memory={"fast": need - 1.0, "slow": 0.0})
    assert not fits_memory(tight, two)
    assert sailor_seconds(tight, two) == math.inf


def test_large_gradients_go_in_buckets() -> None:
    model = replace(MODEL, params={**MODEL.params, 1: (300e6, 0.0, 0.0)})
    whole = plan((0, 3, (("fast", 1),) * 2))
    # 1.2 GB in two buckets of 0.5 GB and one of 0.2 GB; each half of it twice over 4 GB/s.
    step = sailor_step(replace(TOY, model=model), whole)
    assert step.reduction == pytest.approx(2 * 1.2 / 2 / 4.0)


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        (plan((0, 3, (("slow", 2),))), "not profiled"),
        (plan((0, 3, (("fast", 1),)), micro_batch=2), "not profiled"),
        (plan((0, 3, (("fast", 4),))), "one machine"),
        (plan((0, 1, (("fast", 1),)), (1, 3, (("fast", 1),) * 2)), "equally many"),
        (plan((0, 1, (("fast", 1),)), (2, 3, (("fast", 1),))), "must cover"),
        (plan((0, 2, (("fast", 1),))), "must cover"),
        (plan((0, 3, (("slow", 1),) * 3)), "do not fit"),
        (plan((0, 3, (("fast", 1), ("fast", 2), ("fast", 2)))), "do not fit"),
        (plan((0, 3, (("none", 1),))), "no such device"),
        (plan((0, 3, ())), "equally many"),
        (plan(), "must cover"),
    ],
)
def test_what_the_rule_does_not_cover_is_refused(wrong: SailorPlan, rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        sailor_step(TOY, wrong)


@published
def test_an_unknown_kind_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="no such device") as refused:
        read_sailor_instance(SHARED, "OPT-350", {"A100": 8}, 1024)
    assert "A100-40" in str(refused.value.nearest)
