"""Cluster files: what they say, how they round-trip, and what is refused where."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from rlplace.cluster.catalogue import DEVICE_KINDS, device_kind
from rlplace.cluster.load import (
    describe_assumptions,
    load_cluster,
    parse_cluster,
    read_cluster,
    save_cluster,
)
from rlplace.cluster.types import Cluster, Link
from rlplace.errors import InputError

EXAMPLES = sorted((Path(__file__).parents[2] / "configs" / "cluster").glob("*.yaml"))

WHOLE = """\
name: lab
kinds:
  - {name: A100-slow, base: A100-80, peak_flops: {bf16: 250 TFLOP/s, fp32: 19.5e12}}
  - name: own
    memory: 24 GiB
    peak_flops: {fp16: 1 PFLOP/s}
    bandwidth: 1 TB/s
    reserve: 0
nodes:
  - count: 2
    devices: {A100-slow: 2}
    intra: nvlink
    nic: ib200
  - devices: [{kind: own, count: 2}, {kind: rtx-3090}, {kind: own}]
    intra: {bandwidth: 25 GB/s, latency: 5 us}
    nic: {bandwidth: 200 Gbps, latency: 14 us}
overrides:
  - {between: [5, 4], bandwidth: 56 GB/s, latency: 2 us, name: bridge}
curves:
  - {kind: all_reduce, ranks: 2, latency: 30 us, seconds_per_byte: 7.0e-12}
"""


def test_everything_that_a_file_can_say() -> None:
    cluster = read_cluster(WHOLE)
    assert [d.kind for d in cluster.devices] == ["A100-slow"] * 4 + ["own"] * 2 + ["3090-24", "own"]
    assert [d.node for d in cluster.devices] == [0, 0, 1, 1, 2, 2, 2, 2]
    assert cluster.kind(0).peak_flops == {"bf16": 250e12, "fp32": 19.5e12}
    assert cluster.kind(0).memory == device_kind("A100-80").memory
    assert cluster.kind(4).peak_flops["fp16"] == 1e15
    assert cluster.link(0, 1).bandwidth == 300e9
    assert cluster.link(0, 4).bandwidth == 25e9, "200 Gbps is bits"
    assert cluster.link(4, 5).name == cluster.link(5, 4).name == "bridge"
    assert cluster.curves[0].seconds_per_byte == 7e-12


def roundtrip(cluster: Cluster, path: Path) -> Cluster:
    save_cluster(cluster, path)
    loaded = Cluster.load(path)
    assert loaded == cluster
    assert loaded.fingerprint == cluster.fingerprint
    return loaded


def test_whole_file_roundtrips(tmp_path: Path) -> None:
    roundtrip(read_cluster(WHOLE), tmp_path / "cluster.yaml")


@pytest.mark.parametrize("kind", DEVICE_KINDS)
def test_every_kind_roundtrips(kind: str, tmp_path: Path) -> None:
    roundtrip(parse_cluster(f"2x3x{kind}+1xT4:pcie:ib100"), tmp_path / "cluster.yaml")
    assert "kinds:" not in (tmp_path / "cluster.yaml").read_text(), "the catalogue is not copied"


@pytest.mark.parametrize(
    "text", ["2x(2x3080-10+2x4090-24):eth25", "(1xT4+1xL4+1xT4)", "512x8xH200"]
)
def test_short_forms_roundtrip(text: str, tmp_path: Path) -> None:
    roundtrip(parse_cluster(text), tmp_path / "cluster.yaml")


FABRIC = """\
kinds:
  - name: own
    memory: 24 GiB
    peak_flops: {fp16: 1 PFLOP/s}
    bandwidth: 1 TB/s
    sms: 120
    half_depth: 64
    attention_efficiency: 0.4
    host_bandwidth: 26 GB/s
    collective_launch: 0.00003
nodes:
  - count: 2
    devices: {own: 8}
    intra: {bandwidth: 400 GB/s, latency: 3 us, efficiency: 0.8, reduces: true, fabric: mesh}
    nic: {bandwidth: 800 Gb/s, latency: 0.000005, efficiency: 0.9, nics: 4, relay: 200 us}
    bridge: 4
"""


def test_what_links_and_hosts_are_like_roundtrips(tmp_path: Path) -> None:
    cluster = roundtrip(read_cluster(FABRIC), tmp_path / "cluster.yaml")
    intra, nic = cluster.nodes[1].intra, cluster.nodes[1].nic
    assert intra == Link(400e9, 3e-6, efficiency=0.8, reduces=True, fabric="mesh")
    assert nic is not None
    assert nic.relay == pytest.approx(2e-4)
    assert replace(nic, relay=0.0) == Link(100e9, 5e-6, efficiency=0.9, nics=4)
    assert [cluster.bridge(device) for device in (0, 3, 4, 8, 15)] == [0, 0, 1, 0, 1]
    kind = cluster.kind(0)
    assert (kind.sms, kind.half_depth, kind.attention_efficiency) == (120, 64.0, 0.4)
    assert (kind.host_bandwidth, kind.collective_launch) == (26e9, 30e-6)


def test_what_convolutions_and_streams_reach_roundtrips(tmp_path: Path) -> None:
    text = FABRIC.replace("sms: 120", "conv_efficiency: 0.7\n    stream_efficiency: 0.9")
    kind = roundtrip(read_cluster(text), tmp_path / "cluster.yaml").kind(0)
    assert (kind.conv_efficiency, kind.stream_efficiency) == (0.7, 0.9)
    assert kind.stream == pytest.approx(0.9e12)
    assert replace(kind, stream_efficiency=0.0).stream == pytest.approx(0.8e12)


def test_defaults_of_a_link_are_not_written(tmp_path: Path) -> None:
    roundtrip(read_cluster(WHOLE), tmp_path / "cluster.yaml")
    text = (tmp_path / "cluster.yaml").read_text()
    assert not any(key in text for key in ("fabric", "nics", "reduces", "relay", "bridge: 0"))


@pytest.mark.parametrize(
    ("old", "new", "field", "rule"),
    [
        ("efficiency: 0.8", "efficiency: 1.5", ":14: nodes[0].intra.efficiency", "less than"),
        ("efficiency: 0.8", "efficiency: 0", ":14: nodes[0].intra.efficiency", "greater than"),
        ("nics: 4", "nics: 0", ":15: nodes[0].nic.nics", "greater than"),
        ("relay: 200 us", "relay: -1 us", ":15: nodes[0].nic.relay", "not negative"),
        ("reduces: true", "reduces: 1", ":14: nodes[0].intra.reduces", "boolean"),
        ("fabric: mesh", "fabric: ring", ":14: nodes[0].intra.fabric", "'cube'"),
        ("bridge: 4", "bridge: -4", ":16: nodes[0].bridge", "greater than"),
        ("relay: 200 us", "relai: 200 us", ":15: nodes[0].nic.relai", "unknown key"),
    ],
)
def test_errors_of_links_name_the_line(old: str, new: str, field: str, rule: str) -> None:
    with pytest.raises(InputError, match=re.escape(rule)) as caught:
        read_cluster(FABRIC.replace(old, new, 1), "lab.yaml")
    assert field in caught.value.field


def test_points_roundtrip(tmp_path: Path) -> None:
    text = WHOLE.replace("7.0e-12}", "7.0e-12, points: [[4 KB, 30 us], [1048576, 0.00123]]}")
    cluster = roundtrip(read_cluster(text), tmp_path / "cluster.yaml")
    assert cluster.curves[0].points[1] == (1048576.0, 0.00123)
    assert cluster.curves[0].points[0] == pytest.approx((4e3, 30e-6))


def test_cores_roundtrip(tmp_path: Path) -> None:
    text = "nodes: [{devices: [{kind: T4, core: 0}, {kind: T4, core: 1}, {kind: T4, core: 0}]}]"
    cluster = roundtrip(read_cluster(text), tmp_path / "cluster.yaml")
    assert [device.core for device in cluster.devices] == [0, 1, 0]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.stem))
def test_examples_load(path: Path, tmp_path: Path) -> None:
    roundtrip(load_cluster(path), tmp_path / "cluster.yaml")


def test_examples_exist() -> None:
    assert len(EXAMPLES) >= 3


def test_short_in_a_file() -> None:
    cluster = read_cluster("short: 4x8xA100-80\nname: mine")
    assert cluster.name == "mine"
    assert cluster.fingerprint == parse_cluster("4x8xA100-80").fingerprint


def test_assumptions_name_what_came_from_the_catalogue() -> None:
    lines = "\n".join(describe_assumptions(parse_cluster("2x8xA100-80")))
    assert "A100-80: 79.1 GiB at 2039 GB/s" in lines
    assert "312 bf16" in lines
    assert "nvlink, 300 GB/s a direction" in lines
    assert "ib1600" in lines
    said = "\n".join(describe_assumptions(parse_cluster("2x8xA100-80:pcie:eth10")))
    assert "nvlink" not in said
    assert "ib1600" not in said


@pytest.mark.parametrize(
    ("old", "new", "field", "rule"),
    [
        ("base: A100-80", "base: A100", ":3: kinds[0]", "not a device kind"),
        ("kind: rtx-3090", "kind: rtx-9090", ":14: nodes[1].devices[1]", "not a device kind"),
        ("    reserve: 0", "    reserv: 0", ":8: kinds[1].reserv", "unknown key"),
        ("bandwidth: 1 TB/s", "bandwidth: -1 TB/s", ":7: kinds[1].bandwidth", "positive"),
        ("bandwidth: 1 TB/s", "bandwidth: 0", ":7: kinds[1].bandwidth", "positive"),
        ("bandwidth: 200 Gbps", "bandwidth: 200 G", ":16: nodes[1].nic.bandwidth", "bits or bytes"),
        ("bandwidth: 200 Gbps", "bandwidth: true", ":16: nodes[1].nic.bandwidth", "with a unit"),
        ("memory: 24 GiB", "memory: 24 Gib", ":5: kinds[1].memory", "capital B"),
        ("memory: 24 GiB", "overlap: 0.5", ":4: kinds[1]", "says its memory"),
        ("latency: 5 us", "latency: 5 u", ":15: nodes[1].intra.latency", "with a unit"),
        ("latency: 5 us", "latency: -5", ":15: nodes[1].intra.latency", "not negative"),
        ("{bf16: 250", "{bf61: 250", ":3: kinds[0].peak_flops.bf61", "fp8"),
        ("nic: ib200", "nic: pcie", ":13: nodes[0].nic", "not a link for nic"),
        ("nic: ib200", "nic: ib", ":13: nodes[0].nic", "is not a link"),
        ("    nic: {bandwidth: 200 Gbps, latency: 14 us}", "", ":14: nodes[1].nic", "is missing"),
        (
            "intra: {bandwidth: 25 GB/s, latency: 5 us}",
            "intra: pcie",
            ":15: nodes[1].intra",
            "base",
        ),
        ("between: [5, 4]", "between: [5, 8]", "overrides[0].between", "device 8 does not exist"),
        ("between: [5, 4]", "between: [4, 4]", "overrides[0].between", "two devices"),
        ("between: [5, 4]", "between: [5]", ":18: overrides[0].between", "required"),
        ("count: 2\n    devices", "count: 0\n    devices", ":10: nodes[0].count", "greater than"),
        ("ranks: 2", "ranks: 1", ":20: curves[0].ranks", "greater than"),
        ("7.0e-12}", "7.0e-12, points: [[4 KB, 1 us]]}", ":20: curves[0].points", "two or more"),
        (
            "7.0e-12}",
            "7.0e-12, points: [[4 KB, 9 us], [1 MB, 1 us]]}",
            ":20: curves[0].points",
            "not fall",
        ),
        ("name: own\n", "name: A100-slow\n", ":4: kinds[1]", "two kinds"),
        ("    bandwidth: 1 TB/s", "    memory: 1 GiB", ":7", "occurs twice"),
        ("nodes:", "nodes: {", ":10", "is not YAML"),
        ("name: lab", "short: 2xT4", ":19: curves", "alone"),
    ],
)
def test_errors_name_the_line_and_the_rule(old: str, new: str, field: str, rule: str) -> None:
    assert old in WHOLE
    with pytest.raises(InputError, match=re.escape(rule)) as caught:
        read_cluster(WHOLE.replace(old, new, 1), "lab.yaml")
    assert field in caught.value.field


def test_unknown_key_offers_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        read_cluster("nodes: [{device: {T4: 2}}]")
    assert "devices" in str(caught.value.nearest) or "devices" in caught.value.field


@pytest.mark.parametrize("text", ["", "- 1", "nodes", "nodes: []", "nodes: [{devices: {}}]", "{}"])
def test_empty_clusters(text: str) -> None:
    with pytest.raises(InputError, match=r"1 to 65536 devices|is a mapping"):
        read_cluster(text)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_cluster(tmp_path / "none.yaml")


def test_broken_yaml_names_the_line() -> None:
    with pytest.raises(InputError, match="is not YAML") as caught:
        read_cluster("nodes:\n  - devices: {T4: 2\n  - x", "mine.yaml")
    assert caught.value.field == "mine.yaml:3"


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ("nic: {bandwidth: 3200 GB/s, latency: 5 us}", "usually said in Gb/s"),
        ("intra: {bandwidth: 1 Gb/s, latency: 5 us}", "bits by mistake"),
    ],
)
def test_far_out_bandwidths_warn(link: str, said: str) -> None:
    with pytest.warns(UserWarning, match=said):
        read_cluster(f"nodes: [{{count: 2, devices: {{T4: 2}}, {link}}}]")


def test_kind_that_no_device_has_warns() -> None:
    with pytest.warns(UserWarning, match="no device is of kind spare"):
        read_cluster("kinds: [{name: spare, base: T4}]\nnodes: [{devices: {T4: 2}}]")


def test_ordinary_files_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_cluster(WHOLE)
