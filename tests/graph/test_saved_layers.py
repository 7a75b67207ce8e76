"""What a GPT layer saves against the closed formula of Korthikanti et al. (arXiv 2205.05198).

Their table 2, in bytes at 16 bits, with s tokens, b samples, width h, a heads and t devices on the
tp axis. The formula leaves out the statistics of norms and of the softmax (a flash kernel's
log-sum-exps); beyond these the counts are equal to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlplace.graph import library
from rlplace.graph.types import Layout, OpGraph, Work

S, H, A = 512, 1024, 16
SBH = S * H
SCORES = 5 * A * S / H


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    shape: dict[str, Any] = {
        "layers": 1,
        "hidden": H,
        "heads": A,
        "ffn": 4 * H,
        "vocab": 512,
        "seq_len": S,
    }
    return library.build("gpt", dropout=0.1, tie_embeddings=False, **shape)


def of_layer(graph: OpGraph, name: str, degree: int) -> list[Layout]:
    """The attention and the MLP of the layer."""
    layers = [group for group in graph.groups if ".h.0." in group.name]
    assert [group.name.split(".")[-1] for group in layers] == ["attn", "mlp"]
    found = [graph.structure(group.index).layouts_with("tp", degree) for group in layers]
    return [next(lay for lay in layouts if lay.name == name) for layouts in found]


def scores(work: Work) -> float:
    """Bytes that a math kernel keeps of its scores at 16 bits."""
    return 2 * work.score_floats(1) + 3 * work.dropped_scores(1)


def saved(layouts: list[Layout]) -> float:
    """Bytes a sample, where what was gathered is gathered again."""
    kept = (lay.work.saved(1) - lay.gathered(1) for lay in layouts)
    return 2 * sum(kept) + sum(lay.work.saved_bytes(1) for lay in layouts)


def statistics(norm_rows: float, heads: float) -> float:
    """Bytes of mean and deviation of two norms, and of a log-sum-exp a head and query."""
    return 2 * (2 * 2 * norm_rows + heads * S)


CASES: dict[str, tuple[str, Callable[[int], float], Callable[[int], float]]] = {
    "whole": ("replicate", lambda t: 34 + SCORES, lambda t: statistics(S, A)),
    "tp": ("shard", lambda t: 10 + 24 / t + SCORES / t, lambda t: statistics(S, A / t)),
    "sequence": ("sequence", lambda t: (34 + SCORES) / t, lambda t: statistics(S / t, A / t)),
}


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("case", CASES)
def test_a_layer_saves_what_the_formula_says(graph: OpGraph, case: str, degree: int) -> None:
    name, factor, extra = CASES[case]
    layouts = of_layer(graph, name, degree)

    counted = saved(layouts) + sum(scores(lay.work) for lay in layouts)

    assert counted - SBH * factor(degree) == pytest.approx(extra(degree), abs=1e-6)
    assert counted == pytest.approx(SBH * factor(degree), rel=0.0012)


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_selective_recompute_keeps_all_but_the_scores(graph: OpGraph, degree: int) -> None:
    counted = saved(of_layer(graph, "sequence", degree))
    assert counted == pytest.approx(SBH * 34 / degree, rel=0.0012)


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_gathered_copies_are_those_of_the_inputs_of_attention_and_mlp(
    graph: OpGraph, degree: int
) -> None:
    """Two copies of sbh elements, of which each device has a shard in any case."""
    gathered = [layout.gathered(1) for layout in of_layer(graph, "sequence", degree)]
    assert gathered == [SBH - SBH / degree] * 2
    assert all(layout.gathered(1) == 0 for layout in of_layer(graph, "shard", degree))


def test_without_dropout_scores_cost_their_softmax_alone() -> None:
    shape: dict[str, Any] = {
        "layers": 1,
        "hidden": 64,
        "heads": 4,
        "ffn": 256,
        "vocab": 64,
        "seq_len": 32,
    }
    graph = library.build("gpt", **shape)
    attention = graph.structure(1).work
    assert attention.score_floats(1) == 4 * 32 * 32
    assert attention.dropped_scores(1) == 0
