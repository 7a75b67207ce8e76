"""Slices of weights by hand: what is whole, what is sent, which kernels run."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from rlplace.cluster.types import Link
from rlplace.cost.analytic import AnalyticCost
from rlplace.cost.exchanges import state_exchanges
from rlplace.cost.memory import transient
from rlplace.cost.slices import in_slices, whole_share
from rlplace.graph.library import build
from rlplace.graph.types import Affine, Layout, Product, Structure, Weight, Work
from rlplace.plan.testing import chain, cluster, round_kind
from rlplace.plan.types import GroupChoice, Instance, Mesh

#: 100 rows a sample: a linear of 40 to 80 with a bias, and a transposed weight of 80 to 50.
_ROWS = Affine(0.0, 100.0)


def _product(role: str, columns: Affine, depth: Affine, rows: Affine = _ROWS) -> Product:
    sizes = (Affine(1.0), rows, columns, depth)
    flops = Affine(0.0, 2.0 * 100 * 80 * (40 if Affine(40.0) in sizes else 50))
    return Product("matmul", role, 1, *sizes, flops, Affine(5.0, 7.0))  # type: ignore[arg-type]


def _n(size: float) -> Affine:
    return Affine(size)


_WORK = Work(
    matmuls=2,
    kernels=5,
    fused_kernels=3,
    moved=Affine(0.0, 1000.0),
    params=40 * 80 + 80 + 80 * 50 + 300,
    frozen_params=20,
    weights=(Weight(0, 80, 40, True, 80), Weight(2, 80, 50, False)),
    products=(
        _product("forward", _n(80), _n(40)),
        _product("input", _n(40), _n(80)),
        _product("weight", _n(40), _ROWS, _n(80)),
        _product("forward", _n(50), _n(80)),
        _product("input", _n(80), _n(50)),
        _product("weight", _n(50), _ROWS, _n(80)),
    ),
)
_FOUR = GroupChoice(zero=3, slices=4)
_PAIR = Mesh((0, 1), 1, 2)


def test_a_slice_and_what_follows_it_are_whole() -> None:
    every = 3280 + 4000 + 320
    assert whole_share(_WORK, _FOUR) * every == pytest.approx(4000 / 4 + 4000 / 4)
    many = replace(_FOUR, slices=40)
    assert whole_share(_WORK, many) * every == pytest.approx(4000 / 40 + 320), "what stays whole"
    assert whole_share(_WORK, GroupChoice(zero=3)) == 1.0
    assert whole_share(_WORK, replace(_FOUR, slices=3)) == 1.0, "it divides no weight"


def test_weights_and_gradients_that_come_and_go() -> None:
    instance = Instance(chain([1.0]), cluster([[round_kind()] * 2]), 2, precision="fp32")
    layout = Layout("replicate", 1, _WORK)
    whole, cut = (
        transient(instance, layout, choice, _PAIR, 1.0) for choice in (GroupChoice(zero=3), _FOUR)
    )
    assert whole == 4 * (7600 + 7580)
    assert cut == pytest.approx(4 * (7600 + 7580) * 2000 / 7600)


def test_slices_go_one_after_the_other() -> None:
    instance = Instance(chain([1.0]), cluster([[round_kind()] * 2]), 2, precision="fp32")
    found = state_exchanges(instance, _WORK, _FOUR, _PAIR)
    gathers = [(one.size, one.count) for one in found if one.kind == "all_gather"]
    assert gathers == [(4 * 320, 1), (4 * 3280, 4), (4 * 4000, 4)]
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        whole = state_exchanges(instance, _WORK, GroupChoice(zero=3), _PAIR)
        sums = [sum(one.given for one in own if one.kind == kind) for own in (whole, found)]
        assert sums[0] == pytest.approx(sums[1]), "as many bytes"


def test_kernels_are_as_many_and_each_so_much_smaller() -> None:
    found = in_slices(_WORK, _FOUR)
    sizes = [(p.role, p.count, p.rows, p.columns, p.depth) for p in found.products]
    assert sizes == [
        ("forward", 4, _ROWS, _n(20), _n(40)),
        ("input", 4, _ROWS, _n(40), _n(20)),
        ("weight", 4, _n(20), _n(40), _ROWS),
        ("forward", 4, _ROWS, _n(50), _n(20)),
        ("input", 4, _ROWS, _n(20), _n(50)),
        ("weight", 4, _n(20), _n(50), _ROWS),
    ]
    assert [p.flops for p in found.products] == [p.flops for p in _WORK.products]
    # Three times more of the rows, or of the results; a join of 80 columns; three sums of 50.
    assert [p.moved(1.0) - 12.0 for p in found.products] == [3 * 100 * 40] * 3 + [3 * 100 * 50] * 3
    assert found.moved(1.0) == 1000 + 300 * 40 + 100 * 2 * 80 + 300 * 50 + 3 * 100 * 3 * 50
    # Three sums of 40 columns of gradients, and a join of 80.
    assert found.backward_moved(1.0) == 2 * 300 * 90 + 3 * 100 * 3 * 40 + 100 * 2 * 80
    assert (found.matmuls, found.kernels, found.fused_kernels) == (8, 5 + 4 + 6, 3 + 4 + 6)


def test_a_product_of_equal_weights_some_of_which_are_cut() -> None:
    both = replace(_WORK.products[0], count=3)
    found = in_slices(replace(_WORK, products=(both,)), _FOUR)
    assert [(p.count, p.columns) for p in found.products] == [(4, _n(20)), (2, _n(80))]
    assert sum(p.flops(1.0) for p in found.products) == pytest.approx(both.flops(1.0))


@pytest.mark.parametrize("family", ["gpt", "llama", "bert"])
def test_every_cut_weight_has_its_three_products(family: str) -> None:
    """Also where a slice of one is as large as another one."""
    args = {"layers": 1, "hidden": 32, "heads": 4, "ffn": 64, "vocab": 96, "seq_len": 12}
    more = {"kv_heads": 2} if family == "llama" else {}
    graph = build(family, **args, **more)  # type: ignore[arg-type]  # a dict has one type
    choice, seen = replace(_FOUR, slices=2), 0
    for structure in graph.structures:
        for layout in structure.layouts_with("tp", 2):
            found, cut = in_slices(layout.work, choice), map(choice.cuts, layout.work.weights)
            more_kernels = sum(cut)
            seen += more_kernels
            for role in ("forward", "input", "weight"):
                counts = [
                    sum(p.count for p in work.products if p.role == role)
                    for work in (layout.work, found)
                ]
                assert counts[1] - counts[0] == more_kernels
            total = sum(p.flops(3.0) for p in found.products)
            assert total == pytest.approx(layout.work.flops(3.0) + layout.work.backward_flops(3.0))
    assert seen


def test_more_slices_take_less_memory_and_more_time() -> None:
    kind = replace(round_kind(), launch_overhead=1e-5, sms=8)
    instance = Instance(chain([1.0]), cluster([[kind] * 2], intra=Link(1e9, 1e-4)), 2)
    cost, structure = AnalyticCost(), Structure("x", _WORK)
    found = [
        cost.group(instance, structure, GroupChoice(zero=3, slices=n), _PAIR, 1.0, 0.0)
        for n in (1, 2, 4, 8)
    ]
    for fewer, more in pairwise(found):
        assert more.transient < fewer.transient
        assert more.forward > fewer.forward
        assert more.backward > fewer.backward
        assert more.static == fewer.static
    # The links take 1e-4 s for each of two weights once more a slice.
    assert found[1].forward - found[0].forward >= 2 * 1e-4
