"""Device kinds by name, from datasheets; `rlplace.cluster.links` has the links.

Peaks are dense (no sparsity), with fp32 accumulation, which is what torch runs: on GeForce cards
that is half of the figure on the box. Memory is what the driver leaves of the nominal size, as
`torch.cuda.get_device_properties(0).total_memory` reports it, rounded down to 0.1 GiB.

Efficiency constants are not in any datasheet. `max_efficiency` is what large cuBLAS (rocBLAS)
matmuls typically hold under the card's power limit; it and what all kinds share are starting
points, which `configs/calibration.json` replaces for the kinds that were measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlplace.cluster.calibrated import calibrated_kind
from rlplace.cluster.types import DeviceKind, Fabric
from rlplace.errors import InputError, nearest_names
from rlplace.units import GIB

#: Share of a slot's (or NVLink-C2C's) bandwidth that copies to and from pinned host memory reach:
#: 12.0-13.4 of 15.75 GB/s (V100), 25.5-26.2 of 31.5 (A100; CSCS ReFrame references), 55 of 63
#: (H200; stas00/ml-engineering).
HOST_SHARE = 0.83

#: Seconds of a collective call of a GPU; fitted by `benchmarks/collectives.py`.
COLLECTIVE_LAUNCH = 36e-6

#: Depth at which a matmul reaches half of the efficiency, and seconds between two kernels: about
#: what was fitted for the kinds that were measured.
HALF_DEPTH, KERNEL_GAP = 300.0, 1e-6

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
        generation: Of its NVLinks; 0 of Infinity Fabric, or where there are none.
        pcie: PCIe generation of its x16 slot.
        nic: Name of the usual network of a host with such devices.
        source: Where the figures come from.
        fabric: How the NVLinks of a host join its devices.
        reduces: Its NVSwitches add up (NVLink SHARP, Hopper and later).
        peers: Whether such cards write to each other's memory over PCIe; else through the host's.
    """

    kind: DeviceKind
    nvlink: float
    generation: int
    pcie: int
    nic: str
    source: str
    fabric: Fabric = "switch"
    reduces: bool = False
    peers: bool = True


def _entry(
    name: str,
    gib: float,
    tflops: dict[str, float],
    gbytes: float,
    *,
    sms: int,
    efficiency: float,
    source: str,
    nvlink: float = 0.0,
    generation: int = 0,
    pcie: int = 4,
    chip_to_chip: float = 0.0,
    nic: str = "eth100",
    fabric: Fabric = "switch",
    reduces: bool = False,
    peers: bool = True,
) -> CatalogueEntry:
    """An entry from figures in the units of datasheets (GiB, TFLOP/s, GB/s).

    `chip_to_chip` is what joins it to its host where that is not PCIe, one direction.
    """
    flops = {dtype: value * 1e12 for dtype, value in tflops.items()}
    kind = DeviceKind(
        name=name,
        memory=int(gib * GIB),
        peak_flops=flops,
        bandwidth=gbytes * 1e9,
        max_efficiency=efficiency,
        launch_overhead=KERNEL_GAP,
        half_flops=0.0,
        half_depth=HALF_DEPTH,
        reserve=int(RESERVE_GIB * GIB),
        sms=sms,
        host_bandwidth=(chip_to_chip * 1e9 or PCIE[pcie]) * HOST_SHARE,
        collective_launch=COLLECTIVE_LAUNCH,
    )
    return CatalogueEntry(
        calibrated_kind(kind), nvlink * 1e9, generation, pcie, nic, source, fabric, reduces, peers
    )


def _tensor(fp32: float, tf32: float, half: float, fp8: float = 0.0) -> dict[str, float]:
    """Peaks of a card with bf16 tensor cores."""
    peaks = {"fp32": fp32, "tf32": tf32, "bf16": half, "fp16": half}
    return peaks | ({"fp8": fp8} if fp8 else {})


_HOPPER = _tensor(67, 494.7, 989.4, 1978.9)

#: Every device kind that is known by name.
ENTRIES: dict[str, CatalogueEntry] = {
    entry.kind.name: entry
    for entry in (
        # Pascal: no tensor cores; fp16 is converted and computed in fp32.
        _entry(
            "P40-24", 22.3, {"fp32": 11.76, "fp16": 11.76}, 346, sms=30, efficiency=0.8, pcie=3,
            nic="eth25", source="NVIDIA P40 datasheet",
        ),
        # Volta and Turing: tensor cores for fp16 only, no bf16.
        _entry(
            "V100-16", 15.7, {"fp32": 15.7, "fp16": 125}, 900, sms=80, efficiency=0.75,
            generation=2, nvlink=300, pcie=3, fabric="cube", nic="ib400",
            source="NVIDIA V100 (SXM2) datasheet; DGX-1",
        ),
        _entry(
            "V100-32", 31.7, {"fp32": 15.7, "fp16": 125}, 900, sms=80, efficiency=0.75,
            generation=2, nvlink=300, pcie=3, fabric="cube", nic="ib400",
            source="NVIDIA V100 (SXM2) datasheet; DGX-1",
        ),
        _entry(
            "T4", 14.7, {"fp32": 8.1, "fp16": 65}, 320, sms=40, efficiency=0.5, pcie=3,
            source="NVIDIA T4 datasheet; 70 W holds the clock down",
        ),
        _entry(
            "2080Ti-11", 10.7, {"fp32": 13.4, "fp16": 53.8}, 616, sms=68, efficiency=0.8, pcie=3,
            nic="eth25", peers=False, source="NVIDIA Turing architecture white paper, RTX 2080 Ti",
        ),
        _entry(
            "TITAN-RTX-24", 23.6, {"fp32": 16.3, "fp16": 130.5}, 672, sms=72, efficiency=0.65,
            pcie=3,
            nic="eth25", peers=False, source="NVIDIA Turing architecture white paper, TITAN RTX",
        ),
        _entry(
            "TITAN-V-12", 11.7, {"fp32": 13.8, "fp16": 110}, 652.8, sms=80, efficiency=0.7, pcie=3,
            nic="eth25", source="NVIDIA TITAN V product page",
        ),
        # Ampere.
        _entry(
            "A10", 22.1, _tensor(31.2, 62.5, 125), 600, sms=72, efficiency=0.55,
            source="NVIDIA A10 datasheet; 150 W",
        ),
        _entry(
            "A10G", 22.1, _tensor(35, 35, 70), 600, sms=80, efficiency=0.8,
            source="NVIDIA A10G datasheet; AWS G5",
        ),
        _entry(
            "3080-10", 9.7, _tensor(29.8, 29.8, 59.5), 760, sms=68, efficiency=0.85, nic="eth25",
            peers=False, source="NVIDIA GA102 white paper, RTX 3080 (10 GB)",
        ),
        _entry(
            "3090-24", 23.6, _tensor(35.6, 35.6, 71), 936, sms=82, efficiency=0.85, nic="eth25",
            peers=False, source="NVIDIA GA102 white paper, RTX 3090",
        ),
        _entry(
            "A6000-48", 47.5, _tensor(38.7, 77.4, 154.8), 768, sms=84, efficiency=0.7, nic="eth25",
            source="NVIDIA RTX A6000 datasheet",
        ),
        _entry(
            "A100-40", 39.4, _tensor(19.5, 156, 312), 1555, sms=108, efficiency=0.8, generation=3,
            nvlink=600,
            nic="ib1600", source="NVIDIA A100 (SXM4) datasheet; DGX A100",
        ),
        _entry(
            "A100-80", 79.1, _tensor(19.5, 156, 312), 2039, sms=108, efficiency=0.8, generation=3,
            nvlink=600,
            nic="ib1600", source="NVIDIA A100 (SXM4) datasheet; DGX A100",
        ),
        _entry(
            "A800-80", 79.1, _tensor(19.5, 156, 312), 2039, sms=108, efficiency=0.8, generation=3,
            nvlink=400,
            nic="ib1600", source="NVIDIA A800 (SXM4) product page",
        ),
        # Ada.
        _entry(
            "L4", 22.0, _tensor(30.3, 60, 121, 242), 300, sms=58, efficiency=0.55,
            source="NVIDIA L4 datasheet; 72 W holds the clock down",
        ),
        _entry(
            "L40S", 44.4, _tensor(91.6, 183, 362, 733), 864, sms=142, efficiency=0.65,
            source="NVIDIA L40S datasheet",
        ),
        _entry(
            "4090-24", 23.6, _tensor(82.6, 82.6, 165.2, 330.3), 1008, sms=128, efficiency=0.9,
            nic="eth25",
            peers=False, source="NVIDIA Ada architecture white paper, RTX 4090",
        ),
        # Hopper and Blackwell.
        _entry(
            "H100-80", 79.1, _HOPPER, 3350, sms=132, efficiency=0.7, generation=4, nvlink=900,
            pcie=5,
            reduces=True, nic="ib3200",
            source="NVIDIA H100 (SXM5) datasheet; DGX H100",
        ),
        _entry(
            "H100-96", 94.5, _HOPPER, 4000, sms=132, efficiency=0.7, generation=4, nvlink=900,
            pcie=5,
            nic="ib3200",
            source="NVIDIA GH200 datasheet (96 GB HBM3)",
        ),
        _entry(
            "H200", 139.8, _HOPPER, 4800, sms=132, efficiency=0.7, generation=4, nvlink=900, pcie=5,
            reduces=True,
            nic="ib3200",
            source="NVIDIA H200 (SXM) datasheet; DGX H200",
        ),
        _entry(
            "B200", 178.3, _tensor(75, 1125, 2250, 4500), 8000, sms=148, efficiency=0.7,
            generation=5, nvlink=1800,
            pcie=5, reduces=True, nic="ib3200", source="NVIDIA HGX B200 datasheet; DGX B200",
        ),
        _entry(
            "H100-96-500W", 94.5, _HOPPER, 2400, sms=132, efficiency=0.55, generation=4, nvlink=900,
            pcie=5,
            reduces=True, nic="ib3200",
            source="pytorch/torchtitan benchmarks, December 2024 (96 GB HBM2e, 500 W)",
        ),
        _entry(
            "H800-80", 79.1, _HOPPER, 3350, sms=132, efficiency=0.7, generation=4, nvlink=400,
            pcie=5,
            reduces=True, nic="ib3200", source="NVIDIA H800 (SXM5) product page",
        ),
        # Four to a host, each with six NVLinks to each of the others.
        _entry(
            "GH200", 94.5, _HOPPER, 4000, sms=132, efficiency=0.7, generation=4, nvlink=900,
            chip_to_chip=450,
            fabric="mesh", nic="ib800", source="NVIDIA GH200 datasheet; Quad GH200 node",
        ),
        _entry(
            "GB200", 184.0, _tensor(80, 1250, 2500, 5000), 8000, sms=152, efficiency=0.7,
            generation=5, nvlink=1800, chip_to_chip=450, reduces=True, nic="ib1600",
            source="NVIDIA GB200 NVL72 datasheet",
        ),
        _entry(
            "B300", 267.5, _tensor(75, 1125, 2250, 4500), 8000, sms=148, efficiency=0.7,
            generation=5, nvlink=1800, pcie=5, reduces=True, nic="ib6400",
            source="NVIDIA DGX B300 datasheet",
        ),
        _entry(
            "GB300", 276.0, _tensor(80, 1250, 2500, 5000), 8000, sms=152, efficiency=0.7,
            generation=5, nvlink=1800, chip_to_chip=450, reduces=True, nic="ib3200",
            source="NVIDIA GB300 NVL72 datasheet",
        ),
        _entry(
            "5090-32", 31.3, _tensor(104.8, 104.8, 209.5, 419), 1792, sms=170, efficiency=0.85,
            pcie=5, nic="eth25", peers=False,
            source="NVIDIA RTX Blackwell architecture white paper, RTX 5090",
        ),
        _entry(
            "MI300X", 191.5, _tensor(163.4, 653.7, 1307.4, 2614.9), 5300, sms=304, efficiency=0.5,
            nvlink=896, pcie=5, fabric="mesh", nic="ib3200",
            source="AMD Instinct MI300X datasheet; eight to a host, 64 GB/s to each other one",
        ),
        # A device is what torch sees: one of the two dies. The fabric figure is that of the
        # links which one die has towards its neighbours.
        _entry(
            "MI250", 63.9, {"fp32": 45.3, "bf16": 181, "fp16": 181}, 1638, sms=104, efficiency=0.65,
            nvlink=200, nic="ib800", source="AMD Instinct MI250 datasheet, half of it",
        ),
        _entry(
            "MI250X", 63.9, {"fp32": 47.9, "bf16": 191.5, "fp16": 191.5}, 1638, sms=110,
            efficiency=0.65, nvlink=200, nic="ib800",
            source="AMD Instinct MI250X datasheet, half of it",
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
    "P40": "P40-24", "GH200-96": "GH200", "GH-96": "GH200", "MI200": "MI250X",
    "H100-96-HBM2e-500W": "H100-96-500W", "RTX-5090": "5090-32", "5090": "5090-32",
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
