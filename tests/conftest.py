"""One thread, no display, no network, and a capture cache of this run alone."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest
from hypothesis import settings

# A busy machine is no failure (no deadline), and CI tries the same examples every time.
settings.register_profile("rlplace", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("rlplace")

_OWN_CACHE = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment before a test module imports numpy or torch; ranks inherit it."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MPLBACKEND", "Agg")
    os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if "RLPLACE_CACHE" not in os.environ:
        # The workers of pytest-xdist inherit the folder, and only its maker removes it.
        config.stash[_OWN_CACHE] = tempfile.mkdtemp(prefix="rlplace-cache-")
        os.environ["RLPLACE_CACHE"] = config.stash[_OWN_CACHE]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the capture cache, if it is ours."""
    if _OWN_CACHE in config.stash:
        shutil.rmtree(config.stash[_OWN_CACHE], ignore_errors=True)
        del os.environ["RLPLACE_CACHE"]


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> None:
    """A test shares the machine with other workers and with the ranks it starts."""
    import torch

    torch.set_num_threads(1)
