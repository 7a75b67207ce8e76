"""The short form of a cluster: ``[NODESx]DEVICESxKIND[:LINK]``, joined with ``+``.

``8xA100-80``, ``4x8xH100-80:ib3200``, ``8xH100-80:pcie``, ``8xV100-16+8xA100-40`` (two nodes) and
``2x(2x3080-10+2x4090-24):eth25`` (two nodes, each with devices of two kinds). ``ib200`` and
``eth25`` say the total Gb/s of a node towards the others, ``pcie`` and ``nvlink`` the link inside;
both may follow one another. A link belongs to its own term: ``2xT4+2xL4:ib200``
leaves the T4 host its usual network.
"""

from __future__ import annotations

import re

from rlplace.cluster.assemble import MAX_DEVICES, HostSpec, assemble
from rlplace.cluster.catalogue import device_kind
from rlplace.cluster.links import link_place, named_link
from rlplace.cluster.types import Cluster, Link
from rlplace.errors import InputError

_EXAMPLE = "4x8xA100-80, 8xV100-16+8xA100-40, 2x(2x3080-10+2x4090-24):eth25"
_TERM = re.compile(
    r"(?:(?P<nodes>\d+)x)?"
    r"(?:\((?P<mixed>[^()]*)\)|(?P<plain>\d+x[A-Za-z0-9][\w.-]*))"
    r"(?P<links>(?::[^:]*)*)"
)
_DEVICES = re.compile(r"(?P<count>\d+)x(?P<kind>[A-Za-z0-9][\w.-]*)")


def parse_cluster(text: str) -> Cluster:
    """A cluster from its short form.

    Args:
        text: As in the module's docstring; spaces do not matter.

    Raises:
        InputError: If the form is not understood, or a kind, link or count is not legal.
    """
    compact = re.sub(r"\s+", "", text).replace("×", "x")  # noqa: RUF001
    hosts = [_host(term, text) for term in re.split(r"\+(?![^()]*\))", compact)]
    names = dict.fromkeys(kind for host in hosts for kind, _ in host.devices)
    return assemble(hosts, {name: device_kind(name) for name in names}, name=text.strip())


def _host(term: str, text: str) -> HostSpec:
    """One term: equal hosts, with the links that it names."""
    match = _TERM.fullmatch(term)
    if match is None:
        rule = f"{term!r} is not of the form [NODESx]DEVICESxKIND[:LINK]"
        raise InputError("cluster", text, rule, _EXAMPLE)
    devices = [
        (kind, None)
        for part in (match["mixed"] or match["plain"] or "").split("+")
        for kind in _devices(part, text)
    ]
    kinds = list(dict.fromkeys(kind for kind, _ in devices))
    links = _links(match["links"].split(":")[1:], kinds, text)
    nodes = _count(match["nodes"] or "1", text)
    return HostSpec(nodes, tuple(devices), links.get("intra"), links.get("nic"), field=term)


def _devices(part: str, text: str) -> list[str]:
    """The kinds of the devices of ``DEVICESxKIND``, by their names in the catalogue."""
    match = _DEVICES.fullmatch(part)
    if match is None:
        raise InputError("cluster", text, f"{part!r} is not of the form DEVICESxKIND", _EXAMPLE)
    return [device_kind(match["kind"]).name] * _count(match["count"], text)


def _count(digits: str, text: str) -> int:
    """A number of nodes or devices."""
    if len(digits) > 9 or not 0 < int(digits) <= MAX_DEVICES:
        rule = f"a number of nodes or devices is 1 to {MAX_DEVICES}, this is {digits}"
        raise InputError("cluster", text, rule, _EXAMPLE)
    return int(digits)


def _links(names: list[str], kinds: list[str], text: str) -> dict[str, Link]:
    """The links that a term names, by their place; inside a node the slowest of its kinds."""
    found: dict[str, Link] = {}
    for name in names:
        place = link_place(name)
        if place in found:
            where = "inside a node" if place == "intra" else "between nodes"
            raise InputError("cluster", text, f"two links {where}: {found[place].name} and {name}")
        found[place] = named_link(name, kinds)
    return found
