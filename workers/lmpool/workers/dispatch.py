"""Dispatch: what becomes of the jobs that a worker holds: prepared, computed, published, and let go."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import nsmallest

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import WorkerError
from lmpool.protocol.job import Failure
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.prompt import digest_of
from lmpool.protocol.query import TrieQuery
from lmpool.protocol.row import Encoding, RowBlock, VectorBlock
from lmpool.workers.execution.contract import QUERY_ERRORS, BackendJob, Finished, failure_of
from lmpool.workers.execution.engine_thread import EngineThread
from lmpool.workers.membership.adapters import AdapterCache
from lmpool.workers.metrics.counters import SENT_AGAIN
from lmpool.workers.metrics.tracing import JobTrace, JobTraces
from lmpool.workers.queries import QueryAnswerer, allowed_in
from lmpool.workers.queue.consumer import STALE_S, InFlightJob, InFlightJobs
from lmpool.workers.queue.publisher import Publisher
from lmpool.workers.queue.segment import SegmentWriter
from lmpool.workers.trie.inputs import TrieInputs

_log = logging.getLogger("lmpool.worker")

MAX_CHECKED = 64
"""Prompts whose clients are looked up in one call: some 0.1 ms of the server's time."""

# Between two lines of the log about prompts that are not computed.
_TELL_EVERY_S = 60.0
# What rows in 16 bits tell beside log-probabilities.
_OF_LOGITS = ("logits", "logz")


class Dispatcher:
    """Takes jobs from the queue to the backend, and its results to the clients.

    Args:
        in_flight: the jobs that the worker holds.
        engine_thread: the backend.
        publisher: stores rows and ends jobs.
        trie_inputs: brings what trie jobs need.
        queries: answers queries about rows.
        info: what the worker serves.
        adapters: which adapters it has.
        segment: may have rows that are asked for again.
        traces: makes spans of jobs; None where they are not traced.

    Attributes:
        failures: jobs that ended without a row or an answer, not counting those that clients send again.
    """

    def __init__(
        self,
        in_flight: InFlightJobs,
        engine_thread: EngineThread,
        publisher: Publisher,
        trie_inputs: TrieInputs,
        queries: QueryAnswerer,
        info: ModelInfo,
        adapters: AdapterCache,
        segment: SegmentWriter,
        traces: JobTraces | None = None,
    ) -> None:
        self._in_flight = in_flight
        self._engine_thread = engine_thread
        self._publisher = publisher
        self._trie_inputs = trie_inputs
        self._queries = queries
        self._is_trie, self._is_lossy = info.is_trie, info.lossy
        self._adapters = adapters
        self._segment = segment
        self._traces = traces
        self._to_prepare: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self._untold, self._told_at = 0, -_TELL_EVERY_S
        self.failures = 0

    async def accept(self, jobs: Iterable[InFlightJob]) -> None:
        """Hold jobs and hand them on; end those that cannot be served. A prompt is computed once at a time."""
        fresh, refused, joined, has_queries = [], [], [], self._is_trie
        for job in jobs:
            backend_job = job.backend_job
            if backend_job is None:
                refused.append(job)
                continue
            has_queries = has_queries or job.query is not None or backend_job.positions is not None
            if self._in_flight.add(job, backend_job):
                fresh.append(backend_job)
            elif not backend_job.bulk:
                joined.append(backend_job.digest)
        if has_queries:
            later = {job.digest for job in fresh if self._needs_more(job)}
            if later:
                # Not here: what they need may have to be fetched, and the next jobs are not to wait for that.
                self._to_prepare.put_nowait(list(later))
                fresh = [job for job in fresh if job.digest not in later]
        known = []
        if self._segment.segment is not None:
            known = [block for job in fresh if (block := self._find(job, job.digest)) is not None]
        if known:
            digests = {digest for block in known for digest in block.digests}
            fresh = [job for job in fresh if job.digest not in digests]
        self._submit(fresh)
        if joined:
            self._engine_thread.promote(joined)
        if refused:
            await self._fail(refused)
            if self._traces is not None:
                self._traces.ended(_traces_of(refused))
        for block in known:
            await self._publish_rows(block)

    def _needs_more(self, job: BackendJob) -> bool:
        """Whether a prompt is to be prepared before the backend can have it, if it needs the backend at all."""
        if self._is_trie or not self._in_flight.wants_row(job.digest) or allowed_in(job):
            return True
        return self._segment.segment is not None and self._may_be_told_of_row(job)

    def _may_be_told_of_row(self, job: BackendJob) -> bool:
        """Whether what is wanted are logits behind the whole prompt, which a row in 16 bits has."""
        query = job.positions
        return query is not None and query.values in _OF_LOGITS and len(job.span) == 1 and not self._is_lossy

    def _find(self, job: BackendJob, row: bytes) -> RowBlock | None:
        """The row of a prompt that this worker has computed before, if it still has it and nobody finds it damaged.

        Args:
            job: what is asked.
            row: the row's digest.
        """
        block = self._segment.find(row)
        if block is None or row in self._in_flight.damaged:
            return None
        return None if any(held.overwrite for held in self._in_flight[job.digest].values()) else block

    async def prepare(self, on_change: Callable[[], None]) -> None:
        """Fetch what jobs need before the backend can have them, or answer them without it; never returns.

        Args:
            on_change: called when there is room again.
        """
        while True:
            digests = await self._to_prepare.get()
            if self._is_trie:
                self._submit(await self._with_inputs(digests))
            else:
                # Who wants the row itself may have joined since: then it is computed, and all are answered from it.
                asked = [digest for digest in digests if digest in self._in_flight]
                asked = [digest for digest in asked if not self._in_flight.wants_row(digest)]
                answered = await self._queries.answer_from_cache(self._in_flight.by_prompt(asked), self._in_flight)
                self.release(answered)
                left = (digest for digest in digests if digest not in answered and digest in self._in_flight)
                jobs, failures = await self._queries.with_tokens([self._in_flight.backend_job(at) for at in left])
                await self._fail_prompts(failures)
                jobs = await self._tell_of_rows(jobs)
                # Nobody may wait for one of them any more.
                self._submit([job for job in jobs if job.digest in self._in_flight])
            on_change()

    async def _tell_of_rows(self, jobs: Sequence[BackendJob]) -> list[BackendJob]:
        """Answer without the backend what rows tell that this worker has computed before; returns the other jobs."""
        rows = {}
        for job in jobs:
            if self._may_be_told_of_row(job) and job.digest in self._in_flight:
                block = self._find(job, digest_of(job.ids, job.adapter))
                if block is not None and block.encoding is not Encoding.F32:
                    rows[job.digest] = job, block
        if rows:
            answers = await asyncio.to_thread(_all_told, rows)
            if answers:
                await self._publish_answers(VectorBlock(list(answers), list(answers.values())))
            return [job for job in jobs if job.digest not in answers]
        return list(jobs)

    async def _with_inputs(self, digests: Iterable[bytes]) -> list[BackendJob]:
        """Trie jobs with all that they need; the others end, and begin anew if asked for again."""
        jobs = self._in_flight.by_prompt(digests)
        queries = {digest: next(iter(group.values())).query for digest, group in jobs.items()}
        wanted = {digest: query for digest, query in queries.items() if isinstance(query, TrieQuery)}
        inputs, failures = await self._publisher.retry(lambda: self._trie_inputs.fill(wanted))
        await self._fail_prompts(failures)
        # The backend may have broken meanwhile.
        held = (digest for digest in inputs if digest in self._in_flight)
        return [self._in_flight.backend_job(digest)._replace(payload=inputs[digest]) for digest in held]

    def _submit(self, jobs: Sequence[BackendJob]) -> None:
        """Hand jobs to the backend."""
        if any(job.adapter for job in jobs):
            jobs = self._adapters.loaded_among(jobs)
        if jobs:
            self._engine_thread.submit(jobs)

    def trace_step(self, finished: Finished) -> None:
        """Note when the step ran that has brought this, for the traces of its jobs."""
        held = [self._in_flight[digest].values() for digest in finished.digests if digest in self._in_flight]
        traces = [trace for jobs in held for trace, _ in _traces_of(jobs)]
        if traces and self._traces is not None and finished.step is not None:
            self._traces.stepped(traces, finished.step, len(held))

    async def publish(self, finished: Finished, worker_id: str) -> None:
        """Publish what a step brought."""
        # Before anything is awaited: a prompt that was given up may be there once more, computed, and end with its row.
        stale = [digest for digest in finished.stale if digest in self._in_flight]
        failures = {digest: self._adapters.failure_of(self._in_flight.backend_job(digest).adapter) for digest in stale}
        for block in finished.blocks:
            await self._publish_rows(block)
        if finished.answers is not None:
            await self._publish_answers(finished.answers)
        for digest, text in finished.failures.items():
            failures[digest] = Failure(WorkerError.__name__, f"{text} (worker {worker_id})")
        await self._fail_prompts(failures)

    async def _publish_answers(self, answers: VectorBlock) -> None:
        jobs = self._in_flight.by_prompt(answers.digests)
        overwrite = {digest for digest, group in jobs.items() if any(job.overwrite for job in group.values())}
        await self._publisher.publish(answers, jobs, overwrite)
        self.release(jobs)

    async def _publish_rows(self, block: RowBlock) -> None:
        """Store rows; answer from them the queries about them."""
        jobs = self._in_flight.by_prompt(block.digests)
        overwrite = self._in_flight.damaged & jobs.keys()
        for_rows: dict[bytes, dict[bytes, InFlightJob]] = {}
        with_queries: dict[bytes, dict[bytes, InFlightJob]] = {}
        for digest, group in jobs.items():
            for entry_id, job in group.items():
                if job.query is not None:
                    with_queries.setdefault(digest, {})[entry_id] = job
                elif job.overwrite:
                    overwrite.add(digest)
            asked = with_queries.get(digest)
            for_rows[digest] = group if asked is None else {id_: group[id_] for id_ in group.keys() - asked.keys()}
        await self._publisher.publish(block, for_rows, overwrite)
        if with_queries:
            await self._queries.answer(with_queries, block)
        self.release(jobs)

    async def _fail_prompts(self, failures: Mapping[bytes, Failure]) -> None:
        """End all jobs that ask for some prompts."""
        if failures:
            jobs = self._in_flight.by_prompt(failures)
            await self._fail(
                [job.failing(failures[digest]) for digest, group in jobs.items() for job in group.values()]
            )
            self.release(jobs)

    async def _fail(self, jobs: Sequence[InFlightJob]) -> None:
        # What a client sends again at once is no failure.
        self.failures += sum(job.failure is not None and job.failure.kind not in SENT_AGAIN for job in jobs)
        await self._publisher.fail(jobs)

    async def drop_unwanted(self) -> int:
        """Drop prompts that no client waits for any more, so that the backend does not compute them.

        Each call checks the prompts whose last check is the longest ago. A client that leaves has most often left many
        prompts: when one of these is dropped, all prompts are checked. Prompts that have just arrived are not checked,
        so a worker that answers within a second checks none.

        Returns:
            how many prompts were dropped.
        """
        now, in_flight = time.monotonic(), self._in_flight
        held = [digest for digest in self._engine_thread.outstanding if digest in in_flight]
        due = [digest for digest in held if now - min(job.since for job in in_flight[digest].values()) >= STALE_S]
        # A prompt counts from its arrival until its first check, so new prompts do not go before all others.
        first = nsmallest(
            MAX_CHECKED, due, key=lambda digest: max(job.checked_at or job.since for job in in_flight[digest].values())
        )
        dropped = await self._drop_unwanted_of(first, now) if first else 0
        if dropped and len(first) < len(held):
            dropped += await self._drop_unwanted_of(set(held).difference(first), now)
        self._tell_dropped(dropped)
        return dropped

    async def _drop_unwanted_of(self, digests: Iterable[bytes], now: float) -> int:
        """Drop those of some prompts that no client waits for; returns how many these are."""
        in_flight = self._in_flight
        jobs = in_flight.by_prompt(digests)
        for group in jobs.values():
            for job in group.values():
                job.checked_at = now
        wanted = await self._publisher.still_wanted(jobs)
        gone = []
        for digest, group in jobs.items():
            removed = group.keys() - wanted.get(digest, {}).keys()
            # A prompt that was answered during the check is about to be published.
            if removed and digest in self._engine_thread.outstanding and in_flight.remove(digest, removed):
                gone.append(digest)
        if gone:
            self._engine_thread.abort(gone)
        return len(gone)

    def _tell_dropped(self, count: int) -> None:
        """Log how many were let go of: at once, then seldom, for after a run that was stopped each look finds some."""
        self._untold += count
        now = time.monotonic()
        if self._untold and now - self._told_at >= _TELL_EVERY_S:
            _log.info("prompts that nobody waits for any more are not computed: %d of them", self._untold)
            self._untold, self._told_at = 0, now

    def release(self, ended: Mapping[bytes, Iterable[bytes]]) -> None:
        """Let go of jobs that have ended; a prompt that was asked for again meanwhile is computed again.

        Args:
            ended: digest of the prompt -> entry ids of the jobs.
        """
        if self._traces is not None:
            jobs = self._in_flight.by_prompt(ended)
            self._traces.ended(
                trace
                for digest, group in jobs.items()
                for trace in _traces_of(group[id_] for id_ in ended[digest] if id_ in group)
            )
        again = [self._in_flight.backend_job(digest) for digest in self._in_flight.release(ended)]
        # What they need may never have been fetched: their first try may have ended for that very reason.
        if later := [job.digest for job in again if self._is_trie or allowed_in(job)]:
            self._to_prepare.put_nowait(later)
        self._submit([job for job in again if job.digest not in later])


def _traces_of(jobs: Iterable[InFlightJob]) -> Iterator[tuple[JobTrace, str]]:
    """The traces of those jobs that have one, and what the jobs failed with, or ""."""
    for job in jobs:
        if job.trace is not None:
            yield job.trace, "" if job.failure is None else job.failure.kind


def _all_told(rows: Mapping[bytes, tuple[BackendJob, RowBlock]]) -> dict[bytes, NDArray[np.float32]]:
    """What is wanted of the logits behind some prompts; without those where it raises, which the backend answers."""
    answers = {}
    for digest, (job, block) in rows.items():
        try:
            answers[digest] = _told(job, block)
        except QUERY_ERRORS as error:
            failure_of(error)
    return answers


def _told(job: BackendJob, block: RowBlock) -> NDArray[np.float32]:
    """What is wanted of the logits behind a prompt, from its row."""
    assert job.positions is not None
    assert block.log_z is not None
    return job.positions.of(block.logits(0)[None], block.log_z, np.empty(0, np.uint32)).ravel()
