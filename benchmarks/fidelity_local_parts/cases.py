"""The plans that are measured: families of models, and layouts for 2 and for 4 ranks.

Wide enough that a step is more than overhead, small enough that it takes about half a second, and
no tensor of 32 MiB or more, for which the C library asks the kernel for fresh pages every time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlplace.graph import library
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Instance, Plan
from rlplace.plan.uniform import uniform_plan
from rlplace.runtime.validate import stand_in_cluster

Value = str | int | float | bool | None


@dataclass(frozen=True)
class Family:
    """A model of the library and the samples of a step."""

    shape: Mapping[str, Value]
    batch: int

    def graph(self) -> OpGraph:
        """Its op graph."""
        return library.build(**self.shape, degrees=(2, 4))  # type: ignore[arg-type]  # plain data


@dataclass(frozen=True)
class Case:
    """A plan to measure.

    Args:
        family: A key of `FAMILIES`.
        ranks: Ranks that are there.
        layout: A key of `LAYOUTS` for so many ranks.
    """

    family: str
    ranks: int
    layout: str

    @property
    def name(self) -> str:
        """What to call it."""
        return f"{self.family} {self.ranks}: {self.layout}"

    @property
    def group(self) -> str:
        """Cases that answer the same question."""
        return f"{self.family} x{self.ranks}"

    def plan(self, graph: OpGraph) -> Plan:
        """The plan, for a cluster that is not known yet."""
        instance = Instance(
            graph, stand_in_cluster(self.ranks), FAMILIES[self.family].batch, "fp32"
        )
        return uniform_plan(instance, **LAYOUTS[self.ranks][self.layout])


_TEXT: dict[str, Value] = {"hidden": 512, "heads": 8, "vocab": 4096, "seq_len": 128}

FAMILIES: dict[str, Family] = {
    "gpt": Family({"name": "gpt", "layers": 4, "ffn": 2048, **_TEXT}, 8),
    "llama": Family({"name": "llama", "layers": 4, "kv_heads": 4, "ffn": 1536, **_TEXT}, 8),
    "mixtral": Family(
        {"name": "mixtral", "layers": 2, "kv_heads": 4, "ffn": 1024, "experts": 4, **_TEXT}, 8
    ),
    "vit": Family(
        {"name": "vit", "layers": 4, "hidden": 512, "heads": 8, "ffn": 2048, "image": 128}, 16
    ),
    "resnet": Family({"name": "resnet", "depths": "1,2,2,1", "image": 128}, 16),
    "dlrm": Family(
        {
            "name": "dlrm",
            "tables": 4,
            "rows": 5000,
            "width": 512,
            "bag": 4,
            "dense": 64,
            "bottom": "2048,2048,1024",
            "top": "2048,2048,1024",
        },
        512,
    ),
}

#: What `uniform_plan` takes, by ranks and by name.
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "dp2": {},
        "dp2 redone": {"recompute": "full"},
        "dp2 zero1": {"zero": 1},
        "dp2 m4": {"micro_batches": 4},
        "tp2": {"tp": 2},
        "pp2 1f1b m4": {"pp": 2, "micro_batches": 4},
        "pp2 gpipe m2": {"pp": 2, "micro_batches": 2, "schedule": "gpipe"},
        "single": {"devices": (0,)},
    },
    4: {
        "dp4": {},
        "dp4 zero1 redone": {"zero": 1, "recompute": "full"},
        "tp2 dp2": {"tp": 2},
        "tp4": {"tp": 4},
        "pp2 dp2 m4": {"pp": 2, "micro_batches": 4},
        "pp2 tp2 m4": {"pp": 2, "tp": 2, "micro_batches": 4},
        "pp4 1f1b m8": {"pp": 4, "micro_batches": 8},
        "pp4 gpipe m4 redone": {
            "pp": 4,
            "micro_batches": 4,
            "schedule": "gpipe",
            "recompute": "full",
        },
    },
}

#: The layouts that every family is measured with, by ranks.
COMMON: dict[int, tuple[str, ...]] = {
    2: ("dp2", "dp2 redone", "tp2", "pp2 1f1b m4", "single"),
    4: ("dp4", "tp2 dp2", "pp2 dp2 m4", "pp4 1f1b m8"),
}

#: Layouts that one family stands for.
FURTHER: dict[int, tuple[tuple[str, str], ...]] = {
    2: (
        ("gpt", "dp2 zero1"),
        ("llama", "pp2 gpipe m2"),
        ("mixtral", "dp2 m4"),
        ("vit", "dp2 m4"),
        ("resnet", "pp2 gpipe m2"),
        ("dlrm", "dp2 zero1"),
    ),
    4: (
        ("gpt", "pp2 tp2 m4"),
        ("llama", "pp4 gpipe m4 redone"),
        ("mixtral", "dp4 zero1 redone"),
        ("vit", "tp4"),
    ),
}


def cases(families: Iterable[str] = FAMILIES, ranks: Iterable[int] = LAYOUTS) -> list[Case]:
    """All cases of some families and numbers of ranks, in the order in which they are run."""
    chosen = tuple(families)
    return [
        Case(family, count, layout)
        for count in ranks
        for family in chosen
        for layout in (
            *COMMON[count],
            *(layout for owner, layout in FURTHER[count] if owner == family),
        )
    ]
