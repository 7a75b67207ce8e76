"""Every published table by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.fidelity_tables import (
    alpa,
    alpa_repo,
    alpa_repro,
    bigscience,
    dtfm,
    galvatron,
    korthikanti,
    llmfoundry,
    megatron,
    megatron_bridge,
    nanotron,
    nemo,
    pytorch_fsdp,
    torchgpipe,
    torchtitan,
)
from benchmarks.fidelity_tables.types import Reading

#: Name -> (file, function that reads it).
TABLES: dict[str, tuple[str, Callable[[Path], Reading]]] = {
    "nanotron": (nanotron.FILE, nanotron.rows),
    "llmfoundry": (llmfoundry.FILE, llmfoundry.rows),
    "bigscience": (bigscience.FILE, bigscience.rows),
    "megatron_table1": (megatron.FILE, megatron.table1),
    "megatron_readme": (megatron.FILE, megatron.readme),
    "korthikanti": (korthikanti.FILE, korthikanti.rows),
    "torchtitan": (torchtitan.FILE, torchtitan.rows),
    "alpa": (alpa.FILE, alpa.rows),
    "alpa_repro": (alpa_repro.FILE, alpa_repro.rows),
    "alpa_repo": (alpa_repo.FILE, alpa_repo.rows),
    "dtfm": (dtfm.FILE, dtfm.rows),
    "torchgpipe": (torchgpipe.FILE, torchgpipe.rows),
    "galvatron": (galvatron.FILE, galvatron.rows),
    "pytorch_fsdp": (pytorch_fsdp.FILE, pytorch_fsdp.rows),
    "nemo": (nemo.FILE, nemo.rows),
    "megatron_bridge": (megatron_bridge.FILE, megatron_bridge.rows),
}
