"""Bytes that the ranks of a plan are going to send in one step, counted before the run.

By what a run itself does: the messages between stages are those that it works out beforehand, and
each stage runs a micro-batch on tensors without contents (`rlplace.runtime.rehearsal`).
"""

from __future__ import annotations

from collections import Counter

from rlplace.graph.program import Program
from rlplace.plan.types import Instance, Plan
from rlplace.runtime.connections import crossings
from rlplace.runtime.rehearsal import rehearsed
from rlplace.runtime.slices import Crossing
from rlplace.simulate.traffic import state_traffic


def planned_traffic(instance: Instance, plan: Plan, program: Program) -> dict[str, float]:
    """Bytes of one step over all ranks by kind, as `Measurement.traffic` counts them.

    Padding of flat buffers is not counted, which is less than the number of shards in elements for
    each buffer. A mixture of experts whose tokens are sent to them is taken to be balanced.

    Args:
        instance: The question.
        plan: A plan that the runtime runs (`rlplace.runtime.validate`).
        program: The exported model, in the dtype in which it runs.
    """
    found = Counter(state_traffic(instance, plan))
    pairs = crossings(program, instance.graph, plan)
    for there, back in pairs:
        found["p2p"] += plan.micro_batches * (crossing_bytes(there) + crossing_bytes(back))
    for index, stage in enumerate(plan.stages):
        arriving = pairs[index - 1][0] if index else None
        shares = stage.samples(plan.micro_batch)
        for samples, replicas in Counter(shares).items():
            replica = shares.index(samples)
            own = rehearsed(program, instance.graph, plan, index, arriving, replica)
            ranks = replicas * stage.mesh.cp * stage.mesh.tp
            found.update({kind: plan.micro_batches * ranks * size for kind, size in own.items()})
    return {kind: size for kind, size in sorted(found.items()) if size}


def crossing_bytes(crossing: Crossing) -> int:
    """Bytes of one whole micro-batch over a border in one direction; a rank sends itself none."""
    return sum(
        message.elements * crossing.tensors[message.tensor].dtype.itemsize
        for message in crossing.messages(crossing.micro_batch)
        if message.source != message.target
    )
