"""Profiles of Galvatron (Miao et al., VLDB 2023; PKU-DAIR/Hetu-Galvatron): layers of transformers.

Read from its JSON files:

- computation: ``layertype_0_bsz4_seq2048`` is milliseconds of the forward of one layer for one
  sample in a micro-batch of 4; ``layertype_other`` is everything but the layers
- memory: under ``1_2_4_sp`` (pp 1, tp 2, dp 4, states sharded over dp, sequence parallel)
  ``layernum[1]_bsz8_seq2048_rank0_ms`` is MiB of states of a model with one layer, ``_act`` of
  what it keeps of 8 samples; two layers less one layer is a layer
- hardware: ``allreduce_size_8_16MB_time`` is milliseconds among 8 devices

By its own rules a backward pass takes twice the forward, and a layer cut in t takes a t-th and its
four all-reduces: two forward, two backward.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rlplace.cluster.types import CollectiveCurve, CollectiveKind
from rlplace.cost.profiled.types import LayerPoint, LayerTable, Profile
from rlplace.errors import InputError
from rlplace.graph.types import Affine
from rlplace.units import MIB

#: Bytes of states a parameter (bf16 mixed, Adam), and of an activation.
_STATES, _BF16 = 16, 2
_BACKWARD = 2.0
_NAMES = {"layer": "0", "other": "other"}


def read_galvatron(
    computation: str | Path,
    memory: str | Path,
    hardware: str | Path,
    *,
    layers: int,
    hidden: int,
    kind: str,
    seq_len: int = 2048,
) -> Profile:
    """The profile of a model: its layers, and one more for embedding, head and loss.

    Args:
        computation: File of times.
        memory: File of memory.
        hardware: File of collectives inside a node.
        layers: Layers of the model.
        hidden: Width of what passes between layers.
        kind: Name of the device; the files do not say it.
        seq_len: Tokens of a sample.

    Raises:
        InputError: If a file cannot be read, or has nothing of such sequences.
    """
    times = _times(Path(computation), seq_len)
    found = _read(Path(memory))
    curves = {
        curve.ranks: curve
        for curve in read_galvatron_curves(hardware)
        if curve.kind == "all_reduce"
    }
    tables: dict[tuple[str, str, int], LayerTable] = {}
    params: dict[tuple[str, int], int] = {}
    for tp in (1, *sorted(curves)):
        held = _held(found, tp, seq_len, str(memory))
        for name in _NAMES:
            states, kept = held[name]
            params[name, tp] = round(states / _STATES)
            # What a layer of the model does twice a pass; the rest has a reduction of its loss.
            exchanges = 2 if name == "layer" and tp > 1 else 0
            points = []
            for batch, seconds in times[name]:
                size = float(batch * seq_len * hidden * _BF16)
                sent = exchanges * curves[tp].seconds(size) if exchanges else 0.0
                forward = seconds / tp
                points.append(
                    LayerPoint(batch, forward + sent, _BACKWARD * forward + sent, kept * batch)
                )
            tables[kind, name, tp] = LayerTable(tuple(points))
    return Profile(
        name=Path(computation).stem,
        layers=(*("layer",) * layers, "other"),
        tables=tables,
        params=params,
        outputs={"layer": Affine(0.0, float(seq_len * hidden))},
        tokens_per_sample=seq_len,
    )


def read_galvatron_curves(hardware: str | Path) -> tuple[CollectiveCurve, ...]:
    """Collectives among the devices of a node, for `Cluster.curves`.

    A gather or a scatter is half of an all-reduce, as Galvatron has it.

    Raises:
        InputError: If the file cannot be read.
    """
    points: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for key, value in _read(Path(hardware)).items():
        match = re.fullmatch(r"(allreduce|all2all)_size_(\d+)_(\d+)MB_time", key)
        if match:
            place = (float(match[3]) * MIB, float(value) * 1e-3)
            points.setdefault((match[1], int(match[2])), []).append(place)
    shares: dict[str, tuple[tuple[CollectiveKind, float], ...]] = {
        "allreduce": (("all_reduce", 1.0), ("all_gather", 0.5), ("reduce_scatter", 0.5)),
        "all2all": (("all_to_all", 1.0),),
    }
    return tuple(
        _curve(kind, ranks, share, sorted(measured))
        for (name, ranks), measured in points.items()
        for kind, share in shares[name]
    )


def _curve(
    kind: CollectiveKind, ranks: int, share: float, measured: list[tuple[float, float]]
) -> CollectiveCurve:
    rising: list[tuple[float, float]] = []
    for size, seconds in measured:
        rising.append((size, max(share * seconds, rising[-1][1] if rising else 0.0)))
    (size_0, time_0), (size_1, time_1) = rising[0], rising[-1]
    slope = (time_1 - time_0) / (size_1 - size_0)
    return CollectiveCurve(kind, ranks, time_0, slope, tuple(rising))


def _times(path: Path, seq_len: int) -> dict[str, list[tuple[int, float]]]:
    """(samples, seconds of the forward) of a layer and of the rest."""
    found: dict[str, list[tuple[int, float]]] = {}
    content = _read(path)
    for name, label in _NAMES.items():
        pattern = rf"layertype_{label}_bsz(\d+)_seq{seq_len}"
        matches = [(re.fullmatch(pattern, key), value) for key, value in content.items()]
        found[name] = sorted(
            (int(match[1]), int(match[1]) * value * 1e-3) for match, value in matches if match
        )
        if not found[name]:
            seen = sorted({part for key in content for part in re.findall(r"seq\d+", key)})
            rule = f"{path.name} has no layertype_{label} of such sequences"
            raise InputError("seq_len", seq_len, rule, seen or None)
    return found


def _held(
    content: dict[str, Any], tp: int, seq_len: int, path: str
) -> dict[str, tuple[float, float]]:
    """(bytes of states, bytes kept of a sample) of a layer and of the rest, on one device."""
    label = re.compile(rf"1_{tp}_(\d+){'_vtp' if tp > 1 else ''}_sp")
    entry = next((key for key in content if label.fullmatch(key)), None)
    if entry is None:
        raise InputError("tp", tp, f"{path} has no such degree", sorted(content))
    match = label.fullmatch(entry)
    assert match
    dp, values = int(match[1]), content[entry]
    pattern = re.compile(rf"layernum\[1\]_bsz(\d+)_seq{seq_len}_rank0_ms")
    batch = next((int(m[1]) for m in map(pattern.fullmatch, values) if m), 0)
    if not batch:
        raise InputError("seq_len", seq_len, f"{path} has no such sequences", sorted(values)[:3])

    def pair(what: str) -> tuple[float, float]:
        one, two = (
            values[f"layernum[{count}]_bsz{batch}_seq{seq_len}_rank0_{what}"] * MIB
            for count in (1, 2)
        )
        return two - one, 2 * one - two

    states, kept = pair("ms"), pair("act")
    return {
        name: (states[place] * dp, kept[place] * dp / batch) for place, name in enumerate(_NAMES)
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise InputError("profile", str(path), f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise InputError("profile", str(path), f"is not JSON ({error})") from error
    return found
