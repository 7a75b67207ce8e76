"""Per-group choices inside one stage, shared by the dynamic program and the stage-wise builder.

For a mesh and a number of micro-batches in flight every group has a few options (layout, ZeRO
level, recompute), each with seconds and bytes. The boundaries of all layouts are replicated, so
no option costs its neighbour anything: the Viterbi pass over the groups falls apart into one
argmin a group, and only memory couples them. A multiplier on memory (Everett 1963) turns that
coupling into a price: for each price of a ladder every group takes its cheapest option, and prefix
sums then give every interval of groups at once. Equal layers all change their option at the same
price, so between the last price that does not fit and the first one that does, a stage takes the
former from some group on: as many layers recompute as memory asks for, not all or none.

Bytes that come and go are those of the group that has most, and have no price. Where weights may be
cut into slices, which free nothing else, each of equal groups pays its part of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from rlplace.cost.analytic import AnalyticCost
from rlplace.cost.types import CostModel
from rlplace.plan.types import GroupChoice, Instance, Mesh
from rlplace.planners.stage_rows import (
    COLUMNS,
    PROHIBITIVE,
    Costs,
    Floats,
    Ints,
    StageRow,
    Table,
    block_of,
    row_of,
    table_of,
)
from rlplace.simulate.stages import boundaries, boundary_bytes, tied_states


@dataclass
class StageSolver:
    """Solves stages of one instance; results are cached by what they depend on.

    Args:
        instance: The question.
        cost: The cost model.
    """

    instance: Instance
    cost: CostModel = field(default_factory=AnalyticCost)
    _classes: dict[Mesh, int] = field(default_factory=dict)
    _limits: dict[Mesh, float] = field(default_factory=dict)
    _numbers: dict[tuple[object, ...], int] = field(default_factory=dict)
    _costs: dict[tuple[int, int], Costs] = field(default_factory=dict)
    _tables: dict[tuple[int, int, int], Table] = field(default_factory=dict)
    _tied: dict[int, tuple[tuple[int, int, Floats], ...]] = field(default_factory=dict)
    _rows: dict[tuple[int, int, int, int], StageRow] = field(default_factory=dict)
    _options: dict[tuple[int, int], tuple[GroupChoice, ...]] = field(default_factory=dict)

    def row(self, stop: int, mesh: Mesh, micro_batches: int, in_flight: int) -> StageRow:
        """The best stage [start, stop) for every start in 0..stop-1.

        Args:
            stop: One past the last group.
            mesh: Where the stage runs; `dp_shard` may be used by ZeRO.
            micro_batches: Micro-batches of a step.
            in_flight: Micro-batches held at the peak.
        """
        key = (self.mesh_class(mesh), micro_batches, in_flight, stop)
        if key not in self._rows:
            table = self._table(mesh, micro_batches, in_flight)
            limit = self.limit(mesh)
            self._rows[key] = row_of(table, stop, micro_batches, limit)
        return self._rows[key]

    def block(
        self,
        cuts: Ints,
        mesh: Mesh,
        micro_batches: int,
        in_flight: int,
        most: float = float("inf"),
    ) -> Floats:
        """Seconds, forward, tail and lean seconds (see `StageRow`) of the stages between all cuts.

        Args:
            cuts: Ascending groups, the last one past the end (N,).
            mesh: Where the stages run.
            micro_batches: Micro-batches of a step.
            in_flight: Micro-batches held at the peak.
            most: Seconds; a stage whose step takes as long may be left out.

        Returns:
            (4, N, N) by first and last cut; seconds are infinite where nothing fits.
        """
        table = self._table(mesh, micro_batches, in_flight)
        return block_of(table, cuts, micro_batches, self.limit(mesh), most)

    def choices(
        self, start: int, stop: int, mesh: Mesh, micro_batches: int, in_flight: int
    ) -> tuple[GroupChoice, ...]:
        """The choices behind `row(...)` at `start`; the leanest ones where nothing fits."""
        row = self.row(stop, mesh, micro_batches, in_flight)
        table = self._table(mesh, micro_batches, in_flight)
        level, split = int(row.level[start]), int(row.split[start])
        picks = [*table.pick[level, start:split], *table.pick[level - 1, split:stop]]
        own = self.instance.graph.groups[start:stop]
        return tuple(
            table.options[group.structure][pick] for group, pick in zip(own, picks, strict=True)
        )

    def transfer(self, cut: int, source: Mesh, target: Mesh, micro_batches: int) -> float:
        """Seconds of one micro-batch from `source` to `target` at the cut before group `cut`."""
        floats, other = self.instance.graph.crossings[cut]
        size = self.instance.global_batch / micro_batches
        return self.cost.transfer(self.instance, source, target, floats(size), other(size))

    def usable(self, mesh: Mesh) -> bool:
        """Whether every group has a choice on a mesh of which the cost is known."""
        return all(
            self.options(index, mesh) for index in range(len(self.instance.graph.structures))
        )

    def options(self, structure: int, mesh: Mesh) -> tuple[GroupChoice, ...]:
        """The choices of which the cost is known that a group of this structure has on a mesh."""
        key = (structure, self.mesh_class(mesh))
        if key not in self._options:
            self._options[key] = self._find_options(structure, mesh)
        return self._options[key]

    def _find_options(self, structure: int, mesh: Mesh) -> tuple[GroupChoice, ...]:
        described = self.instance.graph.structures[structure]
        layouts = described.layouts_at(mesh.tp)
        levels = self.instance.zero_levels if mesh.dp_shard > 1 else (0,)
        offered = (
            GroupChoice(layout.name, zero, recompute, offload, slices)  # type: ignore[arg-type]  # a mode
            for layout in layouts
            for zero in levels
            for recompute in self.instance.recompute_options(described.work)
            for offload in self.instance.offered_offload
            for slices in self.instance.slice_options(layout.work, zero, recompute)
        )
        knows = self.cost.knows
        return tuple(one for one in offered if knows(self.instance, described, one, mesh))

    @cached_property
    def reads(self) -> tuple[tuple[float, float, float, float], ...]:
        """What each group reads (see `boundaries`)."""
        return boundaries(self.instance.graph)

    def mesh_class(self, mesh: Mesh) -> int:
        """A number that is equal for meshes on which every stage costs the same."""
        if mesh not in self._classes:
            looks = self.cost.looks(self.instance, mesh)
            number = self._numbers.setdefault((looks, self.limit(mesh)), len(self._numbers))
            self._classes[mesh] = number
        return self._classes[mesh]

    def limit(self, mesh: Mesh) -> float:
        """Bytes for states and activations on the tightest device of the mesh."""
        if mesh not in self._limits:
            self._limits[mesh] = self._find_limit(mesh)
        return self._limits[mesh]

    def _find_limit(self, mesh: Mesh) -> float:
        instance = self.instance
        kinds = {instance.cluster.devices[d].kind: d for d in mesh.devices}
        free = min(
            instance.memory_limit(device) - instance.cluster.kind(device).reserve
            for device in kinds.values()
        )
        execution = instance.execution
        return (free - execution.reserve) / (1.0 + execution.fragmentation)

    def _table(self, mesh: Mesh, micro_batches: int, in_flight: int) -> Table:
        key = (self.mesh_class(mesh), micro_batches, in_flight)
        if key not in self._tables:
            self._tables[key] = self._build(mesh, micro_batches, in_flight)
        return self._tables[key]

    def _build(self, mesh: Mesh, micro_batches: int, in_flight: int) -> Table:
        key = (self.mesh_class(mesh), micro_batches)
        if key not in self._costs:
            self._costs[key] = self._find_costs(mesh, micro_batches)
        return self._with_tied(table_of(self._costs[key], micro_batches, in_flight), mesh)

    def _find_costs(self, mesh: Mesh, micro_batches: int) -> Costs:
        graph = self.instance.graph
        options = tuple(self.options(index, mesh) for index in range(len(graph.structures)))
        samples = self.instance.global_batch / micro_batches / mesh.dp
        kinds: dict[tuple[int, float], int] = {}
        owner = []
        for group in graph.groups:
            kept = boundary_bytes(self.instance, self.reads[group.index], samples)
            owner.append(kinds.setdefault((group.structure, kept), len(kinds)))
        costs = [
            [
                self.cost.group(self.instance, graph.structures[s], o, mesh, samples, kept)
                for o in options[s]
            ]
            for s, kept in kinds
        ]
        widest = max(len(row) for row in costs)

        def column(name: str) -> Floats:
            rows = [[getattr(cost, name) for cost in row] for row in costs]
            return np.array([row + [PROHIBITIVE] * (widest - len(row)) for row in rows])

        return Costs(
            options=options,
            owner=np.array(owner, np.int64),
            hidden=min(cost.hidden for row in costs for cost in row),
            **{name: column(name) for name in COLUMNS},
        )

    def _with_tied(self, table: Table, mesh: Mesh) -> Table:
        """The table with what it counts twice of tied parameters."""
        number = self.mesh_class(mesh)
        if number not in self._tied:
            self._tied[number] = tuple(self._find_tied(mesh))
        tied = self._tied[number]
        if not tied:
            return table
        pairs = np.array([(before, after) for before, after, _ in tied], np.int64)
        columns = [held[table.pick[:, after]] for _, after, held in tied]
        sums = table.sums._replace(pairs=pairs, twice=np.stack(columns, axis=1))
        return replace(table, sums=sums)

    def _find_tied(self, mesh: Mesh) -> Iterator[tuple[int, int, Floats]]:
        """A group that uses a tied parameter, the next one, and its bytes by the latter's option.

        Once for each such pair of groups.
        """
        graph = self.instance.graph
        for tied in graph.tied:
            own = [group for group in graph.groups if tied[0] in group.params]
            for before, after in pairwise(own):
                choices = self.options(after.structure, mesh)
                held = [tied_states(self.instance, after, c, mesh, tied).total for c in choices]
                yield before.index, after.index, np.array(held)
