"""The suites are frozen, apart from what is trained on, and legal questions."""

from __future__ import annotations

import pytest

from rlplace.bench.real import BRANCHING, CLUSTERS, FAMILIES, on_cluster
from rlplace.bench.suites import SUITES, fingerprint, suite
from rlplace.cluster.short import parse_cluster
from rlplace.envs.builders.room import has_room
from rlplace.envs.clusters import TRAIN_KINDS
from rlplace.errors import InputError
from rlplace.graph import library
from rlplace.planners.exhaustive import all_plans

#: Of every eighth problem. A change means that older results are of other questions.
_FROZEN = {
    "tiny": "dedfbc6646af0e73",
    "random": "4a8e258c2be1a31b",
    "random-dev": "ad6c1057abf701c8",
}


@pytest.mark.parametrize("name", _FROZEN)
def test_the_questions_are_frozen(name: str) -> None:
    problems = suite(name)
    assert len(problems) == 200
    assert fingerprint(problems[::8]) == _FROZEN[name]


def test_names_are_unique_and_makers_repeat() -> None:
    for name in SUITES:
        problems = suite(name)
        assert len({problem.name for problem in problems}) == len(problems)
    first, again = suite("random", 3)[1], suite("random", 3)[1]
    assert first.instance is not again.instance
    assert first.fingerprint == again.fingerprint


def test_a_part_is_spread_over_the_suite() -> None:
    names = [problem.name for problem in suite("tiny", 3)]
    assert names == ["tiny 0", "tiny 100", "tiny 199"]


@pytest.mark.parametrize(("name", "count"), [("tinny", None), ("tiny", 0)])
def test_what_is_not_there_is_refused(name: str, count: int | None) -> None:
    with pytest.raises(InputError, match=r"tiny|at least 1"):
        suite(name, count)


def test_evaluation_shares_no_device_kind_and_no_graph_with_training() -> None:
    evaluated, developed = suite("random", 20), suite("random-dev", 20)
    kinds = {kind.name for problem in evaluated for kind in problem.instance.cluster.kinds}
    assert not kinds & set(TRAIN_KINDS)
    graphs = [{p.instance.graph.fingerprint for p in part} for part in (evaluated, developed)]
    assert not graphs[0] & graphs[1]


def test_every_second_random_cluster_is_mixed() -> None:
    mixed = [len(problem.instance.cluster.islands) > 1 for problem in suite("random")[:10]]
    assert mixed == [False, True] * 5


def test_tiny_instances_can_be_enumerated_and_have_a_plan() -> None:
    for problem in suite("tiny", 12):
        assert has_room(problem.instance)
        assert 1 < sum(1 for _ in all_plans(problem.instance)) <= 12_000


def test_library_problems_are_known_models_on_known_clusters() -> None:
    assert len(FAMILIES) >= 12
    assert len(CLUSTERS) >= 10
    for family in (*FAMILIES, *BRANCHING):
        for model in family.models:
            library.spec(model, seq_len=family.seq_len)
    sizes = {name: len(parse_cluster(text).devices) for name, text in CLUSTERS.items()}
    assert {sizes["512xA100-80"], sizes["6xA100-80"], sizes["12xH100"]} == {512, 6, 12}


def test_the_largest_model_that_has_room_is_taken() -> None:
    family = next(one for one in FAMILIES if one.name == "resnet")
    instance = on_cluster(family, "6xA100-80")
    assert instance.graph.name == "resnet-152"
    assert instance.global_batch == 96
    assert has_room(instance)
