from __future__ import annotations

import json
import math
import re
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.cost.given import (
    PiperStage,
    broken_rule,
    device_loads,
    makespan,
    makespan_bound,
    max_load,
    piper_load,
    simulate_events,
    stage_load,
    stage_memory,
)
from rlplace.errors import InputError
from rlplace.graph.formats.dnn_partitioning import read_dnn_partitioning
from rlplace.graph.formats.doppler import read_doppler
from rlplace.graph.formats.giph import read_giph
from rlplace.graph.formats.piper import read_piper
from rlplace.graph.formats.read import read_instance, read_instances
from rlplace.graph.formats.types import GivenInstance, LoadCosts
from tests.graph.formats.examples import dnn_partitioning, doppler, giph, piper, shared

LOADS = read_dnn_partitioning(dnn_partitioning(), "tiny")
GIPH = read_giph(giph(), "0/0")
DOPPLER = read_doppler(doppler(), "tiny")
PIPER = read_piper(piper(), "tiny")


def reference(key: str) -> Any:
    return json.loads(shared("reference_values.json").read_text())[key]


# --- dnn-partitioning


def test_loads_count_each_output_once_at_each_accelerator() -> None:
    # a on the first accelerator sends to b (CPU) and c (second): one transfer out at the first,
    # one in at the second; b and c each send to d on the second: only b's crosses.
    loads = device_loads(LOADS, [1, 0, 2, 2])
    assert loads == pytest.approx((20.0, 1.0 + 0.5, 3.0 + 4.0 + 0.5 + 0.25))


def test_a_cpu_pays_for_no_transfer() -> None:
    assert device_loads(LOADS, [0, 0, 0, 0]) == (100.0, 0.0, 0.0)
    assert max_load(LOADS, [0, 0, 0, 0]) == 100.0


@pytest.mark.parametrize(
    ("placement", "rule"),
    [
        ([1, 1, 1, 2], "b cannot run on an accelerator"),
        ([1, 0, 2, 2], "c must share a device .* color class 1"),
        ([1, 0, 1, 1], "device 1 needs 160 bytes of 100"),
        ([1, 0, 1, 2], None),
    ],
)
def test_illegal_placements_say_why_and_cost_infinity(placement: list[int], rule: Any) -> None:
    broken = broken_rule(LOADS, placement)
    if rule is None:
        assert broken is None
        assert max_load(LOADS, placement) == 20.0
    else:
        assert broken is not None
        assert re.search(rule, broken)
        assert max_load(LOADS, placement) == math.inf


def test_everything_on_one_accelerator_costs_what_was_published() -> None:
    instances = read_instances(shared("dnn_partitioning_graphs.json"))
    published = reference("dnn_partitioning_max_load")
    assert len(published) == 8
    for name, values in published.items():
        found = instances[f"throughput-inputs/{name}"]
        loads = device_loads(found, [1] * len(found.graph.groups))
        assert max(loads) == pytest.approx(values["single_accelerator"], rel=1e-5)


@pytest.mark.parametrize("name", ["bert24_inference", "bert24_training", "resnet50_inference"])
def test_the_best_contiguous_split_costs_what_was_published(name: str) -> None:
    found = read_instance(
        shared("dnn_partitioning_graphs.json"), f"throughput-inputs/LayerGraphs/{name}"
    )
    published = reference("dnn_partitioning_max_load")[f"LayerGraphs/{name}"]
    assert best_contiguous(found) == pytest.approx(published["dp_contiguous_optimum"], rel=1e-5)


def best_contiguous(instance: GivenInstance) -> float:
    """The least largest load with one set of consecutive layers on each device.

    A plain dynamic program over the prefixes of the forward graph; an op of the backward pass goes
    with the forward op of its color class.
    """
    costs = instance.costs
    assert isinstance(costs, LoadCosts)
    layers = [op for op, backward in enumerate(costs.backward) if not backward]
    home = {costs.colors[op]: index for index, op in enumerate(layers)}
    layer_of = [home[color] for color in costs.colors]
    needs = [0] * len(layers)
    for edge in instance.graph.edges:
        if not costs.backward[edge.dst]:
            needs[layer_of[edge.dst]] |= 1 << layer_of[edge.src]
    prefixes = prefixes_of(needs)
    best = {0: [0.0] * (costs.accelerators + 1)}
    on_cpu = {0: [0.0] * (costs.accelerators + 1)}
    for prefix in prefixes[1:]:
        best[prefix] = [math.inf] * (costs.accelerators + 1)
        on_cpu[prefix] = [math.inf] * (costs.accelerators + 1)
        for smaller in (p for p in prefixes if p & prefix == p and p != prefix):
            cpu, accelerator = loads_of(instance, costs, layer_of, prefix ^ smaller)
            for used in range(costs.accelerators + 1):
                options = [best[prefix][used], max(best[smaller][used - 1], accelerator)]
                best[prefix][used] = min(options[: 1 + (used > 0)])
                options = [
                    on_cpu[prefix][used],
                    max(best[smaller][used], cpu),
                    max(on_cpu[smaller][used - 1], accelerator) if used else math.inf,
                ]
                on_cpu[prefix][used] = min(options)
    return min(*best[prefixes[-1]], *on_cpu[prefixes[-1]])


def prefixes_of(needs: list[int]) -> list[int]:
    """All sets of layers that hold what each of their layers needs, as bits, small ones first."""
    found, front = {0}, [0]
    while front:
        grown = {
            prefix | 1 << layer
            for prefix in front
            for layer, need in enumerate(needs)
            if not prefix >> layer & 1 and need & prefix == need
        }
        front = sorted(grown - found)
        found |= grown
    return sorted(found, key=lambda prefix: (prefix.bit_count(), prefix))


def loads_of(
    instance: GivenInstance, costs: LoadCosts, layer_of: list[int], layers: int
) -> tuple[float, float]:
    """Loads of a CPU and of an accelerator that runs a set of layers; infinity if it overflows."""
    inside = [op for op, layer in enumerate(layer_of) if layers >> layer & 1]
    cpu = sum(costs.cpu_times[op] for op in inside)
    if sum(costs.memory[op] for op in inside) > costs.memory_cap:
        return cpu, math.inf
    placement = [costs.cpus if layers >> layer & 1 else costs.cpus + 1 for layer in layer_of]
    return cpu, device_loads(instance, placement)[costs.cpus]


# --- GiPH and DOPPLER


def test_a_schedule_by_hand() -> None:
    # Op 0 on device 0 until 1. Its 8 units reach op 1 at once and its 4 units op 2 on device 1 at
    # 1 + 3 + 4 * 0.5 = 6; op 2 takes 2 * 2 there, and its 4 units come back by 10 + 3 + 4 * 0.25.
    schedule = simulate_events(GIPH, [0, 0, 1, 0])
    assert schedule.start == (0.0, 1.0, 6.0, 14.0)
    assert schedule.end == (1.0, 5.0, 10.0, 15.0)
    assert makespan(GIPH, [0, 0, 1, 0]) == 15.0
    assert makespan(GIPH, [0, 0, 0, 0]) == 8.0


def test_an_op_may_not_run_everywhere() -> None:
    with pytest.raises(InputError, match="placement of op1=1: may not run there"):
        makespan(GIPH, [0, 1, 0, 0])


@given(st.integers(0, 15))
def test_laws_of_the_simulator(bits: int) -> None:
    placement = [bits >> op & 1 for op in range(4)]
    schedule = simulate_events(DOPPLER, placement)
    for edge, size in zip(DOPPLER.graph.edges, (4.0, 4.0, 1.0, 1.0), strict=True):
        delay = 0.0 if placement[edge.src] == placement[edge.dst] else size
        assert schedule.start[edge.dst] >= schedule.end[edge.src] + delay
    for a, b in product(range(4), repeat=2):
        if a != b and placement[a] == placement[b]:
            assert schedule.end[a] <= schedule.start[b] or schedule.end[b] <= schedule.start[a]
    assert schedule.makespan >= makespan_bound(DOPPLER)


def test_first_come_first_served() -> None:
    # Ops 1 and 2 ask device 0 at the same time: the edge of op 1 was made first.
    schedule = simulate_events(DOPPLER, [0, 0, 0, 0])
    assert schedule.start == (0.0, 1.0, 3.0, 5.0)


def test_published_placements_of_giph_take_the_published_time() -> None:
    path = shared("giph_small8dev.json")
    cases = json.loads(path.read_text())["reference"]
    assert len(cases) == 12
    for case in cases:
        found = read_instance(path, f"{case['network']}/{case['program']}")
        time = makespan(found, found.from_file_order(case["heft_placement"]))
        assert time == pytest.approx(case["heft_makespan"], rel=1e-6)
        assert time >= makespan_bound(found)


def test_published_values_of_doppler() -> None:
    simulators = reference("doppler_simulator")
    chain = read_instance(shared("doppler_graphs.json"), "chain_mm")
    values = simulators["chain_mm_4dev"]
    ops = len(chain.graph.groups)
    assert makespan(chain, [0] * ops) == pytest.approx(values["peer_simulator"]["single_device"])
    round_robin = [op % 4 for op in range(ops)]
    assert makespan(chain, round_robin) == pytest.approx(values["peer_simulator"]["round_robin"])
    bound = values["own_fast_simulator"]["lower_bound"]
    assert makespan_bound(chain) == pytest.approx(bound)
    ffnn = read_instance(shared("doppler_graphs.json"), "ffnn")
    bound = simulators["ffnn_4dev"]["own_fast_simulator"]["lower_bound"]
    assert makespan_bound(ffnn) == pytest.approx(bound, rel=1e-5)


# --- Piper


def test_a_stage_pays_for_compute_crossing_edges_and_the_exchange() -> None:
    first = PiperStage((0,), 2, 1, ("plain",))
    # 6 / 2; the edge costs 2 * 16 bytes over two copies; the exchange 4 * 1 * 16 / 2 / 8 bytes.
    assert stage_load(PIPER, first) == 6 / 2 + (32 / 2 + 4.0) / 8
    second = PiperStage((1,), 1, 2, ("plain",))
    assert stage_load(PIPER, second) == 2.5 + 2 * (16 + 4) / 8
    whole = PiperStage((0, 1), 1, 1, ("plain", "redo"))
    assert stage_load(PIPER, whole) == 11.0


def test_memory_counts_the_micro_batches_in_flight() -> None:
    first = PiperStage((0,), 2, 1, ("plain",))
    assert stage_memory(PIPER, first, later_copies=0) == 20 + 10
    assert stage_memory(PIPER, first, later_copies=1) == 2 * 20 + 10


def test_the_load_of_a_pipeline_is_its_slowest_stage_and_it_has_to_fit() -> None:
    first, second = PiperStage((0,), 2, 1, ("plain",)), PiperStage((1,), 1, 1, ("plain",))
    load = max(stage_load(PIPER, stage) for stage in (first, second))
    assert piper_load(PIPER, [first, second]) == load
    whole = PiperStage((0, 1), 1, 1, ("plain", "plain"))
    assert stage_memory(PIPER, whole, 0) == 80
    assert piper_load(PIPER, [whole]) == math.inf
    assert piper_load(PIPER, [PiperStage((0, 1), 1, 1, ("plain", "redo"))]) == 11.0


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([PiperStage((0,), 1, 1, ("plain",))], "exactly one stage"),
        ([PiperStage((1,), 1, 1, ("plain",)), PiperStage((0,), 1, 1, ("plain",))], "backward"),
        ([PiperStage((0, 1), 3, 1, ("plain", "redo"))], "divide the 8 micro-batches"),
        ([PiperStage((0, 1), 8, 1, ("plain", "redo"))], "more devices than there are"),
        ([PiperStage((0, 1), 1, 2, ("plain", "plain"))], "no such variant"),
    ],
)
def test_illegal_pipelines_are_refused(stages: list[PiperStage], message: str) -> None:
    with pytest.raises(InputError, match=message):
        piper_load(PIPER, stages)


def test_one_published_stage_without_cuts_costs_its_compute() -> None:
    found = read_instance(shared("piper_graphs.json"), "bert32a100")
    groups = len(found.graph.groups)
    whole = PiperStage(tuple(range(groups)), 1, 1, ("vanilla",) * groups)
    assert stage_load(found, whole) == pytest.approx(0.972864)
    # Eight copies: an eighth of it, and the exchange of 2.6e9 parameter bytes for 1920 samples.
    copies = PiperStage(tuple(range(groups)), 8, 1, ("vanilla",) * groups)
    assert 0.972864 / 8 < stage_load(found, copies) < 0.972864 / 8 * 1.01


# --- any form


def test_a_rule_refuses_the_costs_of_another_form() -> None:
    with pytest.raises(InputError, match="needs LoadCosts"):
        max_load(GIPH, [0] * 4)
    with pytest.raises(InputError, match="needs EventCosts"):
        makespan(LOADS, [0] * 4)
    with pytest.raises(InputError, match="needs PiperCosts"):
        piper_load(GIPH, [])


def test_a_placement_names_a_device_for_every_group() -> None:
    with pytest.raises(InputError, match="length of the placement=3"):
        makespan(GIPH, [0, 0, 0])
    with pytest.raises(InputError, match="placement of op2=2: devices are 0 to 1"):
        makespan(GIPH, [0, 0, 2, 0])
