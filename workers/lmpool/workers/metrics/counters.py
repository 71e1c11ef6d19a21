"""Counters of a worker: plain numbers that its parts count up, for the heartbeat, the log and `prometheus.py`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable

from lmpool.broker.readers import QueueState, drain_seconds
from lmpool.broker.server_checks import ServerMemory
from lmpool.errors import AdapterChanged, SourceMissing, UnknownTokenSet, UnknownVocabulary
from lmpool.metrics import PROMPTS, Histogram, pack_counts, quantile
from lmpool.protocol.job import Failure
from lmpool.workers.execution.contract import BackendStats

SENT_AGAIN = tuple(kind.__name__ for kind in (SourceMissing, UnknownVocabulary, UnknownTokenSet, AdapterChanged))
"""Failures that clients answer by sending what was missing: no row is lost."""

OUTCOMES = ("row", "answer", "sent_again", "failed", "dead")


class Counters:
    """Numbers of one worker. Counted up by one thread each, read by any.

    Attributes:
        step_s: seconds of each step; counted in the backend's thread, as is `batch`.
        batch: prompts that each step finished.
        publish_s: seconds from a block of rows or answers that is ready to its jobs' end, tries included.
        job_s: seconds from a job's queueing to its end with a row or an answer.
        ended: outcome, of `OUTCOMES` -> jobs.
        claimed: jobs taken over from workers that fell silent.
        homed: jobs taken whose home this worker is, as far as their clients know.
        stolen: jobs taken from other workers' lanes.
        lane: jobs in the worker's own lane, waiting and held, as of the last heartbeat; 0 before the first.
        refused: rows that the server refused.
        evicted: rows that were gone as soon as they were stored.
        shared: rows written to shared memory.
        shared_bytes: size of the segment that they are written to; 0 without one.
        exported: rows stored themselves, for clients that do not read this worker's shared memory.
        published_bytes: bytes of rows and answers sent to the server.
        fetched_bytes: bytes of rows and weights fetched to answer queries.
        server_errors: attempts to use the server that failed.
        queued_ms: entry id of a job that is in flight and has been in the backlog -> when it was queued, in ms since
            1970.
        queue: the model's queue as of the last heartbeat; None before the first.
        serving: live workers of the model as of the last sweep, this one included; 1 before the first.
        speed: answers a second of the backend while it computes, in the last interval between two heartbeats in which
            it did; 0 before the first.
        memory: the server's memory as of the last heartbeat; None where it is not asked for, or not told.
    """

    def __init__(self) -> None:
        self.step_s = Histogram()
        self.batch = Histogram(PROMPTS)
        self.publish_s = Histogram()
        self.job_s = Histogram()
        self.ended: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.claimed = 0
        self.homed = 0
        self.stolen = 0
        self.lane = 0
        self.refused = 0
        self.evicted = 0
        self.shared = 0
        self.shared_bytes = 0
        self.exported = 0
        self.published_bytes = 0
        self.fetched_bytes = 0
        self.server_errors = 0
        self.queued_ms: dict[bytes, bytes] = {}
        self.queue: QueueState | None = None
        self.serving = 1
        self.speed = 0.0
        self.memory: ServerMemory | None = None
        self.clock_ahead_s = 0.0

    def note_queue(self, queue: QueueState, asked_at: float) -> None:
        """Take the state of the queue.

        Args:
            queue: as read now.
            asked_at: when it was asked for, by this machine's clock.
        """
        # Entries carry the server's time: a clock that is wrong here must not show as a slow pool.
        self.clock_ahead_s = queue.server_time - (asked_at + time.time()) / 2
        self.queue = queue

    @property
    def drain_s(self) -> float | None:
        """Seconds that the queue takes to drain, as if all live workers were as fast as this one.

        None before the first heartbeat. While nothing is known of the speed, for nothing has been computed yet, as long
        as the oldest job has waited already.
        """
        if self.queue is None:
            return None
        return drain_seconds(self.queue, self.speed * self.serving)

    def stepped(self, seconds: float, answers: int) -> None:
        """Count a step of the backend, in its thread."""
        self.step_s.observe(seconds)
        self.batch.observe(answers)

    def published(self, outcome: str, entry_ids: Collection[bytes], seconds: float) -> None:
        """Count jobs that ended with what was asked for.

        Args:
            outcome: "row" or "answer".
            entry_ids: their ids in the queue, which begin with the time of queueing in ms.
            seconds: how long publishing took.
        """
        now_ms = (time.time() + self.clock_ahead_s) * 1000
        self.publish_s.observe(seconds)
        self.ended[outcome] += len(entry_ids)
        begun = [entry_id.partition(b"-")[0] for entry_id in entry_ids]
        if since := self.queued_ms:
            begun = [since.pop(entry_id, b"") or ms for entry_id, ms in zip(entry_ids, begun, strict=True)]
        # What is computed together was mostly queued together too: few of these differ.
        counts: dict[bytes, int] = {}
        for ms in begun:
            counts[ms] = counts.get(ms, 0) + 1
        for queued_ms, count in counts.items():
            self.job_s.observe(max(0.0, now_ms - int(queued_ms)) / 1000, count)

    def failed(self, failures: Iterable[tuple[Failure | None, bool]]) -> None:
        """Count jobs that failed: the failure of each, and whether the job went to the dead letters."""
        for failure, is_dead in failures:
            is_sent_again = failure is not None and failure.kind in SENT_AGAIN
            self.ended["dead" if is_dead else "sent_again" if is_sent_again else "failed"] += 1


class CounterDelta:
    """Turns counters that only grow into rates, since the last heartbeat and since the last line of the log.

    Args:
        counters: the worker's.
    """

    def __init__(self, counters: Counters) -> None:
        now = time.monotonic()
        self._counters = counters
        self._heartbeat, self._heartbeat_at = BackendStats(), now
        self._job_counts: list[int] = []
        self._answers = self._busy_s = 0.0
        self._logged, self._logged_at = BackendStats(), now
        self._homed_logged = self._stolen_logged = 0

    def since_heartbeat(self, now: BackendStats) -> dict[str, str | float]:
        """What happened since the last call, as fields of the heartbeat; "" where nothing has."""
        before, self._heartbeat = self._heartbeat, now
        at, self._heartbeat_at = self._heartbeat_at, time.monotonic()
        jobs = self._counters.job_s
        counts, self._job_counts = jobs.since(self._job_counts), list(jobs.counts)
        p50, p99 = quantile(counts, 0.5), quantile(counts, 0.99)
        rows, steps = now.rows - before.rows, now.steps - before.steps
        self._note_speed()
        return {
            "speed": round(self._counters.speed, 3),
            "rows_per_s": round(rows / max(1e-3, self._heartbeat_at - at), 1),
            "batch": round(rows / steps, 1) if steps else "",
            "p50_s": "" if p50 is None else round(p50, 6),
            "p99_s": "" if p99 is None else round(p99, 6),
            # Quantiles of several workers cannot be put together, counts can.
            "job_counts": pack_counts(counts),
        }

    def _note_speed(self) -> None:
        answers, busy_s = self._counters.batch.total, self._counters.step_s.total
        if answers > self._answers and busy_s > self._busy_s:
            self._counters.speed = (answers - self._answers) / (busy_s - self._busy_s)
            self._answers, self._busy_s = answers, busy_s

    def describe_since_log(self, now: BackendStats) -> str:
        """What happened since the last call, as a text for people; "" where there was no step."""
        before, self._logged = self._logged, now
        at, self._logged_at = self._logged_at, time.monotonic()
        if now.steps == before.steps:
            return ""
        rows, steps, tokens = now.rows - before.rows, now.steps - before.steps, now.tokens - before.tokens
        rate = rows / max(1e-3, self._logged_at - at)
        batch, reused = rows / max(1, steps), (now.reused - before.reused) / max(1, tokens)
        homed, self._homed_logged = self._counters.homed - self._homed_logged, self._counters.homed
        stolen, self._stolen_logged = self._counters.stolen - self._stolen_logged, self._counters.stolen
        return (
            f"{rate:.1f} rows/s, {batch:.1f} prompts a batch, {100 * reused:.0f} % of tokens from the prefix cache, "
            f"{homed} prompts homed, {stolen} stolen"
        )
