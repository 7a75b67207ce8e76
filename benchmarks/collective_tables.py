"""Published times of collectives as cases: what was measured, on what, and whether it is fitted.

Each function reads one table of ../shared/data. Where a table does not name its hardware, the
guess is said beside it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from rlplace.cluster.types import Cluster, CollectiveKind

DATA = Path(__file__).parents[1] / ".." / "shared" / "data"

MIB = 2.0**20
#: Bytes of a measurement that says only that it was large.
LARGE = 1024 * MIB


@dataclass(frozen=True, slots=True)
class Case:
    """One measured time.

    Args:
        table: Where it comes from.
        kind: The collective.
        cluster: What it ran on, in the short form.
        nics: NICs of a node where they are not as usual, else 0.
        members: Devices of the group; of p2p the senders.
        busy: Devices that communicated at the same time; of p2p the receivers.
        size: Bytes of the whole tensor.
        seconds: Measured.
        fitted: Whether constants may be fitted to it.
        reduces: Whether switches were allowed to add up.
    """

    table: str
    kind: CollectiveKind
    cluster: str
    members: tuple[int, ...]
    busy: tuple[int, ...]
    size: float
    seconds: float
    fitted: bool = False
    reduces: bool = True
    nics: int = 0


def read(path: str) -> list[dict[str, str]]:
    """Rows of a CSV file below the data folder."""
    with (DATA / path).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@cache
def parsed(short: str) -> Cluster:
    """A cluster from its short form."""
    return Cluster.parse(short)


def of_bus_bandwidth(kind: str, ranks: int, size: float, bandwidth: float) -> float:
    """Seconds of a collective whose bus bandwidth (nccl-tests, PERFORMANCE.md) is given."""
    passes = 2.0 if kind == "all_reduce" else 1.0
    return passes * (ranks - 1) / ranks * size / bandwidth


#: Clusters of the rows of `collective_bandwidths.csv`, by GPU, GPUs and network as it names them.
_MACHINES: dict[tuple[str, str, str], str] = {
    ("A100-40", "24", "4x HDR 200 Gb/s"): "3x8xA100-40:ib800",
    ("A100-80", "8", ""): "8xA100-80",
    ("A100-80", "16", "4x 200 Gb/s dual port"): "2x8xA100-80:ib800",
    ("A100", "16", "8x 200 Gb/s (DGX A100)"): "2x8xA100-80:ib1600",
    ("A100", "2", ""): "2xA100-80",
    ("A100", "3", ""): "3xA100-80:pcie",
    ("A100-80", "16", "4x HDR"): "2x8xA100-80:ib800",
    ("RTX-5090", "8", ""): "8x5090-32",
    ("RTX-5090", "4", ""): "4x5090-32",
    ("MI300X", "2", ""): "8xMI300X",
    ("MI300X", "8", ""): "8xMI300X",
    ("V100-16", "4", ""): "4xV100-16",
    ("V100-32", "4", ""): "4xV100-32",
    ("V100-32", "16", "4x Omni-Path 100 Gb/s"): "4x4xV100-32:opa400",
    ("V100-32", "64", "4x Omni-Path 100 Gb/s"): "16x4xV100-32:opa400",
    ("A100-80", "32", "4x Omni-Path 100 Gb/s"): "4x8xA100-80:opa400",
}


#: Those that are fitted.
_FITTED = {"8x5090-32", "8xMI300X", "2x8xA100-80:ib1600", "4x4xV100-32:opa400"}


def bandwidths() -> Iterator[Case]:
    """collective_bandwidths.csv; figures of the playbook are taken for bus bandwidths.

    The example output of nccl-tests on four nodes of unnamed hardware reaches what nodes of four
    A100 with as many HDR NICs would.
    """
    for number, row in enumerate(read("published/collective_bandwidths.csv")):
        ranks = int(row["gpus"] or 16)
        network, gpu, text = row["inter_link"], row["gpu"], row["algorithm"]
        table, fitted = "nccl-tests reports", False
        if gpu.startswith("unstated"):
            short, table = "4x4xA100-40:ib800", "nccl-tests, 4 nodes"
            fitted = number % 2 == 0 and float(row["bytes"]) < 2e7
        elif "EFA" in network:
            nodes = int(row["nodes"])
            short = "8xH100-80" if nodes == 1 else f"{nodes}x8xH100-80:efa3200"
            table = "ultra-scale playbook"
            fitted = row["collective"] != "reduce_scatter" and nodes in (2, 8, 32)
        elif gpu in {"H200", "B200"} or gpu == "H100-80":
            short, table = f"{ranks}x{gpu}", "ml-engineering, Hopper and later"
            fitted = gpu == "H200" or (gpu == "B200" and ranks == 8 and "ring" in text)
        elif (gpu, row["gpus"], network) in _MACHINES:
            short = _MACHINES[gpu, row["gpus"], network]
            fitted = ranks > 2 and short in _FITTED
        else:
            continue
        if gpu == "H200" and text == "default" and ranks < 5:
            fitted = False
        digits = row["bytes"] if row["bytes"].isdigit() else ""
        size = float(digits or LARGE)
        kind = _kind(row["collective"])
        bus = float(row["busbw_GBps"]) * 1e9
        members = tuple(range(ranks))
        seconds = of_bus_bandwidth(kind, ranks, size, bus)
        yield Case(table, kind, short, members, members, size, seconds, fitted, "ring" not in text)


def galvatron() -> Iterator[Case]:
    """galvatron_comm_profile.csv.

    The GPUs are not named: 158 GB/s inside a node is what an A800 reaches, 231 GB/s an A100; the
    network that gives a single flow as much as each of eight has eight NICs of 100 Gb/s.
    """
    for row in read("published/galvatron_comm_profile.csv"):
        kind, ranks = _kind(row["collective"]), int(row["group_size"] or 0)
        value = float(row["value"])
        if row["quantity"] == "time_ms":
            size = float(row["note"].split()[0]) * MIB
            whole = size * ranks if kind == "all_to_all" else size
            fitted = ranks == 8
            group = tuple(range(ranks))
            table = "galvatron 2025"
            everyone = tuple(range(8))
            yield Case(table, kind, "8xA100-80", group, everyone, whole, value / 1e3, fitted)
        elif row["quantity"] in {"busbw_GBps", "GBps"}:
            nodes, each = (int(part[0]) for part in row["cluster"].split("_"))
            short = f"{nodes}x{each}xA800-80:ib800"
            yield from _galvatron_case(row, kind, short, LARGE / value / 1e9, 8)
        elif row["quantity"] == "ms_per_MB" and row["note"] in {"", "pp 1"}:
            nodes = 2 if "2x8" in row["cluster"] else 1
            short = f"{nodes}x8xTITAN-RTX-24:ib100"
            yield from _galvatron_case(row, kind, short, LARGE / MIB * value / 1e3, 0)


def _galvatron_case(
    row: dict[str, str], kind: CollectiveKind, short: str, per_pass: float, nics: int
) -> Iterator[Case]:
    """An all-reduce of consecutive or strided groups, or messages between pipeline stages."""
    ranks, devices = int(row["group_size"]), len(parsed(short).devices)
    everyone = tuple(range(devices))
    table = "galvatron TITAN RTX" if "TITAN" in row["cluster"] else "galvatron 2023-24"
    if kind == "p2p":
        each = devices // ranks
        # The boundary in the middle is the one that crosses nodes.
        first = devices // 2 - each
        senders, receivers = everyone[first : first + each], everyone[first + each :][:each]
        size = LARGE * each
        yield Case(table, kind, short, senders, receivers, size, per_pass, nics=nics)
        return
    step = devices // ranks if row["placement"] == "strided" else 1
    members = everyone[: ranks * step : step]
    seconds = 2 * (ranks - 1) / ranks * per_pass
    fitted = devices == ranks == 8
    yield Case(table, kind, short, members, everyone, LARGE, seconds, fitted, nics=nics)


def aceso() -> Iterator[Case]:
    """V100 with NVLink, eight to a node; every fifth all-reduce of eight is fitted.

    Sizes are MiB of a rank's input. What is not an all-reduce was timed with the copies that
    cut and join tensors, which are no part of the collective.
    """
    for number, row in enumerate(read("profiles/aceso/collectives_v100.csv")):
        kind, ranks = _kind(row["collective"]), int(row["gpus"])
        size, milliseconds = float(row["data_size(MB)"]) * MIB, float(row["time(ms)"])
        if milliseconds > 1e6:
            continue
        whole = size * ranks if kind in {"all_gather", "all_to_all"} else size
        members = tuple(range(ranks))
        fitted = kind == "all_reduce" and ranks == 8 and number % 5 == 0
        yield Case(
            "aceso", kind, "8xV100-32", members, members, max(whole, 1.0), milliseconds / 1e3,
            fitted,
        )  # fmt: skip
    for place, short, target in (
        ("intra", "8xV100-32", 1),
        ("inter", "2x8xV100-32:ib100", 8),
    ):
        path = DATA / f"profiles/aceso/p2p_{place}_node_v100.csv"
        lines = path.read_text(encoding="utf-8").splitlines()
        megabytes, speeds = ([float(part) for part in line.split(",")] for line in lines[:2])
        for amount, speed in zip(megabytes, speeds, strict=True):
            fitted = place == "intra" and amount in {1.0, 16.0, 256.0}
            taken = amount * MIB / speed / 1e9
            yield Case(
                f"aceso p2p {place}", "p2p", short, (0,), (target,), amount * MIB, taken, fitted
            )


def nnscaler() -> Iterator[Case]:
    """MI200, sixteen dies of a node; between dies are one to four links, which is not modelled."""
    for row in read("profiles/nnscaler/mi200_comm.csv"):
        kind, ranks = _kind(row["collective"].replace(" ", "_")), int(row["gpus"])
        size = float(row["size_mb"]) * MIB
        members = tuple(range(ranks))
        whole = size * ranks if kind == "all_to_all" else size
        yield Case(
            "nnscaler MI200", kind, "16xMI250X", members, members, whole, float(row["seconds"])
        )


#: Networks of the nodes of `intra_node_fits.csv` by kind and GPUs of a node: machine types
#: a2-highgpu-1g, 2g and 4g of GCP; Alps; 25 and 1 Gb/s Ethernet.
_NETWORKS = {
    ("A100-40", 1): "eth24", ("A100-40", 2): "eth32", ("A100-40", 4): "eth50",
    ("GH-96", 1): "ib800", ("GH-96", 2): "ib800", ("GH-96", 4): "ib800",
    ("RTX-2080", 1): "eth25", ("RTX-2080", 2): "eth25", ("RTX-2080", 4): "eth25",
    ("Titan-RTX", 1): "eth25", ("Titan-RTX", 2): "eth25", ("Titan-RTX", 4): "eth25",
    ("RTX-3090", 1): "eth1", ("RTX-3090", 2): "eth1",
}  # fmt: skip
_KINDS = {"RTX-2080": "2080Ti-11"}


def sailor() -> Iterator[Case]:
    """Messages between two nodes from all their GPUs, at sizes of the fits' range."""
    for row in read("profiles/sailor/intra_node_fits.csv"):
        gpus = int(row["gpus"])
        network = _NETWORKS.get((row["gpu"], gpus))
        if row["source"] != "homo_inter" or network is None:
            continue
        kind = _KINDS.get(row["gpu"], row["gpu"])
        each = 4 if row["gpu"] == "GH-96" else gpus
        short = f"2x{each}x{kind}:{network}"
        senders, receivers = tuple(range(gpus)), tuple(range(each, each + gpus))
        for exponent in (0, 4, 8):
            fit = sum(float(row[f"c{power}"]) * exponent**power for power in (0, 1, 2)) * 1e9
            size = 2.0**exponent * 1e6
            fitted = (row["gpu"], gpus) in {("RTX-2080", 1), ("GH-96", 1)}
            yield Case("sailor", "p2p", short, senders, receivers, size, size / fit, fitted)


def _kind(name: str) -> CollectiveKind:
    kinds: dict[str, CollectiveKind] = {
        "allreduce": "all_reduce", "all_reduce": "all_reduce", "all_gather": "all_gather",
        "reduce_scatter": "reduce_scatter", "all_to_all": "all_to_all", "all2all": "all_to_all",
        "p2p": "p2p",
    }  # fmt: skip
    return kinds.get(name, "broadcast")


def cases() -> list[Case]:
    """All of them."""
    found = [*bandwidths(), *galvatron(), *aceso(), *nnscaler(), *sailor()]
    return [replace(case, size=max(case.size, 1.0)) for case in found]
