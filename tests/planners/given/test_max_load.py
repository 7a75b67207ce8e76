from __future__ import annotations

import json
import math
from itertools import product
from typing import Any

import networkx as nx
import numpy as np
import pytest

from rlplace.cost.given import broken_rule, max_load
from rlplace.errors import InputError
from rlplace.graph.formats.dnn_partitioning import read_dnn_partitioning
from rlplace.graph.formats.giph import read_giph
from rlplace.graph.formats.read import read_instances
from rlplace.graph.formats.types import GivenInstance, LoadCosts
from rlplace.planners.given.contiguous import best_contiguous
from rlplace.planners.given.ideals import find_ideals
from rlplace.planners.given.max_load import contiguous, scattered
from rlplace.planners.given.units import contiguous_units
from rlplace.planners.types import Limits
from tests.graph.formats.examples import giph, shared


def random_instance(seed: int, training: bool) -> GivenInstance:
    """Six layers with skips, some without time; two accelerators and a CPU, memory that binds.

    In training every layer has a backward op too, and one backward op has no layer.
    """
    rng = np.random.default_rng(seed)
    layers = 6 if not training else 5
    nodes: list[dict[str, Any]] = []
    edges: list[tuple[int, int]] = []

    def node(at: int, backward: bool, color: int) -> None:
        time = float(rng.integers(0, 4))
        one = {"id": at, "fpgaLatency": time, "cpuLatency": 3.0 * time, "colorClass": color}
        size = float(rng.integers(0, 3))
        supported = bool(rng.random() < 0.9)
        nodes.append(
            {**one, "size": size, "supportedOnFpga": supported, "isBackwardNode": backward}
        )

    for layer in range(layers):
        node(layer, False, layer if rng.random() < 0.8 else 0)
    costs = rng.integers(0, 3, 20) / 4
    pairs = [(a, b) for b in range(layers) for a in range(b) if rng.random() < 0.4]
    edges += [(a, b) for a, b in pairs]
    if training:
        for layer in range(layers):
            node(10 + layer, True, nodes[layer]["colorClass"])
        node(19, True, 99)
        edges += [(10 + b, 10 + a) for a, b in pairs] + [(layers - 1, 10 + layers - 1), (19, 10)]
    return read_dnn_partitioning(
        {
            "maxSizePerFPGA": 0.7 * sum(float(n["size"]) for n in nodes),
            "maxFPGAs": 2,
            "maxCPUs": 1,
            "nodes": nodes,
            "edges": [{"sourceId": a, "destId": b, "cost": costs[a]} for a, b in edges],
        },
        "random",
    )


def all_loads(instance: GivenInstance) -> tuple[float, float]:
    """The least largest load of all placements: of contiguous ones, and of any."""
    costs = instance.costs
    assert isinstance(costs, LoadCosts)
    colors = sorted({c for c in costs.colors if c is not None})
    with_layer = {
        c for c, backward in zip(costs.colors, costs.backward, strict=True) if not backward
    }
    order = []
    for edge in instance.graph.edges:
        a, b = costs.colors[edge.src], costs.colors[edge.dst]
        ends = costs.backward[edge.src], costs.backward[edge.dst]
        if not any(ends):
            order.append((a, b))
        elif all(ends) and not {a, b} <= with_layer:
            order.append((b, a))
    least = [math.inf, math.inf]
    for devices in product(range(costs.devices), repeat=len(colors)):
        of = dict(zip(colors, devices, strict=True))
        load = max_load(instance, [of[c] for c in costs.colors if c is not None])
        least[1] = min(least[1], load)
        if load < least[0]:
            quotient = nx.DiGraph((of[a], of[b]) for a, b in order if of[a] != of[b])  # type: ignore[index]  # all have a class
            if nx.is_directed_acyclic_graph(quotient):
                least[0] = load
    return least[0], least[1]


@pytest.mark.parametrize("training", [False, True])
def test_both_reach_the_optimum_of_all_placements(training: bool) -> None:
    for seed in range(15):
        instance = random_instance(seed, training)
        best, anyhow = all_loads(instance)
        rng = np.random.default_rng(0)
        found = contiguous(instance, Limits(), rng)
        assert found.value == pytest.approx(best), seed
        assert best_contiguous(instance).bound <= best * (1 + 1e-9)
        other = scattered(instance, Limits(evaluations=60_000), rng)
        assert other.value == pytest.approx(anyhow), seed
        assert other.placement is not None
        assert broken_rule(instance, other.placement) is None


def test_with_few_ideals_allowed_the_parts_are_runs_of_a_line() -> None:
    for seed in range(10):
        instance = random_instance(seed, False)
        exact, line = best_contiguous(instance), best_contiguous(instance, most=2)
        assert line.bound <= exact.load * (1 + 1e-9)
        assert exact.load <= line.load * (1 + 1e-9)
        assert max_load(instance, line.placement) == pytest.approx(line.load)


def test_ideals_are_the_sets_that_hold_what_they_need() -> None:
    ideals = find_ideals([[], [0], [0], [1, 2]], 100)  # a diamond
    assert ideals is not None
    assert ideals.members == (0, 0b1, 0b11, 0b101, 0b111, 0b1111)
    assert ideals.between(1, 4) == (1, 2)
    assert ideals.sums(np.array([1.0, 2.0, 4.0, 8.0])).tolist() == [0, 1, 3, 5, 7, 15]
    assert find_ideals([[], [0], [0], [1, 2]], 5) is None


def test_the_same_seed_gives_the_same_placement() -> None:
    instance = random_instance(1, True)
    one, two = (
        scattered(instance, Limits(evaluations=5_000), np.random.default_rng(7)) for _ in range(2)
    )
    assert one.placement == two.placement
    assert one.evaluations == two.evaluations


def test_one_evaluation_is_an_answer_and_another_form_is_refused() -> None:
    found = scattered(random_instance(2, False), Limits(evaluations=1), np.random.default_rng(0))
    assert found.placement is not None
    assert found.stopped == "evaluations"
    for placer in (contiguous, scattered):
        with pytest.raises(InputError, match="needs LoadCosts"):
            placer(read_giph(giph(), "0/0"), Limits(), np.random.default_rng(0))


def published() -> dict[str, tuple[GivenInstance, dict[str, float]]]:
    instances = read_instances(shared("dnn_partitioning_graphs.json"))
    values = json.loads(shared("reference_values.json").read_text())["dnn_partitioning_max_load"]
    return {name: (instances[f"throughput-inputs/{name}"], own) for name, own in values.items()}


def test_the_published_contiguous_optima_are_found() -> None:
    cases = published()
    assert len(cases) == 8
    for name, (instance, values) in cases.items():
        found = best_contiguous(instance)
        assert found.load == pytest.approx(values["dp_contiguous_optimum"], rel=1e-5), name
        assert found.bound == found.load
        assert max_load(instance, found.placement) == pytest.approx(found.load)


def test_exact_merging_leaves_few_ideals_of_the_published_translator() -> None:
    """Zero-time nodes join their neighbours: 168 ideals, of over 400,000 without that."""
    instance, _ = published()["LayerGraphs/gnmt_inference"]
    units = contiguous_units(instance)
    ideals = find_ideals([sorted(before) for before in units.before], 1000)
    assert ideals is not None
    assert len(ideals) == 168


@pytest.mark.parametrize(
    "name",
    [
        "LayerGraphs/bert24_training",
        "LayerGraphs/gnmt_training",
        "OperatorGraphs/bert_l-3_training",
    ],
)
def test_other_shapes_beat_the_published_search_and_contiguous_parts(name: str) -> None:
    instance, values = published()[name]
    found = scattered(instance, Limits(evaluations=300_000), np.random.default_rng(0))
    assert found.value < values["local_search_10_restarts_noncontiguous"]
    assert found.value < values["dp_contiguous_optimum"] * (1 - 1e-6)
