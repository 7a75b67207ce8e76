"""Rules on what groups may do, from a YAML file: a list of the fields of `Rule`.

- groups: "*.attn"
  zero_levels: [0, 1]
  tp_degrees: [1, 2]
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from rlplace.cost.masked import Rule
from rlplace.errors import InputError, nearest_names


def load_rules(path: Path) -> tuple[Rule, ...]:
    """The rules of a file.

    Raises:
        InputError: If it is not a readable list of rules; names the rule and the field.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        rule = f"a readable YAML file of rules ({error})"
        raise InputError("rules", str(path), " ".join(rule.split())) from error
    if not isinstance(found, list):
        raise InputError("rules", type(found).__name__, "a list of rules", "- groups: '*'")
    return tuple(_rule(f"rules[{index}]", entry) for index, entry in enumerate(found))


def _rule(place: str, entry: Any) -> Rule:
    """One entry as a rule."""
    known = [field.name for field in fields(Rule)]
    if not isinstance(entry, dict) or not isinstance(entry.get("groups"), str):
        raise InputError(place, entry, "a mapping with a pattern of names", "groups: '*'")
    for key, value in entry.items():
        if key not in known:
            near = nearest_names(str(key), known)
            raise InputError(f"{place}.{key}", value, f"must be one of {', '.join(known)}", near)
        if key != "groups" and not isinstance(value, list):
            raise InputError(f"{place}.{key}", value, "a list of what is allowed", [value])
    legal = {key: tuple(value) for key, value in entry.items() if key != "groups"}
    return Rule(entry["groups"], **legal)
