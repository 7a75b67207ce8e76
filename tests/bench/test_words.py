"""What planners say of themselves."""

from __future__ import annotations

import re

import pytest

from rlplace.bench.planners import ALL, planners
from rlplace.bench.words import words

EVERY = planners([ALL])


@pytest.mark.parametrize("name", EVERY)
def test_every_planner_says_what_it_is_and_what_it_decides(name: str) -> None:
    own = words(name, EVERY[name])
    assert 20 < len(own.title) < 300
    assert len(own.space) > 20, "its file has no paragraph that begins with 'Decision space:'"


def test_a_planner_of_a_file_of_its_own_has_the_first_line() -> None:
    own = words("dapple", EVERY["dapple"])
    assert own.title.startswith("DAPPLE (Fan et al., arXiv 2007.01045): stages and replicas")
    assert own.space.startswith("contiguous stages, each replicated")
    assert own.space.endswith("the micro-batch count")


def test_planners_of_one_file_have_their_own_entries() -> None:
    titles = [words(name, EVERY[name]).title for name in ("data_parallel", "zero1", "megatron")]
    for name, title in zip(("data_parallel", "zero1", "megatron"), titles, strict=True):
        assert re.match(rf"`{name}` \(.*arXiv", title), title
    assert titles[0].endswith("every device holds everything")
