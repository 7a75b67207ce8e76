"""Expert iteration: search from what the policy proposes, then imitate what was found.

(Anthony et al. 2017, https://arxiv.org/abs/1705.08439.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from rlplace.envs.types import Builder
from rlplace.plan.types import Instance
from rlplace.policies.imitate import ImitationState, imitate
from rlplace.policies.network import PlaceNet
from rlplace.policies.planner import Path, Rollouts
from rlplace.policies.teacher import TeacherConfig, records_of, search
from rlplace.policies.types import ImitationConfig, Records

#: Plans for an instance, as choices, that come from elsewhere (as annealed and followed).
Polish = Callable[[Rollouts, np.random.Generator], Sequence[Path]]


def improve(
    net: PlaceNet,
    builder: Builder,
    instances: Sequence[Instance],
    value: Callable[[Instance, Any], float],
    teacher: TeacherConfig,
    imitation: ImitationConfig,
    seed: int,
    polish: Polish | None = None,
) -> ImitationState:
    """One round: the network is trained in place on the best plans found from its own.

    Args:
        net: The policy; it leads the search.
        builder: The decision process.
        instances: Where to search.
        value: What a complete state is worth, smaller is better.
        teacher: How to search.
        imitation: How to imitate.
        seed: Of everything random.
        polish: Adds plans to the search, such as a local search's.
    """
    parts = []
    for index, instance in enumerate(instances):
        rng = np.random.default_rng((seed, index))
        rollouts = Rollouts(net, builder, instance, rng)
        extra = polish(rollouts, rng) if polish is not None else ()
        found = search(rollouts, partial(value, instance), teacher, extra)
        parts.append(records_of(rollouts, found, teacher))
    optimizer = torch.optim.Adam(net.parameters(), lr=imitation.learning_rate)
    return imitate(net, optimizer, Records.join(parts), imitation, seed)
