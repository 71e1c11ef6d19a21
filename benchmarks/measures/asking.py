"""Asking two sides the same prompts, in turns."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from benchmarks.harness.pairs import Take, alternate
from benchmarks.harness.processes import BenchmarkError, Child
from benchmarks.harness.workplace import Workplace
from benchmarks.measures.transport import FULL_V

Ids = list[int]

PROMPT_TOKENS = 32
_FIRST_ORDINARY_ID = 3
_TOLERANCE, _NARROW_TOLERANCE = 1e-2, 0.25


class Asked:
    """The prompts that both sides of a pair are asked."""

    def __init__(self) -> None:
        self._random = random.Random()
        self.last: list[Ids] = []

    def fresh(self, number: int, length: int) -> list[Ids]:
        """Prompts that nobody has asked before."""
        draw = self._random.randrange
        self.last = [[draw(_FIRST_ORDINARY_ID, FULL_V) for _ in range(length)] for _ in range(number)]
        return self.last


def compare(
    place: Workplace, ours: Child, peer: Child, number: int, *, narrow: bool = False, repeats: int | None = None
) -> dict[str, list[float]]:
    """The same distinct prompts for both, asked all at once; `narrow` when both compute in 16 bits."""
    asked = Asked()
    takes = {
        "pool": lambda: rate(ours, asked.fresh(number, PROMPT_TOKENS)),
        "direct": lambda: rate(peer, asked.last),
    }
    samples = alternated(takes, repeats or place.repeats)
    # A new prompt: the rows of measured ones may be in the pool's cache, or evicted from it.
    checked = asked.fresh(1, PROMPT_TOKENS)
    first, second = (side.ask("together", prompts=checked)["probe"] for side in (ours, peer))
    agree(first, second, _NARROW_TOLERANCE if narrow else _TOLERANCE)
    return samples


def alternated(takes: Mapping[str, Take], repeats: int) -> dict[str, list[float]]:
    """Samples of all sides in turns, after a round that warms up."""
    for take in takes.values():
        take()
    return alternate(takes, repeats)


def rate(side: Child, prompts: Sequence[Ids]) -> float:
    """Rows a second for prompts asked all at once."""
    return len(prompts) / float(side.ask("together", within=900, prompts=prompts)["seconds"])


def agree(first: Sequence[float], second: Sequence[float], tolerance: float = _TOLERANCE) -> None:
    """See that both sides have computed the same.

    Raises:
        BenchmarkError: they have not.
    """
    if any(abs(a - b) > tolerance for a, b in zip(first, second, strict=True)):
        raise BenchmarkError(f"the sides disagree on a row: {first} and {second}")
