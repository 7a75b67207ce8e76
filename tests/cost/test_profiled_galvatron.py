"""Tests of reading Galvatron's profiles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlplace.cost.profiled import profile_graph, read_galvatron, read_galvatron_curves
from rlplace.cost.profiled.types import Profile
from rlplace.errors import InputError
from rlplace.units import MIB

SHARED = Path(__file__).parents[3] / "shared/data/profiles/galvatron"


def write(folder: Path) -> None:
    """One file of each kind: layers of 10 ms a sample, less in a batch of 2."""
    times = {
        "layernum[2]_bsz1_seq16": 100.0,
        "layertype_0_bsz1_seq16": 10.0,
        "layertype_0_bsz2_seq16": 8.0,
        "layertype_other_bsz1_seq16": 4.0,
    }
    (folder / "times.json").write_text(json.dumps(times))

    def entry(states: float, rest: float, kept: float) -> dict[str, float]:
        return {
            f"layernum[{n}]_bsz8_seq16_rank0_{what}": n * each + other
            for n in (1, 2)
            for what, each, other in (("ms", states, rest), ("act", kept, 3.0))
        }

    memory = {
        "1_1_8_sp": entry(2.0, 1.0, 5.0),
        "1_2_4_sp": entry(2.0, 9.0, 5.0),
        "1_2_4_vtp_sp": entry(2.0, 1.0, 5.0),
        "layertype_0_sp": {"16": {}},
    }
    (folder / "memory.json").write_text(json.dumps(memory))
    hardware = {
        "allreduce_size_2_1MB_time": 1.0,
        "allreduce_size_2_4MB_time": 2.5,
        "all2all_size_2_1MB_time": 0.5,
        "all2all_size_2_2MB_time": 0.7,
    }
    (folder / "hardware.json").write_text(json.dumps(hardware))


def read(folder: Path, seq_len: int = 16) -> Profile:
    """The toy, three layers of a width at which a sample is half a mebibyte."""
    paths = (folder / name for name in ("times.json", "memory.json", "hardware.json"))
    hidden = int(MIB) // 2 // 2 // 16
    return read_galvatron(*paths, layers=3, hidden=hidden, kind="gpu", seq_len=seq_len)


def test_layers_come_in_seconds_elements_and_bytes(tmp_path: Path) -> None:
    write(tmp_path)
    profile = read(tmp_path)
    assert profile.layers == ("layer", "layer", "layer", "other")
    two = profile.table("gpu", "layer", 1).at(2)
    assert (two.forward, two.backward) == pytest.approx((16e-3, 32e-3))
    assert two.saved == pytest.approx(2 * 5 * MIB)
    assert profile.params["layer", 1] == 2 * MIB * 8 // 16
    assert profile.params["other", 1] == MIB * 8 // 16
    graph = profile_graph(profile)
    assert graph.params == 3 * MIB + MIB // 2
    assert graph.edges[0].floats(1.0) * 2 == MIB // 2


def test_a_cut_layer_takes_its_share_and_two_all_reduces_a_pass(tmp_path: Path) -> None:
    write(tmp_path)
    profile = read(tmp_path)
    two = profile.table("gpu", "layer", 2).at(2)
    assert (two.forward, two.backward) == pytest.approx((8e-3 + 2e-3, 16e-3 + 2e-3))
    assert two.saved == pytest.approx(2 * 5 * MIB / 2)
    assert profile.params["layer", 2] == 2 * MIB * 4 // 16
    assert profile.table("gpu", "other", 2).at(1).forward == pytest.approx(2e-3)


def test_gathers_are_half_of_an_all_reduce(tmp_path: Path) -> None:
    write(tmp_path)
    curves = {curve.kind: curve for curve in read_galvatron_curves(tmp_path / "hardware.json")}
    assert curves["all_reduce"].seconds(4 * MIB) == pytest.approx(2.5e-3)
    assert curves["all_gather"].seconds(4 * MIB) == pytest.approx(1.25e-3)
    assert curves["all_to_all"].ranks == 2


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read(tmp_path)
    write(tmp_path)
    with pytest.raises(InputError, match="no layertype_0") as refused:
        read(tmp_path, 32)
    assert refused.value.nearest == ["seq16"]
    (tmp_path / "memory.json").write_text("{}")
    with pytest.raises(InputError, match="no such degree"):
        read(tmp_path)
    (tmp_path / "memory.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        read(tmp_path)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the published profiles")
def test_llama_has_as_many_parameters_as_it_should() -> None:
    profile = read_galvatron(
        SHARED / "gpt__computation_profiling_bf16_llama2-7b_all__5c104c6.json",
        SHARED / "gpt__memory_profiling_bf16_llama2-7b_all__5c104c6.json",
        SHARED / "hardware__sp_time_1nodes_8gpus_per_node__e8efe41.json",
        layers=32,
        hidden=4096,
        kind="gpu",
    )
    assert profile_graph(profile).params == pytest.approx(6.74e9, rel=0.01)
