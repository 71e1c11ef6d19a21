"""What a worker did between two looks at its counters: for the heartbeat and for the log."""

from __future__ import annotations

import time

from lmpool.workers.backend import BackendStats


class Meter:
    """Turns counters that only grow into rates; the heartbeat and the log each have their own last look."""

    def __init__(self) -> None:
        now = time.monotonic()
        self._rows, self._rows_at = 0, now
        self._logged, self._logged_at = BackendStats(), now

    def rate(self, rows: int) -> float:
        """Rows a second since the last call."""
        now = time.monotonic()
        rate = (rows - self._rows) / max(1e-3, now - self._rows_at)
        self._rows, self._rows_at = rows, now
        return rate

    def describe(self, now: BackendStats) -> str:
        """What happened since the last call, for people."""
        before, self._logged = self._logged, now
        at, self._logged_at = self._logged_at, time.monotonic()
        rows, steps, tokens = now.rows - before.rows, now.steps - before.steps, now.tokens - before.tokens
        rate = rows / max(1e-3, self._logged_at - at)
        batch, reused = rows / max(1, steps), (now.reused - before.reused) / max(1, tokens)
        return f"{rate:.1f} rows/s, {batch:.1f} prompts a batch, {100 * reused:.0f} % of tokens from the prefix cache"
