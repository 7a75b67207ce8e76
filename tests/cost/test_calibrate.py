"""Tests of fitting constants, through the real estimator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rlplace.cluster.types import Cluster, DeviceKind, Link
from rlplace.cost.calibrate import fit
from rlplace.cost.constants import apply
from rlplace.cost.measured import Measured, percentile_error, split
from rlplace.errors import InputError
from rlplace.plan import testing
from rlplace.plan.frameworks import Framework
from rlplace.plan.types import Instance
from rlplace.plan.uniform import uniform_plan
from rlplace.simulate.predict import predict

KIND = DeviceKind(
    "card", int(80e9), {"bf16": 200e12, "fp32": 20e12}, 1.5e12, max_efficiency=0.6, half_flops=1e9
)
TRUTH = {
    "kind.card.max_efficiency": 0.83,
    "kind.card.memory_efficiency": 0.55,
    "link.net.bandwidth": 4e9,
}
NAMES = tuple(TRUTH)


def cluster(devices: int) -> Cluster:
    """Nodes of two cards with a slow network between them."""
    return testing.cluster(
        [[KIND, KIND]] * (devices // 2),
        intra=Link(100e9, 2e-6, "inner"),
        nic=Link(10e9, 1e-5, "net"),
    )


def questions() -> list[Measured]:
    """Models of several widths on 2 to 8 cards in several shapes, not yet measured."""
    found = []
    clusters = {devices: cluster(devices) for devices in (2, 4, 8)}
    for width in (128, 512, 2048):
        graph = testing.transformer(4, width, seq_len=256)
        for devices, where in clusters.items():
            instance = Instance(graph, where, 64)
            for pp, tp, micro_batch in ((1, 1, 4), (2, 1, 2), (1, 2, 8), (2, 2, 4)):
                if devices % (pp * tp) == 0 and 64 % (devices // pp // tp * micro_batch) == 0:
                    plan = uniform_plan(instance, pp=pp, tp=tp, micro_batch=micro_batch)
                    name = f"{width} on {devices}: pp{pp} tp{tp}"
                    found.append(Measured(instance, plan, 1.0, name=name))
    return found


def measured(
    rows: Sequence[Measured], truth: dict[str, float], noise: float = 0.0, sick: int = 0
) -> list[Measured]:
    """The rows as a machine with these constants would run them."""
    rng = np.random.default_rng(0)
    real = predict([replace(row, instance=apply(row.instance, truth)) for row in rows])
    ill = set(rng.choice(len(rows), sick, replace=False).tolist())
    return [
        replace(row, step_time=seconds * rng.lognormal(0.0, noise) * (20.0 if i in ill else 1.0))
        for i, (row, (seconds, _)) in enumerate(zip(rows, real, strict=True))
    ]


def test_known_constants_are_recovered() -> None:
    found = fit(measured(questions(), TRUTH), NAMES, predict)
    assert not found.undetermined
    assert found.constants == pytest.approx(TRUTH, rel=0.01)
    assert percentile_error(found.fitted) < 1e-3 < percentile_error(found.fitted, before=True)


def test_noise_and_sick_runs_do_not_mislead() -> None:
    rows = measured(questions(), TRUTH, noise=0.03, sick=2)
    found = fit(rows, NAMES, predict)
    assert found.constants == pytest.approx(TRUTH, rel=0.1)
    assert max(found.errors.values()) < 0.1
    assert percentile_error(found.fitted) < 0.05


def test_the_band_is_of_rows_that_were_not_fitted() -> None:
    rows = measured(questions(), TRUTH, noise=0.05)
    fitted, others = split(rows, 0.3)
    assert len(fitted) + len(others) == len(rows)
    assert others
    found = fit(fitted, NAMES, predict, held_out=others)
    assert (len(found.fitted), len(found.held_out)) == (len(fitted), len(others))
    ratios = [row.measured / row.after for row in found.held_out]
    assert found.band == pytest.approx(np.percentile(ratios, [10, 90]))
    assert found.band[0] < 1.0 < found.band[1]
    assert found.band_rows == "held out"
    assert fit(fitted, NAMES[:1], predict).band_rows == "fitted"


def test_what_no_row_tells_is_left_as_it_was() -> None:
    rows = measured(questions(), TRUTH)
    reserve = {"kind.card.reserve": 1e9}
    rows = [replace(row, instance=apply(row.instance, reserve)) for row in rows]
    found = fit(rows, (*NAMES, "kind.card.reserve"), predict)
    assert "no prediction moves" in found.undetermined["kind.card.reserve"]
    assert "kind.card.reserve" not in found.constants
    assert found.constants == pytest.approx(TRUTH, rel=0.01)


def test_what_runs_into_its_limit_is_left_as_it_was() -> None:
    rows = measured(questions(), TRUTH)
    rows = [replace(row, step_time=(row.step_time or 0.0) / 1e3) for row in rows]
    found = fit(rows, NAMES[:1], predict)
    assert "runs into its limit" in found.undetermined[NAMES[0]]
    assert found.constants == {}
    assert all(row.before == row.after for row in found.fitted)


def test_two_constants_that_do_the_same_are_not_both_fitted() -> None:
    # Efficiency of the memory and its bandwidth occur as a product only.
    names = ("kind.card.memory_efficiency", "kind.card.bandwidth")
    found = fit(measured(questions(), TRUTH), names, predict)
    assert len(found.undetermined) == 1
    assert "other constants explain the same" in next(iter(found.undetermined.values()))


def test_memory_tells_the_reserve() -> None:
    rows = [
        replace(row, instance=apply(row.instance, {"kind.card.reserve": 1e9}))
        for row in questions()
    ]
    real = predict(
        [replace(r, instance=apply(r.instance, {"kind.card.reserve": 3e9})) for r in rows]
    )
    rows = [
        Measured(row.instance, row.plan, None, size)
        for row, (_, size) in zip(rows, real, strict=True)
    ]
    found = fit(rows, ("kind.card.reserve",), predict)
    assert found.constants["kind.card.reserve"] == pytest.approx(3e9, rel=0.01)
    assert {row.quantity for row in found.fitted} == {"peak_memory"}
    assert found.band == (1.0, 1.0)


def test_an_interrupted_fit_keeps_the_best_so_far() -> None:
    def impatient(evaluations: int, _median: float) -> None:
        if evaluations == 9:
            raise KeyboardInterrupt

    found = fit(measured(questions(), TRUTH), NAMES, predict, progress=impatient)
    assert found.interrupted

    def loss(predicted: list[float]) -> float:
        misses = np.log([p / row.measured for p, row in zip(predicted, found.fitted, strict=True)])
        return float(np.sum(np.sqrt(1.0 + (misses / 0.1) ** 2) - 1.0))

    before, after = ([getattr(row, at) for row in found.fitted] for at in ("before", "after"))
    assert loss(after) < loss(before)


def test_progress_counts_and_gets_better() -> None:
    seen: list[tuple[int, float]] = []
    fit(measured(questions(), TRUTH), NAMES, predict, progress=lambda *now: seen.append(now))
    assert [count for count, _ in seen] == list(range(1, len(seen) + 1))
    assert seen[-1][1] <= seen[0][1]


def test_unknown_names_are_refused_with_the_nearest() -> None:
    rows = measured(questions()[-3:], TRUTH)
    for name, nearest in (
        ("kind.card.max_eficiency", "kind.card.max_efficiency"),
        ("kind.cart.max_efficiency", "kind.card.max_efficiency"),
        ("link.nett.latency", "link.net.latency"),
        ("kinds.card.overlap", "kind"),
        ("card", "kind.H100-80.max_efficiency"),
    ):
        with pytest.raises(InputError) as refused:
            fit(rows, [name], predict)
        assert nearest in str(refused.value.nearest)


def test_too_few_measurements_are_refused() -> None:
    with pytest.raises(InputError, match="fewer than the 3 constants"):
        fit(measured(questions()[-2:], TRUTH), NAMES, predict)


def own(rows: Sequence[Measured]) -> list[Measured]:
    """The rows, run by a framework without overheads."""
    return [replace(r, instance=replace(r.instance, framework=Framework("own"))) for r in rows]


def on_gpus(rows: Sequence[Measured]) -> list[Measured]:
    """The rows, on devices that have a host beside them."""
    made = []
    for row in rows:
        cluster = row.instance.cluster
        kinds = tuple(replace(kind, sms=1, max_efficiency=1.0) for kind in cluster.kinds)
        instance = replace(row.instance, cluster=replace(cluster, kinds=kinds))
        plan = replace(row.plan, cluster=instance.cluster.fingerprint)
        made.append(replace(row, instance=instance, plan=plan))
    return made


def test_an_overhead_is_found_though_none_was_known() -> None:
    name = "framework.own.launch"
    rows = measured(on_gpus(own(questions())), {name: 2e-4})
    found = fit(rows, [name], predict)
    assert found.before == {name: 0.0}
    assert found.constants[name] == pytest.approx(2e-4, rel=0.02)


def test_a_constant_that_is_zero_needs_limits_to_start_from() -> None:
    with pytest.raises(InputError, match="nowhere to start"):
        fit(measured(own(questions()[:3]), {}), ["kind.card.reserve"], predict)


def test_a_measurement_is_above_zero_and_measures_something() -> None:
    row = questions()[0]
    with pytest.raises(InputError, match="above zero"):
        replace(row, step_time=0.0)
    with pytest.raises(InputError, match="neither"):
        replace(row, step_time=None)
