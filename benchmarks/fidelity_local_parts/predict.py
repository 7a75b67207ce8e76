"""Estimates of measured plans: the cluster of each setting, and constants fitted on a few plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.fidelity_local_parts.cases import FAMILIES, Case
from benchmarks.fidelity_local_parts.records import Log, Record, Setting
from rlplace.cluster.load import read_cluster
from rlplace.cluster.types import Cluster, CollectiveCurve, Device, DeviceKind, Link, Node
from rlplace.cost.calibrate import fit
from rlplace.cost.constants import apply
from rlplace.cost.measured import Calibration, Measured
from rlplace.graph.types import OpGraph
from rlplace.plan.files import parse_plan
from rlplace.plan.types import Instance
from rlplace.simulate.estimate import Estimator
from rlplace.simulate.predict import predict
from rlplace.simulate.types import Estimate, most_held

#: Constants of a core and of the runtime, fitted where nothing is limited.
CORE = (
    "kind.cpu.max_efficiency",
    "kind.cpu.conv_efficiency",
    "kind.cpu.launch_overhead",
)
#: Constants that a limited setting adds.
NETWORK = ("link.tbf.efficiency", "link.tbf.latency")
QUOTA = ("kind.cpu-slow.max_efficiency", "kind.cpu-slow.memory_efficiency")

#: The plans that constants are fitted to (family, ranks, layout); all others are predicted.
FITTED: tuple[tuple[str, int, str], ...] = (
    ("gpt", 2, "dp2"),
    ("llama", 2, "pp2 1f1b m4"),
    ("vit", 2, "tp2"),
    ("resnet", 2, "single"),
    ("dlrm", 2, "dp2"),
    ("mixtral", 4, "dp4"),
)


@dataclass(frozen=True)
class Row:
    """One plan: what was measured, what is predicted.

    Args:
        record: The plan with its runs.
        measured: Seconds of a step, at the usual pace of the machine.
        noise: By how much two runs of it differ, as a share.
        held: Measured bytes of states and activations of the fullest rank.
        estimate: What is predicted.
        fitted: Whether constants were fitted to it.
    """

    record: Record
    measured: float
    noise: float
    held: float
    estimate: Estimate
    fitted: bool

    @property
    def case(self) -> Case:
        """The plan's name."""
        return case_of(self.record)

    @property
    def error(self) -> float:
        """Predicted over measured step time, minus 1."""
        return self.estimate.step_time / self.measured - 1.0

    @property
    def memory_error(self) -> float:
        """Predicted over measured bytes, minus 1."""
        return most_held(self.estimate.memory) / self.held - 1.0


def case_of(record: Record) -> Case:
    """The case that a record is of."""
    return Case(record.family, record.ranks, record.layout)


def rows(log: Log) -> tuple[dict[str, list[Row]], dict[str, Calibration]]:
    """Predictions of everything in a log, and the fits, by setting.

    The constants of a core are fitted in the setting without limits, if it was measured; the
    other settings keep them, and add what they limit.
    """
    found: dict[str, list[Row]] = {}
    fits: dict[str, Calibration] = {}
    usual = log.usual_pace()
    constants: dict[str, float] = {}
    for name, setting in sorted(log.settings.items(), key=lambda item: _limits(item[1])):
        own = [record for record in log.records if record.setting == name]
        chosen = [r for r in own if (r.family, r.ranks, r.layout) in FITTED]
        if not own:
            continue
        before = dict(constants)
        measured = [_measured(log, setting, record, before, usual) for record in chosen]
        names = _names(setting)
        if len(measured) >= len(names):
            fits[name] = fit(measured, names, predict)
            found_constants = fits[name].constants
            if not _limits(setting):
                constants = found_constants
            before = {**before, **found_constants}
        found[name] = [
            _row(log, setting, record, before, usual, record in chosen) for record in own
        ]
    return found, fits


def _limits(setting: Setting) -> bool:
    return bool(setting.nodes or setting.slow)


def _names(setting: Setting) -> tuple[str, ...]:
    if not _limits(setting):
        return CORE
    return (NETWORK if setting.nodes else ()) + (QUOTA if setting.slow else ())


def instance_of(
    log: Log, setting: Setting, record: Record, constants: Mapping[str, float]
) -> Instance:
    """What a measured plan was asked for, with constants of a core and of a setting."""
    graph, batch = _graph(record.family), FAMILIES[record.family].batch
    plain = Instance(graph, read_cluster(log.clusters[record.ranks]), batch, "fp32")
    plain = apply(plain, {k: v for k, v in constants.items() if k not in (*NETWORK, *QUOTA)})
    limited = replace(plain, cluster=limited_cluster(plain.cluster, setting))
    return apply(limited, {k: v for k, v in constants.items() if k in (*NETWORK, *QUOTA)})


@cache
def _graph(family: str) -> OpGraph:
    return FAMILIES[family].graph()


def limited_cluster(cluster: Cluster, setting: Setting) -> Cluster:
    """This machine with the limits of a setting."""
    if setting.nodes:
        cluster = _over_nodes(cluster, setting.nodes, setting.bandwidth)
    if setting.slow is not None:
        cluster = _slowed(cluster, *setting.slow)
    return cluster


def _over_nodes(cluster: Cluster, nodes: int, bandwidth: float) -> Cluster:
    """The ranks spread over hosts of one core; no curve was measured between these."""
    ranks = len(cluster.devices)
    link = cluster.nodes[0].intra
    nic = Link(bandwidth, link.latency, "tbf")
    devices = tuple(
        Device(device.index, device.kind, device.index * nodes // ranks, 0)
        for device in cluster.devices
    )
    hosts = tuple(Node(node, link, nic) for node in range(nodes))
    return replace(cluster, devices=devices, nodes=hosts, curves=())


def _slowed(cluster: Cluster, rank: int, share: float) -> Cluster:
    """A rank that has a share of its core; gloo's collectives take the slowest core's time."""
    (kind,) = cluster.kinds
    slow = _slow_kind(kind, share)
    devices = tuple(
        replace(device, kind=slow.name) if device.index == rank else device
        for device in cluster.devices
    )
    curves = tuple(_slow_curve(curve, share) for curve in cluster.curves)
    return replace(cluster, devices=devices, kinds=(kind, slow), curves=curves)


def _slow_kind(kind: DeviceKind, share: float) -> DeviceKind:
    return replace(
        kind,
        name=f"{kind.name}-slow",
        peak_flops={dtype: peak * share for dtype, peak in kind.peak_flops.items()},
        bandwidth=kind.bandwidth * share,
        launch_overhead=kind.launch_overhead / share,
    )


def _slow_curve(curve: CollectiveCurve, share: float) -> CollectiveCurve:
    return replace(
        curve,
        latency=curve.latency / share,
        seconds_per_byte=curve.seconds_per_byte / share,
        points=tuple((size, seconds / share) for size, seconds in curve.points),
    )


def _measured(
    log: Log, setting: Setting, record: Record, constants: Mapping[str, float], usual: float
) -> Measured:
    instance = instance_of(log, setting, record, constants)
    plan = parse_plan(record.plan)
    return Measured(instance, plan, _time(record, usual), name=case_of(record).name)


def _time(record: Record, usual: float) -> float:
    """Mean over the runs of the step time at the usual pace."""
    return sum(run.step_time(usual) for run in record.runs) / len(record.runs)


def _row(
    log: Log,
    setting: Setting,
    record: Record,
    constants: Mapping[str, float],
    usual: float,
    fitted: bool,
) -> Row:
    instance = instance_of(log, setting, record, constants)
    times = [run.step_time(usual) for run in record.runs]
    return Row(
        record=record,
        measured=_time(record, usual),
        noise=max(times) / min(times) - 1.0,
        held=max(most_held(run.memory) for run in record.runs),
        estimate=Estimator(instance).estimate(parse_plan(record.plan)),
        fitted=fitted,
    )


def predictions(found: Mapping[str, Sequence[Row]]) -> Iterable[Row]:
    """All rows that no constant was fitted to."""
    return (row for own in found.values() for row in own if not row.fitted)
