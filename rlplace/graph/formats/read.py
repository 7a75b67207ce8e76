"""Opens a file of a public op-graph form; the content says which form it is, not the name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlplace.errors import InputError, nearest_names
from rlplace.graph.formats.dnn_partitioning import is_dnn_partitioning, read_dnn_partitioning
from rlplace.graph.formats.doppler import (
    is_doppler,
    is_doppler_text,
    read_doppler,
    read_doppler_text,
)
from rlplace.graph.formats.giph import giph_names, is_giph, read_giph
from rlplace.graph.formats.piper import is_piper, read_piper
from rlplace.graph.formats.types import GivenInstance
from rlplace.graph.types import OpGraph

SUFFIXES = (".onnx", ".json", ".txt")
_LOOKED_FOR = (
    "is of no known form; looked for dnn-partitioning JSON (nodes, maxFPGAs), Piper JSON (nodes, "
    "maxMemoryPerDevice), DOPPLER JSON (comp, comm, edges) or text (counts and lists of integers), "
    "GiPH JSON (networks, programs), and a JSON object of such graphs by name"
)

Reader = Callable[[str, int | None], GivenInstance]


def is_graph_file(model: str) -> bool:
    """Whether a model is named as a file of a public op-graph form (``net.onnx``)."""
    return model.lower().endswith(SUFFIXES)


def read_graph(
    path: str | Path,
    name: str | None = None,
    *,
    dims: Mapping[str, int] | None = None,
    seq_len: int | None = None,
) -> OpGraph:
    """The op graph of a file.

    An ONNX file gives a graph that every planner takes. All other forms give times instead of work:
    their graph has names, structures and edges only, and `read_instance` has the costs.

    Args:
        path: The file.
        name: Which graph of a file that holds several.
        dims: Sizes of named dims of an ONNX file, the batch excepted.
        seq_len: Size of the one named dim that is neither the batch nor in `dims`.

    Raises:
        InputError: If the file cannot be read, is of no known form, or is damaged.
        MissingExtraError: If it is an ONNX file and the package onnx is not installed.
    """
    if str(path).lower().endswith(".onnx"):
        from rlplace.graph.formats.onnx_graph import read_onnx

        return read_onnx(path, dims=dims, seq_len=seq_len)
    return read_instance(path, name, devices=1).graph


def read_model(path: str, seq_len: int | None = None) -> OpGraph:
    """The op graph of a file that a plan for a cluster can be made of.

    Args:
        path: The file.
        seq_len: As in `read_graph`.

    Raises:
        InputError: As `read_graph`, and if the file gives times instead of work.
    """
    graph = read_graph(path, seq_len=seq_len)
    if not path.lower().endswith(".onnx"):
        rule = (
            "gives the times of its own devices, not ops that another cluster can be asked about; "
            "compare planners on it with rlplace.cost.given"
        )
        raise InputError("model", path, rule)
    return graph


def instance_names(path: str | Path) -> list[str]:
    """Names of the instances in a file; one that holds a single graph has one, the file's own.

    Raises:
        InputError: As in `read_instance`.
    """
    return list(_readers(Path(path)))


def read_instance(
    path: str | Path, name: str | None = None, *, devices: int | None = None
) -> GivenInstance:
    """A public planning problem with its given costs.

    Args:
        path: A dnn-partitioning, Piper, DOPPLER or GiPH file, or a JSON object of such by name.
        name: Which instance of a file that holds several.
        devices: Number of devices of a DOPPLER graph, where the file does not say it.

    Raises:
        InputError: If the file cannot be read, is of no known form, or is damaged (says where).
    """
    readers = _readers(Path(path))
    if name is None:
        if len(readers) > 1:
            known = ", ".join(list(readers)[:8])
            raise InputError("name", name, f"{path} holds {len(readers)} graphs: choose one", known)
        name = next(iter(readers))
    if name not in readers:
        near = nearest_names(name, readers) or ", ".join(list(readers)[:8])
        raise InputError("name", name, f"no graph in {path} has this name", near)
    return readers[name](name, devices)


def read_instances(path: str | Path, *, devices: int | None = None) -> dict[str, GivenInstance]:
    """All instances of a file by name; see `read_instance`."""
    return {name: read(name, devices) for name, read in _readers(Path(path)).items()}


def _readers(path: Path) -> dict[str, Reader]:
    text = _text(path)
    if is_doppler_text(text):
        return {path.stem: lambda name, devices: read_doppler_text(text, name, devices)}
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        at = f"(it is not JSON: line {error.lineno}: {error.msg})"
        raise InputError("file", str(path), f"{_LOOKED_FOR} {at}") from error
    found = _readers_of(data, path.stem)
    if not found:
        raise InputError("file", str(path), _LOOKED_FOR)
    return found


def _readers_of(data: Any, stem: str) -> dict[str, Reader]:
    """A reader for each instance of JSON data; empty if it is of no known form."""
    if is_giph(data):
        return dict.fromkeys(giph_names(data), lambda name, _: read_giph(data, name))
    single = _reader_of(data)
    if single is not None:
        return {stem: single}
    if not isinstance(data, dict):
        return {}
    readers = {name: _reader_of(content) for name, content in data.items()}
    return {name: reader for name, reader in readers.items() if reader is not None}


def _reader_of(data: Any) -> Reader | None:
    if is_dnn_partitioning(data):
        return lambda name, _: read_dnn_partitioning(data, name)
    if is_piper(data):
        return lambda name, _: read_piper(data, name)
    if is_doppler(data):
        return lambda name, devices: read_doppler(data, name, devices)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise InputError("file", str(path), f"cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InputError("file", str(path), f"{_LOOKED_FOR} (it is not text)") from error
