"""Op graphs made by hand for the tests of tables and pictures."""

from collections.abc import Sequence

from rlplace.graph.types import Affine, Collective, Edge, Group, Layout, OpGraph, Structure, Work

EDGE_FLOATS = Affine(0.0, 64.0)


def graph(
    names: Sequence[str],
    structures: Sequence[int],
    edges: Sequence[tuple[int, int]],
    flops: Sequence[float] | None = None,
    layouts: dict[int, tuple[Layout, ...]] | None = None,
) -> OpGraph:
    """Groups by name and structure; structure `s` does ``flops[s]`` forward, twice that back."""
    count = max(structures) + 1
    costs = flops or [float(s + 1) for s in range(count)]
    kinds = tuple(
        Structure(
            f"s{s}",
            Work(
                flops=Affine(0.0, costs[s]),
                backward_flops=Affine(0.0, 2 * costs[s]),
                saved=Affine(0.0, 8.0),
                saved_bytes=Affine(0.0, 3.0),
                params=100 + s,
                frozen_params=10,
            ),
            (layouts or {}).get(s, ()),
        )
        for s in range(count)
    )
    groups = tuple(
        Group(i, name, structures[i], (f"op{i}a", f"op{i}b")) for i, name in enumerate(names)
    )
    tensors = tuple(Edge(a, b, f"t{a}", floats=EDGE_FLOATS) for a, b in edges)
    return OpGraph("made", groups, tensors, kinds)


def layered_model(layers: int, skip_from: int | None = None) -> OpGraph:
    """An embedding, attention and MLP `layers` times, a head; perhaps a skip into the head."""
    names = ["embed"]
    for layer in range(layers):
        names += [f"layers.{layer}.attn", f"layers.{layer}.mlp"]
    names.append("head")
    last = len(names) - 1
    edges = [(i, i + 1) for i in range(last)]
    if skip_from is not None:
        edges.append((1 + 2 * skip_from, last))
    return graph(names, [0, *[1, 2] * layers, 3], edges)


def unet(levels: int) -> OpGraph:
    """A way down and a way up of `levels` boxes each, a time embedding that all of them read."""
    names = ["time", *(f"down.{i}" for i in range(levels)), "middle"]
    names += [f"up.{i}" for i in range(levels)]
    last = len(names) - 1
    edges = [(i, i + 1) for i in range(1, last)]
    edges += [(1 + i, last - i) for i in range(levels)]
    edges += [(0, i) for i in range(1, last + 1)]
    return graph(names, list(range(last + 1)), edges)


def sharded(degree: int, forward: int, backward: int, floats: float = 1.0) -> Layout:
    """A layout of so many all-reduces."""
    phases = ["forward"] * forward + ["backward"] * backward
    collectives = tuple(
        Collective("all_reduce", "forward" if phase == "forward" else "backward", Affine(0, floats))
        for phase in phases
    )
    return Layout("shard", degree, Work(), collectives)
