"""Takes jobs for a worker, hands prompts to the backend, publishes results, and drops prompts that no client wants."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from heapq import nsmallest

import numpy as np
from numpy.typing import NDArray
from redis.exceptions import RedisError

from lmpool.aio import end_tasks
from lmpool.broker.connection import reply_timeout
from lmpool.errors import LMPoolError, WorkerError
from lmpool.protocol.job import Failure, digest_of
from lmpool.protocol.query import TrieQuery
from lmpool.protocol.row import RowBlock, VectorBlock
from lmpool.rows.datagram import MAX_ROWS
from lmpool.workers.execution.contract import Finished
from lmpool.workers.execution.engine_thread import EngineThread, StepResult
from lmpool.workers.execution.in_flight import InFlight, InFlightPrompt, StreamEntry, entry_ids
from lmpool.workers.membership.adapters import AdapterCache
from lmpool.workers.metrics.counters import SENT_AGAIN
from lmpool.workers.metrics.tracing import JobTraces
from lmpool.workers.queries import QueryAnswerer, allowed_in, logits_from_rows
from lmpool.workers.queue.consumer import Consumer
from lmpool.workers.queue.jobs import STALE_S, Taken
from lmpool.workers.queue.leases import Leases

_log = logging.getLogger("lmpool.worker")

MAX_CHECKED = 64
"""Max prompts per call of the server that checks whether clients still wait; a call takes the server about 0.1 ms."""

_LOG_DROPPED_INTERVAL_S = 60.0  # Seconds between two log lines about dropped prompts.
_SMALL_BYTES = 64 * 1024  # Max bytes of a step's results that are published together with results of other steps.
_MAX_JOINED_STEPS = 8  # Max steps whose results are published together: few, as the first result must not wait long.
_MAX_BLOCK_MS = 10_000  # Max ms that a read for jobs blocks; then the worker polls, as the server may lose wake-ups.
# Max seconds of a short step. It ends before the next call of the server, so one call takes several batches.
_SHORT_STEP_S = 0.001
_MAX_TAKEN_BYTES = 32 * 1024 * 1024  # Max bytes of the prompts that a call takes: far below a connection's limit.
_MAX_UNPUBLISHED_BATCHES = 4  # Max batches of prompts that a worker holds before their results are published.
# Max part of a lease for which a worker takes no new prompts, to become empty for a prompt that must run alone. The
# worker tries again a third of a lease later, so the worker takes new prompts for at least half of the time.
_DRAIN_SHARE = 1 / 3


class Lifecycle:
    """State of a worker: running, stopping or broken. Each change of the state wakes the worker's tasks.

    Attributes:
        stopping: set when the worker must take no more jobs, and finish the prompts that it holds.
        broken: why the backend cannot be used any more, or None.
    """

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self.broken: BaseException | None = None
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """Have the worker take no more jobs, and finish the prompts that it holds."""
        self.stopping.set()
        self.notify()

    def notify(self) -> None:
        """Wake all tasks that wait for a change of the worker's state."""
        self._changed.set()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, or the backend is broken."""
        while self.broken is None and not condition():
            await self.wait_for_change()

    async def wait_for_change(self) -> None:
        """Wait for the next change of the worker's state."""
        self._changed.clear()
        await self._changed.wait()


class ResultQueue:
    """Queue of step results to publish: large results one by one, small results of several steps together.

    Args:
        lifecycle: is notified of each result, because each result frees capacity of the backend.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._large: asyncio.Queue[StepResult] = asyncio.Queue()
        self._small: asyncio.Queue[StepResult] = asyncio.Queue()

    def put(self, result: StepResult) -> None:
        """Add the result of a step."""
        # A step that has only failures counts as large, so that its failures do not wait for rows of other steps.
        (self._small if 0 < result.nbytes <= _SMALL_BYTES else self._large).put_nowait(result)
        self._lifecycle.notify()

    async def run(self, publish: Callable[[Sequence[StepResult]], Awaitable[None]], *, small: bool) -> None:
        """Publish results; never returns.

        A call of the server costs as much as dozens of small results. So one task publishes all small results: each
        call publishes the small results that are ready, of at most `_MAX_JOINED_STEPS` steps.
        """
        queue, max_steps = (self._small, _MAX_JOINED_STEPS) if small else (self._large, 1)
        while True:
            results = [await queue.get()]
            while len(results) < max_steps and not queue.empty():
                results.append(queue.get_nowait())
            await publish(results)
            for _ in results:
                queue.task_done()
            self._lifecycle.notify()

    def take_all(self) -> list[InFlightPrompt]:
        """Take all results that are not published yet; returns their prompts whose answers have memory."""
        results = [queue.get_nowait() for queue in (self._large, self._small) for _ in range(queue.qsize())]
        return [prompt for result in results for prompt in result.ended]

    async def join(self) -> None:
        """Wait until all results are published."""
        await self._large.join()
        await self._small.join()


class FetchLoop:
    """Takes jobs while the backend has capacity: new jobs, and jobs of workers whose leases expired."""

    def __init__(self, dispatcher: Dispatcher, consumer: Consumer, leases: Leases) -> None:
        self.dispatcher, self.consumer, self.leases = dispatcher, consumer, leases
        self.lifecycle, self.in_flight = dispatcher.lifecycle, dispatcher.in_flight
        self.engine_thread, info = dispatcher.engine_thread, dispatcher.info
        self._claim_wait_s = _DRAIN_SHARE * info.lease_s
        # Max bytes of a job. Trie jobs have no useful limit, because their inputs are larger than their prompts.
        self._max_job_bytes = float("inf") if info.is_trie else 4 * info.max_prompt_tokens
        # Locked from the read of jobs until they are in `in_flight`: the worker renews leases only of jobs in flight.
        self._taking = asyncio.Lock()
        self._pausing = 0  # Number of callers of `paused` that wait for the lock.
        # Ms for which a read for jobs blocks. The reply must come before the connection counts as broken.
        self._block_ms = int(min(_MAX_BLOCK_MS, 1000 * reply_timeout(info.lease_s) * 2 / 3))
        self._check_at = -math.inf  # Loop time at which the worker checks for jobs, if it is idle.

    async def fetch(self) -> None:
        """Take jobs until the worker stops: a batch for an idle backend, the next batch while the backend computes."""
        lifecycle = self.lifecycle
        while not lifecycle.stopping.is_set():
            await lifecycle.wait_for(lambda: lifecycle.stopping.is_set() or self._capacity_for_new() > 0)
            await self.dispatcher.publisher.retry(self._take)

    async def _take(self) -> None:
        """Take new jobs."""
        async with self._taking:
            # Check the capacity again: a prompt that must run alone may have begun while this task waited for the lock.
            is_wanted = not self.lifecycle.stopping.is_set() and not self._pausing
            if not is_wanted or (capacity := self._capacity_for_new()) <= 0:
                return
            taken = await self.consumer.take(self._count_to_take(capacity), self._block_ms)
            if (delay_ms := self.consumer.woken_ms) is not None or not taken:
                self._check_in((delay_ms or 0) / 1000)
            await self.dispatcher.accept(taken)

    async def find_work_when_idle(self) -> None:
        """Whenever the worker is idle, check for jobs in the backlog and in other lanes, until the worker stops.

        The worker checks when it is woken, and when the end of its jobs has left more jobs in the lanes than a batch.
        """
        lifecycle, publisher, batch = self.lifecycle, self.dispatcher.publisher, self.engine_thread.batch
        time_of = asyncio.get_running_loop().time

        def must_check() -> bool:
            is_due = time_of() >= self._check_at or publisher.jobs_in_lanes > batch
            return lifecycle.stopping.is_set() or (is_due and not self.in_flight)

        while True:
            await lifecycle.wait_for(must_check)
            if lifecycle.stopping.is_set():
                return
            self._check_at, publisher.jobs_in_lanes = math.inf, 0
            delay_s = await publisher.retry(lambda: self.consumer.find_work(batch, self.engine_thread.step_s))
            if delay_s < math.inf:
                self._check_in(delay_s)

    def _check_in(self, delay_s: float) -> None:
        """Have the worker check for jobs after a delay, if it is idle then."""
        loop = asyncio.get_running_loop()
        self._check_at = min(self._check_at, loop.time() + delay_s)
        loop.call_later(delay_s, self.lifecycle.notify)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Take no new jobs during the block; end a read that waits for jobs."""
        self._pausing += 1  # No other read begins while this task waits for the lock.
        ending = asyncio.create_task(self.consumer.end_read())
        try:
            await self._taking.acquire()
        except asyncio.CancelledError:
            await end_tasks([ending])
            raise
        finally:
            self._pausing -= 1
        try:
            await ending
            yield
        finally:
            self._taking.release()

    @property
    def is_idle(self) -> bool:
        """Whether the worker holds no job, and no stop is requested."""
        return not self.in_flight and not self.lifecycle.stopping.is_set()

    def check_now(self) -> None:
        """Have the worker check for jobs in the backlog and in other lanes now, if it is idle."""
        self._check_in(0)

    async def claim(self) -> None:
        """Claim jobs of other workers whose leases expired, up to the capacity.

        Raises:
            RedisError, OSError, LMPoolError: the server cannot be used.
        """
        lifecycle = self.lifecycle
        async with self.paused():
            alone, claims = False, 0
            while True:
                # A busy worker claims as soon as it has capacity: jobs of crashed workers go before new jobs.
                is_free = alone or await self._wait_until(lambda: lifecycle.stopping.is_set() or self._capacity() > 0)
                if not is_free or lifecycle.stopping.is_set():
                    break
                count = max(1, min(self._capacity(), self.engine_thread.batch))
                try:
                    taken, alone, others = await self.leases.claim(count, entry_ids(self.in_flight))
                except (RedisError, OSError, LMPoolError):
                    self.consumer.failed_at = time.monotonic()
                    raise
                if not taken and not alone and claims >= others:
                    break
                claims += 1
                await self.dispatcher.accept(taken)
                if alone and taken:
                    # The prompt may have crashed other workers, so it runs alone in this worker.
                    await lifecycle.wait_for(lambda: not self.in_flight)
                elif alone and not await self._wait_until(lambda: not self.in_flight):
                    # Do not take the prompt: another worker may become empty sooner, or a later claim takes the prompt.
                    break
        if alone:  # Take new prompts for as long as the drain took, even if this worker gets the turn to claim again.
            await asyncio.sleep(self._claim_wait_s)

    async def _wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait until a condition holds, for at most `_DRAIN_SHARE` of a lease; return whether it holds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._claim_wait_s):
                await self.lifecycle.wait_for(condition)
                return True
        return False

    def _capacity(self) -> int:
        """Number of prompts that the worker may take now."""
        return min(self.engine_thread.capacity, self._unpublished_capacity())

    def _count_to_take(self, capacity: int) -> int:
        """Max prompts to take in one call: a batch, or with very short steps several batches, up to the capacity."""
        batch = self.engine_thread.batch
        is_short = self.engine_thread.step_s < _SHORT_STEP_S and capacity * self._max_job_bytes <= _MAX_TAKEN_BYTES
        return capacity // batch * batch if is_short and capacity > batch else min(capacity, batch)

    def _capacity_for_new(self) -> int:
        # Take only whole batches: the result of a partial batch would free capacity for only a partial batch again.
        return self._capacity() if self._unpublished_capacity() >= self.engine_thread.batch else 0

    def _unpublished_capacity(self) -> int:
        # Do not count prompts that yield to rows: hundreds of steps may pass until these prompts are published.
        unpublished = len(self.in_flight) - self.engine_thread.yielding
        return _MAX_UNPUBLISHED_BATCHES * self.engine_thread.batch - unpublished


@dataclass(eq=False)
class Dispatcher:
    """Hands prompts to the backend, and the backend's results to the publisher.

    Attributes:
        failures: number of entries that ended without a result, except entries that clients send again.
    """

    lifecycle: Lifecycle
    in_flight: InFlight
    engine_thread: EngineThread
    queries: QueryAnswerer
    adapters: AdapterCache
    traces: JobTraces | None = None

    def __post_init__(self) -> None:
        self.publisher, self.info = self.queries.publisher, self.queries.info
        self.segment, self._is_trie = self.publisher.segment, self.info.is_trie
        self._to_prepare: asyncio.Queue[list[InFlightPrompt]] = asyncio.Queue()
        self._dropped, self._logged_at = 0, -_LOG_DROPPED_INTERVAL_S
        self.failures = 0

    # Methods that pass prompts from the queue to the backend

    async def accept(self, taken: Taken) -> None:
        """Send new prompts to the backend, add entries to prompts in flight, and fail refused entries."""
        fresh, later, joined = list[InFlightPrompt](), list[InFlightPrompt](), list[InFlightPrompt]()
        for prompt in taken.prompts:
            held = self.in_flight.get(prompt.digest)
            if held is not None:
                held.entries.update(prompt.entries)
                if not prompt.bulk:
                    joined.append(held)
                continue
            self.in_flight[prompt.digest] = prompt
            (later if self._must_prepare(prompt) else fresh).append(prompt)
        if later:
            # Let another task prepare these prompts: fetching inputs takes time, and the next jobs must not wait.
            self._to_prepare.put_nowait(later)
        cached: dict[InFlightPrompt, RowBlock] = {}
        if self.segment.segment is not None:
            cached = {prompt: block for prompt in fresh if (block := self._find_row(prompt, prompt.digest)) is not None}
            fresh = [prompt for prompt in fresh if prompt not in cached]
        self._submit(fresh)
        if joined:
            self.engine_thread.promote(joined)
        if taken.refused:
            await self._fail(taken.refused)
            self._trace_ended(taken.refused)
        for prompt, block in cached.items():
            await self._publish_rows(block, {prompt.digest: prompt})

    def _must_prepare(self, prompt: InFlightPrompt) -> bool:
        """Whether the inputs of a prompt must be fetched first, or the prompt may be answered without the backend."""
        asks_less = any(entry.query is not None for entry in prompt.entries.values())
        return self._is_trie or asks_less or bool(allowed_in(prompt)) or self._may_be_in_row(prompt)

    def _may_be_in_row(self, prompt: InFlightPrompt) -> bool:
        """Whether the query is about the prompt's last position only, whose logits a row in shared memory may have."""
        query = prompt.positions
        if query is None or query.values == "hidden" or query.is_of_next_token or self.segment.segment is None:
            return False
        length = len(prompt.ids) // 4
        return prompt.span == range(length - 1, length) and not self.info.lossy

    def _find_row(self, prompt: InFlightPrompt, digest: bytes) -> RowBlock | None:
        """The row `digest`, if this worker has computed the row, still holds it, and no client found it damaged."""
        block = self.segment.find(digest)
        is_damaged = prompt.is_damaged or any(entry.overwrite for entry in prompt.entries.values())
        return None if block is None or is_damaged else block

    def _holds(self, prompt: InFlightPrompt) -> bool:
        return self.in_flight.get(prompt.digest) is prompt

    def _held_entries(self, prompts: Iterable[InFlightPrompt]) -> dict[InFlightPrompt, list[StreamEntry]]:
        """The prompts that the worker still holds, each with its present entries; more entries may be added later."""
        return {prompt: list(prompt.entries.values()) for prompt in prompts if self._holds(prompt)}

    def _submit(self, prompts: Sequence[InFlightPrompt]) -> None:
        """Hand prompts to the backend."""
        if any(prompt.adapter for prompt in prompts):
            prompts = self.adapters.loaded_among(prompts)
        if prompts:
            self.engine_thread.submit(prompts)

    async def prepare(self) -> None:
        """Fetch the inputs of prompts for the backend, or answer prompts without the backend; never returns."""
        while True:
            prompts = await self._to_prepare.get()
            await (self._prepare_tries(prompts) if self._is_trie else self._prepare_queries(prompts))
            self.lifecycle.notify()  # Answered prompts free capacity.

    async def _prepare_tries(self, prompts: Sequence[InFlightPrompt]) -> None:
        """Fetch the inputs of trie jobs and submit them; jobs whose inputs are missing fail."""
        held = [prompt for prompt in prompts if self._holds(prompt)]
        queries = {prompt.digest: next(iter(prompt.entries.values())).query for prompt in held}
        wanted = {digest: query for digest, query in queries.items() if isinstance(query, TrieQuery)}
        inputs, failures = await self.publisher.retry(lambda: self.queries.trie_inputs.fill(wanted))
        await self._fail_prompts({prompt: failures[prompt.digest] for prompt in held if prompt.digest in failures})
        ready = [prompt for prompt in held if prompt.digest in inputs and self._holds(prompt)]
        for prompt in ready:
            prompt.payload = inputs[prompt.digest]
        self._submit(ready)

    async def _prepare_queries(self, prompts: Sequence[InFlightPrompt]) -> None:
        """Answer queries without the backend where that is possible, and submit the other prompts."""
        held = [prompt for prompt in prompts if self._holds(prompt)]
        in_segment = await self._answer_from_rows(held)
        prompts = [prompt for prompt in held if prompt not in in_segment]
        # If a client requests the row of the prompt too, the backend computes the row, which then answers all queries.
        queried = [prompt for prompt in prompts if self._holds(prompt) and not prompt.wants_row]
        answered = await self.queries.answer_from_cache(queried)
        self.release(answered)
        left = [prompt for prompt in prompts if prompt not in answered and self._holds(prompt)]
        failures = await self.queries.set_tokens(left)
        await self._fail_prompts(failures)
        left = [prompt for prompt in left if prompt not in failures and self._holds(prompt)]
        in_rows = await self._answer_from_segment(left)
        self._submit([prompt for prompt in left if prompt not in in_rows and self._holds(prompt)])

    async def _answer_from_rows(self, prompts: Sequence[InFlightPrompt]) -> Collection[InFlightPrompt]:
        """Answer the requests for prompts whose rows this worker's shared memory holds; return these prompts."""
        found = {prompt: block for prompt in prompts if (block := self._find_row(prompt, prompt.digest)) is not None}
        # Divide the prompts before the first await: a request for the row may join a query while a row is published.
        ended = self._held_entries(prompt for prompt in found if not prompt.wants_row)
        for prompt in [prompt for prompt in found if prompt.wants_row]:
            await self._publish_rows(found[prompt], {prompt.digest: prompt})
        if ended:
            entries = {prompt.digest: waiting for prompt, waiting in ended.items()}
            await self.queries.answer(entries, [found[prompt] for prompt in ended])
            self.release(ended)
        return found

    async def _answer_from_segment(self, prompts: Sequence[InFlightPrompt]) -> Collection[InFlightPrompt]:
        """Answer queries for logits from 16-bit rows in shared memory; return the answered prompts."""
        wanted = [prompt for prompt in prompts if self._may_be_in_row(prompt)]
        found = {prompt: self._find_row(prompt, digest_of(prompt.ids, prompt.adapter)) for prompt in wanted}
        rows = {prompt: block for prompt, block in found.items() if block is not None and block.log_z is not None}
        answers = await asyncio.to_thread(logits_from_rows, rows) if rows else {}
        if answers:
            vectors = VectorBlock([prompt.digest for prompt in answers], list(answers.values()))
            await self._publish_answers(vectors, {prompt.digest: prompt for prompt in answers})
        return answers

    # Methods that pass results from the backend to the clients

    async def publish(self, results: Sequence[StepResult]) -> None:
        """Publish the results of some steps together."""
        for result in results:
            if self.traces is not None and result.step is not None:
                entries = [entry for prompt in result.prompts for entry in prompt.entries.values()]
                if traces := [entry.trace for entry in entries if entry.trace is not None]:
                    self.traces.stepped(traces, result.step, len(result.prompts))
        finished = _joined(results)
        # Skip results of aborted prompts. A prompt that is requested again after an abort is a new object.
        prompts = {prompt.digest: prompt for result in results for prompt in result.prompts if self._holds(prompt)}
        stale = [prompt for result in results for prompt in result.stale if self._holds(prompt)]
        failures = {prompt: self.adapters.failure_of(prompt.adapter) for prompt in stale}
        for block in finished.blocks:
            await self._publish_rows(block, prompts)
        if finished.answers is not None:
            await self._publish_answers(finished.answers, prompts)
        for digest, text in finished.failures.items():
            if digest in prompts:
                text = f"{text} (worker {self.adapters.worker_id})"
                failures[prompts[digest]] = Failure(WorkerError.__name__, text)
        if failures:
            await self._fail_prompts(failures)
        for result in results:
            self.engine_thread.published(result.ended)

    def notify_early(self, result: StepResult) -> None:
        """Notify clients on this host of the results of a step; the backend's thread calls this method."""
        if len(result.prompts) > MAX_ROWS:
            return
        entries = {prompt.digest: list(prompt.entries.values()) for prompt in result.prompts if not prompt.is_damaged}
        if any(entry.overwrite for waiting in entries.values() for entry in waiting):
            return
        for block in (*result.finished.blocks, result.finished.answers):
            if block is not None:
                self.publisher.notify_early(block, entries)

    async def _publish_rows(self, block: RowBlock, prompts: Mapping[bytes, InFlightPrompt]) -> None:
        """Store the rows that clients request, and answer queries from rows; `prompts`: digest -> prompt."""
        ended: dict[InFlightPrompt, list[StreamEntry]] = {}
        for_rows: dict[bytes, list[StreamEntry]] = {}
        for_queries: dict[bytes, list[StreamEntry]] = {}
        overwrite: set[bytes] = set()
        for digest in block.digests:
            if (prompt := prompts.get(digest)) is None or self.in_flight.get(digest) is not prompt:
                continue
            entries = ended[prompt] = list(prompt.entries.values())
            if queries := [entry for entry in entries if entry.query is not None]:
                for_queries[digest] = queries
                entries = [entry for entry in entries if entry.query is None]
            for_rows[digest] = entries
            if prompt.is_damaged or any(entry.overwrite for entry in entries):
                overwrite.add(digest)
        publishing = self.publisher.publish(block, for_rows, overwrite)
        if for_queries:
            # Publish answers concurrently: they do not depend on the stored rows.
            await asyncio.gather(publishing, self.queries.answer(for_queries, [block]))
        else:
            await publishing
        self.release(ended)

    async def _publish_answers(self, answers: VectorBlock, prompts: Mapping[bytes, InFlightPrompt]) -> None:
        ended = self._held_entries(prompts[digest] for digest in answers.digests if digest in prompts)
        entries = {prompt.digest: waiting for prompt, waiting in ended.items()}
        overwrite = {digest for digest, waiting in entries.items() if any(entry.overwrite for entry in waiting)}
        await self.publisher.publish(answers, entries, overwrite)
        self.release(ended)

    async def _fail_prompts(self, failures: Mapping[InFlightPrompt, Failure]) -> None:
        """End all entries of prompts, with a failure for each prompt."""
        if ended := self._held_entries(failures):
            await self._fail([entry.failing(failures[prompt]) for prompt, group in ended.items() for entry in group])
            self.release(ended)

    async def _fail(self, entries: Sequence[StreamEntry]) -> None:
        self.failures += sum(entry.failure is not None and entry.failure.kind not in SENT_AGAIN for entry in entries)
        await self.publisher.fail(entries)

    def release(self, ended: Mapping[InFlightPrompt, Sequence[StreamEntry]]) -> None:
        """Forget answered stream entries of prompts. If other entries have joined a prompt, submit the prompt again."""
        if self.traces is not None:
            self._trace_ended(entry for entries in ended.values() for entry in entries)
        again = [each for each, entries in ended.items() if self._holds(each) and not self._remove(each, entries)]
        if again:
            self.engine_thread.published(again)
            for prompt in again:
                prompt.restart()
            # Prepare these prompts again: the row may be in shared memory now, and inputs may not have been fetched.
            found = {prompt for prompt in again if self._find_row(prompt, prompt.digest) is not None}
            if later := [prompt for prompt in again if prompt in found or self._must_prepare(prompt)]:
                self._to_prepare.put_nowait(later)
            self._submit([prompt for prompt in again if prompt not in later])

    def _remove(self, prompt: InFlightPrompt, entries: Iterable[StreamEntry]) -> bool:
        """Remove entries of a prompt, and the prompt if no entry is left; return whether the prompt was removed."""
        for entry in entries:
            prompt.entries.pop(entry.id, None)
        if prompt.entries:
            return False
        del self.in_flight[prompt.digest]
        return True

    # Methods that drop prompts that no client waits for

    async def drop_unwanted(self) -> int:
        """Drop prompts that no client waits for any more, so that the backend does not compute them.

        Each call checks the prompts whose last check is the longest ago. Usually a client that disconnects has many
        jobs, so after a drop the call checks all prompts. Prompts younger than a second start no check, so a worker
        that answers within a second checks no prompts.

        Returns:
            the number of dropped prompts.
        """
        now = time.monotonic()
        held = [prompt for prompt in self.in_flight.values() if prompt.is_owed]
        due = [prompt for prompt in held if now - min(entry.since for entry in prompt.entries.values()) >= STALE_S]
        # If a prompt was never checked, sort it by its arrival, so that old prompts are checked before new prompts.
        first = nsmallest(
            MAX_CHECKED, due, lambda prompt: max(entry.checked_at or entry.since for entry in prompt.entries.values())
        )
        dropped = await self._drop_unwanted_of(first, now) if first else 0
        if dropped:
            dropped += await self._drop_unwanted_of(set(held).difference(first), now)
            self.lifecycle.notify()
        # Log the first drop at once, then one sum a minute: after a client has stopped, each check drops some prompts.
        self._dropped += dropped
        if self._dropped and now - self._logged_at >= _LOG_DROPPED_INTERVAL_S:
            _log.info("dropped %d prompts that no client waits for any more", self._dropped)
            self._dropped, self._logged_at = 0, now
        return dropped

    async def _drop_unwanted_of(self, prompts: Iterable[InFlightPrompt], now: float) -> int:
        """Drop the prompts that no client waits for; return their number."""
        checked = self._held_entries(prompts)
        for entries in checked.values():
            for entry in entries:
                entry.checked_at = now
        wanted = await self.publisher.still_wanted({prompt.digest: entries for prompt, entries in checked.items()})
        dropped = []
        for prompt, entries in checked.items():
            kept = {entry.id for entry in wanted.get(prompt.digest, ())}
            removed = [entry for entry in entries if entry.id not in kept]
            # Do not drop a prompt that was answered during the check: its result is about to be published.
            if removed and prompt.is_owed and self._holds(prompt) and self._remove(prompt, removed):
                dropped.append(prompt)
        if dropped:
            self.engine_thread.abort(dropped)
        return len(dropped)

    def _trace_ended(self, entries: Iterable[StreamEntry]) -> None:
        if self.traces is not None:
            self.traces.ended(entries)


def _joined(results: Sequence[StepResult]) -> Finished:
    """Join the results of several steps; rows and vectors are copied."""
    if len(results) == 1:
        return results[0].finished
    finished = [result.finished for result in results]
    blocks = [block for step in finished for block in step.blocks]
    digests = [digest for block in blocks for digest in block.digests]
    is_alike = len({(block.encoding, block.numbers.shape[1]) for block in blocks}) == 1
    # Keep the blocks separate if a prompt has two rows: it was aborted, submitted again, and computed twice.
    if len(blocks) > 1 and is_alike and len(set(digests)) == len(digests):
        blocks = [RowBlock.joined(blocks)]
    vectors: dict[bytes, NDArray[np.float32]] = {}
    failures: dict[bytes, str] = {}
    for step in finished:
        failures |= step.failures
        if step.answers is not None:
            vectors.update(zip(step.answers.digests, step.answers.vectors, strict=True))
    return Finished(blocks, failures, VectorBlock(list(vectors), list(vectors.values())) if vectors else None)
