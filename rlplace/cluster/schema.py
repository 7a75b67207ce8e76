"""What a cluster file may contain, as pydantic models; unknown keys are refused.

Sizes, bandwidths and times are numbers in base units (bytes, bytes/s, seconds, FLOP/s) or strings
with a unit. A bandwidth is that of one direction.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    Tag,
    field_validator,
)

from rlplace.cluster.types import Fabric, Link
from rlplace.errors import InputError
from rlplace.units import parse_bandwidth, parse_size, parse_time

_FLOPS = re.compile(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*([KMGTP]?)FLOPS?(?:/s)?", re.IGNORECASE)
_EXPONENT = re.compile(r"\d+(\.\d*)?[eE][+-]?\d+")
_PREFIX = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def parse_flops(field: str, value: str | float) -> float:
    """FLOPs (or FLOP/s) from ``"312 TFLOP/s"``, ``"2 GFLOP"`` or a plain number.

    Raises:
        InputError: If it is not of that form, or not positive.
    """
    number = float(value) if isinstance(value, int | float) else 0.0
    if isinstance(value, str):
        if (match := _FLOPS.fullmatch(value)) is None:
            raise InputError(field, value, "a number with the unit FLOP or FLOP/s", "'312 TFLOP/s'")
        number = float(match[1]) * _PREFIX[match[2].upper()]
    if not 0.0 < number < float("inf"):
        raise InputError(field, value, "must be positive and finite")
    return number


def _unit(parse: Callable[[str, str | float], float], field: str) -> BeforeValidator:
    """A validator that reads numbers and strings with `parse`, and refuses all else."""

    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise InputError(field, value, "a number, or a string with a unit")
        # YAML 1.1 takes 1e12, without a dot and a sign, for a string.
        is_number = isinstance(value, str) and _EXPONENT.fullmatch(value)
        return parse(field, float(value) if is_number else value)

    return BeforeValidator(read)


def _or_zero(parse: Callable[[str, str | float], float]) -> Callable[[str, str | float], float]:
    """A parser that takes zero too."""
    return lambda field, value: 0.0 if value == 0 else parse(field, value)


Size = Annotated[float, _unit(parse_size, "size")]
SizeOrZero = Annotated[float, _unit(_or_zero(parse_size), "size")]
Bandwidth = Annotated[float, _unit(parse_bandwidth, "bandwidth")]
BandwidthOrZero = Annotated[float, _unit(_or_zero(parse_bandwidth), "bandwidth")]
Time = Annotated[float, _unit(parse_time, "time")]
Flops = Annotated[float, _unit(parse_flops, "flops")]
FlopsOrZero = Annotated[float, _unit(_or_zero(parse_flops), "flops")]
Count = Annotated[int, Field(strict=True, ge=1)]
Index = Annotated[int, Field(strict=True, ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LinkModel(_Strict):
    """A link written out: bandwidth of one direction, latency of a message."""

    bandwidth: Bandwidth
    latency: Time
    name: str = ""
    efficiency: Share = 1.0
    nics: Count = 1
    reduces: StrictBool = False
    fabric: Fabric = "switch"
    relay: Time = 0.0

    def link(self) -> Link:
        """The link that is written out."""
        return Link(**self.model_dump(include=_LINK_FIELDS))


_LINK_FIELDS = {field.name for field in fields(Link)}

#: A link by its name (``nvlink``, ``pcie``, ``ib200``, ``eth25``) or written out.
LinkField = Annotated[
    Annotated[str, Tag("by name")] | Annotated[LinkModel, Tag("written out")],
    Discriminator(lambda value: "by name" if isinstance(value, str) else "written out"),
]

#: Steps of pydantic's error locations that are no keys of a file.
PYDANTIC_STEPS = ("by name", "written out", "[key]")


class KindModel(_Strict):
    """A device kind; what is not said is that of `base`, a kind of the catalogue."""

    name: str
    base: str | None = None
    memory: Size | None = None
    peak_flops: dict[Literal["fp32", "tf32", "bf16", "fp16", "fp8"], Flops] | None = None
    bandwidth: Bandwidth | None = None
    launch_overhead: Time | None = None
    max_efficiency: Share | None = None
    half_flops: FlopsOrZero | None = None
    memory_efficiency: Share | None = None
    overlap: Annotated[float, Field(ge=0, le=1)] | None = None
    reserve: SizeOrZero | None = None
    sms: Index | None = None
    half_depth: Annotated[float, Field(ge=0)] | None = None
    attention_efficiency: Share | None = None
    host_bandwidth: BandwidthOrZero | None = None
    collective_launch: Time | None = None
    conv_efficiency: Annotated[float, Field(gt=0)] | None = None
    stream_efficiency: Annotated[float, Field(ge=0, le=1)] | None = None


class DeviceModel(_Strict):
    """`count` devices of a kind; those with the same `core` take turns."""

    kind: str
    count: Count = 1
    core: Index | None = None


def _as_list(value: Any) -> Any:
    """``{A100-80: 8}`` as a list of devices."""
    if isinstance(value, dict):
        return [{"kind": str(kind), "count": count} for kind, count in value.items()]
    return value


class NodeModel(_Strict):
    """`count` equal hosts."""

    count: Count = 1
    devices: Annotated[list[DeviceModel], BeforeValidator(_as_list)]
    intra: LinkField | None = None
    nic: LinkField | None = None
    bridge: Index = 0


class OverrideModel(LinkModel):
    """The link of one pair of devices."""

    between: tuple[Index, Index]


class CurveModel(_Strict):
    """A measured collective, as `rlplace.cluster.types.CollectiveCurve`."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p"]
    ranks: Annotated[int, Field(strict=True, ge=2)]
    latency: Time
    seconds_per_byte: Annotated[float, Field(gt=0)]
    points: tuple[tuple[Size, Time], ...] = ()

    @field_validator("points")
    @classmethod
    def _ascend(cls, points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        steps = list(pairwise(points))
        if len(points) == 1 or any(b <= a or t < s for (a, s), (b, t) in steps):
            rule = "two or more points (bytes, seconds), sizes ascending, times not falling"
            raise InputError("points", points, rule)
        return points


class ClusterModel(_Strict):
    """A cluster file: either `short`, or `nodes` with the rest."""

    name: str = ""
    short: str | None = None
    kinds: list[KindModel] = []
    nodes: list[NodeModel] = []
    overrides: list[OverrideModel] = []
    curves: list[CurveModel] = []


#: Every key that may occur anywhere, to offer the nearest one.
KEYS = frozenset(
    key
    for model in (
        ClusterModel,
        KindModel,
        NodeModel,
        DeviceModel,
        LinkModel,
        OverrideModel,
        CurveModel,
    )
    for key in model.model_fields
)
