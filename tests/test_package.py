from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import rlplace
from rlplace.errors import InputError
from rlplace.resources import resource, resource_names

ROOT = Path(__file__).parents[1]
#: What discovery starts as processes of their own: the planner never imports it.
RANKS = {"rlplace.cluster.bench_worker"}
#: Training imports torch_geometric, and that imports transformers where it is installed.
TRAINING = {f"rlplace.policies.{name}" for name in ("convolution_pyg", "policy", "train")}
HEAVY = ("torch", "torch_geometric", "transformers", "wandb", "matplotlib")


def loaded_by(*modules: str) -> set[str]:
    """The heavy packages that a fresh interpreter has loaded after importing `modules`."""
    code = (
        f"import json, sys, {', '.join(modules)};"
        f"print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def modules_of(*rooms: str) -> list[str]:
    """Names of the modules under folders of rlplace, links followed."""
    package = ROOT / "rlplace"
    paths = (path for room in rooms for path in sorted((package / room).glob("**/*.py")))
    parts = (path.relative_to(ROOT).with_suffix("").parts for path in paths)
    return [".".join(part).removesuffix(".__init__") for part in parts]


def test_import_rlplace_loads_nothing_heavy() -> None:
    assert loaded_by("rlplace") == set()


def test_planning_core_loads_nothing_heavy() -> None:
    core = modules_of("plan", "cost", "simulate", "planners", "cluster")
    assert "rlplace.plan.types" in core
    in_process = [module for module in core if module not in RANKS]
    assert loaded_by("rlplace.graph.types", "rlplace.resources", *in_process) == set()


def test_no_module_loads_wandb_or_transformers_by_being_imported() -> None:
    everything = modules_of("graph", "cluster", "runtime", "report", "export", "envs", "policies")
    assert set(everything) > TRAINING
    lean = [module for module in everything if module not in TRAINING]
    assert not loaded_by(*lean) & {"wandb", "transformers", "torch_geometric"}
    assert "wandb" not in loaded_by(*TRAINING)


def test_versions_agree() -> None:
    assert importlib.metadata.version("rlplace") == rlplace.__version__


@pytest.mark.parametrize("name", rlplace.__all__)
def test_public_name_is_found(name: str) -> None:
    assert getattr(rlplace, name) is not None


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'plaec'"):
        _ = rlplace.plaec


@pytest.mark.parametrize("name", ["checkpoints/README.md", "configs/README.md", "configs"])
def test_resource_finds_what_the_repository_holds(name: str) -> None:
    found = resource(name)
    assert found.exists()
    assert found.resolve() == (ROOT / name).resolve()


def test_every_shipped_name_is_found() -> None:
    names = resource_names()
    assert names == sorted(set(names))
    assert all(resource(name).exists() for name in names)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("configs/READNE.md", "configs/README.md"),
        ("checkpoint/README.md", "checkpoints/README.md"),
        ("configs/../pyproject.toml", None),
        ("/etc/passwd", None),
    ],
)
def test_unknown_resource_names_the_nearest(name: str, nearest: str | None) -> None:
    with pytest.raises(InputError) as error:
        resource(name)
    if nearest is not None:
        assert nearest in str(error.value.nearest)


@pytest.mark.parametrize("folder", ["envs", "policies"])
def test_folder_refuses_its_bare_name(folder: str) -> None:
    spec = importlib.util.spec_from_file_location(folder, ROOT / folder / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=f"import this folder as `rlplace.{folder}`"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
