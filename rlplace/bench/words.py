"""What planners say of themselves: title and decision space, out of the docstring of their file."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_SPACE = "Decision space:"
#: The end of a sentence; "et al., 2020" is none.
_STOP = re.compile(r"(?<=[A-Za-z0-9)`])\.(?:\s+(?=[A-Z])|$)")


@dataclass(frozen=True, slots=True)
class Words:
    """What a planner is.

    Args:
        title: In a line, with its paper.
        space: What it decides, in a sentence; empty if its file does not say.
    """

    title: str
    space: str = ""


def words(name: str, planner: Callable[..., Any]) -> Words:
    """What a planner or placer is.

    The title is the entry of its name in a list (``- `name` (paper): ...``) where the file holds
    several planners, else the first line.

    Args:
        name: Under which it is registered.
        planner: A function, or a part of one.
    """
    module = sys.modules[getattr(planner, "func", planner).__module__]
    paragraphs = [_line(part) for part in inspect.cleandoc(module.__doc__ or "").split("\n\n")]
    entries = (entry for part in paragraphs if part.startswith("- ") for entry in part.split("- "))
    own = next((entry for entry in entries if f"`{name}`" in entry.split(":")[0]), "")
    title = own.strip("; ") or paragraphs[0]
    space = next((part for part in paragraphs if part.startswith(_SPACE)), _SPACE)
    return Words(_sentence(title), _sentence(space.removeprefix(_SPACE).strip()))


def _line(paragraph: str) -> str:
    return " ".join(paragraph.split())


def _sentence(text: str) -> str:
    return _STOP.split(text)[0].rstrip(".")
