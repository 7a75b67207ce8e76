from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlplace.errors import InputError
from rlplace.runtime.measure import Measurement, Recorder, merge, within
from rlplace.runtime.memory import ActivationTracker, LiveTracker, tensor_bytes
from rlplace.simulate.types import Event, MemoryUse, Timeline


def test_round_trip(tmp_path: Path) -> None:
    line = Timeline((Event(0, "F", 0, 1, 0.0, 0.25),), "measured")
    memory = (MemoryUse(params=8.0, activations=4.0), MemoryUse())
    made = Measurement(
        (0.2, 0.1, 0.4), 1, (2.0, 1.5), memory, (0, 5), line, {"p2p": 7}, "cpu", "ab"
    )
    made.save(tmp_path / "m.json")
    assert Measurement.load(tmp_path / "m.json") == made
    assert made.step_time == 0.2
    assert made.spread == pytest.approx(0.15)
    assert made.peak_memory == (12.0, 0.0)


@pytest.mark.parametrize("text", ['{"format": 1, "step_ti', '{"format": 99}', "[]"])
def test_a_broken_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(InputError, match="measurement file"):
        Measurement.load(path)


def test_the_recorder_is_silent_until_it_is_switched_on() -> None:
    recorder = Recorder(3, torch.device("cpu"))
    with recorder.event("F"):
        pass
    assert recorder.events == []
    recorder.active = True
    with recorder.event("B", 1, 2):
        pass
    (event,) = recorder.events
    assert recorder.kind == "backward"
    assert recorder.doing == "backward of micro-batch 2 (stage 1)"
    assert (event.device, event.kind, event.stage, event.micro_batch) == (3, "B", 1, 2)
    assert event.start <= event.end


def test_merge_orders_and_moves() -> None:
    events = [Event(1, "B", 0, 0, 12.0, 13.0), Event(0, "F", 0, 0, 10.5, 11.0)]
    line = merge(events, 10.0)
    assert [(e.kind, e.start) for e in line.events] == [("F", 0.5), ("B", 2.0)]
    assert line.seconds == 3.0


def test_what_goes_on_beside_a_step_is_cut_to_it() -> None:
    recorder = Recorder(1, torch.device("cpu"))
    with recorder.aside("checkpoint"):
        pass
    (event,) = recorder.beside
    assert (event.device, event.kind) == (1, "checkpoint")
    assert (recorder.kind, recorder.doing) == ("start", "start")
    every = [Event(0, "checkpoint", -1, -1, *span) for span in ((0, 1), (0, 3), (2.5, 9), (4, 5))]
    cut = within(every, 2.0, 4.0)
    assert [(one.start, one.end) for one in cut] == [(2.0, 3.0), (2.5, 4.0)]


def test_the_tracker_counts_what_backward_needs() -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(32, 64)
    tracker = ActivationTracker([weight])
    with tracker.watching():
        y = (x @ weight).tanh()
        z = y.view(64, 32).tanh()
    # x for the matmul, and the outputs of both tanh; the view is no storage of its own.
    assert tracker.current == 3 * 32 * 64 * 4
    torch.autograd.backward(z.sum())
    del y, z
    assert tracker.current == 0
    assert tracker.peak == 3 * 32 * 64 * 4


def test_the_live_tracker_sees_what_comes_and_goes() -> None:
    x = torch.randn(32, 64)
    size = 32 * 64 * 4
    with LiveTracker() as live:
        y = (x.view(64, 32) * 2).tanh()
        assert (live.current, live.peak) == (size, 2 * size)
        del y
    assert live.current == 0


def test_the_live_tracker_knows_what_went_on() -> None:
    doing = "forward", "forward of micro-batch 0 (stage 0)"
    with LiveTracker(lambda: doing[0], lambda: doing[1]) as live:
        kept = [torch.ones(8) * 2]
        doing = "backward", "backward of micro-batch 0 (stage 0)"
        kept.append(torch.ones(16) * 2)
        doing = "backward", "backward of micro-batch 1 (stage 0)"
        kept.pop()
        torch.ones(2) * 2
        kept.clear()
        doing = "optimizer", "optimizer"
        torch.ones(2) * 2
    assert live.peaks == {
        "forward": (2 * 8 * 4, "forward of micro-batch 0 (stage 0)"),
        "backward": ((8 + 2 * 16) * 4, "backward of micro-batch 0 (stage 0)"),
        "optimizer": (2 * 2 * 4, "optimizer"),
    }
    assert live.peak == (8 + 2 * 16) * 4


def test_a_shared_storage_counts_once() -> None:
    whole = torch.zeros(10)
    assert tensor_bytes([whole, whole[:5], torch.zeros(2)]) == 48
