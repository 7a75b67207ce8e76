"""Events of devices, from a simulated step."""

from __future__ import annotations

import numpy as np

from rlplace.plan.schedules import lane_orders
from rlplace.plan.types import Mesh
from rlplace.simulate.events import predicted_events
from rlplace.simulate.orders import orders
from rlplace.simulate.timeline import AT_ONCE, Durations, simulate
from rlplace.simulate.types import Event


def test_events_of_two_stages_by_hand() -> None:
    """The first stage has two devices; half a second each way, during which both stages wait."""
    order = orders(lane_orders("1f1b", (0, 1), 1))
    durations = Durations(
        seconds=np.array([1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 0.0, 0.0]),
        transfer=np.array([0.5]),
        sends=np.array([AT_ONCE]),
        optimizer=np.array([0.25, 0.75]),
        bucket_first=np.array([0, 1, 1]),
        bucket_seconds=np.array([3.0]),
        bucket_ready=np.array([1.0]),
        late=np.zeros(2),
        joint_one=np.zeros(0, np.int64),
        joint_other=np.zeros(0, np.int64),
        joint_seconds=np.zeros(0),
        cores=np.arange(2),
    )
    meshes = [Mesh((0, 1), 2), Mesh((2,))]
    found = set(predicted_events(order, simulate(order, durations), meshes, [0.5]))
    assert found == {
        *(Event(device, "F", 0, 0, 0.0, 1.0) for device in (0, 1)),
        *(Event(device, "send", 0, 0, 1.0, 1.5) for device in (0, 1)),
        Event(2, "F", 1, 0, 1.5, 2.5),
        Event(2, "B", 1, 0, 2.5, 4.5),
        Event(2, "send", 1, 0, 4.5, 5.0),
        *(Event(device, "B", 0, 0, 5.0, 7.0) for device in (0, 1)),
        *(Event(device, "reduce", 0, 0, 7.0, 10.0) for device in (0, 1)),
        *(Event(device, "optimizer", 0, 0, 10.0, 10.25) for device in (0, 1)),
        Event(2, "reduce", 1, 0, 5.0, 5.0),
        Event(2, "optimizer", 1, 0, 5.0, 5.75),
    }
