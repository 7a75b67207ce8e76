"""Files of rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlplace.cli import BAD_INPUT, NOTHING_FITS, OK, main
from rlplace.commands.rules import load_rules
from rlplace.cost.masked import Rule
from rlplace.errors import InputError
from rlplace.plan.types import Plan


def _call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def _file(folder: Path, text: str) -> Path:
    path = folder / "rules.yaml"
    path.write_text(text)
    return path


def test_a_file_is_a_list_of_rules(tmp_path: Path) -> None:
    text = "- groups: '*.attn'\n  zero_levels: [0, 3]\n- {groups: lm_head, kinds: [A100-40]}\n"
    assert load_rules(_file(tmp_path, text)) == (
        Rule("*.attn", zero_levels=(0, 3)),
        Rule("lm_head", kinds=("A100-40",)),
    )


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("groups: '*'", "a list of rules"),
        ("- zero_levels: [0]", r"rules\[0\].*pattern of names"),
        ("- groups: '*'\n  zero_level: [0]", r"rules\[0\].zero_level.*zero_levels"),
        ("- groups: '*'\n  zero_levels: 0", r"rules\[0\].zero_levels.*\[0\]"),
        ("- [", "readable YAML"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(InputError, match=match):
        load_rules(_file(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="readable"):
        load_rules(tmp_path / "none.yaml")


def test_plan_obeys_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "gpt2-tiny", "2xA100-40", "--global-batch", "8", "--json", "--rules"]
    one = _file(tmp_path, "- groups: '*'\n  zero_levels: [3]\n  tp_degrees: [1]\n")
    out = tmp_path / "plan.json"
    assert _call(*arguments, one, "--out", out) == OK
    capsys.readouterr()
    stages = Plan.load(out).stages
    assert {choice.zero for stage in stages for choice in stage.choices} == {3}
    none = _file(tmp_path, "- {groups: '*', zero_levels: [0]}\n- {groups: '*', zero_levels: [3]}\n")
    assert _call(*arguments, none) == NOTHING_FITS
    assert "2 rules" in capsys.readouterr().out
    assert _call(*arguments, tmp_path / "none.yaml") == BAD_INPUT
