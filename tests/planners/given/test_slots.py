from __future__ import annotations

import numpy as np
import pytest

from rlplace.cost.given.event_loop import event_arrays
from rlplace.graph.formats.doppler import read_doppler
from rlplace.graph.formats.giph import read_giph
from rlplace.planners.given.slots import Slots
from tests.graph.formats.examples import giph


def test_a_gap_is_filled_where_it_is_wide_enough() -> None:
    data = {"comp": [1e10, 1e10, 4e10, 5e10], "comm": [0] * 4, "edges": [], "default_devices": 1}
    slots = Slots(event_arrays(read_doppler(data, "free")))
    slots.put(0, 0, 0.0)
    slots.put(1, 0, 5.0)
    slots.put_earliest(2, np.array([0]))
    slots.put_earliest(3, np.array([0]))
    assert slots.end.tolist() == [1.0, 6.0, 5.0, 11.0]


def test_inputs_arrive_over_the_links() -> None:
    slots = Slots(event_arrays(read_giph(giph(), "0/0")))
    slots.put(0, 0, 0.0)
    assert slots.arrivals(1) == pytest.approx([1.0, 1.0 + 3.0 + 8.0 * 0.5])
    slots.put(1, 0, 1.0)
    # Op 2: on device 0 after op 1, 5 to 7; on device 1 from 6 to 10.
    slots.put_earliest(2, np.array([0, 1]))
    assert (slots.placement[2], slots.end[2]) == (0, 7.0)
