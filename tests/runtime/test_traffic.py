"""What ranks send is what was counted before, by kind, to the byte."""

from __future__ import annotations

import functools

import pytest

from rlplace.runtime.measure import Measurement
from rlplace.runtime.planned import planned_traffic
from rlplace.runtime.pool import Pool
from tests.runtime.traffic_cases import CASES, job, program_of

pytestmark = pytest.mark.dist


@functools.cache
def measured() -> dict[str, Measurement]:
    with Pool(4, timeout=30) as pool:
        return dict(zip(CASES, pool.run([job(name)[1] for name in CASES], limit=280), strict=True))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", CASES)
def test_ranks_send_what_was_counted_before(name: str) -> None:
    instance, own = job(name)
    sent = {kind: size for kind, size in measured()[name].traffic.items() if size}
    counted = planned_traffic(instance, own.plan, program_of(CASES[name].model))
    assert sent.keys() == counted.keys()
    padding = 0.001 if CASES[name].zero else 0.0
    for kind, size in counted.items():
        assert sent[kind] == pytest.approx(size, rel=padding, abs=0.5), kind
