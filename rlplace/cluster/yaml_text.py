"""YAML that remembers its lines, so that every complaint about a cluster file can name one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from rlplace.cluster.schema import KEYS, PYDANTIC_STEPS
from rlplace.errors import InputError, nearest_names

#: Keys and list positions from the root of a file.
Location = tuple[int | str, ...]


@dataclass(frozen=True)
class YamlText:
    """A parsed file.

    Args:
        source: What to call it in messages.
        content: Mapping that it holds.
        tree: Its nodes, which know their lines.
    """

    source: str
    content: dict[Any, Any]
    tree: yaml.Node

    def field(self, location: Location) -> str:
        """``cluster.yaml:12: nodes[0].nic.bandwidth``."""
        steps = [step for step in location if step not in PYDANTIC_STEPS]
        path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
        return f"{self.source}:{self._line(steps)}: {path.lstrip('.')}"

    @contextmanager
    def at(self, *location: int | str) -> Iterator[None]:
        """Inside, an `InputError` gets the field of this location."""
        try:
            yield
        except InputError as error:
            raise InputError(
                self.field(location), error.value, error.rule, error.nearest
            ) from error

    def error(self, error: ValidationError) -> InputError:
        """The first of pydantic's errors in the form of all others."""
        first = error.errors()[0]
        field, given = self.field(first["loc"]), first["input"]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, InputError):
            return InputError(field, cause.value, cause.rule, cause.nearest)
        if first["type"] == "extra_forbidden":
            return InputError(
                field, given, "unknown key", nearest_names(str(first["loc"][-1]), KEYS)
            )
        return InputError(field, given, first["msg"][:1].lower() + first["msg"][1:])

    def _line(self, steps: list[int | str]) -> int:
        """The line (from 1) of the deepest of some steps that the file has."""
        node, line = self.tree, self.tree.start_mark.line
        for step in steps:
            if isinstance(node, yaml.MappingNode):
                pairs = {key.value: (key, value) for key, value in node.value}
                if step not in pairs:
                    break
                key, node = pairs[str(step)]
                line = key.start_mark.line
            elif isinstance(node, yaml.SequenceNode) and step in range(len(node.value)):
                node = node.value[int(step)]
                line = node.start_mark.line
        return line + 1


def parse_yaml(text: str, source: str) -> YamlText:
    """Parse a mapping.

    Raises:
        InputError: If it is not YAML, not a mapping, or a key occurs twice in one mapping (YAML
            itself would keep the last and say nothing).
    """
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line if error.problem_mark else 0
        given = text.splitlines()[line] if line < len(text.splitlines()) else ""
        raise InputError(f"{source}:{line + 1}", given, f"is not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise InputError(source, text[:40], f"is not YAML: {error}") from error
    if not isinstance(content, dict) or tree is None:
        rule = "a cluster file is a mapping with nodes or short"
        raise InputError(source, text[:40], rule, "short: 4x8xA100-80")
    _refuse_twice(tree, source)
    return YamlText(source, content, tree)


def _refuse_twice(node: yaml.Node, source: str) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                where = f"{source}:{key.start_mark.line + 1}"
                raise InputError(where, key.value, "the key occurs twice in one mapping")
            seen.add(key.value)
            _refuse_twice(value, source)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_twice(value, source)
