"""Sends the same prompts to two sides in turns, and compares their rates and values."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence

from benchmarks.harness.pairs import Take, alternate
from benchmarks.harness.processes import BenchmarkError, Child
from benchmarks.harness.testbed import Testbed

Ids = list[int]

FULL_V = 49_152  # Vocabulary size of SmolLM2.
PROMPT_TOKENS = 32  # Tokens per random prompt.
_FIRST_ORDINARY_ID = 3  # Lowest ordinary token id of SmolLM2; smaller ids are special tokens.
_TOLERANCE = 1e-2  # Max difference between the two sides' float32 log-probabilities of a token.
_NARROW_TOLERANCE = 0.25  # Max difference of a token's log-probability between two sides that compute in 16 bits.


class PromptSource:
    """Random prompts that both sides of a pair receive."""

    def __init__(self) -> None:
        self._random = random.Random()
        self.last: list[Ids] = []

    def draw(self, number: int, length: int) -> list[Ids]:
        """New random prompts, so that no cache holds their rows."""
        draw = self._random.randrange
        self.last = [[draw(_FIRST_ORDINARY_ID, FULL_V) for _ in range(length)] for _ in range(number)]
        return self.last


def compare(
    testbed: Testbed,
    ours: Child,
    peer: Child,
    number: int,
    *,
    narrow: bool = False,
    repeats: int | None = None,
    pause_s: float = 0,
) -> dict[str, list[float]]:
    """Measure two sides with the same distinct prompts, sent at once.

    `narrow` if both sides compute in 16 bits. `pause_s` is the time before each sample, in which the other side's
    processes may come to rest.
    """
    source = PromptSource()

    def take(side: Child, prompts: Sequence[Ids]) -> float:
        time.sleep(pause_s)
        return rate(side, prompts)

    takes = {
        "pool": lambda: take(ours, source.draw(number, PROMPT_TOKENS)),
        "direct": lambda: take(peer, source.last),
    }
    samples = alternated(takes, repeats or testbed.repeats)
    # Compare on a new prompt: the pool's cache may hold the rows of measured prompts, or may have evicted them.
    checked = source.draw(1, PROMPT_TOKENS)
    first, second = (side.request("together", prompts=checked)["probe"] for side in (ours, peer))
    agree(first, second, _NARROW_TOLERANCE if narrow else _TOLERANCE)
    return samples


def alternated(takes: Mapping[str, Take], repeats: int) -> dict[str, list[float]]:
    """Sample all sides in turns, after one round of warm-up."""
    for take in takes.values():
        take()
    return alternate(takes, repeats)


def rate(side: Child, prompts: Sequence[Ids]) -> float:
    """Rows per second for prompts that are sent all at once."""
    return len(prompts) / float(side.request("together", within=900, prompts=prompts)["seconds"])


def agree(first: Sequence[float], second: Sequence[float], tolerance: float = _TOLERANCE) -> None:
    """Raise BenchmarkError if the two sides computed different values."""
    if any(abs(a - b) > tolerance for a, b in zip(first, second, strict=True)):
        raise BenchmarkError(f"the sides disagree on a row: {first} and {second}")
