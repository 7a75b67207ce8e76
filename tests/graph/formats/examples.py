"""Tiny files of each form, written for these tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

#: Published graphs beside the checkout; they are not part of it.
SHARED = Path(__file__).parents[4] / "shared" / "data" / "op_graphs"


def shared(name: str) -> Path:
    """A published file; the test is skipped where it is absent."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{path} is absent")
    return path


def dnn_partitioning() -> dict[str, Any]:
    """Four nodes, given out of order: b reads a, d reads b and c. Node b runs on CPUs only."""

    def node(id: int, cpu: float, fpga: float, size: float, color: int | None) -> dict[str, Any]:
        made = {
            "id": id,
            "name": "abcd"[id - 10],
            "supportedOnFpga": id != 11,
            "cpuLatency": cpu,
            "fpgaLatency": fpga,
            "isBackwardNode": 0,
            "size": size,
        }
        return made if color is None else {**made, "colorClass": color}

    return {
        "maxSizePerFPGA": 100.0,
        "maxFPGAs": 2,
        "maxCPUs": 1,
        "nodes": [
            node(13, 40.0, 4.0, 60.0, None),
            node(10, 10.0, 1.0, 50.0, 1),
            node(11, 20.0, 2.0, 0.0, None),
            node(12, 30.0, 3.0, 50.0, 1),
        ],
        "edges": [
            {"sourceId": 10, "destId": 11, "cost": 0.5, "size": 8},
            {"sourceId": 10, "destId": 12, "cost": 0.5, "size": 8},
            {"sourceId": 11, "destId": 13, "cost": 0.25},
            {"sourceId": 12, "destId": 13, "cost": 0.125},
        ],
    }


def dnn_partitioning_table() -> dict[str, Any]:
    """The same as a table."""
    columns = ["cpuLatency", "fpgaLatency", "size", "supportedOnFpga", "isBackwardNode"]
    return {
        "maxSizePerFPGA": 100.0,
        "maxFPGAs": 2,
        "maxCPUs": 1,
        "cols": columns,
        "nodes": [
            [40.0, 4.0, 60.0, 1, 0],
            [10.0, 1.0, 50.0, 1, 0],
            [20.0, 2.0, 0.0, 0, 0],
            [30.0, 3.0, 50.0, 1, 0],
        ],
        "edges": [[1, 2, 0.5], [1, 3, 0.5], [2, 0, 0.25], [3, 0, 0.125]],
    }


def piper() -> dict[str, Any]:
    """Two layers; the second also at degree 2, and both with recompute."""

    def variant(name: str, time: float, each: float, **sync: dict[str, float]) -> dict[str, Any]:
        return {
            "id": name,
            "timePerSample": time,
            "parameterSize": 16.0,
            "memoryUsageA": each,
            "memoryUsageB": 10.0,
            "syncTimeFw": sync.get("fw", {}),
            "syncTimeBw": sync.get("bw", {}),
        }

    out, into = {"bw": {"7": 0.0}}, {"fw": {"5": 0.0}}
    return {
        "maxDevices": 4,
        "maxMemoryPerDevice": 60.0,
        "bandwidth": 8.0,
        "mbsInBatch": 8,
        "nodes": [
            {"id": 5, "TMPCs": {"1": [variant("plain", 6.0, 20.0, **out)]}},
            {
                "id": 7,
                "name": "head",
                "TMPCs": {
                    "1": [
                        variant("plain", 4.0, 40.0, **into),
                        variant("redo", 5.0, 5.0, **into),
                    ],
                    "2": [variant("plain", 2.5, 20.0, fw={"5": 4.0})],
                },
            },
        ],
        "edges": [{"sourceId": 5, "destId": 7, "communicationCost": 16.0}],
    }


def giph() -> dict[str, Any]:
    """Two devices, the second twice as slow and unfit for ops of type 1; a diamond of four ops."""
    return {
        "networks": [
            {
                "comp_rate": [1.0, 2.0],
                "comm_delay": [[0.0, 3.0], [3.0, 0.0]],
                "comm_rate": [[0.0, 0.5], [0.25, 0.0]],
                "device_constraints": {"0": [0, 1], "1": [0]},
            }
        ],
        "programs": [
            {
                "compute": [1.0, 4.0, 2.0, 1.0],
                "type": [0, 1, 0, 0],
                "edges": [[0, 1, 8.0], [0, 2, 4.0], [1, 3, 2.0], [2, 3, 4.0]],
            }
        ],
    }


#: One input (node 0 of 5), then four nodes in a diamond.
DOPPLER_TEXT = """5
0,
0, 0, 1, 2,
1, 2, 3, 3,
10000000000,40000000000,fill
20000000000,10000000000,einsummable
20000000000,10000000000,einsummable
10000000000,0,select
"""


def doppler() -> dict[str, Any]:
    """The same as JSON, with a number of devices."""
    return {
        "comp": [1e10, 2e10, 2e10, 1e10],
        "comm": [4e10, 1e10, 1e10, 0],
        "edges": [[0, 1], [0, 2], [1, 3], [2, 3]],
        "node_type": ["fill", "einsummable", "einsummable", "select"],
        "default_devices": 2,
    }
