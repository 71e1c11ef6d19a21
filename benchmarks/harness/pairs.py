"""A against B: measured in turns in one run, compared pair by pair."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Take = Callable[[], float]
"""Takes one sample of one side, such as its rows per second."""

_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Side:
    """Samples of one side, in the order in which they were taken.

    Attributes:
        name: what was measured.
        unit: of the samples.
        samples: at least one.
    """

    name: str
    unit: str
    samples: list[float]

    @property
    def median(self) -> float:
        """The median of the samples."""
        return statistics.median(self.samples)

    def __str__(self) -> str:
        return f"{self.name}: {show(self.median)} [{show(min(self.samples))}–{show(max(self.samples))}] {self.unit}"


@dataclass(frozen=True, slots=True)
class Goal:
    """What a ratio must reach.

    Attributes:
        value: the bound.
        at_most: True when the ratio must not be above the bound, False when it must not be below.
    """

    value: float
    at_most: bool = False

    def reached(self, ratio: float) -> bool:
        """Whether a ratio is good enough."""
        return ratio <= self.value if self.at_most else ratio >= self.value

    def __str__(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.value:g}"


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the report: the ratios of A to B.

    Attributes:
        name: the measure.
        meaning: one sentence that says what A and B are.
        goal: what is asked; None when the figure is for orientation only.
        a: the numerator.
        b: the denominator, with as many samples.
    """

    name: str
    meaning: str
    goal: Goal | None
    a: Side
    b: Side

    @property
    def ratios(self) -> list[float]:
        """A ÷ B of each pair."""
        return [a / b for a, b in zip(self.a.samples, self.b.samples, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of the ratios."""
        return statistics.median(self.ratios)

    @property
    def verdict(self) -> str:
        """ "reached", "below" or "above" (of what is asked), or "" when nothing is asked."""
        if self.goal is None:
            return ""
        if self.goal.reached(self.ratio):
            return "reached"
        return "above" if self.goal.at_most else "below"

    def __str__(self) -> str:
        asked = f"asked {self.goal}: {self.verdict}" if self.goal else "for orientation"
        low, high = min(self.ratios), max(self.ratios)
        return f"{self.name}: {show(self.ratio)} [{show(low)}–{show(high)}] ({asked})\n  A {self.a}\n  B {self.b}"


def alternate(sides: Mapping[str, Take], repeats: int) -> dict[str, list[float]]:
    """Take samples of all sides in turns (A B A B …), so that what changes on the machine meets all of them.

    Returns:
        side -> its `repeats` samples.
    """
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, take in sides.items():
            samples[name].append(take())
    return samples


@dataclass(frozen=True, slots=True)
class Interval:
    """Where a ratio lies, by what chance brings in nineteen of twenty cases.

    Attributes:
        median: of the ratios of all pairs.
        low: no less than this.
        high: no more than this.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, rounds: Sequence[Sequence[float]]) -> Interval:
        """By bootstrap: rounds are drawn, and pairs in each, for the pairs of a round have the same processes.

        Args:
            rounds: the ratios of each round's pairs, at least one.
        """
        draw = random.Random(0).choices
        medians = sorted(
            statistics.median(
                [ratio for ratios in draw(rounds, k=len(rounds)) for ratio in draw(ratios, k=len(ratios))]
            )
            for _ in range(_RESAMPLES)
        )
        outside = _RESAMPLES // 40
        everything = [ratio for ratios in rounds for ratio in ratios]
        return cls(statistics.median(everything), medians[outside], medians[-outside - 1])

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}–{self.high:.3f}]"


def show(value: float) -> str:
    """A figure with three digits or all that stand before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
