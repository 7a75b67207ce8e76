"""Names of groups in which a person recognises the model."""

from __future__ import annotations

from collections.abc import Sequence

from rlplace.graph.coarsen import is_matmul, module_path
from rlplace.graph.drafts import Draft


def group_names(drafts: Sequence[Draft]) -> list[str]:
    """What the working ops of a group have in common of their module paths, made unique."""
    paths = [_common_path(draft) or [""] for draft in drafts]
    while len({path[0] for path in paths}) == 1 and all(_can_drop_first(path) for path in paths):
        paths = [path[1:] for path in paths]
    names: list[str] = []
    for path in paths:
        name = ".".join(path) or "root"
        again = sum(n == name or n.startswith(f"{name}#") for n in names)
        names.append(f"{name}#{again + 1}" if again else name)
    return names


def _can_drop_first(path: Sequence[str]) -> bool:
    """Whether a path still says what it is without its first part (``3`` alone does not)."""
    return len(path) > 1 and not path[1].isdigit()


def _common_path(draft: Draft) -> list[str]:
    anchors = [node for node in draft.nodes if is_matmul(node)] or list(draft.nodes)
    paths = [module_path(node).split(".") for node in anchors]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return shared
