"""Where nothing fits: what would."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlplace.graph.types import Affine
from rlplace.plan.testing import chain, cluster, round_kind
from rlplace.plan.types import Instance
from rlplace.planners.grid import grid
from rlplace.planners.remedies import scaled, shortage, smallest_changes
from rlplace.planners.types import Budget
from rlplace.units import format_bytes

#: 128 MB of states under AdamW, 64 MB under bf16; eight equal groups.
_GRAPH = chain([1e9] * 8, floats=1e3, params=10**6)


def _instance(devices: int, megabytes: float) -> Instance:
    kind = round_kind(memory=megabytes * 1e6)
    return Instance(_GRAPH, cluster([[kind] * devices]), 16, memory_margin=0.0)


def test_the_smallest_changes_that_would_fit() -> None:
    changes = smallest_changes(_instance(2, 40.0), seconds=20.0)
    assert changes[0] == "2 times the devices (4 instead of 2) with ZeRO-3"
    assert any("precision=bf16" in change for change in changes)


def test_narrower_states_are_told_together_where_neither_is_enough() -> None:
    """Of 128 MB, an 8-bit optimizer alone leaves 80 and bf16 alone 64; both leave 48."""
    changes = smallest_changes(_instance(1, 55.0), seconds=20.0)
    assert [change for change in changes if "precision=" in change or "optimizer=" in change] == [
        "bf16 weights with an 8-bit optimizer (precision=bf16, optimizer=adamw-8bit)"
    ]
    alone = smallest_changes(_instance(1, 70.0), seconds=20.0)
    assert "bf16 weights and optimizer states (precision=bf16)" in alone
    assert not any("optimizer=adamw-8bit" in change for change in alone)


def test_a_change_that_would_not_fit_is_not_told() -> None:
    assert smallest_changes(_instance(1, 0.1), seconds=20.0) == ()


def test_the_shortage_names_device_and_bytes() -> None:
    instance = _instance(1, 20.0)
    result = grid(instance, Budget(), np.random.default_rng(0))
    assert result.plan is None
    assert result.estimate is not None
    peak = result.estimate.peak_memory[0]
    assert shortage(instance, result) == (
        f"the leanest plan needs {format_bytes(peak)} on device 0 (round), "
        f"whose limit is {format_bytes(20e6)}"
    )
    assert shortage(instance, replace(result, estimate=None)) == "no plan could be built"


@pytest.mark.parametrize(("devices", "factor", "nodes"), [(2, 3, 1), (2, 4, 1), (4, 4, 4)])
def test_a_small_node_grows_before_nodes_are_repeated(
    devices: int, factor: int, nodes: int
) -> None:
    base = cluster([[round_kind()] * devices])
    grown = scaled(base, factor)
    assert len(grown.devices) == devices * factor
    assert [device.index for device in grown.devices] == list(range(devices * factor))
    assert len(grown.nodes) == nodes
    assert all(node.nic is not None for node in grown.nodes) == (nodes > 1)
    assert grown.link(0, devices * factor - 1).bandwidth > 0


def test_nodes_keep_their_links() -> None:
    base = cluster([[round_kind()] * 2] * 2)
    grown = scaled(base, 2)
    assert [node.nic for node in grown.nodes] == [base.nodes[0].nic] * 4
    assert [device.node for device in grown.devices] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_kernel_and_what_it_keeps_are_changes() -> None:
    """Score matrices are most of what a math kernel keeps; flash has nothing to redo."""
    plain = chain([1e9] * 4)
    structures = tuple(
        replace(s, work=replace(s.work, score_floats=Affine(0.0, 1e6))) for s in plain.structures
    )
    kind = round_kind(memory=3.5e6)
    instance = Instance(
        replace(plain, structures=structures),
        cluster([[kind]]),
        1,
        attention="math",
        memory_margin=0.0,
        recompute_modes=("none",),
    )
    changes = " ".join(smallest_changes(instance, seconds=20.0))
    assert "attention=flash" in changes
    assert "redoing the core attention" in changes
    flash = replace(instance, attention="flash", cluster=cluster([[round_kind(memory=1.0)]]))
    assert "attention" not in " ".join(smallest_changes(flash, seconds=20.0))
