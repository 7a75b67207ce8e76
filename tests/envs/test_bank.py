from __future__ import annotations

import numpy as np
import pytest

from rlplace.envs.bank import InstanceBank, instance_key
from rlplace.envs.features import instance_view
from rlplace.envs.instances import InstanceGenerator
from rlplace.plan.types import Instance
from rlplace.simulate.bound import bound

_SMALL = InstanceGenerator(max_devices=4, max_groups=16)


def _instance(seed: int) -> Instance:
    return _SMALL(np.random.default_rng([11, seed]))


def test_an_equal_instance_keeps_its_number_and_the_oldest_is_forgotten() -> None:
    bank = InstanceBank(capacity=2)
    instances = [_instance(seed) for seed in range(3)]
    views = [instance_view(instance, bound(instance)) for instance in instances]
    assert [bank.add(*pair) for pair in zip(instances[:2], views[:2], strict=True)] == [0, 1]
    assert bank.add(_instance(0), views[0]) == 0
    assert bank.add(instances[2], views[2]) == 2
    assert len(bank) == 2
    assert bank.view(0) is views[0]
    with pytest.raises(KeyError, match="instance 1"):
        bank.view(1)
    assert bank.add(instances[1], views[1]) == 3


def test_the_key_tells_questions_apart() -> None:
    first, second = _instance(0), _instance(1)
    assert instance_key(first) == instance_key(_instance(0))
    assert instance_key(first) != instance_key(second)
