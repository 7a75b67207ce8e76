"""Plans as files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.errors import InputError
from rlplace.plan.files import FORMAT, dump_plan, load_plan, parse_plan
from rlplace.plan.testing import cluster, random_plan, round_kind, transformer
from rlplace.plan.types import Action, GroupChoice, Instance, Mesh, Plan, Stage
from rlplace.plan.uniform import uniform_plan

degrees = st.integers(1, 64)
choices = st.builds(
    GroupChoice,
    st.text(),
    st.integers(0, 3),
    st.sampled_from(["none", "full"]),
    slices=st.integers(1, 8),
)
ranks = st.lists(st.integers(0, 4096), max_size=8).map(tuple)
meshes = st.builds(Mesh, ranks, degrees, degrees, degrees, degrees)
stages = st.builds(Stage, degrees, degrees, meshes, st.lists(choices, max_size=4).map(tuple))
values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
actions = st.builds(Action, degrees, st.sampled_from(["F", "B", "W"]), degrees)
plans = st.builds(
    Plan,
    st.lists(stages, max_size=3).map(tuple),
    degrees,
    degrees,
    st.text(),
    st.text(),
    graph_name=st.text(),
    source=st.dictionaries(st.text(), values, max_size=3),
    orders=st.lists(st.lists(actions, max_size=4).map(tuple), max_size=3).map(tuple),
)


def _plan() -> Plan:
    instance = Instance(transformer(2), cluster([[round_kind()] * 4]), 8)
    return uniform_plan(instance, pp=2, tp=2)


@given(plans)
def test_json_and_back(plan: Plan) -> None:
    again = parse_plan(json.loads(json.dumps(dump_plan(plan))))
    assert again == plan
    assert {k: type(v) for k, v in again.source.items()} == {
        k: type(v) for k, v in plan.source.items()
    }


def test_a_file_and_back(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    instance = Instance(transformer(2), cluster([[round_kind()] * 4]), 8)
    for seed in range(5):
        plan = random_plan(instance, np.random.default_rng(seed))
        first, *rest = plan.stages
        named = replace(first, shares=first.samples(plan.micro_batch))
        plan = replace(plan, stages=(named, *rest))
        plan.save(path)
        assert Plan.load(path) == plan
    assert [child.name for child in tmp_path.iterdir()] == ["plan.json"]


def test_action_lists_are_short_texts() -> None:
    orders = ((Action(0, "F", 0), Action(0, "B", 0)), (Action(1, "W", 2),))
    plan = replace(_plan(), schedule="explicit", orders=orders)
    assert dump_plan(plan)["plan"]["orders"] == ["0F0 0B0", "1W2"]
    with pytest.raises(InputError, match="an action is a stage"):
        parse_plan(_broken(orders=["0F0 F1"]))
    with pytest.raises(InputError, match="a text of actions for each lane"):
        parse_plan(_broken(orders=[["0F0"]]))


def _broken(**changes: Any) -> dict[str, Any]:
    data = dump_plan(_plan())
    data["plan"] |= changes
    return data


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "not a plan file"),
        ({}, "no 'format'"),
        (dump_plan(_plan()) | {"format": 99}, "reads format 1"),
        ({"format": FORMAT}, "plan"),
        (_broken(micro_batches="many"), "micro_batches='many'"),
        (_broken(micro_batches=2.5), "micro_batches=2.5"),
        (_broken(micro_batches="4"), "micro_batches='4'"),
        (_broken(stages=[{"start": 0}]), "stages.0"),
        (_broken(micro_batchs=4), "micro_batchs"),
    ],
)
def test_a_wrong_field_is_named(data: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_plan(data)


def test_a_field_deep_inside_is_named() -> None:
    data = dump_plan(_plan())
    data["plan"]["stages"][1]["choices"][0]["recompute"] = "perhaps"
    with pytest.raises(InputError, match=r"my\.json: stages\.1\.choices\.0\.recompute='perhaps'"):
        parse_plan(data, where="my.json")


def test_a_missing_field_is_named() -> None:
    data = dump_plan(_plan())
    del data["plan"]["stages"][0]["mesh"]
    with pytest.raises(InputError, match=r"stages\.0\.mesh"):
        parse_plan(data)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_cut_off_file(tmp_path: Path, share: float) -> None:
    path = tmp_path / "plan.json"
    _plan().save(path)
    text = path.read_text()
    path.write_text(text[: int(share * len(text.rstrip()))])
    with pytest.raises(InputError, match="may be cut off"):
        load_plan(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        load_plan(tmp_path / "none.json")
    with pytest.raises(InputError, match="Is a directory"):
        load_plan(tmp_path)
    (tmp_path / "binary").write_bytes(b"\x80\x81\xff" * 9)
    with pytest.raises(InputError, match="not text"):
        load_plan(tmp_path / "binary")
