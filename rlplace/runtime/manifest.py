"""Folders of checkpoints: each is there as a whole with a manifest that proves it, or not at all.

A checkpoint is written into a hidden folder and renamed when its files are on the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 2
_MANIFEST, _PREFIX, _BLOCK = "manifest.json", "step-", 1 << 20


@dataclass(frozen=True)
class FileNote:
    """What a manifest says of a file.

    Args:
        name: In the folder.
        size: Bytes.
        sha256: Of its content.
    """

    name: str
    size: int
    sha256: str


def target(root: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` steps."""
    return root / f"{_PREFIX}{step:08d}"


def scratch(root: Path, step: int) -> Path:
    """Where that checkpoint is written."""
    return root / f".{_PREFIX}{step:08d}.part"


def note(path: Path) -> FileNote:
    """What the manifest is to say of a file."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return FileNote(path.name, size, digest.hexdigest())


def commit(root: Path, step: int, files: Iterable[FileNote], content: Mapping[str, Any]) -> Path:
    """Make a written folder a checkpoint.

    Args:
        root: Folder of all checkpoints.
        step: Steps done.
        files: Every file of the folder.
        content: JSON data that belongs to it.
    """
    part, final = scratch(root, step), target(root, step)
    for one in (files := list(files)):
        _sync(part / one.name)
    notes = [[one.name, one.size, one.sha256] for one in sorted(files, key=lambda one: one.name)]
    text = json.dumps({"format": FORMAT, "step": step, "files": notes, **content})
    seal = hashlib.sha256(text.encode()).hexdigest()
    with (part / _MANIFEST).open("w") as stream:
        stream.write(f"{seal}\n{text}\n")
        stream.flush()
        os.fsync(stream.fileno())
    _sync(part)
    if final.exists():  # steps done again after a restart; what they gave before is stale or bad
        shutil.rmtree(final)
    part.rename(final)
    _sync(root)
    return final


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        ValueError: If it is damaged.
        OSError: If it cannot be read.
    """
    seal, _, text = (folder / _MANIFEST).read_text().rstrip("\n").partition("\n")
    if hashlib.sha256(text.encode()).hexdigest() != seal:
        raise ValueError(f"{_MANIFEST} is damaged")
    content: dict[str, Any] = json.loads(text)
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']} is not {FORMAT}")
    return content


def fault_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint, None if it is good. Reads all of it."""
    try:
        for name, size, digest in read_manifest(folder)["files"]:
            path = folder / name
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes, not {size}"
            if note(path).sha256 != digest:
                return f"{name} has another checksum"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return str(error)
    return None


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint, good or bad."""
    return path.name.startswith(_PREFIX) and path.is_dir()


def found(root: Path) -> list[Path]:
    """All checkpoints, good or bad, the latest first."""
    return sorted(root.glob(f"{_PREFIX}*"), reverse=True)


def latest_good(root: Path) -> Path | None:
    """The last checkpoint that is whole; a warning names those that are not."""
    for folder in found(root):
        fault = fault_of(folder)
        if fault is None:
            return folder
        warnings.warn(f"checkpoint {folder} is not used: {fault}", stacklevel=2)
    return None


def prune(root: Path, step: int, keep: int) -> None:
    """Remove all but the last `keep` checkpoints of those up to a step."""
    last = target(root, step)
    for folder in [one for one in found(root) if one <= last][keep:]:
        shutil.rmtree(folder, ignore_errors=True)


def remove_scratch(root: Path) -> None:
    """Remove what writers that failed left behind."""
    for folder in root.glob(f".{_PREFIX}*.part"):
        shutil.rmtree(folder, ignore_errors=True)


def _sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
