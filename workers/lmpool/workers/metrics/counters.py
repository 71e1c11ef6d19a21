"""Counters of a worker: its parts count up plain numbers, for the heartbeat, the log and `prometheus.py`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from lmpool.broker.scripts import QueueState, drain_seconds
from lmpool.broker.server_checks import ServerMemory
from lmpool.errors import AdapterChanged, SourceMissing, UnknownTokenSet, UnknownVocabulary
from lmpool.metrics import PROMPTS, Histogram, pack_counts, quantile
from lmpool.protocol.job import Failure
from lmpool.workers.execution.contract import BackendStats

SENT_AGAIN = tuple(kind.__name__ for kind in (SourceMissing, UnknownVocabulary, UnknownTokenSet, AdapterChanged))
"""Failures after which clients send the missing data: no row is lost."""

OUTCOMES = ("row", "answer", "sent_again", "failed", "dead")


@dataclass(slots=True, eq=False)
class WorkerCounters:
    """Numbers of one worker. One thread counts each up, any thread reads them.

    Attributes:
        step_s: seconds of each step; counted in the backend's thread, as is `batch`.
        batch: prompts that each step finished.
        publish_s: seconds from a block being ready to the end of its jobs, retries included.
        job_s: seconds from a job's queueing to its end with a row or an answer.
        ended: outcome, of `OUTCOMES` -> jobs.
        claimed: jobs claimed from workers whose leases expired.
        homed: jobs taken whose home this worker is, as their clients know it.
        stolen: jobs taken from other workers' lanes.
        lane: jobs in the worker's own lane, waiting and held, at the last heartbeat; 0 before the first.
        refused: rows that the server refused.
        evicted: rows that were evicted as soon as they were stored.
        shared: rows written to shared memory.
        shared_bytes: size of the shared memory; 0 without one.
        exported: rows stored whole, for clients that do not read this worker's shared memory.
        published_bytes: bytes of rows and answers sent to the server.
        fetched_bytes: bytes of rows and weights fetched to answer queries.
        server_errors: failed attempts to use the server.
        queued_ms: id of an entry in flight that was in the backlog -> when it was queued, in ms since 1970.
        queue: the model's queue at the last heartbeat; None before the first.
        serving: live workers of the model at the last sweep, this one included; 1 before the first.
        speed: results per second of the backend while it computes, in the last heartbeat interval in which it did; 0
            before the first.
        memory: the server's memory at the last heartbeat; None if it was not read.
        clock_ahead_s: server clock minus local clock, in seconds.
    """

    step_s: Histogram = field(default_factory=Histogram)
    batch: Histogram = field(default_factory=lambda: Histogram(PROMPTS))
    publish_s: Histogram = field(default_factory=Histogram)
    job_s: Histogram = field(default_factory=Histogram)
    ended: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(OUTCOMES, 0)))
    claimed: int = 0
    homed: int = 0
    stolen: int = 0
    lane: int = 0
    refused: int = 0
    evicted: int = 0
    shared: int = 0
    shared_bytes: int = 0
    exported: int = 0
    published_bytes: int = 0
    fetched_bytes: int = 0
    server_errors: int = 0
    queued_ms: dict[bytes, bytes] = field(default_factory=dict)
    queue: QueueState | None = None
    serving: int = 1
    speed: float = 0.0
    memory: ServerMemory | None = None
    clock_ahead_s: float = 0.0

    def note_queue(self, queue: QueueState, sent_at: float) -> None:
        """Record the state of the queue, which was requested at the local time `sent_at`."""
        # Entries carry the server's time: a wrong local clock must not look like a slow pool.
        self.clock_ahead_s = queue.server_time - (sent_at + time.time()) / 2
        self.queue = queue

    @property
    def drain_s(self) -> float | None:
        """Seconds to drain the queue, if all live workers are as fast as this one; None before the first heartbeat.

        Before anything was computed, the age of the oldest job.
        """
        return None if self.queue is None else drain_seconds(self.queue, self.speed * self.serving)

    def stepped(self, seconds: float, answers: int) -> None:
        """Count a step of the backend, in its thread."""
        self.step_s.observe(seconds)
        self.batch.observe(answers)

    def published(self, outcome: str, entry_ids: Collection[bytes], seconds: float) -> None:
        """Count jobs that ended with the requested result.

        Args:
            outcome: "row" or "answer".
            entry_ids: their ids in the queue, which begin with the time of queueing in ms.
            seconds: seconds that publishing took.
        """
        now_ms = (time.time() + self.clock_ahead_s) * 1000
        self.publish_s.observe(seconds)
        self.ended[outcome] += len(entry_ids)
        begun = [entry_id.partition(b"-")[0] for entry_id in entry_ids]
        if since := self.queued_ms:
            begun = [since.pop(entry_id, b"") or ms for entry_id, ms in zip(entry_ids, begun, strict=True)]
        # Jobs of one step were mostly queued together, so few of these times differ.
        for queued_ms, count in Counter(begun).items():
            self.job_s.observe(max(0.0, now_ms - int(queued_ms)) / 1000, count)

    def failed(self, failures: Iterable[tuple[Failure | None, bool]]) -> None:
        """Count failed jobs: the failure of each, and whether it became a dead letter."""
        for failure, is_dead in failures:
            is_sent_again = failure is not None and failure.kind in SENT_AGAIN
            self.ended["dead" if is_dead else "sent_again" if is_sent_again else "failed"] += 1


class CounterDelta:
    """Rates of counters since the last heartbeat and since the last log line."""

    def __init__(self, counters: WorkerCounters) -> None:
        now = time.monotonic()
        self._counters = counters
        self._heartbeat, self._heartbeat_at = BackendStats(), now
        self._job_counts: list[int] = []
        self._answers = self._busy_s = 0.0
        self._logged, self._logged_at = BackendStats(), now
        self._homed_logged = self._stolen_logged = 0

    def since_heartbeat(self, now: BackendStats) -> dict[str, str | float]:
        """The rates since the last call as fields of the heartbeat; "" without a value."""
        before, self._heartbeat = self._heartbeat, now
        at, self._heartbeat_at = self._heartbeat_at, time.monotonic()
        jobs = self._counters.job_s
        counts, self._job_counts = jobs.since(self._job_counts), list(jobs.counts)
        p50, p99 = quantile(counts, 0.5), quantile(counts, 0.99)
        rows, steps = now.rows - before.rows, now.steps - before.steps
        answers, busy_s = self._counters.batch.total, self._counters.step_s.total
        if answers > self._answers and busy_s > self._busy_s:
            self._counters.speed = (answers - self._answers) / (busy_s - self._busy_s)
            self._answers, self._busy_s = answers, busy_s
        return {
            "speed": round(self._counters.speed, 3),
            "rows_per_s": round(rows / max(1e-3, self._heartbeat_at - at), 1),
            "batch": round(rows / steps, 1) if steps else "",
            "p50_s": "" if p50 is None else round(p50, 6),
            "p99_s": "" if p99 is None else round(p99, 6),
            # Quantiles of several workers cannot be combined, counts can.
            "job_counts": pack_counts(counts),
        }

    def describe_since_log(self, now: BackendStats) -> str:
        """The rates since the last call as text; "" without a step."""
        before, self._logged = self._logged, now
        at, self._logged_at = self._logged_at, time.monotonic()
        if now.steps == before.steps:
            return ""
        counters = self._counters
        rows, steps, tokens = now.rows - before.rows, now.steps - before.steps, now.tokens - before.tokens
        rate = rows / max(1e-3, self._logged_at - at)
        batch, reused = rows / max(1, steps), (now.reused - before.reused) / max(1, tokens)
        homed, self._homed_logged = counters.homed - self._homed_logged, counters.homed
        stolen, self._stolen_logged = counters.stolen - self._stolen_logged, counters.stolen
        return (
            f"{rate:.1f} rows/s, {batch:.1f} prompts a batch, {100 * reused:.0f} % of tokens from the prefix cache, "
            f"{homed} prompts homed, {stolen} stolen"
        )
