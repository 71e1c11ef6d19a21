"""Checks of what callers give to a producer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lmpool.card import ModelCard
from lmpool.checks import shown
from lmpool.errors import SettingsError
from lmpool.prompts import Prompt, encode_prompt

ENDLESS_S = 9e8
"""What stands for no deadline at all: a request ends in its row, or when nobody could have answered it for long.

Infinity would make deadlines that cannot be reckoned with.
"""


def encode(card: ModelCard, ids: Any, adapter: str) -> Prompt:
    """A prompt for a model.

    Args:
        card: the model's.
        ids: as `Producer.logprobs` takes them.
        adapter: "name@revision", or "" for none.

    Raises:
        InvalidPrompt: it is none for this model.
    """
    return encode_prompt(ids, vocab_size=card.vocab_size, max_tokens=card.max_prompt_tokens, adapter=adapter)


def iterate(prompts: Iterable[Any]) -> Iterable[Any]:
    """Several prompts.

    Raises:
        SettingsError: text, or nothing that can be iterated over.
    """
    # An array of no axes has `__iter__` all the same.
    if isinstance(prompts, (str, bytes)) or not hasattr(prompts, "__iter__") or getattr(prompts, "ndim", 1) == 0:
        raise SettingsError(f"prompts: {type(prompts).__name__} is not a sequence of prompts")
    return prompts


def check_timeout(timeout: float) -> float:
    """Seconds that a request may take.

    Raises:
        SettingsError: not a number above 0.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < 1e9:
        raise SettingsError(f"timeout: {shown(timeout)} must be a number of seconds above 0")
    return float(timeout)
