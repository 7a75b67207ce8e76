"""What rlplace says when a request cannot be met."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RlplaceError(Exception):
    """Base of every error that rlplace raises on purpose."""


class InputError(RlplaceError, ValueError):
    """A user's mistake: which field, what was given, which rule it breaks, what would be legal.

    Args:
        field: Name of the argument, key or flag, as the user typed it.
        value: The value received.
        rule: The rule it breaks, as a sentence without a full stop.
        nearest: The nearest legal value or values, or None where there is none.
    """

    def __init__(self, field: str, value: object, rule: str, nearest: object = None) -> None:
        self.field = field
        self.value = value
        self.rule = rule
        self.nearest = nearest
        hint = "" if nearest is None else f" (nearest legal: {nearest})"
        super().__init__(f"{field}={value!r}: {rule}{hint}")

    def __reduce__(self) -> tuple[type[InputError], tuple[str, object, str, object]]:
        """Pickle by the four arguments, so that the error survives the way out of a worker."""
        return type(self), (self.field, self.value, self.rule, self.nearest)


class CaptureError(RlplaceError):
    """`torch.export` refused a model; the message names the user's own line and a way out."""


class InfeasibleError(RlplaceError):
    """No plan fits; the message says which limit failed, by how much, and what would help."""


class MissingExtraError(RlplaceError, ImportError):
    """An optional package is needed; the message names the extra that brings it."""


class RankFailedError(RlplaceError):
    """A rank of a distributed run failed; the message names it and the cause."""


def nearest_names(name: str, known: Iterable[str], count: int = 3) -> str | None:
    """The known names closest to `name`, comma separated, or None if nothing is close."""
    lowered = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), list(lowered), n=count, cutoff=0.4)
    return ", ".join(lowered[match] for match in close) or None
