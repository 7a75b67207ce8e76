"""Models from the configs of transformers, with random weights: nothing is downloaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from rlplace.errors import MissingExtraError

#: The name under which sdpa is registered once more. An attention without a mask function gets no
#: mask, and then sdpa is told `is_causal`: without padding that is the same, and unlike with a mask
#: tensor, flash kernels and grouped KV heads are possible.
_ATTENTION = "rlplace_sdpa"


def from_hub(family: str, model: str, config: dict[str, Any], attends: bool = True) -> nn.Module:
    """A model of transformers in training mode.

    Args:
        family: Its config class is ``<family>Config``.
        model: Name of its class.
        config: Fields of the config that differ.
        attends: Whether it knows attention implementations.

    Raises:
        MissingExtraError: If transformers is not installed.
    """
    try:
        import transformers
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
    except ImportError as error:
        rule = "the models of the library need transformers: pip install rlplace[models]"
        raise MissingExtraError(rule) from error
    if attends:
        config = config | {"attn_implementation": _ATTENTION}
        transformers.AttentionInterface.register(_ATTENTION, sdpa_attention_forward)
    with quiet(transformers.logging):
        made = getattr(transformers, f"{family}Config")(**config)
        build: Callable[[Any], nn.Module] = getattr(transformers, model)
        return build(made).train()


@contextlib.contextmanager
def quiet(logging: Any) -> Iterator[None]:
    """Without transformers' remarks about configs; the level is put back."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
