"""Draws the tokens that a student requests at each position of a text, the same in all processes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def tokens_at(ids: list[int], count: int, vocab_size: int) -> NDArray[np.int64]:
    """`count` tokens for each position of a text: int64 (n, count)."""
    return np.random.default_rng(ids).integers(vocab_size, size=(len(ids), count))
