"""Devices that nothing tells apart: of placements that exchange them one is looked at."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from rlplace.cost.given.event_loop import EventArrays


def alike_before(arrays: EventArrays) -> list[int | None]:
    """For each device the last one before it with equal times and links; None without one."""
    before: list[int | None] = [None] * arrays.devices
    for one, other in combinations(range(arrays.devices), 2):
        swapped = np.arange(arrays.devices)
        swapped[[one, other]] = other, one
        links = (arrays.delays, arrays.rates)
        same = all(np.array_equal(link, link[np.ix_(swapped, swapped)]) for link in links)
        if same and np.array_equal(arrays.times, arrays.times[:, swapped]):
            before[other] = one
    return before
