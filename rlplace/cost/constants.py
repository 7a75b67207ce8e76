"""The named constants of a cost model, and an instance with other values for them.

A name has three parts: ``kind.H100-80.max_efficiency`` is of a device kind, ``link.ib.latency`` of
all links of a family, ``framework.torch.launch`` of a framework. Every number of `DeviceKind`,
`Link` and `Framework` has such a name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from rlplace.cluster.calibrated import link_family, numbers_of, overlaid
from rlplace.cluster.types import Cluster, Link, Node
from rlplace.errors import InputError, nearest_names
from rlplace.plan.types import Instance

SECTIONS = ("kind", "link", "framework")


@dataclass(frozen=True, slots=True)
class Range:
    """Where a constant may lie.

    Args:
        low: Smallest value; above zero, the constant is fitted by its logarithm.
        high: Largest value.
    """

    low: float
    high: float

    @property
    def logarithmic(self) -> bool:
        """Whether equal steps are equal factors."""
        return self.low > 0.0

    def start(self, value: float) -> float:
        """Where a fit begins: a factor that is not above its lowest value in the middle."""
        return math.sqrt(self.low * self.high) if value <= self.low and self.logarithmic else value

    def encode(self, value: float) -> float:
        """The number that a fit works with."""
        inside = min(max(value, self.low), self.high)
        if self.logarithmic:
            return math.log(inside)
        return (inside - self.low) / (self.high - self.low)

    def decode(self, number: float) -> float:
        """The value of such a number."""
        if self.logarithmic:
            return min(max(math.exp(number), self.low), self.high)
        return self.low + number * (self.high - self.low)


_SHARE, _EFFICIENCY, _LAUNCH = Range(0.0, 1.0), Range(0.02, 1.0), Range(1e-7, 1e-2)
#: Of constants whose meaning bounds them; all others stay within `_FACTOR` of where they start.
RANGES: dict[str, Range] = {
    "max_efficiency": _EFFICIENCY,
    "memory_efficiency": _EFFICIENCY,
    "attention_efficiency": _EFFICIENCY,
    "efficiency": _EFFICIENCY,
    "overlap": _SHARE,
    "overlap_reduce": _SHARE,
    "overlap_gather": _SHARE,
    "overlap_exchange": _SHARE,
    "redone_matmuls": _SHARE,
    "fusion": _SHARE,
    "fragmentation": _SHARE,
    "cached": _SHARE,
    "launch": _LAUNCH,
    "backward_launch": _LAUNCH,
    "collective_launch": _LAUNCH,
    "launch_overhead": _LAUNCH,
    "latency": Range(1e-7, 1.0),
    "step_overhead": Range(1e-4, 60.0),
    "attention": Range(0.1, 10.0),
}
_FACTOR = 30.0


def range_of(name: str, value: float) -> Range:
    """Where a constant may lie that is `value` now.

    Raises:
        InputError: If nothing bounds it: it is 0, and its meaning sets no limits.
    """
    field = split_name(name)[2]
    if field in RANGES:
        return RANGES[field]
    if value <= 0.0:
        rule = "is 0 and has no limits of its own, so a fit has nowhere to start"
        raise InputError("constant", name, rule, ", ".join(RANGES))
    return Range(value / _FACTOR, value * _FACTOR)


def split_name(name: str) -> tuple[str, str, str]:
    """Section, owner and field of a name; an owner may contain dots.

    Raises:
        InputError: If it has not three parts, or begins with none of `SECTIONS`.
    """
    section, _, rest = name.partition(".")
    owner, _, field = rest.rpartition(".")
    if section not in SECTIONS or not owner or not field:
        rule = "a constant is named kind.KIND.FIELD, link.FAMILY.FIELD or framework.NAME.FIELD"
        nearest = nearest_names(section, SECTIONS)
        raise InputError("constant", name, rule, nearest or "kind.H100-80.max_efficiency")
    return section, owner, field


def constants_of(instance: Instance) -> dict[str, float]:
    """Every constant that an instance has, by name, with its value.

    Links of a family that differ in a constant (``ib200`` and ``ib3200`` in bandwidth) share its
    name; the value is that of the first.
    """
    found: dict[str, float] = {}
    parts: list[tuple[str, object]] = [
        (f"kind.{kind.name}", kind) for kind in instance.cluster.kinds
    ]
    parts += [(f"link.{link_family(link.name)}", link) for link in _links(instance.cluster)]
    parts.append((f"framework.{instance.execution.name}", instance.execution))
    for prefix, described in parts:
        if not prefix.endswith("."):  # a nameless link, or framework, has no constants to name
            for field, value in numbers_of(described).items():
                found.setdefault(f"{prefix}.{field}", value)
    return found


def check_names(names: Iterable[str], known: Mapping[str, float]) -> None:
    """Refuse constants that no measurement has.

    Raises:
        InputError: With the nearest names.
    """
    for name in names:
        section, owner, field = split_name(name)
        if name not in known:
            own = [other for other in known if other.startswith(f"{section}.{owner}.")]
            like = [
                f"{section}.{a}.{f}"
                for s, a, f in map(split_name, known)
                if (s, f) == (section, field)
            ]
            close = nearest_names(name, own or like or known)
            raise InputError("constant", name, "no measurement has such a constant", close)


def apply(instance: Instance, constants: Mapping[str, float]) -> Instance:
    """An instance with other constants; those of devices that it does not have are left out.

    Args:
        instance: The question.
        constants: Values by name.

    Raises:
        InputError: If a name is none, or its owner is here and has no such constant.
    """
    return apply_all([instance], constants)[0]


def apply_all(
    instances: Sequence[Instance], constants: Mapping[str, float]
) -> tuple[Instance, ...]:
    """`apply` to many: instances (and clusters) that are one object before are one afterwards."""
    values: dict[str, dict[str, dict[str, float]]] = {section: {} for section in SECTIONS}
    for name, value in constants.items():
        section, owner, field = split_name(name)
        values[section].setdefault(owner, {})[field] = value
    clusters: dict[int, Cluster] = {}
    made: dict[int, Instance] = {}
    for instance in instances:
        if id(instance) in made:
            continue
        key = id(instance.cluster)
        if key not in clusters:
            clusters[key] = _cluster(instance.cluster, values["kind"], values["link"])
        execution = instance.execution
        changes = values["framework"].get(execution.name)
        made[id(instance)] = replace(
            instance,
            cluster=clusters[key],
            framework=overlaid(execution, changes, f"framework.{execution.name}")
            if changes
            else instance.framework,
        )
    return tuple(made[id(instance)] for instance in instances)


def _cluster(
    cluster: Cluster, kinds: dict[str, dict[str, float]], links: dict[str, dict[str, float]]
) -> Cluster:
    """A cluster with other kinds and links, or the same one where nothing changes."""
    names = {kind.name for kind in cluster.kinds}
    families = {link_family(link.name) for link in _links(cluster)}
    if not names & kinds.keys() and not families & links.keys():
        return cluster
    return replace(
        cluster,
        kinds=tuple(
            overlaid(kind, kinds.get(kind.name, {}), f"kind.{kind.name}") for kind in cluster.kinds
        ),
        nodes=tuple(_node(node, links) for node in cluster.nodes),
        overrides=tuple((a, b, _link(link, links)) for a, b, link in cluster.overrides),
    )


def _link(link: Link, links: dict[str, dict[str, float]]) -> Link:
    family = link_family(link.name)
    return overlaid(link, links.get(family, {}), f"link.{family}")


def _links_of(node: Node) -> dict[str, Link]:
    found = ((field.name, getattr(node, field.name)) for field in fields(node))
    return {name: value for name, value in found if isinstance(value, Link)}


def _node(node: Node, links: dict[str, dict[str, float]]) -> Node:
    changed = {name: _link(link, links) for name, link in _links_of(node).items()}
    return replace(node, **changed)  # type: ignore[arg-type]  # fields that hold links


def _links(cluster: Cluster) -> list[Link]:
    """Every distinct link of a cluster."""
    found = [link for node in cluster.nodes for link in _links_of(node).values()]
    return list(dict.fromkeys([*found, *(link for _, _, link in cluster.overrides)]))
