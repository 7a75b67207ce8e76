"""The suite of public problems: op graphs and profiles that peers published, under their costs.

Read from a folder that has

- ``op_graphs``: graphs of dnn-partitioning, Piper, DOPPLER and GiPH (of these the problems that
  the file has reference placements of), each under its form's own rule;
- ``profiles``: those of Galvatron and Aceso, on which planners make plans, and Sailor's, where a
  plan is worth what Sailor's own rule says.

Each form is a suite of its own (``public giph``), since neither values nor planners are comparable
between them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from rlplace.bench.placements import PlacementProblem
from rlplace.bench.profiles import ACESO, aceso_gpt, galvatron_llama
from rlplace.bench.types import Problem, Question
from rlplace.cost.given.sailor_form import SailorInstance, read_sailor_instance
from rlplace.cost.types import CostModel
from rlplace.errors import InputError
from rlplace.graph.formats.read import read_instances
from rlplace.graph.formats.types import GivenInstance, PiperCosts
from rlplace.plan.types import Instance
from rlplace.units import GIB

PUBLIC = "public"
_Made = TypeVar("_Made", GivenInstance, SailorInstance, Instance, CostModel)

#: Form -> its file.
_GRAPHS = {
    "dnn-partitioning": "op_graphs/dnn_partitioning_graphs.json",
    "piper": "op_graphs/piper_graphs.json",
    "doppler": "op_graphs/doppler_graphs.json",
    "giph": "op_graphs/giph_small8dev.json",
}
#: Piper's graph on the devices that its published figure is of.
BERT = "bert32a100 on 512"
_FOLDERS = {peer: f"profiles/{peer}" for peer in ("galvatron", "aceso", "sailor")}
#: GB a device of Galvatron's llama2-7b.
_GALVATRON_MEMORY = (24, 36)


@dataclass(frozen=True, slots=True)
class SailorCase:
    """A problem of Sailor: a model, samples of a step, and devices of each kind."""

    model: str
    batch: int
    fast: int
    slow: int

    @property
    def name(self) -> str:
        """Unique among them."""
        return f"{self.model}, {self.fast} A100-40 + {self.slow} V100-16"

    def read(self, folder: Path) -> SailorInstance:
        """The problem, from the folder of Sailor's profiles."""
        devices = {"A100-40": self.fast, "V100-16": self.slow}
        return read_sailor_instance(folder, self.model, devices, self.batch)


#: The problems that Sailor was run on here.
SAILOR = (
    *(
        SailorCase("OPT-350", 1024, fast, slow)
        for fast, slow in ((8, 8), (16, 16), (32, 32), (32, 96), (80, 240), (128, 384))
    ),
    *(SailorCase("GPT-Neo-2.7", 2048, count, count) for count in (8, 16, 32)),
)


def public(folder: Path | None) -> Iterator[Question]:
    """The problems, form by form.

    Raises:
        InputError: If no folder is given, or it lacks some of the data.
    """
    root = checked(folder)
    for form, file in _GRAPHS.items():
        for name, instance in given(root / file).items():
            yield PlacementProblem(f"{PUBLIC} {form}", name, partial(_same, instance))
    for case in SAILOR:
        make = partial(case.read, root / _FOLDERS["sailor"])
        yield PlacementProblem(f"{PUBLIC} sailor", case.name, make)
    for memory in _GALVATRON_MEMORY:
        asked = galvatron_llama(root / _FOLDERS["galvatron"], memory)
        yield _planned("galvatron", f"llama2-7b, {memory} GB", *asked)
    for size in ACESO:
        asked = aceso_gpt(root / _FOLDERS["aceso"], size)
        yield _planned("aceso", f"GPT {size} on {len(asked[0].cluster.devices)}", *asked)


def checked(folder: Path | None) -> Path:
    """The folder, if all is there.

    Raises:
        InputError: If it is not; with what is missing.
    """
    if folder is None:
        raise InputError("public-data", None, "must be the folder of the public data")
    missing = [at for at in (*_GRAPHS.values(), *_FOLDERS.values()) if not (folder / at).exists()]
    if missing:
        raise InputError("public-data", str(folder), f"lacks {', '.join(missing)}")
    return folder


def given(path: Path) -> dict[str, GivenInstance]:
    """The problems of a file by name; those with a reference, where it says of which it has one.

    BERT-32 of Piper is there twice, as in the file and on the devices of its published figure.

    Raises:
        InputError: As `read_instances`.
    """
    found = read_instances(path)
    for name in [name for name in found if name == "bert32a100"]:
        found |= {BERT: bert_on_512(found[name])}
    listed = json.loads(path.read_text()).get("reference")
    if listed is None:
        return found
    names = [f"{one['network']}/{one['program']}" for one in listed]
    return {name: found[name] for name in names}


def bert_on_512(instance: GivenInstance) -> GivenInstance:
    """Piper's BERT-32 on the devices of its figure, which its file does not say.

    512 devices of 8 GiB at 25 GiB/s: `single` in algo.cpp of msr-fiddle/piper.
    """
    costs = instance.costs
    assert isinstance(costs, PiperCosts)
    changed = replace(costs, devices=512, memory_cap=8 * GIB, bandwidth=25 * GIB)
    return replace(instance, name=BERT, costs=changed)


def _planned(peer: str, name: str, instance: Instance, cost: CostModel) -> Problem:
    make: Callable[[], Instance] = partial(_same, instance)
    return Problem(f"{PUBLIC} {peer}", name, make, partial(_same, cost))


def _same(made: _Made) -> _Made:
    return made
