from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from rlplace.errors import InputError
from rlplace.graph.types import OpGraph
from rlplace.report.graph_boxes import Box, Picture
from rlplace.report.graph_drawing import curve, draw_graph
from rlplace.report.graph_picture import picture
from tests.report.graphs import graph, layered_model, unet


def towers() -> OpGraph:
    """Two towers of three layers each, folded, and a loss."""
    names = [f"{side}.layers.{i}.mlp" for side in ("text", "image") for i in range(3)] + ["loss"]
    edges = [(0, 1), (1, 2), (3, 4), (4, 5), (2, 6), (5, 6)]
    return graph(names, [0, 0, 0, 1, 1, 1, 2], edges)


def decoder() -> OpGraph:
    """An encoder, and layers of self-attention, cross-attention and MLP that read it."""
    names = ["encoder", "embed"]
    edges = []
    for layer in range(4):
        start = len(names)
        names += [f"d.{layer}.self", f"d.{layer}.cross", f"d.{layer}.mlp"]
        edges += [(start - 1, start), (start, start + 1), (start + 1, start + 2), (0, start + 1)]
    names.append("head")
    edges.append((len(names) - 2, len(names) - 1))
    return graph(names, [0, 1, *[2, 3, 4] * 4, 5], edges)


GRAPHS = {
    "layers": layered_model(12),
    "skip": layered_model(6, skip_from=2),
    "unet": unet(4),
    "towers": towers(),
    "decoder": decoder(),
    "one": graph(["all"], [0], []),
}


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("name", GRAPHS)
def test_every_group_has_one_box_and_boxes_do_not_overlap(name: str, fold: bool) -> None:
    made = GRAPHS[name]
    drawn = picture(made, fold=fold)
    covered = sorted(group for box in drawn.boxes for group in box.groups)
    assert covered == list(range(len(made.groups)))
    assert sum(box.share for box in drawn.boxes) == pytest.approx(1.0)
    for a, b in combinations(drawn.boxes, 2):
        assert not _overlap(a, b), (a.name, b.name)
    for box in drawn.boxes:
        assert box.x >= 0.0
        assert box.x + box.width <= drawn.width
        assert box.y >= 0.0
        assert box.y + box.height <= drawn.height


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("name", GRAPHS)
def test_arrows_join_the_boxes_of_the_edges(name: str, fold: bool) -> None:
    made = GRAPHS[name]
    drawn = picture(made, fold=fold)
    box_of = {group: index for index, box in enumerate(drawn.boxes) for group in box.groups}
    wanted = {(box_of[e.src], box_of[e.dst]) for e in made.edges if box_of[e.src] < box_of[e.dst]}
    assert {(arrow.src, arrow.dst) for arrow in drawn.arrows} == wanted
    for arrow in drawn.arrows:
        assert arrow.size == 64 * 2
        assert _on_border(arrow.points[0], drawn.boxes[arrow.src])
        assert _on_border(arrow.points[-1], drawn.boxes[arrow.dst])


@pytest.mark.parametrize("name", GRAPHS)
def test_arrows_pass_beside_the_boxes(name: str) -> None:
    from matplotlib.path import Path as Curve

    drawn = picture(GRAPHS[name])
    for arrow in drawn.arrows:
        points, codes = curve(arrow)
        line = Curve(points, codes).interpolated(1).to_polygons(closed_only=False)
        for x, y in np.asarray(line[0]).tolist():
            for index, box in enumerate(drawn.boxes):
                inside = (
                    box.x + 0.02 < x < box.x + box.width - 0.02
                    and box.y + 0.02 < y < box.y + box.height - 0.02
                )
                # Only what all boxes of a U read may cross some of them.
                assert not inside or name == "unet", (arrow, index)


def test_equal_layers_are_drawn_once_in_a_frame_that_holds_them() -> None:
    drawn = picture(layered_model(80))
    assert [box.name for box in drawn.boxes] == [
        "embed",
        "layers.0-79.attn",
        "layers.0-79.mlp",
        "head",
    ]
    assert [frame.count for frame in drawn.frames] == [80]
    held = [box.name for box in drawn.boxes if drawn.frames[0].holds(box)]
    assert held == ["layers.0-79.attn", "layers.0-79.mlp"]
    assert drawn.boxes[2].height > drawn.boxes[0].height
    assert drawn.height < 8.0


def test_a_unet_is_a_u() -> None:
    drawn = picture(unet(4))
    place = {box.name: box.centre for box in drawn.boxes}
    for level in range(4):
        down, up = place[f"down.{level}"], place[f"up.{3 - level}"]
        assert down[0] < up[0]
        assert down[1] == pytest.approx(up[1], abs=0.05)  # the skip runs straight across
    assert place["down.0"][1] < place["down.3"][1] < place["middle"][1] + 1e-6
    skips = [a for a in drawn.arrows if a.leaves == "right" and drawn.boxes[a.src].name != "time"]
    assert len(skips) >= 4


def test_residual_layers_are_no_u() -> None:
    names = [f"l{i}" for i in range(10)]
    chain = [(i, i + 1) for i in range(9)]
    for skips in (
        [(i, i + 2) for i in range(8)],
        [(a, b) for a in range(8) for b in range(a + 2, 10)],
    ):
        drawn = picture(graph(names, list(range(10)), chain + skips))
        assert len({round(box.centre[0], 1) for box in drawn.boxes}) == 1


def test_towers_stand_side_by_side() -> None:
    drawn = picture(towers())
    text, image, loss = (box.centre for box in drawn.boxes)
    assert text[1] == pytest.approx(image[1], abs=0.2)
    assert abs(text[0] - image[0]) > 2.0
    assert loss[1] > max(text[1], image[1])


@pytest.mark.parametrize(
    ("suffix", "head"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")]
)
def test_the_picture_is_written(suffix: str, head: bytes, tmp_path: Path) -> None:
    drawn = picture(decoder())
    written = draw_graph(drawn, tmp_path / f"graph{suffix}").read_bytes()
    assert written.startswith(head)
    if suffix == ".svg":
        text = written.decode()
        assert all(box.name in text for box in drawn.boxes)
        assert "x4" in text


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\.svg") as caught:
        draw_graph(picture(decoder()), tmp_path / "graph.bmp")
    assert caught.value.nearest == "graph.png"


def _overlap(a: Box, b: Box) -> bool:
    aside = a.x + a.width <= b.x or b.x + b.width <= a.x
    return not (aside or a.y + a.height <= b.y or b.y + b.height <= a.y)


def _on_border(point: tuple[float, float], box: Box) -> bool:
    x, y = point
    across = min(abs(x - box.x), abs(x - box.x - box.width)) < 1e-6
    along = min(abs(y - box.y), abs(y - box.y - box.height)) < 1e-6
    inside = (
        box.x - 1e-6 <= x <= box.x + box.width + 1e-6
        and box.y - 1e-6 <= y <= box.y + box.height + 1e-6
    )
    return inside and (across or along)


def test_pictures_are_plain_data() -> None:
    assert picture(decoder()) == picture(decoder())
    assert isinstance(picture(decoder()), Picture)
