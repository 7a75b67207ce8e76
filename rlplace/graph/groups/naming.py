"""Names of groups in which a person recognises the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from rlplace.graph.groups.anchors import common, is_anchor, kind, module_path
from rlplace.graph.groups.drafts import Draft

#: So many children of a module are named one by one.
_LISTED = 4


@dataclass(frozen=True)
class _Name:
    """A name in parts.

    Args:
        path: The module that the group is, or is in.
        own: What the group is of it; empty if it is all of it.
    """

    path: tuple[str, ...]
    own: str

    def __str__(self) -> str:
        return ".".join(filter(None, (*self.path, self.own))) or "root"

    def without_first(self) -> _Name | None:
        """Without the first part of the path, if that still says what it is (``3`` does not)."""
        rest = ".".join(filter(None, (*self.path[1:], self.own)))
        return _Name(self.path[1:], self.own) if rest and not rest[0].isdigit() else None


def group_names(drafts: Sequence[Draft]) -> list[str]:
    """The largest module that a group is all of, or else its share of one; made unique."""
    anchors = [_anchors(draft) for draft in drafts]
    holds = Counter(prefix for nodes in anchors for node in nodes for prefix in _prefixes(node))
    names = [_name(draft, nodes, holds) for draft, nodes in zip(drafts, anchors, strict=True)]
    while len({name.path[0] for name in names if name.path}) == 1:
        shorter = [name.without_first() if name.path else name for name in names]
        if len(names) == 1 or any(name is None for name in shorter):
            break
        names = [name for name in shorter if name is not None]
    return _unique([str(name) for name in names])


def _anchors(draft: Draft) -> list[fx.Node]:
    return [node for node in draft.nodes if is_anchor(node)] or list(draft.nodes)


def _name(draft: Draft, anchors: Sequence[fx.Node], holds: Counter[tuple[str, ...]]) -> _Name:
    paths = [tuple(_path(node)) for node in anchors]
    mine = Counter(prefix for node in anchors for prefix in _prefixes(node))
    path = tuple(common(paths))
    while len(path) > 1 and holds[path[:-1]] == len(anchors):
        path = path[:-1]
    again = path and all(p == path for p in paths) and path not in _parents(holds)
    if path and (holds[path] == len(anchors) or again):
        return _Name(path, "")
    whole = {prefix for prefix, count in mine.items() if count == holds[prefix]}
    children = list(dict.fromkeys(_child(p, len(path), whole) for p in paths if p != path))
    if not children and not path:
        children = list(dict.fromkeys(_owner(name) for name in draft.params))
    if not children:
        children = list(dict.fromkeys(kind(node) for node in anchors))
    return _Name(path, _joined(children))


def _parents(holds: Counter[tuple[str, ...]]) -> set[tuple[str, ...]]:
    return {prefix[:-1] for prefix in holds}


def _joined(children: Sequence[str]) -> str:
    """``q+k+v``, ``branch3x3`` of ``branch3x3_1`` and ``branch3x3_2``, or the first and last."""
    shared = "".join(common(children)).rstrip("_.")
    if len(children) > 1 and len(shared) > 2:
        return shared
    return "+".join(children) if len(children) <= _LISTED else f"{children[0]}..{children[-1]}"


def _child(path: tuple[str, ...], depth: int, whole: set[tuple[str, ...]]) -> str:
    """What follows after `depth` parts: one more, with the number after it unless it is whole."""
    stop = depth + 1
    if path[:stop] not in whole and len(path) > stop and path[stop].isdigit():
        stop += 1
    return ".".join(path[depth:stop])


def _owner(param: str) -> str:
    """What a parameter is of: ``w.0``, or ``proj`` of ``proj.weight``."""
    head, _, last = param.rpartition(".")
    return param if last.isdigit() or not head else head


def _path(node: fx.Node) -> list[str]:
    return [part for part in module_path(node).split(".") if part]


def _prefixes(node: fx.Node) -> Iterator[tuple[str, ...]]:
    path = tuple(_path(node))
    for count in range(1, len(path) + 1):
        yield path[:count]


def _unique(names: Sequence[str]) -> list[str]:
    found: list[str] = []
    seen: Counter[str] = Counter()
    for name in names:
        seen[name] += 1
        found.append(f"{name}#{seen[name]}" if seen[name] > 1 else name)
    return found
