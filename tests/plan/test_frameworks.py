from dataclasses import replace

import pytest

from rlplace.cluster.types import Cluster
from rlplace.errors import InputError
from rlplace.plan.frameworks import Framework, framework, frameworks
from rlplace.plan.testing import transformer
from rlplace.plan.types import Instance


def test_each_shipped_framework_has_sane_constants() -> None:
    for name, found in frameworks().items():
        assert found.name == name
        assert 0.0 <= found.launch < 1e-3
        assert 0.0 <= found.backward_launch < 1e-3
        assert found.band[0] <= 1.0 <= found.band[1]


def test_an_unknown_framework_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"torhc.*torch"):
        framework("torhc")
    with pytest.raises(InputError, match="framework"):
        Instance(transformer(1, 64), Cluster.parse("2xA100-80"), 8, framework="torhc")


def test_constants_of_ones_own_are_taken_as_they_are() -> None:
    own = Framework("own", launch=1e-4)
    instance = Instance(transformer(1, 64), Cluster.parse("2xA100-80"), 8, framework=own)
    assert instance.execution == own
    assert replace(instance, framework="torch").execution == framework("torch")


def test_sends_of_no_kind_are_refused() -> None:
    assert Framework("own", sends="in turn").sends == "in turn"
    with pytest.raises(InputError, match=r"sends.*later.*beside"):
        Framework("own", sends="later")  # type: ignore[arg-type]  # the mistake under test
