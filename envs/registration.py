"""Makes ``rlplace/Place-v0`` known to gymnasium; `import rlplace` calls `register`."""

from __future__ import annotations

from gymnasium.envs.registration import register as add
from gymnasium.envs.registration import registry

ENV_ID = "rlplace/Place-v0"


def register() -> None:
    """Register the environment, unless it is known already; imports nothing heavy."""
    if ENV_ID not in registry:
        add(ENV_ID, entry_point="rlplace.envs.env:PlaceEnv")
