"""Ratios of a side A to a side B: both sides are sampled in turns in one run, and compared pair by pair."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Take = Callable[[], float]
"""A function that takes one sample of one side, such as the rows per second of a pool."""

_RESAMPLES = 2000  # Bootstrap samples: enough for two digits of a 95 % interval.


@dataclass(frozen=True, slots=True)
class Side:
    """The samples of one side (A or B) in order of time, at least one."""

    name: str
    unit: str
    samples: list[float]

    @property
    def median(self) -> float:
        """Median of the samples."""
        return statistics.median(self.samples)

    def __str__(self) -> str:
        return f"{self.name}: {show(self.median)} [{show(min(self.samples))}–{show(max(self.samples))}] {self.unit}"


@dataclass(frozen=True, slots=True)
class Goal:
    """The bound that a ratio must reach: a minimum, or with `at_most` a maximum."""

    value: float
    at_most: bool = False

    def reached(self, ratio: float) -> bool:
        """Whether a ratio reaches the goal."""
        return ratio <= self.value if self.at_most else ratio >= self.value

    def __str__(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.value:g}"


@dataclass(frozen=True, slots=True)
class Result:
    """A row of the report: the samples of A and B, and the ratios A ÷ B.

    Attributes:
        name: name of the measure.
        meaning: one sentence that defines A and B.
        goal: the bound for the ratio; None when the ratio is for orientation only.
        a: samples of the numerator.
        b: samples of the denominator, in pairs with the samples of `a`.
    """

    name: str
    meaning: str
    goal: Goal | None
    a: Side
    b: Side

    @property
    def ratios(self) -> list[float]:
        """A ÷ B for each pair."""
        return [a / b for a, b in zip(self.a.samples, self.b.samples, strict=True)]

    @property
    def ratio(self) -> float:
        """Median of the ratios."""
        return statistics.median(self.ratios)

    @property
    def verdict(self) -> str:
        """ "reached", "below" or "above" the goal, or "" without a goal."""
        if self.goal is None:
            return ""
        if self.goal.reached(self.ratio):
            return "reached"
        return "above" if self.goal.at_most else "below"

    def __str__(self) -> str:
        goal = f"goal {self.goal}: {self.verdict}" if self.goal else "for orientation"
        low, high = min(self.ratios), max(self.ratios)
        return f"{self.name}: {show(self.ratio)} [{show(low)}–{show(high)}] ({goal})\n  A {self.a}\n  B {self.b}"


def alternate(sides: Mapping[str, Take], repeats: int) -> dict[str, list[float]]:
    """Sample all sides in turns (A B A B …), so that changes on the machine affect all of them alike."""
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, take in sides.items():
            samples[name].append(take())
    return samples


@dataclass(frozen=True, slots=True)
class Interval:
    """The median ratio of all pairs, and its 95 % confidence interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, rounds: Sequence[Sequence[float]]) -> Interval:
        """Bootstrap in two stages: draw rounds, then pairs of each round, because the pairs of a round share processes.

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
        tail = _RESAMPLES // 40  # Number of bootstrap samples in a tail of 2.5 %.
        all_ratios = [ratio for ratios in rounds for ratio in ratios]
        return cls(statistics.median(all_ratios), medians[tail], medians[-tail - 1])

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}–{self.high:.3f}]"


def show(value: float) -> str:
    """Format a number with three significant digits, or with all digits before the decimal point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
