"""The session of a producer in one event loop: requests rows, watches the model and the workers, and closes."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from redis.exceptions import RedisError

from lmpool.aio import silence_limit
from lmpool.broker.connection import reply_timeout
from lmpool.broker.server import Server
from lmpool.errors import DeadlineExceeded, LMPoolError, ProducerClosed, QueueFull, UnknownModel
from lmpool.producer.client.adapters import Adapters
from lmpool.producer.client.connections import CLOSED, TROUBLE, Connections
from lmpool.producer.client.discovery import Discovery, Liveness, Vocabularies, WorkerInfo
from lmpool.producer.client.receive import EntryReader, FoundEntries, Receiver, WantedEntries
from lmpool.producer.client.requests import (
    ALONE_S,
    ENDLESS_S,
    BatchWaiter,
    Deadline,
    DeadlineTimers,
    PendingRequest,
    PendingRequests,
    RowLRU,
    SingleWaiter,
    Stage,
    Tasks,
    Waiter,
)
from lmpool.producer.client.submit import CacheClient, Submitter
from lmpool.producer.metrics import Counters, Traces
from lmpool.protocol.job import Prompt, encode_prompt
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import SentWeights
from lmpool.protocol.row import Row
from lmpool.rows.shared_memory import RowMemory

WhenFull = Literal["wait", "raise"]
"""Whether requests wait while the queue is full, or fail."""
WhenAbsent = Literal["wait", "raise"]
"""Whether opening and requests wait while no worker serves the model, or fail."""
Priority = Literal["interactive", "bulk"]
"""Whether a client's queued prompts share the workers' time, or come after those of interactive clients."""

_log = logging.getLogger("lmpool.producer")

# Tasks that fetch announced rows: one fetches while the other waits for the server.
_COLLECTORS = 2
# Seconds between two checks of the model, its workers, and requests without a reply.
_WATCH_S = 1.0
# Max requests checked per interval, so that a check does not occupy the server.
_MAX_RECHECKED = 2000
# Max seconds for the commands that remove this client from the server when the session closes.
_GOODBYE_S = 1.0
# Max workers per interval whose presence is checked, chosen at random.
_MAX_WORKERS_CHECKED = 32
# Rows read from shared memory between two ticks of the event loop.
_ROWS_PER_TICK = 8
# Max single lookups in shared memory per event-loop tick, so that other tasks get their turn.
_MAX_LOOKUPS_PER_TICK = 4


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """The options of `Producer` that its sessions use."""

    when_full: WhenFull = "wait"
    when_absent: WhenAbsent = "raise"
    priority: Priority = "interactive"
    keep_answers: bool = True


class Session:
    """Requests rows from one model's workers, in one event loop.

    Attributes:
        loop: the event loop.
        info: the model info that was read last; set by `open`. A plain attribute, because every request reads it.
        closed: whether the session has ended.
        vocabularies: the vocabularies, tokenizers and token sets of the pool.
        adapters: the adapters of the model.
        fetching_head: held while one caller fetches the model's head, which can take a gigabyte.
    """

    info: ModelInfo

    def __init__(
        self,
        server: Server,
        keys: Keys,
        cache: RowLRU,
        counters: Counters,
        options: SessionOptions,
        traces: Traces | None = None,
    ) -> None:
        self._tasks = tasks = Tasks()
        self.loop = tasks.loop
        self.closed = False
        self._options = options
        self._traces = traces
        self._cache = cache
        self._stats = counters.stats
        self._counters = counters
        self._connections = connections = Connections(server, keys, is_bulk=options.priority == "bulk")
        connections.segments.counts = counters.shared
        self._requests = requests = PendingRequests(cache, counters)
        self._pool_cache = CacheClient(connections, requests, tasks)
        waits = options.when_full == "wait"
        self._submitter = Submitter(
            connections, requests, self._pool_cache, tasks, waits_when_full=waits, traces=traces
        )
        self._receiver = Receiver(connections, requests, tasks, self._submitter, self._follow_model)
        self._entries = EntryReader(connections, tasks)
        self._deadlines = DeadlineTimers(self.loop, self._on_deadline)
        self._discovery = Discovery(connections.redis, keys)
        self._liveness = Liveness(connections, self._discovery)
        self.vocabularies = Vocabularies(connections, keys)
        self.adapters = Adapters(connections)
        self.fetching_head = asyncio.Lock()
        self._supervisor: asyncio.Task[None] | None = None
        self._is_following = self._has_logged_absence = False
        self._alone_since: float | None = None
        self._batch_memory = RowMemory()
        self._lookups_left = _MAX_LOOKUPS_PER_TICK
        self._next_recheck = 0

    # Opening and closing

    async def open(self, model: str | None) -> None:
        """Connect and read the model info. After a failure the caller may try again.

        Raises:
            ServerError: the server cannot be used.
            UnknownModel, AmbiguousModel: the model is not served, or `model` is None and several models are.
        """
        try:
            info = await self._find_info(model)
            await self._liveness.start(info.name)
            self._submitter.homes.has_choice = self._liveness.count > 1
        except LMPoolError:
            raise
        except (RedisError, OSError) as error:
            raise self.explain(error) from error
        self._adopt(info)
        self._supervisor = self.loop.create_task(self._supervise(), name="lmpool-producer")
        # Start the task now: a task that is cancelled before its first step does not run its `finally`.
        await asyncio.sleep(0)
        await self._connections.scan_segments()

    async def _find_info(self, model: str | None) -> ModelInfo:
        try:
            return await self._discovery.info(model)
        except UnknownModel as error:
            if not error.is_loading:
                # A server that refuses writes has also refused the worker's info. Then that is the error.
                await self._connections.check_writes(model or "")
            if model and self._options.when_absent == "wait":
                await self._discovery.want(model)
            raise

    async def _supervise(self) -> None:
        """Run the background tasks until cancelled, by `close` or by the end of `asyncio.run`."""
        parts = [self._receiver.read(), self._watch(), self._connections.follow_segments()]
        parts += [self._receiver.collect() for _ in range(_COLLECTORS)]
        try:
            await asyncio.gather(*map(self._tasks.spawn, parts))
        except asyncio.CancelledError:
            raise
        except BaseException:
            _log.exception("a background task failed; closing the connection to the pool")
            raise
        finally:
            self._end()
            # If the loop was closed without cancelling its tasks, nothing can run any more.
            if not self.loop.is_closed():
                await self._shut_down()

    def _end(self) -> None:
        self.closed = self._connections.closed = True

    async def _shut_down(self) -> None:
        await self._tasks.cancel()
        try:
            async with asyncio.timeout(_GOODBYE_S):
                await self._submitter.cancel_all()
                await self._connections.redis.unlink(self._connections.model.reply)
        except (*TROUBLE, TimeoutError):
            pass  # The keys expire.
        for request in self._requests:
            self._requests.resolve(request, ProducerClosed(CLOSED))
        await self._connections.close()

    async def close(self) -> None:
        """End all requests, remove this client from the server, and close the connections."""
        if self._supervisor is None:
            self._end()
            await self._connections.close()
        elif not self.closed:
            self.close_soon()
            await asyncio.wait([self._supervisor])

    def close_soon(self) -> None:
        """Close an open session without waiting."""
        if self._supervisor is not None:
            self._supervisor.cancel()

    # Requests

    def encode(self, ids: Any, adapter: str = "") -> Prompt:
        """Check a prompt against the model's limits and encode it; `adapter` is "name@digest" or ""."""
        info = self.info
        return encode_prompt(ids, vocab_size=info.vocab_size, max_tokens=info.max_prompt_tokens, adapter=adapter)

    def cached(self, prompt: Prompt) -> Row | None:
        """Return a prompt's row from the producer's own memory or from shared memory, and count the request.

        Shared memory is checked at most four times per event-loop tick, and never while requests are pending: the
        prompt would overtake them. The submitter checks shared memory for these prompts.
        """
        row = self._cache.get(prompt.digest)
        if row is not None:
            stats = self._stats
            stats.requests += 1
            stats.local_hits += 1
        elif self._lookups_left and not len(self._requests) and self._connections.segments.has_any:
            if self._lookups_left == _MAX_LOOKUPS_PER_TICK:
                self.loop.call_soon(self._allow_lookups)
            self._lookups_left -= 1
            began = self.loop.time()
            row = self._connections.segments.find(prompt.digest, self.info.vocab_size)
            if row is not None:
                self._cache.put(prompt.digest, row, is_shared=True)
                self._count_hits(1, self.loop.time() - began)
        return row

    def _allow_lookups(self) -> None:
        self._lookups_left = _MAX_LOOKUPS_PER_TICK

    def _count_hits(self, count: int, seconds: float) -> None:
        self._stats.requests += count
        self._stats.cache_hits += count
        self._counters.seconds["cache_hits"].observe(seconds, count)

    def count_hit(self, deadline: Deadline) -> None:
        """Count a request that was served by entries of a cached row."""
        self._count_hits(1, self.loop.time() - deadline.end + deadline.seconds)

    def read_entries(self, wanted: WantedEntries, deadline: Deadline) -> asyncio.Future[FoundEntries]:
        """Read entries of a cached row; None if the row is not cached or cannot be read in time."""
        return self._entries.read(wanted, deadline.end)

    async def answer(
        self,
        prompt: Prompt,
        deadline: Deadline,
        *,
        warm: bool = False,
        private: bool = False,
        damaged: bool = False,
        whole: bool = False,
        weights: SentWeights | None = None,
    ) -> Row:
        """Request a row, or the result of the prompt's query.

        Args:
            prompt: the prompt and its query.
            deadline: until when.
            warm: the row must only be in the pool's cache; the result is empty.
            private: no other client can make this request; the result is removed from the cache once it is read.
            damaged: the cached result is damaged and must be overwritten.
            whole: the cache must hold the row itself, because its reader cannot read this shared memory.
            weights: weights of a trie job, which must not change until the result arrives. The result is private.
        """
        self.check_open()
        waiter = self.begin(prompt, deadline.end, deadline.seconds, warm=warm)
        request = waiter.request
        if weights is not None:
            request.weights_name, request.weights = weights.name, weights
        is_kept = not prompt.query or self._options.keep_answers
        request.is_private = private or weights is not None or not is_kept
        request.damaged = request.damaged or damaged
        request.whole = request.whole or whole
        try:
            return await waiter.future
        finally:
            self.end(waiter)

    def begin(self, prompt: Prompt, until: float, seconds: float, *, warm: bool = False) -> SingleWaiter:
        """Start to wait for a row. The caller awaits the waiter's future, and then always calls `end`.

        Args:
            prompt: the prompt and its query.
            until: loop time of the deadline.
            seconds: timeout, for the error text.
            warm: as for `answer`.
        """
        waiter = SingleWaiter(self.loop, seconds)
        waiter.request = self._add(prompt, waiter, until, warm=warm)
        self._deadlines.add(waiter, until)
        return waiter

    def end(self, waiter: SingleWaiter) -> None:
        """End a wait; cancels the request if it has no other waiter."""
        self._deadlines.remove(waiter)
        request = waiter.request
        if request.waiters:
            self._remove_waiter(request, waiter)
        # A private result stays until its last waiter has read it.
        if request.is_private and self._requests.get(request.prompt.digest) is None:
            self._pool_cache.discard([request])

    def _add(self, prompt: Prompt, waiter: Waiter, until: float, *, warm: bool = False) -> PendingRequest:
        self._stats.requests += 1
        request, is_new = self._requests.add(prompt, waiter, until=until, warm=warm)
        if is_new:
            self._submitter.add(request)
        if self._traces is not None:
            self._traces.note(request, is_new)
        return request

    def _remove_waiter(self, request: PendingRequest, waiter: Waiter, why: str = "cancelled") -> None:
        if waiter in request.waiters and self._requests.remove_waiter(request, waiter, why):
            self._submitter.cancel(request)

    async def answer_all(self, prompts: Sequence[Prompt], deadline: Deadline) -> NDArray[np.float32]:
        """Request the rows of several prompts: float32 (n, V). The first failure cancels the others."""
        segments, vocab_size = self._connections.segments, self.info.vocab_size
        if prompts and segments.has_any:
            # Reuse memory: shared rows arrive faster than the system hands out new pages.
            memory = self._batch_memory.take_writeable(4 * len(prompts) * vocab_size)
            batch = BatchWaiter(self.loop, memory.view(np.float32).reshape(len(prompts), vocab_size))
        else:
            batch = BatchWaiter(self.loop, np.empty((len(prompts), vocab_size), np.float32))
        copied = await self._copy_shared(prompts, batch.rows) if segments.has_any else set[int]()
        waits: list[tuple[PendingRequest, Waiter]] = []
        for index, prompt in enumerate(prompts):
            waiter = batch.at(index)
            if index in copied:
                batch.count()
            elif (row := self._cache.get(prompt.digest)) is not None:
                self._stats.requests += 1
                self._stats.local_hits += 1
                waiter(row)
            else:
                waits.append((self._add(prompt, waiter, deadline.end), waiter))
        timer = self.loop.call_at(deadline.end, self._expire_first, waits, deadline.seconds)
        try:
            await batch.future
        finally:
            timer.cancel()
            for request, waiter in waits:
                if request.waiters:
                    self._remove_waiter(request, waiter)
        return batch.rows

    async def _copy_shared(self, prompts: Sequence[Prompt], out: NDArray[np.float32]) -> set[int]:
        """Copy rows from shared memory into `out`, float32 (n, V); returns the indices of the copied rows."""
        began, copied = self.loop.time(), set[int]()
        for index, prompt in enumerate(prompts):
            is_kept = self._cache.get(prompt.digest) is not None
            if not is_kept and self._connections.segments.find(prompt.digest, out.shape[1], out[index]) is not None:
                copied.add(index)
            if index % _ROWS_PER_TICK == _ROWS_PER_TICK - 1:
                await asyncio.sleep(0)
        self._count_hits(len(copied), self.loop.time() - began)
        return copied

    # Deadlines

    def _on_deadline(self, waiter: SingleWaiter) -> None:
        self._expire(waiter.request, waiter, waiter.seconds)

    def _expire_first(self, waits: Sequence[tuple[PendingRequest, Waiter]], seconds: float) -> None:
        """End a batch at its deadline, with the error of its first pending prompt."""
        for request, waiter in waits:
            if waiter in request.waiters:
                self._expire(request, waiter, seconds)
                return

    def _expire(self, request: PendingRequest, waiter: Waiter, timeout_s: float) -> None:
        if waiter in request.waiters:
            error = self._deadline_error(request, f"no row within {timeout_s:g} s")
            self._remove_waiter(request, waiter, type(error).__name__)
            waiter(error)

    def _deadline_error(self, request: PendingRequest, text: str) -> LMPoolError:
        """Return the exception that says why a request has no row yet; its message begins with `text`."""
        connections = self._connections
        if connections.trouble is not None:
            return type(connections.trouble)(f"{text}: {connections.trouble}")
        is_refused = request.stage in (Stage.REFUSED, Stage.SENDING_AGAIN)
        if is_refused or (self._submitter.is_full and request.stage is not Stage.WAITING):
            return QueueFull(f"{text}: {connections.describe_full_queue()}")
        # Before the check for workers: a server that evicts rows evicts heartbeats too.
        if request.lost:
            why = connections.describe_lost_row(request.lost, len(self._requests), request.prompt.length)
            return DeadlineExceeded(f"{text}: {why}")
        return self._liveness.deadline_error(text)

    # The interface for adapters and tries

    def check_open(self) -> None:
        """Raise ProducerClosed if the session has ended."""
        self._connections.check_open()

    @property
    def fingerprint(self) -> str:
        """The model's fingerprint."""
        return self._connections.model.fingerprint

    async def workers(self) -> list[WorkerInfo]:
        """Return the live workers of the model."""
        return await self._discovery.workers(self.info.name)

    def explain(self, error: BaseException) -> LMPoolError:
        """Convert an exception of redis-py or of the operating system."""
        return self._connections.explain(error)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the background."""
        self._tasks.spawn(work)

    # The watch

    async def _watch(self) -> None:
        """Check every second, because notifications can be lost: the model, its workers, and late requests."""
        while True:
            await asyncio.sleep(_WATCH_S)
            absence = None
            try:
                # redis-py's client was opened with a longer timeout, before the lease was known.
                async with silence_limit(reply_timeout(self.info.lease_s)):
                    await self._reload_info()
                    await self.adapters.renew()
                    if self._requests:
                        absence = await self._liveness.check(self.loop.time())
                        self._on_absence(absence)
                    else:
                        self._liveness.pause()
                    await self._check_homes()
                if self._requests:
                    await self._recheck()
                # Requests that cannot be sent clear the trouble themselves: only their connection may be broken.
                if not self._submitter.is_retrying:
                    self._connections.trouble = None
            except TROUBLE as error:
                self._liveness.pause()  # The workers could not be read, so they are not missing.
                self._connections.note(error)
                await self._connections.reconnect(error)
            self._end_endless(absence or self._connections.trouble)

    async def _check_homes(self) -> None:
        """Forget the homes of workers that have left; checks some workers per call."""
        homes = self._submitter.homes
        homes.has_choice = self._liveness.count > 1
        if workers := list(homes.workers):
            chosen = random.sample(workers, min(len(workers), _MAX_WORKERS_CHECKED))
            homes.forget(await self._discovery.gone(self.info.name, chosen))

    async def _recheck(self) -> None:
        """Fetch rows whose notifications were lost; submit requests again that had no reply for a lease."""
        now, lease_s = self.loop.time(), self.info.lease_s
        waiting = (request for request in self._requests if request.stage is Stage.WAITING)
        late = [request for request in waiting if now - request.since > _WATCH_S]
        # Continue after the last portion, so that slow requests at the front do not hide the others.
        at = self._next_recheck if self._next_recheck < len(late) else 0
        late = late[at : at + _MAX_RECHECKED]
        self._next_recheck = at + len(late)
        await self._pool_cache.fetch([request.prompt.digest for request in late])
        pending = filter(self._requests.is_open, late)
        # Only the script can check whether the row of a warming request is cached.
        silent = [request for request in pending if request.warm or now - request.since > lease_s]
        if silent:
            await self._submitter.submit(silent, again=True)

    def _on_absence(self, absence: LMPoolError | None) -> None:
        """End the requests when the workers are missing for too long, or log that they wait."""
        if absence is None:
            self._has_logged_absence = False
        elif self._options.when_absent == "raise":
            self._give_up(list(self._requests), absence)
        elif not self._has_logged_absence:
            self._has_logged_absence = True
            _log.warning("%s; requests wait until their deadlines", absence)

    def _end_endless(self, why: LMPoolError | None) -> None:
        """End requests without a deadline when this reason has lasted for `ALONE_S`."""
        now = self.loop.time()
        if why is None or not self._requests:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        elif (seconds := now - self._alone_since) >= ALONE_S:
            error = type(why)(f"no row could be had for {seconds:.0f} s: {why}")
            self._give_up([request for request in self._requests if request.until - now > ENDLESS_S / 2], error)

    def _give_up(self, requests: list[PendingRequest], error: LMPoolError) -> None:
        for request in requests:
            self._requests.resolve(request, error)
            self._submitter.cancel(request)

    # The model

    def _adopt(self, info: ModelInfo) -> None:
        """Use a model, or the same model with other weights."""
        self._connections.adopt(info)
        self._requests.restart(self.fingerprint)
        self._submitter.homes.clear()
        self._counters.model = info.name
        self.info = info

    def _renew(self, info: ModelInfo) -> None:
        """Use a newer info of the same weights."""
        self._connections.renew(info)
        self.info = info

    def _follow_model(self) -> None:
        """Read the info of the changed model and send all requests again."""
        if not self._is_following:
            self._is_following = True
            self._tasks.spawn(self._reload_quietly())
        self._submitter.retry_soon()

    async def _reload_quietly(self) -> None:
        try:
            await self._reload_info()
        except TROUBLE as error:
            self._connections.note(error)
        finally:
            self._is_following = False

    async def _reload_info(self) -> None:
        info = await self._discovery.find(self.info.name)
        if info is None:
            return  # No worker serves at the moment; requests wait for the next one.
        if info.fingerprint == self.info.fingerprint:
            self._renew(info)
            return
        _log.info("the model %r has changed: sending %d prompts again", info.name, len(self._requests))
        self._adopt(info)
        self._submitter.retry_soon()
        await self._connections.scan_segments()
