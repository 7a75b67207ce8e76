"""A cluster as it is named on the command line."""

from __future__ import annotations

from pathlib import Path

from rlplace.cluster.types import Cluster


def named_cluster(text: str) -> Cluster:
    """The cluster of a YAML file, or of the short form (``4x8xH100-80:ib3200``)."""
    is_file = text.endswith((".yaml", ".yml")) or Path(text).is_file()
    return Cluster.load(text) if is_file else Cluster.parse(text)
