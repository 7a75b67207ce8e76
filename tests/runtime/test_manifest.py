from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlplace.runtime import manifest


def write(root: Path, step: int, text: str = "weights") -> Path:
    part = manifest.scratch(root, step)
    part.mkdir(parents=True)
    (part / "data").write_text(text)
    return manifest.commit(root, step, [manifest.note(part / "data")], {"batches": step})


def test_a_commit_leaves_a_good_checkpoint_and_no_scratch(tmp_path: Path) -> None:
    folder = write(tmp_path, 3)
    assert manifest.fault_of(folder) is None
    assert manifest.read_manifest(folder)["batches"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    assert manifest.latest_good(tmp_path) == folder


def cut_short(folder: Path) -> None:
    (folder / "data").write_text("weigh")


def flip(folder: Path) -> None:
    (folder / "data").write_text("weighty")


def remove(folder: Path) -> None:
    (folder / "data").unlink()


def half_a_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[: len(text) // 2])


def no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (cut_short, "data has 5 bytes, not 7"),
        (flip, "data has another checksum"),
        (remove, "data is missing"),
        (half_a_manifest, "manifest.json is damaged"),
        (no_manifest, "manifest.json is missing"),
    ],
)
def test_the_last_good_one_is_found_and_the_bad_one_named(
    tmp_path: Path, damage: Callable[[Path], None], word: str
) -> None:
    good, bad = write(tmp_path, 2), write(tmp_path, 10)
    damage(bad)
    with pytest.warns(UserWarning, match=f"step-00000010 is not used: {word}"):
        assert manifest.latest_good(tmp_path) == good


def test_half_written_folders_are_no_checkpoints_and_are_removed(tmp_path: Path) -> None:
    manifest.scratch(tmp_path, 4).mkdir()
    assert manifest.latest_good(tmp_path) is None
    manifest.remove_scratch(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        write(tmp_path, step)
    manifest.prune(tmp_path, 6, 2)
    assert [path.name for path in manifest.found(tmp_path)] == [
        "step-00000008",
        "step-00000006",
        "step-00000004",
    ]


def test_a_step_that_is_done_again_replaces_what_is_there(tmp_path: Path) -> None:
    write(tmp_path, 2, "before")
    folder = write(tmp_path, 2, "after")
    assert (folder / "data").read_text() == "after"
    assert manifest.fault_of(folder) is None
