"""Questions that peers answered, on the profiles that they planned with and under their costs.

Nothing of the profiles is here: they are read from a folder. What the files do not say (layers,
links, memory, global batch) is as the peers tell of their runs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rlplace.cluster.types import Cluster, Device, DeviceKind, Link, Node
from rlplace.cost.profiled import (
    ProfiledCost,
    profile_graph,
    read_aceso,
    read_galvatron,
    read_galvatron_curves,
)
from rlplace.plan.frameworks import Framework
from rlplace.plan.types import Instance
from rlplace.units import GIB, MIB

#: Megatron reduces gradients after the last backward pass.
MEGATRON = Framework("megatron", overlap_reduce=0.0)

#: Size -> (layers, V100-32).
ACESO = {
    "350M": (24, 1),
    "1_3B": (24, 4),
    "2_6B": (32, 8),
    "6_7B": (32, 16),
    "13B": (40, 32),
}


def aceso_gpt(folder: Path, size: str, fine: bool = True) -> tuple[Instance, ProfiledCost]:
    """GPT with 28,000 MiB a V100, global batch 1024, without ZeRO as Aceso has it; and its cost.

    Args:
        folder: Of Aceso's profiles.
        size: One of `ACESO`.
        fine: As in `read_aceso`.
    """
    layers, devices = ACESO[size]
    profile = read_aceso(folder, size, layers, fine=fine)
    cluster = v100s(devices)
    instance = Instance(
        profile_graph(profile),
        replace(cluster, kinds=(replace(cluster.kinds[0], memory=int(28000 * MIB)),)),
        1024,
        "fp16-mixed",
        framework=MEGATRON,
        memory_margin=0.0,
        zero_levels=(0,),
    )
    return instance, ProfiledCost(profile)


def v100s(count: int) -> Cluster:
    """Nodes of 8 V100-32, with the plateaus of Aceso's point-to-point tables as links."""
    kind = DeviceKind("V100-32", int(32 * GIB), {"fp16": 125e12}, 900e9, overlap=0.0)
    intra, nic = Link(42.4e9, 1e-5, "nvlink"), Link(5.44e9, 2e-5, "ib")
    nodes = tuple(Node(i, intra, nic if count > 8 else None) for i in range(-(-count // 8)))
    devices = tuple(Device(rank, kind.name, rank // 8) for rank in range(count))
    return Cluster(devices, nodes, (kind,), name=f"{count} x V100-32")


def galvatron_llama(folder: Path, memory: float) -> tuple[Instance, ProfiledCost]:
    """llama2-7b on 8 GPUs of `memory` GB, 2048 tokens, global batch 16, and its profile's cost."""
    hardware = folder / "hardware__sp_time_1nodes_8gpus_per_node__e8efe41.json"
    profile = read_galvatron(
        folder / "gpt__computation_profiling_bf16_llama2-7b_all__5c104c6.json",
        folder / "gpt__memory_profiling_bf16_llama2-7b_all__5c104c6.json",
        hardware,
        layers=32,
        hidden=4096,
        kind="gpu",
    )
    kind = DeviceKind("gpu", int(memory * GIB), {"bf16": 312e12}, 1.5e12)
    node = Node(0, Link(150e9, 1e-5, "nvlink"))
    devices = tuple(Device(rank, "gpu", 0) for rank in range(8))
    instance = Instance(
        profile_graph(profile),
        Cluster(devices, (node,), (kind,), curves=read_galvatron_curves(hardware)),
        16,
        "bf16-mixed",
        framework=Framework("galvatron"),
        memory_margin=0.0,
    )
    return instance, ProfiledCost(profile)
