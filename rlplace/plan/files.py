"""Plans as JSON files, with a format version and the fingerprints of graph and cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rlplace.errors import InputError
from rlplace.plan.orders import format_orders, parse_lane
from rlplace.plan.types import Action, Plan

FORMAT = 1
_ADAPTER: TypeAdapter[Plan] = TypeAdapter(Plan)
_ACTIONS: TypeAdapter[tuple[Action, ...]] = TypeAdapter(tuple[Action, ...])


def dump_plan(plan: Plan) -> dict[str, Any]:
    """A plan as plain JSON data; the action lists of a lane as text (`parse_lane`)."""
    content = _ADAPTER.dump_python(plan, mode="json")
    content["orders"] = [format_orders([lane]) for lane in plan.orders]
    return {"format": FORMAT, "plan": content}


def parse_plan(data: Any, where: str = "plan") -> Plan:
    """A plan from plain JSON data.

    Raises:
        InputError: If the format is unknown or a field is missing or of the wrong type.
    """
    if not isinstance(data, dict) or "format" not in data:
        raise InputError(where, type(data).__name__, "is not a plan file: it has no 'format'")
    if data["format"] != FORMAT:
        rule = f"this version of rlplace reads format {FORMAT}"
        raise InputError(f"{where}: format", data["format"], rule, FORMAT)
    content = _with_actions(data.get("plan"), where)
    try:
        # Strict as to types; from JSON text, where a tuple may be a list.
        plan = _ADAPTER.validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "plan"
        raise InputError(f"{where}: {field}", first.get("input"), first["msg"]) from error
    for field, value in _ignored(content, _ADAPTER.dump_python(plan, mode="json")):
        raise InputError(f"{where}: {field}", value, "a plan has no such field")
    return plan


def _with_actions(content: Any, where: str) -> Any:
    """The content of a plan file with its action lists as actions in place of text."""
    if not isinstance(content, dict) or not content.get("orders"):
        return content
    lines = content["orders"]
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise InputError(f"{where}: orders", lines, "a text of actions for each lane", ["0F0 0B0"])
    parsed = [_ACTIONS.dump_python(parse_lane(line), mode="json") for line in lines]
    return {**content, "orders": parsed}


def _ignored(given: Any, kept: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """Fields of plain data (path, value) that have no place in what was made of it."""
    if isinstance(given, list):
        for index, (item, other) in enumerate(zip(given, kept, strict=True)):
            yield from _ignored(item, other, f"{path}{index}.")
    elif isinstance(given, dict):
        for key, item in given.items():
            if key not in kept:
                yield f"{path}{key}", item
            else:
                yield from _ignored(item, kept[key], f"{path}{key}.")


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan; an existing file is replaced in one step."""
    target = Path(path)
    scratch = target.with_name(target.name + ".part")
    scratch.write_text(json.dumps(dump_plan(plan), indent=1) + "\n")
    scratch.replace(target)


def load_plan(path: str | Path) -> Plan:
    """Read a plan.

    Raises:
        InputError: If there is no such file, or it is not a plan of a known format.
    """
    source = Path(path)
    try:
        content = source.read_bytes()
    except OSError as error:
        raise InputError("plan file", str(path), f"cannot be read ({error.strerror})") from error
    try:
        data = json.loads(content)
    except UnicodeDecodeError as error:
        raise InputError("plan file", str(path), "is not JSON: it is not text") from error
    except json.JSONDecodeError as error:
        rule = f"is not JSON (line {error.lineno}: {error.msg}); the file may be cut off"
        raise InputError("plan file", str(path), rule) from error
    return parse_plan(data, where=source.name)
