"""Makes ``rlplace/Place-v0`` known to gymnasium.

`rlplace.envs` calls `register`; so does gymnasium itself where rlplace is installed, through the
entry point ``gymnasium.envs`` of the package's metadata.
"""

from __future__ import annotations

ENV_ID = "rlplace/Place-v0"


def register() -> None:
    """Register the environment, unless it is known already; imports nothing heavy."""
    # Not `import gymnasium`: that is still being imported where it looks for entry points.
    from gymnasium.envs.registration import register as add
    from gymnasium.envs.registration import registry

    if ENV_ID not in registry:
        add(ENV_ID, entry_point="rlplace.envs.env:PlaceEnv")
