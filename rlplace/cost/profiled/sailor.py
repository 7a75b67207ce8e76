"""Profiles of Sailor (Strati et al., SOSP 2025; eth-easl/sailor): layers, memory, network fits.

Its trainer is Megatron-DeepSpeed in fp32, 1F1B, Adam; the times of a layer contain the all-reduces
of its tp group. Read from a folder of CSV files:

- ``layer_times.csv``: model, gpu, micro_batch, tp, layer, fwd_s, bwd_s, update_s (the optimizer
  step of the whole model, repeated in each row)
- ``layer_memory.csv``: model, tp, layer, params_floats, act_output_floats, act_mem_bytes (of one
  sample)
- ``network_fits.csv``: of a pair of senders and receivers, see `BandwidthFit`
- ``setup.json``: memory of each kind of device
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rlplace.cluster.types import Cluster, Device, DeviceKind, Link, Node
from rlplace.cost.profiled.network import BandwidthFit, FittedNetwork
from rlplace.cost.profiled.rows import read_rows
from rlplace.cost.profiled.types import LayerPoint, LayerTable, Profile
from rlplace.errors import InputError, nearest_names
from rlplace.graph.types import Affine

#: Bytes that the runtime takes on a device whatever the plan, as Sailor's validation has it.
RESERVE = 5_060_000_000

_Times = dict[tuple[str, int, int, int], dict[str, str]]


def read_sailor(folder: str | Path, model: str) -> Profile:
    """The profile of a model.

    Args:
        folder: Where the files are.
        model: Such as ``OPT-350``.

    Raises:
        InputError: If a file is missing, or has no such model.
    """
    source = Path(folder)
    times: _Times = {
        (row["gpu"], int(row["tp"]), int(row["layer"]), int(row["micro_batch"])): row
        for row in read_rows(source / "layer_times.csv", {"model": model})
    }
    memory = {
        (int(row["layer"]), int(row["tp"])): row
        for row in read_rows(source / "layer_memory.csv", {"model": model})
    }
    count = 1 + max(layer for _, _, layer, _ in times)
    places = {(gpu, tp) for gpu, tp, _, _ in times}
    tables = {
        (gpu, str(layer), tp): _table(times, memory, gpu, tp, layer)
        for gpu, tp in places
        for layer in range(count)
        if (layer, tp) in memory
    }
    return Profile(
        name=model,
        layers=tuple(map(str, range(count))),
        tables=tables,
        params={(str(at), tp): int(row["params_floats"]) for (at, tp), row in memory.items()},
        outputs={
            str(at): Affine(0.0, float(row["act_output_floats"]))
            for (at, tp), row in memory.items()
            if tp == 1
        },
    )


def _table(
    times: _Times, memory: dict[tuple[int, int], dict[str, str]], gpu: str, tp: int, layer: int
) -> LayerTable:
    own = sorted(
        (batch, row) for (g, t, at, batch), row in times.items() if (g, t, at) == (gpu, tp, layer)
    )
    held = float(memory[layer, tp]["act_mem_bytes"])
    points = tuple(
        LayerPoint(batch, float(row["fwd_s"]), float(row["bwd_s"]), held * batch, held * batch)
        for batch, row in own
    )
    params = [int(row["params_floats"]) for (_, t), row in memory.items() if t == tp]
    share = int(memory[layer, tp]["params_floats"]) / sum(params)
    return LayerTable(points, share * float(own[0][1]["update_s"]))


def read_sailor_network(folder: str | Path, zone: str = "us-central1-a") -> FittedNetwork:
    """The bandwidth fits inside a zone.

    Raises:
        InputError: If the file is missing.
    """
    fits = {}
    for row in read_rows(Path(folder) / "network_fits.csv"):
        if row["send_zone"] == row["recv_zone"] == zone:
            key = (row["send_gpu"], int(row["send_gpus"]), row["recv_gpu"], int(row["recv_gpus"]))
            fits[key] = BandwidthFit(*(float(row[name]) for name in ("c2", "c1", "c0")))
    return FittedNetwork(fits)


def sailor_cluster(folder: str | Path, nodes: Sequence[tuple[str, int]]) -> Cluster:
    """A cluster of kinds that Sailor measured.

    Its links have no figures: `read_sailor_network` has them.

    Args:
        folder: Where ``setup.json`` is.
        nodes: Kind and number of devices of each node.

    Raises:
        InputError: If a kind is not there, with the nearest.
    """
    machines = json.loads((Path(folder) / "setup.json").read_text())["machines"]
    known = {name: of["mem_per_gpu"] for name, of in machines.items() if isinstance(of, dict)}
    for name, _ in nodes:
        if name not in known:
            raise InputError("kind", name, "Sailor has no such device", nearest_names(name, known))
    kinds = tuple(
        DeviceKind(name, known[name], {"fp32": 1.0}, 1.0, reserve=RESERVE)
        for name in dict.fromkeys(name for name, _ in nodes)
    )
    link = Link(1.0, 0.0, "sailor")
    hosts = tuple(Node(index, link, link) for index in range(len(nodes)))
    owners = [(index, name) for index, (name, count) in enumerate(nodes) for _ in range(count)]
    devices = tuple(Device(rank, name, node) for rank, (node, name) in enumerate(owners))
    return Cluster(devices, hosts, kinds, name="Sailor")
