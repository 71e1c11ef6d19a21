"""What a worker has done: plain numbers that its parts count up, for the heartbeat and for metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable

from lmpool.broker.queue import QueueState
from lmpool.errors import AdapterChanged, SourceMissing, UnknownVocabulary
from lmpool.histogram import PROMPTS, Histogram
from lmpool.protocol.job import Failure

SENT_AGAIN = (SourceMissing.__name__, UnknownVocabulary.__name__, AdapterChanged.__name__)
"""Failures that clients answer by sending what was missing: no row is lost."""

OUTCOMES = ("row", "answer", "sent_again", "failed", "dead")


class Figures:
    """Numbers of one worker. Counted up by one thread each, read by any.

    Attributes:
        step_s: seconds of each step; counted in the backend's thread, as is `batch`.
        batch: prompts that each step finished.
        publish_s: seconds from a block of rows or answers that is ready to its jobs' end, tries included.
        job_s: seconds from a job's queueing to its end with a row or an answer.
        ended: outcome, of `OUTCOMES` -> jobs.
        claimed: jobs taken over from workers that fell silent.
        refused: rows that the server refused.
        evicted: rows that were gone as soon as they were stored.
        published_bytes: bytes of rows and answers sent to the server.
        fetched_bytes: bytes of rows and weights fetched to answer asks.
        server_errors: attempts to use the server that failed.
        queued_ms: entry of a job that is held and has been in the backlog -> when it was queued, in ms since 1970.
        queue: the model's queue as of the last heartbeat; None before the first.
    """

    def __init__(self) -> None:
        self.step_s = Histogram()
        self.batch = Histogram(PROMPTS)
        self.publish_s = Histogram()
        self.job_s = Histogram()
        self.ended: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.claimed = 0
        self.refused = 0
        self.evicted = 0
        self.published_bytes = 0
        self.fetched_bytes = 0
        self.server_errors = 0
        self.queued_ms: dict[bytes, bytes] = {}
        self.queue: QueueState | None = None
        self._clock_ahead_s = 0.0

    def look_at(self, queue: QueueState, asked_at: float) -> None:
        """Take the state of the queue.

        Args:
            queue: as read now.
            asked_at: when it was asked for, by this machine's clock.
        """
        # Entries carry the server's time: a clock that is wrong here must not show as a slow pool.
        self._clock_ahead_s = queue.server_time - (asked_at + time.time()) / 2
        self.queue = queue

    def published(self, outcome: str, entries: Collection[bytes], seconds: float) -> None:
        """Count jobs that ended with what was asked for.

        Args:
            outcome: "row" or "answer".
            entries: their ids in the queue, which begin with the time of queueing in ms.
            seconds: how long publishing took.
        """
        now_ms = (time.time() + self._clock_ahead_s) * 1000
        self.publish_s.observe(seconds)
        self.ended[outcome] += len(entries)
        begun = [entry.partition(b"-")[0] for entry in entries]
        if since := self.queued_ms:
            begun = [since.pop(entry, b"") or ms for entry, ms in zip(entries, begun, strict=True)]
        # What is computed together was mostly queued together too: few of these differ.
        counts: dict[bytes, int] = {}
        for ms in begun:
            counts[ms] = counts.get(ms, 0) + 1
        for queued_ms, count in counts.items():
            self.job_s.observe(max(0.0, now_ms - int(queued_ms)) / 1000, count)

    def failed(self, endings: Iterable[tuple[Failure | None, bool]]) -> None:
        """Count jobs that ended without: the failure of each, and whether it went to the dead letters."""
        for failure, is_dead in endings:
            is_sent_again = failure is not None and failure.kind in SENT_AGAIN
            self.ended["dead" if is_dead else "sent_again" if is_sent_again else "failed"] += 1
