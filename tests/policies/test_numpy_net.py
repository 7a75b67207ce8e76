from __future__ import annotations

import subprocess
import sys

import numpy as np

from rlplace.envs.types import Candidates, InstanceView
from rlplace.policies.network import PlaceNet
from rlplace.policies.numpy_net import NumpyNet, expected_shapes

States = list[tuple[InstanceView, Candidates, int]]


def numpy_twin(net: PlaceNet) -> NumpyNet:
    return NumpyNet(net.config, {name: value.numpy() for name, value in net.state_dict().items()})


def test_numpy_answers_as_torch_does(toy_states: States, trained_like: PlaceNet) -> None:
    twin = numpy_twin(trained_like)
    for view, candidates, step in toy_states:
        states = [candidates, candidates]
        theirs = trained_like.score(trained_like.encode(view), states, step)
        ours = twin.score(twin.encode(view), states, step)
        for mine, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(mine, other, atol=1e-5)


def test_shapes_are_those_of_the_torch_network(trained_like: PlaceNet) -> None:
    torch_shapes = {name: tuple(v.shape) for name, v in trained_like.state_dict().items()}
    assert expected_shapes(trained_like.config) == torch_shapes


def test_planning_with_numpy_imports_no_torch() -> None:
    code = (
        "import sys; import rlplace.policies.numpy_net, rlplace.policies.store;"
        "import rlplace.policies.planner;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'stable_baselines3', 'wandb')))"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == 0
