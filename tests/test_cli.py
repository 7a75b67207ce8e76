import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlplace import api
from rlplace.cli import BAD_INPUT, COMMANDS, NOTHING_FITS, OK, main
from rlplace.plan.types import Instance

OWN_MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

    def forward(self, x, y):
        return (self.layers(x) - y).pow(2).mean()


class Branchy(Net):
    def forward(self, x, y):
        if x.sum() > 0:
            return super().forward(x, y)
        return y.sum()


def make():
    return Net(), {"x": torch.randn(4, 64), "y": torch.randn(4, 64)}


def branchy():
    return Branchy(), {"x": torch.randn(4, 64), "y": torch.randn(4, 64)}


def wrong():
    return Net()
"""


@pytest.fixture
def own_model(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN_MODEL)
    return path


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    code = ended.value.code
    assert isinstance(code, int)
    return code


def test_plan_prints_one_json_object_with_the_public_names(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    arguments = ["plan", "gpt2", "2x4xA100-40", "--global-batch", 32, "--seq-len", 256]
    assert call(*arguments, "--out", out, "--picture", picture, "--json") == OK
    found = json.loads(capsys.readouterr().out)
    for name in ("step_time", "peak_memory", "tokens_per_s", "mfu", "bound", "gap"):
        assert found[name] > 0.0
    assert found["feasible"] is True
    assert found["plan_seconds"] > 0.0
    assert found["planner"] in found["alternatives"]
    assert sum(int(row["groups"].split(":")[0]) for row in found["stages"]) >= 20
    assert json.loads(out.read_text())["format"] == 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plan_prints_verdict_table_and_alternatives(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("plan", "gpt2", "4xA100-40", "--global-batch", 32, "--seq-len", 256) == OK
    text = capsys.readouterr().out
    for words in ("fits", "stage", "GiB", "idle", "MFU", "bound", "gap", "grid", "policy"):
        assert words in text


@pytest.mark.parametrize(("flags", "code"), [((), BAD_INPUT), (("--precision", "fp32"), OK)])
def test_plan_refuses_what_a_run_does_not_execute(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], code: int
) -> None:
    """A V100 has no bf16, so fp16 is what it is planned for."""
    arguments = ["plan", "gpt2-tiny", "2xV100-32", "--global-batch", 8, *flags]
    assert call(*arguments) == OK
    assert call(*arguments, "--runnable") == code
    assert ("the runtime executes fp32" in capsys.readouterr().err) == (code == BAD_INPUT)


def test_plan_offers_slices(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []

    def watched(instance: Instance, *arguments: Any) -> api.Placement:
        asked.append(instance.slices)
        return place(instance, *arguments)

    place = api.place
    monkeypatch.setattr(api, "place", watched)
    arguments = ["plan", "gpt2-tiny", "2xA100-40", "--global-batch", 8, "--time-limit", 0.05]
    assert call(*arguments) == OK
    assert call(*arguments, "--slices", 4) == OK
    assert asked == [(1,), (1, 4)]
    assert call(*arguments, "--slices", 0) == BAD_INPUT
    assert "numbers of slices, each at least 1" in " ".join(capsys.readouterr().err.split())


def test_plan_takes_another_planner_and_offers_it_schedules(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["plan", "gpt2-tiny", "4x1xA100-40:eth1", "--global-batch", 16]
    named = [*arguments, "--planner", "overlap", "--time-limit", 20, "--json"]
    found = {}
    for schedules in (("1f1b",), ("1f1b", "zb-h1", "zb-v")):
        assert call(*named, "--schedules", *schedules) == OK
        found[schedules] = json.loads(capsys.readouterr().out)
        assert found[schedules]["planner"] == "overlap"
        assert list(found[schedules]["alternatives"]) == ["overlap"]
    few, many = (data["step_time"] for data in found.values())
    assert many <= few
    assert call(*arguments, "--planner", "overlapp") == BAD_INPUT
    assert "overlap" in capsys.readouterr().err
    assert call(*arguments, "--schedules", "zb-v") == BAD_INPUT
    assert "only these choose schedules" in " ".join(capsys.readouterr().err.split())
    assert call(*arguments, "--schedules", "2f2b") == BAD_INPUT
    assert "schedules" in capsys.readouterr().err


def test_plan_explains_itself_where_it_is_asked_to(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "gpt2-tiny", "4xA100-40", "--global-batch", 32, "--time-limit", 0.05]
    assert call(*arguments, "--explain") == OK
    text = " ".join(capsys.readouterr().out.split())
    assert "- of a step of " in text
    assert "is the fullest, with " in text
    assert call(*arguments, "--explain", "--json") == OK
    assert json.loads(capsys.readouterr().out)["explanation"][0].startswith("of a step of ")
    assert call(*arguments, "--json") == OK
    assert "explanation" not in json.loads(capsys.readouterr().out)


def test_calibrate_fits_what_slow_runs_show(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The devices took twice the seconds that were predicted: their efficiency is about half."""
    runs = []
    for batch in (8, 16, 32):
        plan = tmp_path / f"plan-{batch}.json"
        where = ("gpt2-demo", "2xA100-80", "--global-batch", batch, "--time-limit", 0.1)
        assert call("plan", *where, "--out", plan, "--json") == OK
        seconds = json.loads(capsys.readouterr().out)["step_time"]
        runs.append({"plan": plan.name, "cluster": "2xA100-80", "step_time": 2 * seconds})
    listed = tmp_path / "runs.json"
    listed.write_text(json.dumps(runs))
    out = tmp_path / "calibration.json"
    names = ("kind.A100-80.max_efficiency", "kind.A100-80.memory_efficiency")
    assert call("calibrate", listed, "--fit", *names, "--out", out, "--json") == OK
    found = json.loads(capsys.readouterr().out)
    assert found["median_error"] < found["median_error_before"] / 2
    assert json.loads(out.read_text())["kinds"]["A100-80"]


def test_plan_of_a_users_own_function(capsys: pytest.CaptureFixture[str], own_model: Path) -> None:
    assert call("plan", f"{own_model}:make", "2xT4", "--global-batch", 64, "--json") == OK
    assert json.loads(capsys.readouterr().out)["model"].endswith(":make")


def test_nothing_fits_exits_with_two_and_says_what_would(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = call("plan", "llama-2-7b", "1xA100-80", "--global-batch", 8, "--seq-len", 512)
    assert code == NOTHING_FITS
    assert "would fit" in " ".join(capsys.readouterr().err.split())
    call_json = ["plan", "llama-2-7b", "1xA100-80", "--global-batch", 8, "--seq-len", 512, "--json"]
    assert call(*call_json) == NOTHING_FITS
    found = json.loads(capsys.readouterr().out)
    assert found["feasible"] is False
    assert found["step_time"] is None
    assert "over" in found["reasons"][0] or "limit" in found["reasons"][0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "lama-3-8b", "8xA100-80", "--global-batch", 8], "llama-3-8b"),
        (["plan", "gpt2", "8xA100-8", "--global-batch", 8], "A100-80"),
        (["plan", "gpt2", "8xA100-80", "--global-batch", 0], "at least 1"),
        (["plan", "gpt2", "nowhere.yaml", "--global-batch", 8], "nowhere.yaml"),
        (["plan", "gpt2", "8xA100-80", "--global-batch", 8, "--policy", "nowhere"], "policy"),
        (["show", "gpt3"], "gpt2"),
        (["show", "gpt2", "--precision", "bf17"], "bf16"),
        (["show", "gpt2", "--picture", "graph.bmp"], "graph.png"),
        (["show", "gpt2-tiny", "--granularity", "medium"], "coarse"),
        (["run", "nowhere.json"], "cannot be read"),
        (["train", "nowhere.yaml"], "nowhere.yaml"),
        (["eval", "--suite", "held-in"], "held-out"),
        (["discover", "--ranks", 0], "ranks"),
    ],
)
def test_bad_input_exits_with_one_and_names_the_nearest_legal_value(
    arguments: list[object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*arguments) == BAD_INPUT
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("branchy", "own.py:17"),
        ("wrong", "returns (module, inputs)"),
        ("mak", "make"),
    ],
)
def test_bad_models_of_a_user(
    function: str, words: str, own_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("plan", f"{own_model}:{function}", "2xT4", "--global-batch", 8) == BAD_INPUT
    assert words in "".join(capsys.readouterr().err.split("\n"))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "--json" in text
    assert len(text) > 400


def test_planning_from_the_cache_imports_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys\n"
        "from rlplace.cli import main\n"
        "try:\n"
        "    main(['plan', 'gpt2', '4xA100-40', '--global-batch', '8', '--json'])\n"
        "except SystemExit as ended:\n"
        "    assert ended.code == 0\n"
        "heavy = {'torch', 'wandb', 'matplotlib', 'transformers', 'torch_geometric'}\n"
        "print('loaded', sorted(heavy & set(sys.modules)))\n"
    )
    call("plan", "gpt2", "4xA100-40", "--global-batch", 8, "--json")  # fills the cache
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip().endswith("loaded []"), done.stderr


def test_show_prints_the_groups_and_draws_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["show", "gpt2", "--seq-len", 256]
    picture = tmp_path / "gpt2.svg"
    assert call(*arguments, "--json", "--picture", picture) == OK
    found = json.loads(capsys.readouterr().out)
    counts = {row["name"]: row["count"] for row in found["rows"]}
    assert max(counts.values()) >= 11  # equal layers are one row
    assert sum(counts.values()) == found["groups"]
    assert found["params"] == 124_439_808 - 768 * 768  # 256 positions, not 1024
    assert all(name in picture.read_text() for name in counts)
    assert call(*arguments, "--all", "--json") == OK
    assert len(json.loads(capsys.readouterr().out)["rows"]) == found["groups"]
    assert call(*arguments) == OK
    text = " ".join(capsys.readouterr().out.split())
    for words in ("FLOPs", "reads", "AR all-reduce", "trainable parameters", "256 tokens"):
        assert words in text


def test_show_takes_a_users_own_function(
    capsys: pytest.CaptureFixture[str], own_model: Path
) -> None:
    assert call("show", f"{own_model}:make", "--granularity", "coarse", "--json") == OK
    found = json.loads(capsys.readouterr().out)
    assert found["params"] == 64 * 256 + 256 + 256 * 64 + 64
    assert found["flops"] >= 3 * 2 * 64 * 256
