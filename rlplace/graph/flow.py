"""What a run of a piece says about its values: which are made of which.

A value is a storage, named by a number. Views share one, so only calls that make or change
something are in a flow.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flow:
    """A call.

    Args:
        reads: Storages of all dtypes that it reads.
        writes: Those that it makes or changes.
        stays: Whether its results are kept where all else is redone.
        adds: Whether it only adds, scales, copies or joins what it reads.
    """

    reads: frozenset[int]
    writes: frozenset[int]
    stays: bool = False
    adds: bool = False


def staying(flows: Sequence[Flow], saved: Collection[int], given: Collection[int]) -> set[int]:
    """What stays of a forward pass whose saved values are made again.

    Args:
        flows: Of the forward pass.
        saved: What the backward pass needs.
        given: What is there in any case: inputs.

    Returns:
        Results of calls that stay, which are saved themselves or read to make what is.
    """
    makers: dict[int, list[Flow]] = {}
    for flow in flows:
        for storage in flow.writes:
            makers.setdefault(storage, []).append(flow)
    found: set[int] = set()
    seen, todo = set(given), list(saved)
    while todo:
        storage = todo.pop()
        if storage in seen:
            continue
        seen.add(storage)
        made_by = makers.get(storage, [])
        if any(flow.stays for flow in made_by):
            found.add(storage)
        else:
            todo += [read for flow in made_by for read in flow.reads]
    return found


def only_added_into(
    flows: Sequence[Flow], ends: Collection[int], others: Collection[int]
) -> set[int]:
    """What a backward pass adds into the gradients of parameters, and reads for nothing else.

    Args:
        flows: Of the backward pass, in order.
        ends: Gradients of parameters.
        others: Gradients of activations.
    """
    leads = dict.fromkeys(ends, True) | dict.fromkeys(others, False)
    for flow in reversed(flows):
        fine = flow.adds and all(leads.get(storage, False) for storage in flow.writes)
        for storage in flow.reads:
            leads[storage] = leads.get(storage, True) and fine
    return {storage for storage, leading in leads.items() if leading}
