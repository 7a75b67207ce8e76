"""Random clusters: one island or a mix, in nodes of usual and of odd sizes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from rlplace.cluster.assemble import HostSpec, assemble
from rlplace.cluster.catalogue import DEVICE_KINDS, ENTRIES
from rlplace.cluster.links import network_link, node_link
from rlplace.cluster.types import Cluster, DeviceKind, Link

#: Kinds of cards that are trained on; the others of the catalogue are seen in evaluation only.
TRAIN_KINDS = (
    "V100-16", "V100-32", "T4", "2080Ti-11", "A10", "3080-10", "3090-24",
    "A100-40", "A100-80", "L4", "4090-24", "H100-80", "B200",
)  # fmt: skip
HELD_OUT_KINDS = ("TITAN-RTX-24", "A10G", "A6000-48", "L40S", "H100-96", "H200", "MI250")

_NETWORKS = ("eth10", "eth25", "eth100", "ib200", "ib400", "ib1600", "ib3200")
_SIZES, _SIZE_ODDS = (1, 2, 4, 8, 3, 6, 12), (0.1, 0.15, 0.27, 0.36, 0.05, 0.05, 0.02)


def random_cluster(
    rng: np.random.Generator,
    kinds: tuple[str, ...] = TRAIN_KINDS,
    *,
    mixed: bool = False,
    max_devices: int = 64,
) -> Cluster:
    """A random cluster of 1 to `max_devices` devices.

    Args:
        rng: Source of randomness.
        kinds: Names of the catalogue to draw from.
        mixed: Whether there are two or three islands of different kinds or links, else one.
        max_devices: At least 1; a mixed cluster has at least 2.
    """
    islands = (2 if max_devices < 6 or rng.random() < 0.7 else 3) if mixed else 1
    largest = max(
        islands, int(2 ** rng.uniform(1.0 if mixed else 0.0, math.log2(max_devices) + 0.7))
    )
    room = max(1, min(largest, max_devices) // islands)
    drawn = [str(kind) for kind in rng.choice(kinds, size=islands, replace=False)]
    if mixed and rng.random() < 0.15:
        drawn = [drawn[0]] * islands
    network = str(rng.choice(_NETWORKS))
    hosts = []
    for index, kind in enumerate(drawn):
        own = str(rng.choice(_NETWORKS)) if rng.random() < 0.3 else network
        if len(set(drawn)) < islands:
            own = _NETWORKS[(_NETWORKS.index(network) + 2 * index) % len(_NETWORKS)]
        hosts.append(_hosts(rng, kind, own, room))
    if islands == 1 and hosts[0].count == 1:
        hosts = [replace(hosts[0], nic=None)]
    return assemble(hosts, DEVICE_KINDS, name="random")


def random_cpu_cluster(rng: np.random.Generator, max_ranks: int = 8) -> Cluster:
    """Ranks on the cores of one machine, as `rlplace discover` finds them.

    Nothing hides behind compute there, and several ranks may share a core.
    """
    ranks = int(2 ** rng.integers(0, int(math.log2(max_ranks)) + 1))
    cores = max(1, ranks // int(rng.choice((1, 1, 2))))
    peak = float(np.exp(rng.uniform(math.log(3e10), math.log(1e12))))
    kind = DeviceKind(
        "cpu",
        memory=int(rng.uniform(2, 16) * 2**30),
        peak_flops={"fp32": peak},
        bandwidth=float(np.exp(rng.uniform(math.log(4e9), math.log(4e10)))),
        launch_overhead=5e-6,
        max_efficiency=0.8,
        half_flops=peak * 1e-5,
        memory_efficiency=0.8,
        overlap=0.0,
        reserve=200 * 2**20,
    )
    speed = float(np.exp(rng.uniform(math.log(2e8), math.log(5e9))))
    link = Link(speed, float(rng.uniform(3e-5, 3e-4)), "gloo")
    host = HostSpec(1, tuple(("cpu", rank % cores) for rank in range(ranks)), link)
    return assemble([host], {"cpu": kind}, name="cpu")


def precision_for(rng: np.random.Generator, cluster: Cluster) -> str:
    """A precision that every kind of the cluster supports; 16-bit mixed more often than not."""
    common = set.intersection(*(set(kind.peak_flops) for kind in cluster.kinds))
    legal = [name for name, dtype in _PRECISIONS if dtype in common]
    odds = np.array([1.0 / (1 + index) ** 2 for index in range(len(legal))])
    return str(rng.choice(legal, p=odds / odds.sum()))


_PRECISIONS = (
    ("bf16-mixed", "bf16"),
    ("fp16-mixed", "fp16"),
    ("fp32", "fp32"),
    ("bf16", "bf16"),
    ("bf16-mixed-fp32grad", "bf16"),
)


def _hosts(rng: np.random.Generator, kind: str, network: str, room: int) -> HostSpec:
    """Equal hosts of one kind that together have at most `room` devices."""
    size = int(rng.choice(_SIZES, p=_SIZE_ODDS))
    size = min(size, 2 ** int(math.log2(room))) if size > room else size
    most = max(1, room // size)
    count = min(most, int(2 ** rng.integers(0, int(math.log2(most)) + 1)))
    if most >= 3 and rng.random() < 0.15:
        count = 3
    slow = not ENTRIES[kind].nvlink or rng.random() < 0.2
    intra = node_link("pcie" if slow else "nvlink", kind)
    return HostSpec(count, ((kind, None),) * size, intra, network_link(network))
