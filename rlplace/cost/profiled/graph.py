"""An op graph whose groups are the layers of a profile."""

from __future__ import annotations

from rlplace.cost.profiled.types import Profile
from rlplace.errors import InputError
from rlplace.graph.types import Affine, Cut, Edge, Group, Layout, OpGraph, Structure, Work

#: The layout of every degree above 1: what the profile's own trainer did there.
LAYOUT = "shard"


def profile_graph(profile: Profile) -> OpGraph:
    """A chain of one group a layer, which planners can cut and estimates can cost.

    A group has the parameters of its layer, and a layout at each tp degree that was measured.
    Everything else about it is in the profile: `ProfiledCost` is the cost model of such a graph,
    and no other is.

    Raises:
        InputError: If a layer was never measured.
    """
    names = list(dict.fromkeys(profile.layers))
    structures = tuple(_structure(profile, name) for name in names)
    groups = tuple(
        Group(index, f"{index}.{name}", names.index(name))
        for index, name in enumerate(profile.layers)
    )
    edges = tuple(
        Edge(index, index + 1, f"out{index}", profile.outputs.get(name, Affine()))
        for index, name in enumerate(profile.layers[:-1])
    )
    return OpGraph(profile.name, groups, edges, structures, profile.tokens_per_sample)


def _structure(profile: Profile, name: str) -> Structure:
    degrees = profile.degrees(name)
    if not degrees:
        raise InputError("layer", name, f"the profile of {profile.name} never measures it")
    # A shard that was not measured at degree 1 still has a whole: as many parameters.
    whole = profile.params.get((name, 1), profile.params[name, degrees[0]] * degrees[0])
    layouts = tuple(
        Layout(LAYOUT, tp, Work(params=profile.params[name, tp])) for tp in degrees if tp > 1
    )
    most = max(degrees)
    cuts = (Cut("layer", most),) if most > 1 else ()
    return Structure(name, Work(params=whole), layouts, cuts)
