"""Histograms that take a fraction of a microsecond an observation; prometheus_client and OpenTelemetry where wanted."""

from __future__ import annotations

import itertools
import os
from bisect import bisect_left
from collections.abc import Sequence
from types import ModuleType

from lmpool.errors import SettingsError
from lmpool.settings import shown

TRACING_VARIABLE = "LMPOOL_TRACING"
"""Environment variable that has programs and workers trace which are not told whether to."""

SECONDS = (*(step * 10.0**power for power in range(-4, 2) for step in (1, 2.5, 5)), 100.0)
"""Upper bounds for anything from a cached row to a patient batch: 0.1 ms to 100 s."""

PROMPTS = tuple(float(2**power) for power in range(11))
"""Upper bounds for the sizes of batches: 1 to 1,024."""


class Histogram:
    """How many observations fell into each bucket, and their sum.

    One thread observes; any other may read meanwhile, and sees some moment between two observations.

    Args:
        bounds: upper bounds of the buckets, ascending, each of its own bucket; above the last there is one more bucket.

    Attributes:
        bounds: as above.
        counts: observations in each bucket, one more than there are bounds.
        total: the sum of all observations.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count one observation, or several of the same value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> tuple[list[tuple[str, int]], float]:
        """The upper bound of each bucket with the observations up to it, and the sum: as Prometheus writes them."""
        # Read once: others count on meanwhile, and the buckets must fit their number.
        sums = itertools.accumulate(list(self.counts))
        bounds = [*(f"{bound:.12g}" for bound in self.bounds), "+Inf"]
        return list(zip(bounds, sums, strict=True)), self.total

    def since(self, before: Sequence[int]) -> list[int]:
        """The counts of what was observed after `counts` was `before`; all of them, if that is empty."""
        return [now - then for now, then in zip(self.counts, before, strict=True)] if before else list(self.counts)


def quantile(counts: Sequence[int], q: float, bounds: Sequence[float] = SECONDS) -> float | None:
    """The value below which a share `q` of the observations lies, as PromQL's `histogram_quantile` tells it.

    Args:
        counts: observations in each bucket.
        q: from 0 to 1.
        bounds: of the buckets.

    Returns:
        linear within a bucket, the last bound for what lies above it; None when there are no observations.
    """
    if not (count := sum(counts)):
        return None
    rank, below = q * count, 0
    for at, bound in enumerate(bounds):
        if counts[at] and below + counts[at] >= rank:
            low = bounds[at - 1] if at else 0.0
            return low + (bound - low) * (rank - below) / counts[at]
        below += counts[at]
    return bounds[-1]


def pack_counts(counts: Sequence[int]) -> str:
    """Counts as short text: "bucket:observations" of those that are not empty, with spaces between."""
    return " ".join(f"{at}:{count}" for at, count in enumerate(counts) if count)


def add_packed(counts: list[int], packed: str) -> None:
    """Add packed counts to others. What does not fit is left out: it is only shown to people."""
    for pair in packed.split():
        at, _, count = pair.partition(":")
        if at.isdecimal() and count.isdecimal() and len(count) < 16 and len(at) < 4 and int(at) < len(counts):
            counts[int(at)] += int(count)


def prometheus(extra: str) -> ModuleType:
    """The library's `prometheus_client.core`, imported by the first call.

    Args:
        extra: the extra of lmpool that brings it.

    Raises:
        SettingsError: it is not installed.
    """
    try:
        import prometheus_client.core
    except ImportError as error:
        raise SettingsError(
            f"metrics need the package prometheus-client, which is not installed: pip install 'lmpool[{extra}]'"
        ) from error
    return prometheus_client.core


def is_traced(tracing: object) -> bool:
    """Whether requests are traced: as told by an argument `tracing`, or by the environment where that is None.

    Raises:
        SettingsError: it is neither True, False nor None, or the variable says something else than 0 or 1.
    """
    if tracing is None:
        value = os.environ.get(TRACING_VARIABLE) or "0"
        if value not in ("0", "1"):
            raise SettingsError(f"{TRACING_VARIABLE}: {shown(value)} must be 0 or 1")
        return value == "1"
    if type(tracing) is not bool:
        raise SettingsError(f"tracing: {shown(tracing)} must be True, False or None")
    return tracing


def opentelemetry() -> ModuleType:
    """The library's `opentelemetry.trace`, imported by the first call.

    Raises:
        SettingsError: it is not installed.
    """
    try:
        import opentelemetry.trace
    except ImportError as error:
        raise SettingsError(
            "tracing needs the package opentelemetry-api, which is not installed: pip install 'lmpool[tracing]'"
        ) from error
    return opentelemetry.trace
