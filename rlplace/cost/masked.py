"""Rules of a user as masks on what groups may do (after nnScaler, Lin et al., OSDI 2024).

nnScaler's constraints say how an op may be cut, on which devices it may be, and when it may run.
Here the first two are rules on groups by name; the third is `Instance.schedules`. A cost model that
obeys them says of what they forbid that it is not known, so no search that asks what groups may do
offers it; and of what a rule of thumb proposes nevertheless, that it fits nowhere.

Groups of equal structure are one to a search, so a rule for some of them is a rule for all.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from rlplace.cost.analytic import AnalyticCost
from rlplace.cost.types import CostModel, GroupCost
from rlplace.errors import InputError, nearest_names
from rlplace.graph.types import Structure
from rlplace.plan.types import JOINED, RECOMPUTE_MODES, GroupChoice, Instance, Mesh

#: Bytes that no device has.
_TOO_MUCH = 1e18


@dataclass(frozen=True, slots=True)
class Rule:
    """What the groups may do whose names a pattern matches; None is anything.

    Args:
        groups: A pattern of names, with ``*`` and ``?``.
        layouts: Names of layouts.
        zero_levels: ZeRO levels.
        recompute_modes: Recompute modes.
        tp_degrees: Tensor-parallel degrees of the mesh that they are on.
        kinds: Device kinds that they may be on.
    """

    groups: str
    layouts: tuple[str, ...] | None = None
    zero_levels: tuple[int, ...] | None = None
    recompute_modes: tuple[str, ...] | None = None
    tp_degrees: tuple[int, ...] | None = None
    kinds: tuple[str, ...] | None = None

    def allows(self, instance: Instance, choice: GroupChoice, mesh: Mesh) -> bool:
        """Whether a group that it is for may run so."""
        devices = instance.cluster.devices
        pairs: tuple[tuple[tuple[object, ...] | None, Iterable[object]], ...] = (
            (self.layouts, (choice.layout,)),
            (self.zero_levels, (choice.zero,)),
            (self.recompute_modes, (choice.recompute,)),
            (self.tp_degrees, (mesh.tp,)),
            (self.kinds, {devices[device].kind for device in mesh.devices}),
        )
        return all(legal is None or set(chosen) <= set(legal) for legal, chosen in pairs)


@dataclass
class MaskedCost:
    """A cost model that obeys rules; see `masked`.

    Args:
        inner: What costs.
        rules: All of them hold.
    """

    inner: CostModel
    rules: tuple[Rule, ...]
    _own: dict[tuple[str, str], tuple[Rule, ...]] = field(default_factory=dict)

    def group(
        self,
        instance: Instance,
        structure: Structure,
        choice: GroupChoice,
        mesh: Mesh,
        samples: float,
        boundary: float,
    ) -> GroupCost:
        """See `rlplace.cost.types.CostModel.group`; what is forbidden needs more than there is."""
        found = self.inner.group(instance, structure, choice, mesh, samples, boundary)
        if self._allowed(instance, structure, choice, mesh):
            return found
        return replace(found, transient=_TOO_MUCH)

    def transfer(
        self, instance: Instance, source: Mesh, target: Mesh, floats: float, other: float
    ) -> float:
        """See `rlplace.cost.types.CostModel.transfer`."""
        return self.inner.transfer(instance, source, target, floats, other)

    def looks(self, instance: Instance, mesh: Mesh) -> Hashable:
        """See `rlplace.cost.types.CostModel.looks`."""
        devices = instance.cluster.devices
        kinds = frozenset(devices[device].kind for device in mesh.devices)
        return self.inner.looks(instance, mesh), kinds, mesh.tp

    def knows(
        self, instance: Instance, structure: Structure, choice: GroupChoice, mesh: Mesh
    ) -> bool:
        """See `rlplace.cost.types.CostModel.knows`."""
        known = self.inner.knows(instance, structure, choice, mesh)
        return known and self._allowed(instance, structure, choice, mesh)

    def _allowed(
        self, instance: Instance, structure: Structure, choice: GroupChoice, mesh: Mesh
    ) -> bool:
        key = (instance.graph.fingerprint, structure.hash)
        if key not in self._own:
            graph = instance.graph
            names = [
                g.name for g in graph.groups if graph.structures[g.structure].hash == structure.hash
            ]
            self._own[key] = tuple(
                rule for rule in self.rules if any(fnmatchcase(n, rule.groups) for n in names)
            )
        return all(rule.allows(instance, choice, mesh) for rule in self._own[key])


def masked(instance: Instance, rules: Iterable[Rule], cost: CostModel | None = None) -> MaskedCost:
    """A cost model of an instance that obeys rules.

    Args:
        instance: The question.
        rules: All of them hold.
        cost: What costs, `AnalyticCost` by default.

    Raises:
        InputError: If a rule is for no group, or allows nothing that there is.
    """
    rules = tuple(rules)
    graph, cluster = instance.graph, instance.cluster
    layouts = {layout.name for structure in graph.structures for layout in structure.layouts}
    known: dict[str, tuple[object, ...]] = {
        "layouts": ("replicate", *sorted(layouts)),
        "zero_levels": instance.zero_levels,
        "recompute_modes": (*RECOMPUTE_MODES, JOINED),
        "tp_degrees": instance.offered_tp,
        "kinds": tuple(kind.name for kind in cluster.kinds),
    }
    names = [group.name for group in graph.groups]
    for index, rule in enumerate(rules):
        if not any(fnmatchcase(name, rule.groups) for name in names):
            near = nearest_names(rule.groups.strip("*"), names)
            raise InputError(f"rules[{index}].groups", rule.groups, "matches no group", near)
        for name, legal in known.items():
            wanted = getattr(rule, name)
            if wanted is not None and not set(wanted) & set(legal):
                rule_text = f"at least one of {', '.join(map(str, legal))}"
                raise InputError(f"rules[{index}].{name}", wanted, rule_text, legal[:1])
    return MaskedCost(cost or AnalyticCost(), rules)
