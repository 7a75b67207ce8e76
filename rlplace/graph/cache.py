"""Captured graphs on disk, so that a model is captured once on a machine.

A file's name is the hash of all that its content depends on: the model (of the library by name and
shape, a user's own by `rlplace.graph.model_key`), how it is captured, the versions of rlplace,
torch and transformers, and the source of this room. Reading imports none of them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rlplace.graph.types import OpGraph


def cache_folder() -> Path:
    """``$RLPLACE_CACHE``, or ``~/.cache/rlplace``."""
    chosen = os.environ.get("RLPLACE_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "rlplace"


def cache_path(request: Mapping[str, Any]) -> Path:
    """Where the graph of a request (plain data: name, shape, how it is captured) is kept."""
    versions = {name: _version(name) for name in ("rlplace", "torch", "transformers")}
    content = {"request": dict(request), "versions": versions, "source": _source_hash()}
    text = json.dumps(content, sort_keys=True)
    return cache_folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def load_graph(path: Path) -> OpGraph | None:
    """The graph in a file; None if there is none, or if it is damaged (with a warning)."""
    try:
        return _adapter().validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValidationError, OSError) as error:
        reason = str(error).split("\n")[0]
        warnings.warn(f"{path} is damaged and will be written again: {reason}", stacklevel=2)
        return None


def store_graph(path: Path, graph: OpGraph) -> None:
    """Write a graph in one step: another process sees the whole file or none.

    A folder that cannot be written to costs a warning, not the result.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            file.write(_adapter().dump_json(graph))
        os.replace(file.name, path)
    except OSError as error:
        warnings.warn(f"the capture is not cached: {error}", stacklevel=2)


@cache
def _adapter() -> TypeAdapter[OpGraph]:
    return TypeAdapter(OpGraph)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@cache
def _source_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
