"""Galvatron's memory profiles: 1 to 4 layers of GPT, Llama and Baichuan on 8 unnamed GPUs.

States are fp32 under FSDP (16 bytes a parameter over all ranks that share them: ZeRO-3), bf16
activations, flash attention. The figure is what is allocated at the peak: states and the peak of
activations; the rank that has more counts. Where `vocab_tp` of the file is 0, embedding and head
are data parallel on the devices that the layers are cut over (the gathered head is as large at
every degree): no plan has two meshes in a stage, so such rows are left out. The runs of 2023 keep
class scores in 16 bits and have as many micro-batches as stages; those of 2026 have one
(activations of the last stage grow with the batch in both, what comes and goes only in the
latter). The states are those of embeddings that are not tied.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from benchmarks.fidelity_tables.read import (
    Columns,
    degrees,
    integer,
    lines,
    pick,
    shape,
    split_off,
)
from benchmarks.fidelity_tables.types import (
    ClusterSpec,
    GraphSpec,
    Measured,
    Reading,
    Row,
    Workload,
)
from rlplace.units import MIB

FILE = "galvatron_memory_profile.csv"
FIT_ONE_IN = 8

#: Vocabulary and ffn of the published configurations of these sizes.
_VOCAB = {"gpt": 50257, "llama": 32000, "baichuan": 64000}
_SAME = ("snapshot", "family", "source_file", "layers", "pp", "tp", "dp", "ckpt")


def rows(data: Path) -> Reading:
    found = Reading()
    pairs: dict[tuple[str, ...], list[tuple[int, Columns]]] = defaultdict(list)
    for line, columns in lines(data / FILE):
        if columns["tp"] != "1" and columns["vocab_tp"] == "0":
            found.left_out["embedding and head are on other axes than the layers"] += 1
            continue
        same = tuple(columns[name] for name in (*_SAME, "seq_parallel", "vocab_tp"))
        pairs[same].append((line, columns))
    for members in pairs.values():
        line, columns = max(members, key=lambda member: _peak(member[1]))
        found.left_out["the other rank of the same run"] += len(members) - 1
        found.rows.append(_row(line, columns))
    found.rows = split_off(found.rows, FIT_ONE_IN)
    return found


def _peak(columns: Columns) -> float:
    """Bytes that are allocated at most."""
    activations = max(float(columns["activation_mib"]), float(columns["activation_peak_mib"]))
    return (float(columns["model_states_mib"]) + activations) * MIB


def _row(line: int, columns: Columns) -> Row:
    tp, pp, dp = (integer(columns[name]) for name in ("tp", "pp", "dp"))
    early = columns["snapshot"].startswith("2023")
    workload = Workload(
        graph=_graph(columns, tp),
        cluster=ClusterSpec("A100-40", 8),
        global_batch=integer(columns["global_batch"]),
        precision="bf16-mixed",
        framework="galvatron-2023" if early else "galvatron",
    )
    plan = {
        "pp": pp,
        "tp": tp,
        "dp_replicate": 1,
        "dp_shard": dp,
        "zero": 3,
        "micro_batches": pp if early else 1,
        "schedule": "gpipe",
        "sequence_parallel": columns["seq_parallel"] == "1",
        "recompute": "layer" if columns["ckpt"] == "1" else "none",
        "balance": "layers",
    }
    measured = Measured(memory=_peak(columns), memory_kind="allocated")
    key = pick(columns, *_SAME, "hidden", "seq_parallel", "vocab_tp", "rank")
    group = (columns["family"], columns["hidden"], columns["layers"])
    return Row("galvatron", line, key, workload, plan, measured, group)


def _graph(columns: Columns, tp: int) -> GraphSpec:
    hidden, family = integer(columns["hidden"]), columns["family"]
    sizes = {name: integer(columns[name]) for name in ("layers", "hidden", "heads", "seq_len")}
    llama = family in ("llama", "baichuan") or "llama" in columns["source_file"]
    if llama:
        vocab = _VOCAB["llama" if family == "gpt" else family]
        fields = shape(**sizes, kv_heads=sizes["heads"], ffn=11008, vocab=vocab)
        return GraphSpec("llama", fields, degrees(tp))
    fields = shape(**sizes, ffn=4 * hidden, vocab=_VOCAB[family], tie_embeddings=False)
    return GraphSpec("gpt", fields, degrees(tp))
