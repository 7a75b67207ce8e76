"""Every layout of one group of each structure, of models that nobody shards by hand, on ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from rlplace.errors import InputError
from rlplace.graph import library
from rlplace.graph.sharding.rules import Strategy
from rlplace.graph.types import Affine, Collective, Layout, OpGraph, Replicate, Shard
from rlplace.runtime.layout_cases import Subject, case_of, params_held, subjects_of
from rlplace.runtime.layout_check import bytes_of, judge, run_cases
from rlplace.runtime.shard_check import Case, Deviation

BATCH = 3
DEGREES = (2, 4)
SHAPES: dict[str, dict[str, Any]] = {
    "resnet-tiny": {"depths": "1", "widths": "64", "image": 16},
    "dlrm-tiny": {},
    "mixtral-tiny": {"layers": 1, "kv_heads": 4},
    "unet-tiny": {"widths": "16", "transformers": "1", "heads": "4"},
    "gcn-tiny": {},
}
#: Its other groups are of kinds that these, or other models, have as well.
UNET_PARTS = ("conv_in", "down.0.residual", "attention", "proj_in", "up.0.residual")


@dataclass(frozen=True)
class Found:
    """A model with one group of each structure."""

    graph: OpGraph
    subjects: list[Subject]

    def layouts(self, degree: int, name: str = "shard") -> dict[str, tuple[Subject, Layout]]:
        """By name of the group."""
        return {
            self.graph.groups[subject.group].name: (subject, layout)
            for subject in self.subjects
            for layout in _all(self.graph, subject)
            if (layout.name, layout.degree) == (name, degree)
        }

    def placements(self, degree: int, name: str = "shard") -> dict[str, dict[str, Any]]:
        """Of the states of each group with such a layout."""
        found: dict[str, dict[str, Any]] = {}
        for group, (subject, layout) in self.layouts(degree, name).items():
            states = dict.fromkeys(state for _, state in subject.piece.states)
            found[group] = dict(zip(states, layout.params, strict=True))
        return found

    def shared(self, degree: int, most: float = 0.75) -> set[str]:
        """Groups of which a device does at most such a part of the FLOPs."""
        return {
            group
            for group, (subject, layout) in self.layouts(degree).items()
            if layout.work.flops(BATCH)
            <= most * self.graph.structure(subject.group).work.flops(BATCH)
        }


def _all(graph: OpGraph, subject: Subject) -> tuple[Layout, ...]:
    structure = graph.structure(subject.group)
    return (*structure.layouts, *structure.bordered)


@cache
def found_in(name: str) -> Found:
    torch.manual_seed(0)
    shape = SHAPES[name]
    graph = library.build(name, degrees=DEGREES, cache=False, **shape)
    spec = library.spec(name, **shape)
    return Found(graph, subjects_of(spec.make(), spec.example(BATCH), graph))


@pytest.mark.dist
@pytest.mark.slow
def test_every_layout_computes_sends_and_holds_what_it_says() -> None:
    kinds: set[tuple[str, str, int]] = set()
    wanted: list[tuple[str, Layout, Case]] = []
    for name in SHAPES:
        found = found_in(name)
        for subject in found.subjects:
            group = found.graph.groups[subject.group].name
            if name == "unet-tiny" and not any(part in group for part in UNET_PARTS):
                continue
            for layout in _all(found.graph, subject):
                title = f"{name} {group} {layout.name} {layout.axis}{layout.degree}"
                kinds.add((layout.name, layout.axis, layout.degree))
                wanted.append((title, layout, case_of(subject, layout, title)))

    reports = run_cases([case for _, _, case in wanted], ranks=4)

    tp = {(n, "tp", d) for n in ("shard", "sequence", "shard-through", "expert") for d in DEGREES}
    assert tp | {("context", "cp", degree) for degree in DEGREES} <= kinds
    assert len(reports) == len(wanted) >= 80
    for (title, layout, case), report in zip(wanted, reports, strict=True):
        verdict = judge(case, layout, BATCH, report)
        assert verdict.problem == "", title
        assert verdict.error < 1e-9, title
        assert verdict.sent == verdict.expected, title


@pytest.mark.parametrize("degree", DEGREES)
def test_residual_blocks_are_cut_between_channels(degree: int) -> None:
    blocks = found_in("resnet-tiny").placements(degree)
    layers = {group: states for group, states in blocks.items() if group.endswith(".layer")}

    assert layers
    for states in layers.values():
        convolutions = [p for n, p in states.items() if n.endswith("convolution.weight")]
        # In pairs: out channels, then in channels.
        assert Shard(0) in convolutions
        assert Shard(1) in convolutions
    assert layers.keys() <= found_in("resnet-tiny").shared(degree)


@pytest.mark.parametrize("degree", DEGREES)
def test_tables_are_cut_between_rows_or_features(degree: int) -> None:
    groups = found_in("dlrm-tiny").placements(degree)
    tables = [s for group, s in groups.items() if group.startswith("tables")]

    assert tables
    for states in tables:
        assert all(p in (Shard(0), Shard(1)) for n, p in states.items() if n.endswith("weight"))


@pytest.mark.parametrize("degree", DEGREES)
def test_experts_are_cut_and_are_whole_on_their_devices(degree: int) -> None:
    def experts(name: str) -> dict[str, Any]:
        (states,) = found_in("mixtral-tiny").placements(degree, name).values()
        return {n.split(".")[-1]: p for n, p in states.items() if ".experts." in n}

    assert experts("expert") == {"gate_up_proj": Shard(0), "down_proj": Shard(0)}
    (cut,) = (
        states
        for group, states in found_in("mixtral-tiny").placements(degree).items()
        if group.endswith("mlp")
    )
    fused = {n.split(".")[-1]: p for n, p in cut.items() if ".experts." in n}
    assert fused == {"gate_up_proj": Shard(1, blocks=2), "down_proj": Shard(2)}


@pytest.mark.parametrize("degree", DEGREES)
def test_residual_and_attention_blocks_of_a_unet_are_cut(degree: int) -> None:
    shared = found_in("unet-tiny").shared(degree)

    for part in ("down.0.residual", "up.0.residual", "self_attention", "cross_attention"):
        assert any(part in group for group in shared), part


@pytest.mark.parametrize("degree", DEGREES)
def test_the_linear_part_of_a_graph_layer_is_cut(degree: int) -> None:
    states = found_in("gcn-tiny").placements(degree)["layers.0"]

    assert states["layers.0.lin.weight"] == Shard(0)
    assert "layers.0" in found_in("gcn-tiny").shared(degree, 1 / degree)


def _layer() -> tuple[Subject, Layout]:
    return found_in("dlrm-tiny").layouts(2)["bottom.2"]


@pytest.mark.dist
def test_a_case_that_fails_stops_no_other() -> None:
    subject, layout = _layer()
    right = case_of(subject, layout, "right")
    first = next(n for n in subject.piece.module.graph.nodes if n.op == "call_function")
    wrong = Strategy((Shard(0), Replicate(), Replicate()), Shard(0))
    torn = replace(right, assignment=replace(right.assignment, strategies={first.name: wrong}))
    blank = replace(right, inputs=[_not_a_number(value) for value in right.inputs])
    seen: list[int] = []

    reports = run_cases([torn, right, blank], ranks=2, progress=seen.append)

    assert [isinstance(report, str) for report in reports] == [True, False, False]
    assert reports[0]
    assert seen[-1] == 3
    verdicts = [judge(right, layout, BATCH, report) for report in reports]
    assert [verdict.problem == "" for verdict in verdicts] == [False, True, False]
    assert math.isinf(verdicts[0].error)
    assert math.isinf(verdicts[2].error)


def _not_a_number(value: Any) -> Any:
    return torch.full_like(value, math.nan).requires_grad_(value.requires_grad)


def test_bytes_are_what_a_device_gives() -> None:
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    sent = tuple(Collective(kind, "forward", Affine(8.0, 4.0)) for kind in kinds)  # type: ignore[arg-type]
    _, layout = _layer()

    given = bytes_of(replace(layout, collectives=sent), batch=2)

    # 16 elements of 8 bytes; of what is gathered or exchanged a device gives its half.
    assert given == {"all_reduce": 128, "all_gather": 64, "reduce_scatter": 128, "all_to_all": 64}


def _report(layout: Layout) -> Deviation:
    sent = tuple((c.kind, int(c.floats(BATCH))) for c in layout.collectives)
    shares = [1 if kind in ("all_reduce", "reduce_scatter") else layout.degree for kind, _ in sent]
    given = tuple(8 * n // share for (_, n), share in zip(sent, shares, strict=True))
    forward = sum(c.phase == "forward" for c in layout.collectives)
    return Deviation(0.0, 0.0, 0.0, sent, given, forward)


_DAMAGE: list[tuple[str, Callable[[Deviation], Deviation]]] = [
    ("error 1.0e-06", lambda r: replace(r, gradients=1e-6)),
    ("error inf", lambda r: replace(r, outputs=math.inf)),
    ("bytes", lambda r: replace(r, given=(r.given[0] + 8, *r.given[1:]))),
    ("called", lambda r: replace(r, forward=r.forward + 1)),
]


@pytest.mark.parametrize(("words", "damage"), _DAMAGE)
def test_what_differs_is_said(words: str, damage: Callable[[Deviation], Deviation]) -> None:
    subject, layout = _layer()
    case = case_of(subject, layout, "layer")
    reports: Sequence[Deviation] = [_report(layout)] * 2

    assert judge(case, layout, BATCH, reports).problem == ""
    assert words in judge(case, layout, BATCH, [damage(reports[0]), reports[1]]).problem


def test_parameters_that_are_held_are_counted() -> None:
    subject, layout = _layer()
    case = case_of(subject, layout, "layer")
    assert params_held(case) == layout.work.params
    more = replace(layout, work=replace(layout.work, params=layout.work.params + 1))

    assert "parameters" in judge(case, more, BATCH, [_report(layout)] * 2).problem


def test_a_layout_that_the_ops_do_not_have_is_refused() -> None:
    subject, layout = _layer()
    other = replace(layout, writes=(Shard(1),))

    with pytest.raises(InputError, match="the ops"):
        case_of(subject, other, "other")
