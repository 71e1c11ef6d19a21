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

# Failures after which clients send the missing data and the job again, so that no row is lost.
SENT_AGAIN = tuple(kind.__name__ for kind in (SourceMissing, UnknownVocabulary, UnknownTokenSet, AdapterChanged))
OUTCOMES = ("row", "answer", "sent_again", "failed", "dead")


@dataclass(slots=True, eq=False)
class WorkerCounters:
    """Counters of one worker. Each is counted up by one thread, and any thread may read it."""

    step_s: Histogram = field(default_factory=Histogram)  # Seconds of each step; counted in the backend's thread.
    batch: Histogram = field(default_factory=lambda: Histogram(PROMPTS))  # Prompts finished per step.
    publish_s: Histogram = field(default_factory=Histogram)  # Seconds to publish a block of results and end its jobs.
    job_s: Histogram = field(default_factory=Histogram)  # Seconds from a job's queueing to its end with a result.
    ended: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(OUTCOMES, 0)))  # Outcome -> ended jobs.
    claimed: int = 0  # Jobs claimed from workers whose leases expired.
    homed: int = 0  # Jobs taken for which clients chose this worker, because it computed a prefix of the prompt.
    stolen: int = 0  # Jobs taken from other workers' lanes.
    lane: int = 0  # Jobs in the worker's own lane, waiting and held, at the last heartbeat.
    refused: int = 0  # Rows that the server refused.
    evicted: int = 0  # Rows that were evicted as soon as they were stored.
    shared: int = 0  # Rows written to shared memory.
    shared_bytes: int = 0  # Bytes of the worker's shared memory; 0 without shared memory.
    exported: int = 0  # Rows stored whole, for clients that do not read this worker's shared memory.
    published_bytes: int = 0  # Bytes of rows and answers sent to the server.
    fetched_bytes: int = 0  # Bytes of rows and weights fetched to answer queries.
    server_errors: int = 0  # Failed attempts to use the server.
    # Id of an entry in flight that was in the backlog -> when it was queued, in ms since 1970.
    queued_ms: dict[bytes, bytes] = field(default_factory=dict)
    queue: QueueState | None = None  # The model's queue at the last heartbeat; None before the first.
    serving: int = 1  # Live workers of the model at the last sweep, this one included.
    speed: float = 0.0  # Results per second of computing, in the last heartbeat interval with steps.
    memory: ServerMemory | None = None  # The server's memory at the last heartbeat; None if it was not read.
    clock_ahead_s: float = 0.0  # Server clock minus local clock, in seconds.

    def note_queue(self, queue: QueueState, sent_at: float) -> None:
        """Record the state of the queue, which was requested at the local time `sent_at`."""
        # Correct the local clock: entries carry the server's time, and a wrong clock must not look like a slow pool.
        self.clock_ahead_s = queue.server_time - (sent_at + time.time()) / 2
        self.queue = queue

    @property
    def drain_s(self) -> float | None:
        """Seconds to drain the queue, if all live workers are as fast as this one; None before the first heartbeat.

        Before the first result, it is the age of the oldest job.
        """
        return None if self.queue is None else drain_seconds(self.queue, self.speed * self.serving)

    def stepped(self, seconds: float, answers: int) -> None:
        """Count a step of the backend, in its thread."""
        self.step_s.observe(seconds)
        self.batch.observe(answers)

    def published(self, outcome: str, entry_ids: Collection[bytes], seconds: float) -> None:
        """Count jobs that ended with a "row" or "answer", which took `seconds` to publish.

        The id of an entry begins with the time of its queueing, in ms.
        """
        now_ms = (time.time() + self.clock_ahead_s) * 1000
        self.publish_s.observe(seconds)
        self.ended[outcome] += len(entry_ids)
        begun = [entry_id.partition(b"-")[0] for entry_id in entry_ids]
        if since := self.queued_ms:
            begun = [since.pop(entry_id, b"") or ms for entry_id, ms in zip(entry_ids, begun, strict=True)]
        # Jobs of one step were mostly queued together, so they have few different times.
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
        self._counters = counters
        self._heartbeat = self._logged = BackendStats(), time.monotonic()
        self._job_counts: list[int] = []
        self._computed = 0.0, 0.0  # Number of answers and busy seconds when the speed was last measured.
        self._moved = 0, 0  # Numbers of homed and of stolen jobs at the last log line.

    def since_heartbeat(self, now: BackendStats) -> dict[str, str | float]:
        """The rates since the last call as fields of the heartbeat; "" without a value."""
        (before, at), self._heartbeat = self._heartbeat, (now, time.monotonic())
        jobs = self._counters.job_s
        counts, self._job_counts = jobs.since(self._job_counts), list(jobs.counts)
        p50, p99 = quantile(counts, 0.5), quantile(counts, 0.99)
        rows, steps = now.rows - before.rows, now.steps - before.steps
        answers, busy_s = self._counters.batch.total, self._counters.step_s.total
        if answers > self._computed[0] and busy_s > self._computed[1]:
            self._counters.speed = (answers - self._computed[0]) / (busy_s - self._computed[1])
            self._computed = answers, busy_s
        return {
            "speed": round(self._counters.speed, 3),
            "rows_per_s": round(rows / max(1e-3, self._heartbeat[1] - at), 1),
            "batch": round(rows / steps, 1) if steps else "",
            "p50_s": "" if p50 is None else round(p50, 6),
            "p99_s": "" if p99 is None else round(p99, 6),
            # Quantiles of several workers cannot be combined, but counts can.
            "job_counts": pack_counts(counts),
        }

    def describe_since_log(self, now: BackendStats) -> str:
        """The rates since the last call as text; "" without a step."""
        (before, at), self._logged = self._logged, (now, time.monotonic())
        rows, steps, tokens = now.rows - before.rows, now.steps - before.steps, now.tokens - before.tokens
        if not steps:
            return ""
        reused = (now.reused - before.reused) / max(1, tokens)
        (homed, stolen), self._moved = self._moved, (self._counters.homed, self._counters.stolen)
        return (
            f"{rows / max(1e-3, self._logged[1] - at):.1f} rows/s, {rows / steps:.1f} prompts a batch, "
            f"{100 * reused:.0f} % of tokens from the prefix cache, {self._moved[0] - homed} prompts homed, "
            f"{self._moved[1] - stolen} stolen"
        )
