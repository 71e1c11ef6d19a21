"""Histograms of durations and batch sizes, fast enough for every request; on-demand imports of metrics libraries."""

from __future__ import annotations

import itertools
import os
import re
from bisect import bisect_left
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from lmpool.errors import SettingsError
from lmpool.settings import check_choice, check_kind

# Environment variable that enables tracing in programs and workers that have no `tracing` setting.
TRACING_VARIABLE = "LMPOOL_TRACING"
# Upper bounds of the buckets for durations, in seconds: from 0.1 ms (a cached row) to 100 s (a batch that waits).
SECONDS = (*(step * 10.0**power for power in range(-4, 2) for step in (1, 2.5, 5)), 100.0)
PROMPTS = tuple(float(2**power) for power in range(11))  # Bucket bounds for batch sizes: 1 to 1,024 prompts.
# The number and the count of a bucket, as text. The pattern limits the digits: any client may have written the text.
_PACKED = re.compile(r"(\d{1,3}):(\d{1,15})", re.ASCII)


class Histogram:
    """The number of observations in each bucket, and the sum of the values. One thread observes, any thread reads."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = bounds  # Inclusive upper bounds of buckets, ascending; one more bucket is above the last bound.
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count one observation, or several of the same value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> tuple[list[tuple[str, int]], float]:
        """Each upper bound with the number of observations up to it, and the sum of the values: Prometheus' format."""
        # Copy the counts first: another thread may count at the same time.
        sums = itertools.accumulate(list(self.counts))
        bounds = [*(f"{bound:.12g}" for bound in self.bounds), "+Inf"]
        return list(zip(bounds, sums, strict=True)), self.total

    def since(self, before: Sequence[int]) -> list[int]:
        """The counts minus the counts `before`, an earlier copy of `counts`; all counts if `before` is empty."""
        return [now - then for now, then in zip(self.counts, before, strict=True)] if before else list(self.counts)


def quantile(counts: Sequence[int], q: float, bounds: Sequence[float] = SECONDS) -> float | None:
    """The quantile `q` (0 to 1) of observations in buckets, as PromQL's `histogram_quantile` computes it.

    Returns:
        the quantile, interpolated within its bucket, but at most the last bound; None without observations.
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
    """Pack counts into a short text: "bucket:count" for each bucket that is not empty, separated by spaces."""
    return " ".join(f"{at}:{count}" for at, count in enumerate(counts) if count)


def add_packed(counts: list[int], packed: str) -> None:
    """Add packed counts to `counts`. Invalid parts are skipped, because these numbers are only shown to people."""
    for pair in filter(None, map(_PACKED.fullmatch, packed.split())):
        if (at := int(pair[1])) < len(counts):
            counts[at] += int(pair[2])


def is_traced(tracing: object) -> bool:
    """Whether requests are traced: the argument `tracing`, or the environment variable if the argument is None."""
    if tracing is None:
        return bool(check_choice(TRACING_VARIABLE, os.environ.get(TRACING_VARIABLE) or "0", ("0", "1")) == "1")
    return bool(check_kind("tracing", tracing, bool, "True, False or None"))


def prometheus(extra: str) -> ModuleType:
    """Import `prometheus_client.core` on demand; SettingsError names the extra of lmpool that installs it."""
    try:
        return import_module("prometheus_client.core")
    except ImportError as error:
        raise SettingsError(f"metrics need prometheus-client: pip install 'lmpool[{extra}]'") from error


def opentelemetry() -> ModuleType:
    """Import `opentelemetry.trace` on demand; SettingsError if it is missing."""
    try:
        return import_module("opentelemetry.trace")
    except ImportError as error:
        raise SettingsError("tracing needs opentelemetry-api: pip install 'lmpool[tracing]'") from error
