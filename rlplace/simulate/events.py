"""A simulated step as events of devices, for pictures and traces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlplace.plan.types import Mesh
from rlplace.simulate.orders import FORWARD, Orders
from rlplace.simulate.timeline import BEGIN, END, LAST, REDUCED, Times
from rlplace.simulate.types import Event

#: Letters of the kinds of `rlplace.simulate.orders`.
_LETTERS = "FBBW"


def predicted_events(
    order: Orders, times: Times, meshes: Sequence[Mesh], transfer: Sequence[float]
) -> Iterator[Event]:
    """The events of all devices: actions, sends, reductions and optimizer steps.

    Args:
        order: The action lists.
        times: When things happen.
        meshes: Of each stage.
        transfer: Seconds from each stage to the next.
    """
    for row in range(len(order.stage)):
        stage, micro_batch = int(order.stage[row]), int(order.micro_batch[row])
        kind, start, end = int(order.kind[row]), float(times.start[row]), float(times.end[row])
        for device in meshes[stage].devices:
            yield Event(device, _LETTERS[kind], stage, micro_batch, start, end)
        arrival = float(times.arrival[row])
        if arrival > 0.0:
            sender = stage - 1 if kind == FORWARD else stage + 1
            start = arrival - transfer[min(stage, sender)]
            for device in meshes[sender].devices:
                yield Event(device, "send", sender, micro_batch, start, arrival)
    for mesh, tail in zip(dict.fromkeys(meshes), times.tails.T.tolist(), strict=True):
        stage = list(meshes).index(mesh)
        for device in mesh.devices:
            yield Event(device, "reduce", stage, 0, tail[LAST], tail[REDUCED])
            yield Event(device, "optimizer", stage, 0, tail[BEGIN], tail[END])
