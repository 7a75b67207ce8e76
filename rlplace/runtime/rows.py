"""Who has which samples: the rows of a batch that a replica of a stage has of a micro-batch.

Micro-batches are runs of rows of the batch, one behind the other, and replicas are runs of a
micro-batch, as long as their shares. A batch may be shorter than the plan's global batch (the last
one of a data set): then the last runs are shorter, or empty.
"""

from __future__ import annotations

from rlplace.plan.types import Plan, Stage


def micro_batch_rows(plan: Plan, micro_batch: int, rows: int) -> int:
    """Rows of a micro-batch of a batch that has `rows` in all."""
    return min(max(rows - micro_batch * plan.micro_batch, 0), plan.micro_batch)


def replica_rows(stage: Stage, micro_batch: int, rows: int) -> tuple[range, ...]:
    """Rows of each replica of a stage, counted from the first of the micro-batch.

    Args:
        stage: The stage.
        micro_batch: Samples of a whole micro-batch.
        rows: Rows that this one has.
    """
    found, start = [], 0
    for samples in stage.samples(micro_batch):
        found.append(range(min(start, rows), min(start + samples, rows)))
        start += samples
    return tuple(found)


def rows_of(plan: Plan, stage: int, replica: int, micro_batch: int, rows: int) -> range:
    """Rows of the batch that a replica of a stage has of a micro-batch.

    Args:
        plan: The plan.
        stage: Index of the stage.
        replica: Index among the dp replicas of its mesh.
        micro_batch: Index of the micro-batch.
        rows: Rows of the batch, at most the plan's global batch.
    """
    there = micro_batch_rows(plan, micro_batch, rows)
    own = replica_rows(plan.stages[stage], plan.micro_batch, there)[replica]
    first = micro_batch * plan.micro_batch
    return range(first + own.start, first + own.stop)


def replica_of(stage: Stage, rank: int) -> int:
    """Index of a rank's replica; the ranks of a cp or tp axis are of one."""
    mesh = stage.mesh
    return mesh.devices.index(rank) // (mesh.cp * mesh.tp)
