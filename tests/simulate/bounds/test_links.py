"""The least seconds of collectives, against the groups that there are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.cluster.types import Cluster, CollectiveCurve, CollectiveKind, Fabric, Link
from rlplace.cost.collectives import ring, seconds
from rlplace.plan.testing import cluster, round_kind
from rlplace.simulate.bounds.links import BestLinks

_KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_FABRICS: tuple[Fabric, ...] = ("switch", "mesh", "cube")


@st.composite
def _links(draw: st.DrawFn) -> Link:
    return Link(
        bandwidth=draw(st.sampled_from((1e9, 1e10, 1e11))),
        latency=draw(st.sampled_from((0.0, 1e-6, 1e-4))),
        efficiency=draw(st.sampled_from((0.5, 1.0))),
        nics=draw(st.sampled_from((1, 2, 4))),
        reduces=draw(st.booleans()),
        fabric=draw(st.sampled_from(_FABRICS)),
        relay=draw(st.sampled_from((0.0, 1e-5))),
    )


@st.composite
def _clusters(draw: st.DrawFn) -> Cluster:
    kinds = [
        replace(round_kind(name), collective_launch=launch)
        for name, launch in (("a", 0.0), ("b", 1e-5))
    ]
    size = st.lists(st.sampled_from(kinds), min_size=1, max_size=5)
    made = cluster(draw(st.lists(size, min_size=1, max_size=4)))
    nodes = tuple(
        replace(
            node,
            intra=draw(_links()),
            nic=node.nic and draw(_links()),
            bridge=draw(st.sampled_from((0, 2))),
        )
        for node in made.nodes
    )
    overrides = ((0, 1, draw(_links())),) if len(made.devices) > 1 and draw(st.booleans()) else ()
    return replace(made, nodes=nodes, overrides=overrides)


@settings(max_examples=200, deadline=None)
@given(_clusters(), st.data())
def test_no_group_is_faster(where: Cluster, data: st.DataObject) -> None:
    devices = tuple(data.draw(st.permutations(range(len(where.devices)))))
    ranks = data.draw(st.integers(1, len(devices)))
    size = data.draw(st.sampled_from((1.0, 1e4, 1e7, 1e10)))
    best = BestLinks(where), BestLinks(where, where.devices[devices[0]].kind)
    for kind in _KINDS:
        real = seconds(kind, size, ring(where, devices[:ranks], devices))
        least, own = (links.seconds(kind, size, ranks) for links in best)
        assert least <= own <= real * (1 + 1e-9)


def test_it_is_that_of_a_group_where_all_links_are_alike() -> None:
    where = cluster([[round_kind()] * 4])
    group = ring(where, (0, 1, 2, 3), (0, 1, 2, 3))
    assert BestLinks(where).seconds("all_gather", 1e9, 4) == seconds("all_gather", 1e9, group)


def test_a_group_that_fits_in_no_node_goes_between_nodes() -> None:
    where = cluster([[round_kind()] * 4] * 2)
    assert BestLinks(where).seconds("all_gather", 1e9, 4) < 0.01
    assert BestLinks(where).seconds("all_gather", 1e9, 8) >= 0.0875


def test_tables_are_the_same_for_many() -> None:
    curve = CollectiveCurve("all_gather", 2, 1e-3, 1e-9)
    best = BestLinks(cluster([[round_kind()] * 4] * 2, curves=(curve,)))
    ranks, sizes = np.array([1, 2, 4, 8, 2]), np.array([1e6, 1e6, 0.0, 1e9, 1e3])
    for kind in _KINDS:
        found = best.table(kind, ranks).seconds(sizes)
        each = [
            best.seconds(kind, s, n) for s, n in zip(sizes.tolist(), ranks.tolist(), strict=True)
        ]
        assert found.tolist() == pytest.approx(each)
        assert best.table(kind, ranks).seconds(1e6)[1] == best.seconds(kind, 1e6, 2)


def test_buckets_follow_one_another() -> None:
    table = BestLinks(cluster([[round_kind()] * 4])).table("all_reduce", np.array([1, 4]))
    once = table.seconds(1e6)
    assert table.seconds(4e6, 1e6).tolist() == (4 * once).tolist()
    assert table.seconds(np.array([1e5, 1e5]), 1e6).tolist() == pytest.approx((0.1 * once).tolist())
