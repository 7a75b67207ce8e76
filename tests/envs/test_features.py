from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlplace.envs.features import DEVICE_FEATURE_NAMES, OP_FEATURE_NAMES, instance_view
from rlplace.envs.instances import InstanceGenerator
from rlplace.envs.types import DEVICE_FEATURES, EDGE_FEATURES, OP_FEATURES
from rlplace.plan.types import Instance
from rlplace.simulate.bound import bound

_GENERATOR = InstanceGenerator(max_devices=24, cpu_share=0.2)


def _instance(seed: int) -> Instance:
    return _GENERATOR(np.random.default_rng([12, seed]))


@pytest.mark.parametrize("seed", range(12))
def test_shapes_and_ranges(seed: int) -> None:
    instance = _instance(seed)
    view = instance_view(instance, bound(instance))
    groups, hosts = len(instance.graph.groups), len(instance.cluster.nodes)
    assert view.op_features.shape == (groups, OP_FEATURES) == (groups, len(OP_FEATURE_NAMES))
    assert view.op_edges.shape == (2, len(instance.graph.edges))
    assert view.op_edge_features.shape == (len(instance.graph.edges), EDGE_FEATURES)
    assert view.device_features.shape == (hosts, DEVICE_FEATURES)
    assert len(DEVICE_FEATURE_NAMES) == DEVICE_FEATURES
    assert view.device_edge_features.shape == (view.device_edges.shape[1], EDGE_FEATURES)
    assert view.globals.shape == (8,)
    for array in (view.op_features, view.op_edge_features, view.device_features, view.globals):
        assert np.isfinite(array).all()
        assert np.abs(array).max(initial=0.0) <= 20.0
    if hosts > 1:
        assert set(view.device_edges.ravel().tolist()) == set(range(hosts))


def test_a_cluster_twice_as_fast_in_everything_looks_the_same() -> None:
    instance = _instance(1)
    cluster = instance.cluster
    kinds = tuple(
        replace(
            kind,
            peak_flops={name: 2 * peak for name, peak in kind.peak_flops.items()},
            bandwidth=2 * kind.bandwidth,
        )
        for kind in cluster.kinds
    )
    nodes = tuple(
        replace(
            node,
            intra=replace(node.intra, bandwidth=2 * node.intra.bandwidth),
            nic=node.nic and replace(node.nic, bandwidth=2 * node.nic.bandwidth),
        )
        for node in cluster.nodes
    )
    faster = replace(instance, cluster=replace(cluster, kinds=kinds, nodes=nodes))
    limit = bound(instance)
    views = [instance_view(instance, limit), instance_view(faster, limit / 2)]
    np.testing.assert_allclose(views[0].op_features, views[1].op_features, atol=1e-5)
    np.testing.assert_allclose(views[0].device_features, views[1].device_features, atol=1e-5)
    np.testing.assert_allclose(views[0].globals, views[1].globals, atol=1e-5)
