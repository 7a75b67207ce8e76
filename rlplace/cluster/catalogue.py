"""Device kinds and links by name, from datasheets.

Peaks are dense (no sparsity), with fp32 accumulation, which is what torch runs: on GeForce cards
that is half of the figure on the box. Memory is what the driver leaves of the nominal size, as
`torch.cuda.get_device_properties(0).total_memory` reports it, rounded down to 0.1 GiB. A link's
bandwidth is that of ONE direction, of one device inside a node and of the whole host outside:
datasheets give both directions together ("NVLink 600 GB/s" is 300 GB/s here), and so does
`CatalogueEntry.nvlink`. They are wire figures; what a collective reaches of them is a matter of
the cost model.

Efficiency constants are not in any datasheet. `max_efficiency` is what large cuBLAS (rocBLAS)
matmuls typically hold under the card's power limit, and `half_flops` the work of
`HALF_SECONDS` at the 16-bit peak; both are starting points that calibration replaces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from rlplace.cluster.types import DeviceKind, Link
from rlplace.errors import InputError, nearest_names
from rlplace.units import GIB

#: A matmul that would take this long at the 16-bit peak reaches half of the efficiency.
HALF_SECONDS = 6.4e-6

#: CUDA context, NCCL buffers and allocator slack of one process.
RESERVE_GIB = 1.25

#: Bytes/s of an x16 slot in one direction by generation (PCI-SIG, after 128b/130b coding).
PCIE = {3: 15.75e9, 4: 31.5e9, 5: 63.0e9}


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A device kind with the machine that it usually sits in.

    Args:
        kind: The device.
        nvlink: Bytes/s of NVLink (Infinity Fabric on MI250) of one device, both directions
            together; 0 where no switch or mesh joins all devices of a host.
        pcie: PCIe generation of its x16 slot.
        nic: Name of the usual network of a host with such devices.
        source: Where the figures come from.
    """

    kind: DeviceKind
    nvlink: float
    pcie: int
    nic: str
    source: str


@dataclass(frozen=True, slots=True)
class LinkKind:
    """A family of links.

    Args:
        place: ``intra`` joins the devices of a node, ``nic`` nodes.
        latency: Seconds a message.
        source: Where the latency comes from.
    """

    place: str
    latency: float
    source: str


_NCCL = "NCCL src/graph/tuning.cc, hwLat, ring, Simple protocol"

#: By family; `ib` and `eth` are followed by the total Gb/s of a node in one direction.
LINK_KINDS: dict[str, LinkKind] = {
    "nvlink": LinkKind("intra", 3.4e-6, _NCCL),
    "pcie": LinkKind("intra", 5.7e-6, _NCCL),
    "ib": LinkKind("nic", 14e-6, _NCCL),
    "eth": LinkKind("nic", 40e-6, "round trip of a kernel TCP socket in a data centre, halved"),
}

#: Names of links that a message can offer (any other number of Gb/s is legal too).
LINK_NAMES = ("nvlink", "pcie", "ib200", "ib400", "ib1600", "ib3200", "eth10", "eth25", "eth100")


def _entry(
    name: str,
    gib: float,
    tflops: dict[str, float],
    gbytes: float,
    *,
    efficiency: float,
    source: str,
    nvlink: float = 0.0,
    pcie: int = 4,
    nic: str = "eth100",
) -> CatalogueEntry:
    """An entry from figures in the units of datasheets (GiB, TFLOP/s, GB/s)."""
    flops = {dtype: value * 1e12 for dtype, value in tflops.items()}
    kind = DeviceKind(
        name=name,
        memory=int(gib * GIB),
        peak_flops=flops,
        bandwidth=gbytes * 1e9,
        max_efficiency=efficiency,
        half_flops=flops["fp16"] * HALF_SECONDS,
        reserve=int(RESERVE_GIB * GIB),
    )
    return CatalogueEntry(kind, nvlink * 1e9, pcie, nic, source)


def _tensor(fp32: float, tf32: float, half: float, fp8: float = 0.0) -> dict[str, float]:
    """Peaks of a card with bf16 tensor cores."""
    peaks = {"fp32": fp32, "tf32": tf32, "bf16": half, "fp16": half}
    return peaks | ({"fp8": fp8} if fp8 else {})


_HOPPER = _tensor(67, 494.7, 989.4, 1978.9)

#: Every device kind that is known by name.
ENTRIES: dict[str, CatalogueEntry] = {
    entry.kind.name: entry
    for entry in (
        # Volta and Turing: tensor cores for fp16 only, no bf16.
        _entry(
            "V100-16", 15.7, {"fp32": 15.7, "fp16": 125}, 900, efficiency=0.75,
            nvlink=300, pcie=3, nic="ib400", source="NVIDIA V100 (SXM2) datasheet; DGX-1",
        ),
        _entry(
            "V100-32", 31.7, {"fp32": 15.7, "fp16": 125}, 900, efficiency=0.75,
            nvlink=300, pcie=3, nic="ib400", source="NVIDIA V100 (SXM2) datasheet; DGX-1",
        ),
        _entry(
            "T4", 14.7, {"fp32": 8.1, "fp16": 65}, 320, efficiency=0.5, pcie=3,
            source="NVIDIA T4 datasheet; 70 W holds the clock down",
        ),
        _entry(
            "2080Ti-11", 10.7, {"fp32": 13.4, "fp16": 53.8}, 616, efficiency=0.8, pcie=3,
            nic="eth25", source="NVIDIA Turing architecture white paper, RTX 2080 Ti",
        ),
        _entry(
            "TITAN-RTX-24", 23.6, {"fp32": 16.3, "fp16": 130.5}, 672, efficiency=0.65, pcie=3,
            nic="eth25", source="NVIDIA Turing architecture white paper, TITAN RTX",
        ),
        _entry(
            "TITAN-V-12", 11.7, {"fp32": 13.8, "fp16": 110}, 652.8, efficiency=0.7, pcie=3,
            nic="eth25", source="NVIDIA TITAN V product page",
        ),
        # Ampere.
        _entry(
            "A10", 22.1, _tensor(31.2, 62.5, 125), 600, efficiency=0.55,
            source="NVIDIA A10 datasheet; 150 W",
        ),
        _entry(
            "A10G", 22.1, _tensor(35, 35, 70), 600, efficiency=0.8,
            source="NVIDIA A10G datasheet; AWS G5",
        ),
        _entry(
            "3080-10", 9.7, _tensor(29.8, 29.8, 59.5), 760, efficiency=0.85, nic="eth25",
            source="NVIDIA GA102 white paper, RTX 3080 (10 GB)",
        ),
        _entry(
            "3090-24", 23.6, _tensor(35.6, 35.6, 71), 936, efficiency=0.85, nic="eth25",
            source="NVIDIA GA102 white paper, RTX 3090",
        ),
        _entry(
            "A6000-48", 47.5, _tensor(38.7, 77.4, 154.8), 768, efficiency=0.7, nic="eth25",
            source="NVIDIA RTX A6000 datasheet",
        ),
        _entry(
            "A100-40", 39.4, _tensor(19.5, 156, 312), 1555, efficiency=0.8, nvlink=600,
            nic="ib1600", source="NVIDIA A100 (SXM4) datasheet; DGX A100",
        ),
        _entry(
            "A100-80", 79.1, _tensor(19.5, 156, 312), 2039, efficiency=0.8, nvlink=600,
            nic="ib1600", source="NVIDIA A100 (SXM4) datasheet; DGX A100",
        ),
        # Ada.
        _entry(
            "L4", 22.0, _tensor(30.3, 60, 121, 242), 300, efficiency=0.55,
            source="NVIDIA L4 datasheet; 72 W holds the clock down",
        ),
        _entry(
            "L40S", 44.4, _tensor(91.6, 183, 362, 733), 864, efficiency=0.65,
            source="NVIDIA L40S datasheet",
        ),
        _entry(
            "4090-24", 23.6, _tensor(82.6, 82.6, 165.2, 330.3), 1008, efficiency=0.9, nic="eth25",
            source="NVIDIA Ada architecture white paper, RTX 4090",
        ),
        # Hopper and Blackwell.
        _entry(
            "H100-80", 79.1, _HOPPER, 3350, efficiency=0.7, nvlink=900, pcie=5, nic="ib3200",
            source="NVIDIA H100 (SXM5) datasheet; DGX H100",
        ),
        _entry(
            "H100-96", 94.5, _HOPPER, 4000, efficiency=0.7, nvlink=900, pcie=5, nic="ib3200",
            source="NVIDIA GH200 datasheet (96 GB HBM3)",
        ),
        _entry(
            "H200", 139.8, _HOPPER, 4800, efficiency=0.7, nvlink=900, pcie=5, nic="ib3200",
            source="NVIDIA H200 (SXM) datasheet; DGX H200",
        ),
        _entry(
            "B200", 178.3, _tensor(75, 1125, 2250, 4500), 8000, efficiency=0.7, nvlink=1800,
            pcie=5, nic="ib3200", source="NVIDIA HGX B200 datasheet; DGX B200",
        ),
        # A device is what torch sees: one of the two dies. The fabric figure is that of the
        # links which one die has towards its neighbours.
        _entry(
            "MI250", 63.9, {"fp32": 45.3, "bf16": 181, "fp16": 181}, 1638, efficiency=0.65,
            nvlink=200, nic="ib800", source="AMD Instinct MI250 datasheet, half of it",
        ),
    )
}  # fmt: skip

DEVICE_KINDS: dict[str, DeviceKind] = {name: entry.kind for name, entry in ENTRIES.items()}

#: Other names of the same cards.
ALIASES: dict[str, str] = {
    "RTX-2080Ti": "2080Ti-11", "2080Ti": "2080Ti-11",
    "RTX-3080": "3080-10", "RTX-3080-10": "3080-10", "3080": "3080-10",
    "RTX-3090": "3090-24", "RTX-3090-24": "3090-24", "3090": "3090-24",
    "RTX-4090": "4090-24", "RTX-4090-24": "4090-24", "4090": "4090-24",
    "A6000": "A6000-48", "RTX-A6000": "A6000-48",
    "T4-16": "T4", "A10-24": "A10", "A10G-24": "A10G", "L4-24": "L4", "L40S-48": "L40S",
    "TITAN-RTX": "TITAN-RTX-24", "TITAN-V": "TITAN-V-12",
    "H200-141": "H200", "B200-180": "B200", "MI250-64": "MI250",
}  # fmt: skip

_CANONICAL = {name.lower(): name for name in DEVICE_KINDS} | {
    alias.lower(): name for alias, name in ALIASES.items()
}


def catalogue_entry(name: str) -> CatalogueEntry:
    """The entry of a device kind, by its name or an alias, in upper or lower case.

    Raises:
        InputError: If there is none, with the nearest names.
    """
    canonical = _CANONICAL.get(name.lower())
    if canonical is None:
        longer = [known for known in DEVICE_KINDS if known.lower().startswith(name.lower())]
        nearest = ", ".join(longer) or nearest_names(name, DEVICE_KINDS) or ", ".join(DEVICE_KINDS)
        raise InputError("kind", name, "is not a device kind of the catalogue", nearest)
    return ENTRIES[canonical]


def device_kind(name: str) -> DeviceKind:
    """A device kind by its name or an alias; raises as `catalogue_entry` does."""
    return catalogue_entry(name).kind


def link_place(name: str) -> str:
    """``intra`` or ``nic``: which of a node's links a name such as ``pcie`` or ``ib200`` means.

    Raises:
        InputError: If the name is not one of `LINK_KINDS`, or ``ib`` or ``eth`` lacks its Gb/s.
    """
    return LINK_KINDS[_family(name)[0]].place


def network_link(name: str) -> Link:
    """The link of a host towards the others: ``ib3200`` is 3200 Gb/s, 400 GB/s, a direction.

    Raises:
        InputError: If the name is not of a network, or its number is not positive.
    """
    family, gigabits = _family(name)
    if LINK_KINDS[family].place != "nic":
        raise InputError("link", name, "joins devices of a node, not nodes", "ib200, eth25")
    return Link(gigabits * 1e9 / 8, LINK_KINDS[family].latency, name.lower())


def node_link(name: str, kind: str) -> Link:
    """The link between two devices of a kind inside a node, in one direction.

    Args:
        name: ``nvlink`` or ``pcie``.
        kind: Name of a catalogue kind.

    Raises:
        InputError: If the name is not of a link inside a node, or the kind does not have it.
    """
    family, _ = _family(name)
    entry = catalogue_entry(kind)
    if LINK_KINDS[family].place != "intra":
        raise InputError("link", name, "joins nodes, not the devices of a node", "nvlink, pcie")
    if family == "nvlink" and not entry.nvlink:
        rule = f"{entry.kind.name} has no NVLink that joins all devices of a host"
        raise InputError("link", name, rule, "pcie, or a pairwise override in a cluster file")
    bandwidth = entry.nvlink / 2 if family == "nvlink" else PCIE[entry.pcie]
    return Link(bandwidth, LINK_KINDS[family].latency, family)


def named_link(name: str, kinds: Iterable[str]) -> Link:
    """The link that a name means for a host with devices of these kinds (the slowest of them).

    Raises:
        InputError: If there is no such link, or a kind does not have it.
    """
    if link_place(name) == "nic":
        return network_link(name)
    return min((node_link(name, kind) for kind in kinds), key=lambda link: link.bandwidth)


def default_links(kind: str) -> tuple[Link, Link]:
    """The links of a usual host with such devices: inside it, and towards other hosts."""
    entry = catalogue_entry(kind)
    inside = node_link("nvlink" if entry.nvlink else "pcie", kind)
    return inside, network_link(entry.nic)


def _family(name: str) -> tuple[str, float]:
    """Family and Gb/s of a link name (0 inside a node)."""
    match = re.fullmatch(r"(nvlink|pcie)|(ib|eth)(\d+(?:\.\d+)?)", name.lower())
    if match is None or (match[3] and not float(match[3])):
        rule = "is not a link; ib and eth are followed by the Gb/s of a node, above zero"
        nearest = nearest_names(name, LINK_NAMES) or ", ".join(LINK_NAMES)
        raise InputError("link", name, rule, nearest)
    return (match[1], 0.0) if match[1] else (match[2], float(match[3]))
