"""What a worker did between two looks at its counters: for the heartbeat and for the log."""

from __future__ import annotations

import time

from lmpool.histogram import pack_counts, quantile
from lmpool.workers.backend.contract import BackendStats
from lmpool.workers.metrics.counters import Figures


class Meter:
    """Turns counters that only grow into rates; the heartbeat and the log each have their own last look.

    Args:
        figures: the worker's.
    """

    def __init__(self, figures: Figures) -> None:
        now = time.monotonic()
        self._figures = figures
        self._beat, self._beat_at = BackendStats(), now
        self._job_counts: list[int] = []
        self._logged, self._logged_at = BackendStats(), now

    def lately(self, now: BackendStats) -> dict[str, str | float]:
        """What happened since the last call, for the heartbeat; "" where nothing has."""
        before, self._beat = self._beat, now
        at, self._beat_at = self._beat_at, time.monotonic()
        jobs = self._figures.job_s
        counts, self._job_counts = jobs.since(self._job_counts), list(jobs.counts)
        p50, p99 = quantile(counts, 0.5), quantile(counts, 0.99)
        rows, steps = now.rows - before.rows, now.steps - before.steps
        return {
            "rows_per_s": round(rows / max(1e-3, self._beat_at - at), 1),
            "batch": round(rows / steps, 1) if steps else "",
            "p50_s": "" if p50 is None else round(p50, 6),
            "p99_s": "" if p99 is None else round(p99, 6),
            # Quantiles of several workers cannot be put together, counts can.
            "job_counts": pack_counts(counts),
        }

    def describe(self, now: BackendStats) -> str:
        """What happened since the last call, for people."""
        before, self._logged = self._logged, now
        at, self._logged_at = self._logged_at, time.monotonic()
        rows, steps, tokens = now.rows - before.rows, now.steps - before.steps, now.tokens - before.tokens
        rate = rows / max(1e-3, self._logged_at - at)
        batch, reused = rows / max(1, steps), (now.reused - before.reused) / max(1, tokens)
        return f"{rate:.1f} rows/s, {batch:.1f} prompts a batch, {100 * reused:.0f} % of tokens from the prefix cache"
