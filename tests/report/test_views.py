import json
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

from rich.console import Console

from rlplace.graph.types import Weight
from rlplace.plan.testing import chain, cluster, round_kind, transformer
from rlplace.plan.types import Instance
from rlplace.plan.uniform import uniform_plan
from rlplace.planners.types import PlannerResult
from rlplace.report.plan_view import (
    infeasible_data,
    notes,
    plan_data,
    render_alternatives,
    render_plan,
    short_names,
    stage_rows,
)
from rlplace.report.timeline_view import bars, chrome_trace, draw, save_trace
from rlplace.simulate.bound import bound
from rlplace.simulate.estimate import estimate, timeline
from rlplace.simulate.types import Event, MemoryUse, Timeline

INSTANCE = Instance(chain([1e12, 1e12, 2e12, 2e12]), cluster([[round_kind()] * 4]), 8, "fp32")
PLAN = uniform_plan(INSTANCE, pp=2, micro_batches=4, cuts=(2,))


def test_stage_rows_say_what_the_estimate_says() -> None:
    guess = estimate(INSTANCE, PLAN)
    rows = stage_rows(INSTANCE, PLAN, guess)
    assert [row.groups.split(":")[0] for row in rows] == ["2", "2"]
    assert [row.devices for row in rows] == ["0-1 round", "2-3 round"]
    assert [row.mesh for row in rows] == ["dp2", "dp2"]
    assert rows[1].busy == guess.stages[1].forward + guess.stages[1].backward
    assert rows[0].memory == max(guess.peak_memory[:2])
    assert rows[0].idle > rows[1].idle
    assert sum(rows[0].memory_parts.values()) == rows[0].memory


def test_ranges_of_ranks_that_are_not_neighbours() -> None:
    mesh = replace(PLAN.stages[0].mesh, devices=(0, 3))
    other = replace(PLAN.stages[1].mesh, devices=(1, 2))
    stages = (replace(PLAN.stages[0], mesh=mesh), replace(PLAN.stages[1], mesh=other))
    plan = replace(PLAN, stages=stages)
    rows = stage_rows(INSTANCE, plan, estimate(INSTANCE, plan))
    assert [row.devices for row in rows] == ["0,3 round", "1-2 round"]


def test_slices_of_weights_are_named() -> None:
    graph = chain([1e12, 1e12], params=64)
    works = (replace(own.work, weights=(Weight(0, 8, 8, True),)) for own in graph.structures)
    pairs = zip(graph.structures, works, strict=True)
    graph = replace(graph, structures=tuple(replace(own, work=work) for own, work in pairs))
    instance = replace(INSTANCE, graph=graph)
    plan = uniform_plan(instance, zero=3, micro_batches=2, slices=4)
    (row,) = stage_rows(instance, plan, estimate(instance, plan))
    assert row.layout == "ZeRO-3, 4 slices"


def test_plan_data_has_the_same_names_whether_something_fits_or_not() -> None:
    guess = estimate(INSTANCE, PLAN)
    limit = bound(INSTANCE)
    late = PlannerResult(None, None, "dynamic", 0, 0.2, stopped="seconds")
    found = plan_data(
        INSTANCE,
        PLAN,
        guess,
        bound=limit,
        planner="grid",
        plan_seconds=0.1,
        alternatives={"grid": PlannerResult(PLAN, guess, "grid", 1, 0.1), "dynamic": late},
    )
    assert json.loads(json.dumps(found))["gap"] == guess.step_time / limit - 1.0
    assert found["alternatives"]["dynamic"] == {
        "step_time": None,
        "seconds": 0.2,
        "stopped": "seconds",
    }
    nothing = infeasible_data(INSTANCE, "too large\nwhat would fit: more")
    assert set(nothing) == set(found)
    assert nothing["feasible"] is False
    assert nothing["reasons"] == ["too large", "what would fit: more"]


def test_a_planner_that_ran_out_of_time_is_not_said_to_find_nothing() -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))
    results = {
        stopped: PlannerResult(None, None, stopped, 1, 0.1, stopped=stopped)
        for stopped in ("done", "seconds")
    }
    console.print(render_alternatives("other", results))
    lines = console.export_text().splitlines()
    assert "nothing fits" in next(line for line in lines if line.startswith("done"))
    assert "none in its time" in next(line for line in lines if line.startswith("seconds "))


def test_rendered_plan_fits_eighty_columns() -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))
    console.print(render_plan(INSTANCE, PLAN, estimate(INSTANCE, PLAN), bound(INSTANCE)))
    text = console.export_text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_memory_is_shown_by_cause_and_whole_groups_are_noted() -> None:
    graph = transformer(2, degrees=(2,))
    head = replace(graph.structures[-1], layouts=())
    graph = replace(graph, structures=(*graph.structures[:-1], head))
    instance = Instance(graph, cluster([[round_kind()] * 4]), 8)
    plan = uniform_plan(instance, pp=2, tp=2)
    console = Console(width=80, record=True, file=open("/dev/null", "w"))
    console.print(render_plan(instance, plan, estimate(instance, plan), bound(instance)))
    lines = console.export_text().splitlines()
    head_line = next(line for line in lines if line.startswith("GiB of"))
    assert head_line.split()[2:] == [field.name for field in fields(MemoryUse)]
    assert sum(line.startswith("stage ") for line in lines) == 3, "the plan's table has one too"
    assert "at tp=2 every device runs all of head: no layout shards it" in lines
    assert max(map(len, lines)) <= 80
    assert notes(INSTANCE, PLAN) == []


def test_bars_are_the_events_of_every_device() -> None:
    line = timeline(INSTANCE, PLAN)
    drawn = bars(line)
    for device in range(4):
        own = sorted((bar for bar in drawn if bar.row == device), key=lambda bar: bar.start)
        assert [bar.kind for bar in own].count("F") == 4
        assert [bar.kind for bar in own].count("B") == 4
        for before, after in pairwise(own):
            assert after.start >= before.start + before.width - 1e-9
    step = estimate(INSTANCE, PLAN).step_time
    assert abs(max(bar.start + bar.width for bar in drawn) - step * 1e3) < 1e-6


def test_a_send_is_a_strip_below_what_runs_meanwhile() -> None:
    line = Timeline((Event(0, "F", 0, 1, 1.0, 2.0), Event(0, "send", 0, 0, 1.0, 1.5)))
    forward, send = bars(line)
    assert send.middle - send.height / 2 >= forward.middle
    assert send.middle + send.height / 2 <= forward.row + 0.5, "within the row"
    assert (send.label, forward.label) == ("", "1")


def test_picture_and_trace_are_written(tmp_path: Path) -> None:
    line = timeline(INSTANCE, PLAN)
    assert draw([line, line], tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads(save_trace(line, tmp_path / "trace.json").read_text())
    assert saved == json.loads(json.dumps(chrome_trace(line)))
    forward = [event for event in saved["traceEvents"] if event["cat"] == "F"]
    assert len(forward) == 4 * 4
    assert forward[0]["name"] == "0F0"
    assert all(event["dur"] >= 0 for event in saved["traceEvents"])


def test_names_lose_a_head_that_most_of_them_share() -> None:
    assert short_names(["m.embed", "m.layers.0", "head"]) == ["embed", "layers.0", "head"]
    assert short_names(["m.a", "a", "m.b"]) == ["m.a", "a", "m.b"]
    assert short_names(["x.a", "y.b", "z"]) == ["x.a", "y.b", "z"]
    assert short_names(["layers.0.a", "layers.1.a"]) == ["layers.0.a", "layers.1.a"]
