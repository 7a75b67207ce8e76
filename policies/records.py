"""Records on disk, one safetensors file an instance: searching is what takes the time."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load, save

from rlplace.envs.types import InstanceView
from rlplace.errors import InputError
from rlplace.policies.types import Records

_ARRAYS = ("step", "starts", "features", "spans", "target")


def save_records(records: Records, path: Path) -> None:
    """Write the records of one instance; the file appears when it is complete."""
    (view,) = records.views
    arrays = {name: getattr(records, name) for name in _ARRAYS}
    arrays |= {f"view.{item.name}": getattr(view, item.name) for item in fields(InstanceView)}
    partial = path.with_suffix(".partial")
    partial.write_bytes(save({name: value.copy() for name, value in arrays.items()}))
    os.replace(partial, path)


def load_records(path: Path) -> Records:
    """Read the records of one instance.

    Raises:
        InputError: If the file is damaged.
    """
    try:
        arrays = load(path.read_bytes())
        view = InstanceView(*(arrays[f"view.{item.name}"] for item in fields(InstanceView)))
        step, starts, features, spans, target = (arrays[name] for name in _ARRAYS)
    except (SafetensorError, KeyError) as error:
        rule = f"the file is cut off or holds no records ({error}); remove it"
        raise InputError("records", str(path), rule) from error
    return Records((view,), step * 0, step, starts, features, spans, target)
