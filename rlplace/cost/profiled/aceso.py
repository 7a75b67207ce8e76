"""Profiles of Aceso (Liu et al., EuroSys 2024; microsoft/SuperScaler): ops of GPT on V100.

Times are in microseconds, sizes in MiB, activations and weights in fp16; the times of a sharded op
contain its collectives. Read from a folder of CSV files:

- ``op_profile_gpt_v100.csv``: model, size, mbs, tp, algo, op_name, forward-compute,
  backward-compute, input_size, output_size, weights, activations, fwd_reserved, bwd_reserved
- ``collectives_v100.csv``: model, size, collective, gpus, data_size(MB), time(ms)
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rlplace.cluster.types import CollectiveCurve, CollectiveKind
from rlplace.cost.profiled.rows import read_rows
from rlplace.cost.profiled.types import LayerPoint, LayerTable, Profile
from rlplace.graph.types import Affine
from rlplace.units import MIB

_FP16 = 2
#: Groups of the ops of a layer, by the op that each begins with.
_PARTS = {
    "encoder-embedding": "embedding",
    "enc-1st-layernorm": "attention",
    "enc-2nd-layernorm": "mlp",
    "final-layernorm": "norm",
    "gpt-post-process": "head",
}
#: The same, where each half is cut again at a border over which little passes.
_FINE_PARTS = {
    **_PARTS,
    "enc-attention-score": "scores",
    "enc-attention-dense": "dense",
    "enc-MLP-GEMM-2": "down",
}
#: Ops whose output lives in the storage of another (Aceso's `consider_shared_space`): share of
#: their activations that counts.
_SHARED = {"enc-attention-softmax": 0.0, "enc-attention-dropout": 1.5}
#: What `data_size` is of the whole tensor.
_WHOLE: dict[CollectiveKind, bool] = {
    "all_reduce": True,
    "reduce_scatter": True,
    "all_gather": False,
    "all_to_all": False,
}

_Key = tuple[str, int, int]


def read_aceso(
    folder: str | Path,
    size: str,
    layers: int,
    *,
    seq_len: int = 2048,
    kind: str = "V100-32",
    fine: bool = False,
) -> Profile:
    """The profile of a GPT, its ops joined to the halves of a layer.

    Args:
        folder: Where the files are.
        size: Such as ``1_3B``.
        layers: Transformer layers of the model.
        seq_len: Tokens of a sample.
        kind: Name of the kind of device that it was measured on.
        fine: Join them to five parts of a layer instead, between which stages and recompute may
            begin too; Aceso's own plans do so between any two ops.

    Raises:
        InputError: If a file is missing, or has no such size.
    """
    parts = _FINE_PARTS if fine else _PARTS
    wanted = {"model": "gpt", "size": size, "algo": "0"}
    joined: dict[_Key, list[dict[str, str]]] = {}
    part = ""
    for row in read_rows(Path(folder) / "op_profile_gpt_v100.csv", wanted):
        part = parts.get(row["op_name"], part)
        joined.setdefault((part, int(row["tp"]), int(row["mbs"])), []).append(row)
    names = list(dict.fromkeys(name for name, _, _ in joined))
    degrees = sorted({tp for _, tp, _ in joined})
    tables = {
        (kind, name, tp): LayerTable(tuple(_points(joined, name, tp)))
        for name in names
        for tp in degrees
    }
    first = {
        (name, tp): next(rows for (n, t, _), rows in joined.items() if (n, t) == (name, tp))
        for name in names
        for tp in degrees
    }
    smallest = min(batch for _, _, batch in joined)
    # What the last op of a part hands on, whole: with what travels beside its own output.
    handed = {name: float(joined[name, 1, smallest][-1]["output_size"]) for name in names}
    return Profile(
        name=f"GPT-{size}",
        layers=(*names[:1], *(names[1:-2] * layers), *names[-2:]),
        tables=tables,
        params={key: round(_sum(rows, "weights") * MIB / _FP16) for key, rows in first.items()},
        outputs={
            name: Affine(0.0, output * MIB / _FP16 / smallest) for name, output in handed.items()
        },
        tokens_per_sample=seq_len,
    )


def _points(joined: dict[_Key, list[dict[str, str]]], name: str, tp: int) -> Iterable[LayerPoint]:
    for batch in sorted(batch for n, t, batch in joined if (n, t) == (name, tp)):
        rows = joined[name, tp, batch]
        kept = sum(_SHARED.get(row["op_name"], 1.0) * float(row["activations"]) for row in rows)
        yield LayerPoint(
            batch,
            _sum(rows, "forward-compute") * 1e-6,
            _sum(rows, "backward-compute") * 1e-6,
            kept * MIB,
            max(float(row["bwd_reserved"]) for row in rows) * MIB,
        )


def _sum(rows: list[dict[str, str]], column: str) -> float:
    return sum(float(row[column]) for row in rows)


def read_aceso_curves(folder: str | Path, size: str) -> tuple[CollectiveCurve, ...]:
    """What collectives among the devices of a node took, for `Cluster.curves`.

    Where a larger message was measured to take less, the time before holds.

    Raises:
        InputError: If the file is missing, or has no such size.
    """
    wanted = {"model": "gpt", "size": size}
    found: dict[tuple[CollectiveKind, int], dict[float, float]] = {}
    for row in read_rows(Path(folder) / "collectives_v100.csv", wanted):
        ranks = int(row["gpus"])
        for kind, whole in _WHOLE.items():
            if row["collective"] == kind:
                whole_size = float(row["data_size(MB)"]) * MIB * (1 if whole else ranks)
                found.setdefault((kind, ranks), {})[whole_size] = float(row["time(ms)"]) * 1e-3
    return tuple(_curve(kind, ranks, points) for (kind, ranks), points in found.items())


def _curve(kind: CollectiveKind, ranks: int, points: dict[float, float]) -> CollectiveCurve:
    rising: list[tuple[float, float]] = []
    for size, seconds in sorted(points.items()):
        rising.append((size, max(seconds, rising[-1][1] if rising else 0.0)))
    (size_0, time_0), (size_1, time_1) = rising[0], rising[-1]
    slope = (time_1 - time_0) / (size_1 - size_0) if len(rising) > 1 else time_0 / size_0
    line = max(time_0 - slope * size_0, 0.0)
    return CollectiveCurve(kind, ranks, line, slope, tuple(rising) if len(rising) > 1 else ())
