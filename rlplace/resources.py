"""Files that travel with rlplace: shipped configs and checkpoints.

`rlplace/configs` and `rlplace/checkpoints` are links to the folders of the same name in the
repository; a wheel holds the files in their place. So one path serves the checkout, an editable
install and a wheel.
"""

from __future__ import annotations

from pathlib import Path

from rlplace.errors import InputError, nearest_names

_HOME = Path(__file__).parent
_FOLDERS = ("checkpoints", "configs")


def resource(path: str) -> Path:
    """The place on disk of a shipped file or folder.

    Args:
        path: Such as ``"configs/train/small.yaml"`` or ``"checkpoints/default"``; always with
            forward slashes, and under ``configs`` or ``checkpoints``.

    Raises:
        InputError: If rlplace ships nothing of that name.
    """
    parts = path.split("/")
    if parts[0] not in _FOLDERS or ".." in parts:
        rule = f"a shipped file lies under one of {', '.join(_FOLDERS)}"
        raise InputError("resource", path, rule, nearest_names(path, resource_names()))
    found = _HOME.joinpath(*parts)
    if not found.exists():
        rule = "rlplace ships nothing of that name"
        raise InputError("resource", path, rule, nearest_names(path, resource_names()))
    return found


def resource_names() -> list[str]:
    """Every shipped file and folder, as `resource` takes them, sorted."""
    found = (entry for folder in _FOLDERS for entry in (_HOME / folder).rglob("*"))
    return sorted(entry.relative_to(_HOME).as_posix() for entry in found)
