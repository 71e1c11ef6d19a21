"""The session of a producer in one event loop: it connects, asks for rows, watches what was asked for, and closes."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from redis.exceptions import RedisError

from lmpool.aio import silence_limit
from lmpool.broker.connection import reply_timeout
from lmpool.broker.server import Server
from lmpool.errors import (
    DeadlineExceeded,
    LMPoolError,
    ProducerClosed,
    QueueFull,
    UnknownModel,
)
from lmpool.producer.client.adapters import Adapters
from lmpool.producer.client.connections import CLOSED, TROUBLE, Connections, Tasks
from lmpool.producer.client.discovery import Discovery, Liveness, Vocabularies, WorkerInfo
from lmpool.producer.client.receive import EntryReader, FoundEntries, Receiver, WantedEntries
from lmpool.producer.client.requests import (
    BatchWaiter,
    Counters,
    DeadlineTimers,
    PendingRequest,
    PendingRequests,
    ProducerStats,
    RowLRU,
    SingleWaiter,
    Stage,
    Waiter,
)
from lmpool.producer.client.submit import CacheClient, Homes, Submitter
from lmpool.producer.client.tracing import Traces
from lmpool.producer.deadline import ALONE_S, ENDLESS_S, Deadline
from lmpool.protocol.job import Prompt, encode_prompt
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import SentWeights
from lmpool.protocol.row import Row
from lmpool.rows.shared_memory import RowMemory

WhenFull = Literal["wait", "raise"]
"""What requests do while the queue is at its limit."""
WhenAbsent = Literal["wait", "raise"]
"""What opening and asking do while no worker serves the model: wait until their deadlines, or end."""

Priority = Literal["interactive", "bulk"]
"""Whose turn it is where prompts wait: those of bulk clients go behind all others."""

_log = logging.getLogger("lmpool.producer")

_COLLECTORS = 2
_WATCH_S = 1.0
_MAX_RECHECKED = 2000
_GOODBYE_S = 1.0
_MAX_LOOKED_FOR = 32
_FEW = 8
_LOOKS = 4


class Session:
    """Asks one model's workers for rows and waits for them, in one event loop.

    Args:
        server: the pool's Redis.
        keys: the deployment's key names.
        cache: the rows in the producer's own memory.
        stats: the outcomes of the producer's requests.
        counters: count how requests end, and how long they took.
        when_full: what requests do while the queue is at its limit.
        when_absent: what requests do while no worker serves the model.
        priority: of its requests, where they wait.
        keep_answers: whether answers to queries stay in the pool's cache when they have been read.
        traces: the spans of its requests; None where they are not traced.

    Attributes:
        loop: the event loop.
        info: the model's info, as it was read last; set by `open`.
        closed: whether it has ended.
        vocabularies: what the tokens of models and tries stand for.
        adapters: which weights the model's adapters have.
    """

    # A plain attribute, for every request reads it.
    info: ModelInfo

    def __init__(
        self,
        server: Server,
        keys: Keys,
        cache: RowLRU,
        stats: ProducerStats,
        counters: Counters | None = None,
        when_full: WhenFull = "wait",
        when_absent: WhenAbsent = "raise",
        priority: Priority = "interactive",
        keep_answers: bool = True,
        traces: Traces | None = None,
    ) -> None:
        self.closed = False
        self._supervisor: asyncio.Task[None] | None = None
        self._waits_when_absent = when_absent == "wait"
        self._keeps_answers = keep_answers
        self._has_told_of_absence = False
        self._alone_since: float | None = None
        self._tasks = Tasks()
        self.loop = self._tasks.loop
        self._cache = cache
        self._stats = stats
        self._requests = PendingRequests(cache, stats, counters)
        self._deadlines = DeadlineTimers(self.loop, self._on_deadline)
        self._connections = Connections(server, keys, is_bulk=priority == "bulk", traces=traces)
        self._traces = traces
        self._connections.segments.counts = self._requests.counters.shared
        self._discovery = Discovery(self._connections.redis, keys)
        self.vocabularies = Vocabularies(self._connections, keys)
        self._entries = EntryReader(self._connections, self._tasks)
        self.adapters = Adapters(self._connections)
        self._pool_cache = CacheClient(self._connections, self._requests, self._tasks)
        self._homes = Homes()
        self._submitter = Submitter(
            self._connections,
            self._requests,
            self._pool_cache,
            self._tasks,
            self._homes,
            waits_when_full=when_full == "wait",
        )
        self._receiver = Receiver(
            self._connections,
            self._requests,
            self._tasks,
            self._submitter.fetch_announced,
            self._homes.note,
            self._follow_model,
        )
        self._is_following = False
        self._batch_memory = RowMemory()
        self._looks_left = _LOOKS
        self._next_recheck = 0
        self._liveness = Liveness(self._connections, self._discovery)
        self._fetching_head = asyncio.Lock()

    async def open(self, model: str | None) -> None:
        """Connect and read the model's info; may be tried again after a failure, until it is closed.

        Args:
            model: name of the model, or None for the only one.

        Raises:
            ServerError: the server cannot be used.
            UnknownModel, AmbiguousModel: there is not exactly the model that was asked for.
        """
        try:
            info = await self._find_info(model)
            await self._liveness.start(info.name)
            self._homes.has_choice = self._liveness.count > 1
        except LMPoolError:
            raise  # It explains itself; as its own cause it would be told twice.
        except (RedisError, OSError) as error:
            raise self.explain(error) from error
        self._adopt(info)
        self._supervisor = self.loop.create_task(self._supervise(), name="lmpool-producer")
        # A task that is cancelled before its first step does not run at all, and this one closes the connections.
        await asyncio.sleep(0)
        await self._connections.look_for_segments()

    def check_open(self) -> None:
        """Raise ProducerClosed if it has ended."""
        self._connections.check_open()

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the info."""
        return self._connections.model.fingerprint

    async def workers(self) -> list[WorkerInfo]:
        """The live workers of the model.

        Raises:
            RedisError, OSError: the server cannot be used.
        """
        return await self._discovery.workers(self.info.name)

    def explain(self, error: BaseException) -> LMPoolError:
        """The exception of our tree for one of redis-py's or the system's."""
        return self._connections.explain(error)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something in the background."""
        self._tasks.spawn(work)

    def encode(self, ids: Any, adapter: str = "") -> Prompt:
        """A prompt for the model.

        Args:
            ids: as `Producer.logprobs` takes them.
            adapter: "name@revision", or "" for none.

        Raises:
            InvalidPrompt: it is none for this model.
        """
        info = self.info
        return encode_prompt(ids, vocab_size=info.vocab_size, max_tokens=info.max_prompt_tokens, adapter=adapter)

    def cached(self, prompt: Prompt) -> Row | None:
        """A prompt's row, if it is in the producer's own memory, or in this host's: a request that ends here.

        Into that of the host only few looks are made before others have had their turn in the event loop, and none
        while requests are under way, which would be overtaken: `Submitter` looks, and lets others go on in between.
        """
        row = self._kept(prompt)
        if row is None and self._looks_left and not len(self._requests) and self._connections.segments.has_any:
            if self._looks_left == _LOOKS:
                self.loop.call_soon(self._renew_looks)
            self._looks_left -= 1
            began = self.loop.time()
            row = self._connections.segments.find(prompt.digest, self.info.vocab_size)
            if row is not None:
                self._cache.put(prompt.digest, row, is_shared=True)
                self._count_found(1, self.loop.time() - began)
        return row

    def _renew_looks(self) -> None:
        self._looks_left = _LOOKS

    def _kept(self, prompt: Prompt) -> Row | None:
        row = self._cache.get(prompt.digest)
        if row is not None:
            self._stats.requests += 1
            self._stats.local_hits += 1
        return row

    def _count_found(self, count: int, seconds: float) -> None:
        """Count requests that the pool's cache has answered without another look."""
        self._stats.requests += count
        self._stats.cache_hits += count
        self._requests.counters.seconds["cache_hits"].observe(seconds, count)

    def read_entries(self, wanted: WantedEntries, deadline: Deadline) -> asyncio.Future[FoundEntries]:
        """Entries of a row in the cache; None when it is not there, or cannot be read in time."""
        return self._entries.read(wanted, deadline.end)

    def count_hit(self, deadline: Deadline) -> None:
        """Count a request that entries in the cache have answered."""
        self._count_found(1, self.loop.time() - deadline.end + deadline.seconds)

    @asynccontextmanager
    async def fetching_head(self, deadline: Deadline) -> AsyncIterator[None]:
        """The turn to fetch the model's head, a gigabyte perhaps, which is not to come twice.

        Raises:
            DeadlineExceeded: others have had it for so long.
        """
        try:
            async with deadline.limit():
                await self._fetching_head.acquire()
        except TimeoutError as error:
            raise DeadlineExceeded(f"the model's head, which is being fetched: {error}") from error
        try:
            yield
        finally:
            self._fetching_head.release()

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
        """Ask for a row, or for what a query wants of it, and wait for the answer.

        Args:
            prompt: what is asked.
            deadline: for how long.
            warm: the row itself is not wanted, only that it be in the pool's cache; the answer is empty.
            private: nobody else can ask for this: the answer is removed from the cache when it has been read.
            damaged: what the cache holds as the answer is damaged: have it replaced.
            whole: whoever needs the row does not read the shared memory that it may lie in.
            weights: what a trie job works on, which must not change meanwhile. Such an answer is private too.
        """
        self.check_open()
        waiter = self.begin(prompt, deadline.end, deadline.seconds, warm=warm)
        request = waiter.request
        if weights is not None:
            request.weights_name, request.weights = weights.name, weights
        is_not_kept = bool(prompt.query) and not self._keeps_answers
        request.is_private = private or weights is not None or is_not_kept
        request.damaged = request.damaged or damaged
        request.whole = request.whole or whole
        try:
            return await waiter.future
        finally:
            self.end(waiter)

    async def answer_all(self, prompts: Sequence[Prompt], deadline: Deadline) -> NDArray[np.float32]:
        """The rows of several prompts, float32 (n, V); the first failure ends the others."""
        batch = BatchWaiter(self.loop, self._new_rows(len(prompts)))
        waits: list[tuple[PendingRequest, Waiter]] = []
        there = await self._read_here(prompts, batch.rows)
        for index, prompt in enumerate(prompts):
            waiter = batch.at(index)
            if index in there:
                batch.count()
                continue
            row = self._kept(prompt)
            if row is None:
                waits.append((self._ask(prompt, waiter, deadline.end), waiter))
            else:
                waiter(row)
        timer = self.loop.call_at(deadline.end, self._expire_first, waits, deadline.seconds)
        try:
            await batch.future
        finally:
            timer.cancel()
            for request, waiter in waits:
                if request.waiters:
                    self._remove_waiter(request, waiter)
        return batch.rows

    def _new_rows(self, count: int) -> NDArray[np.float32]:
        """float32 (n, V) for rows; where they come faster than new memory, what was used before."""
        vocab_size = self.info.vocab_size
        if not (count and self._connections.segments.has_any):
            return np.empty((count, vocab_size), np.float32)
        memory = self._batch_memory.take_writeable(4 * count * vocab_size)
        return memory.view(np.float32).reshape(count, vocab_size)

    async def _read_here(self, prompts: Sequence[Prompt], out: NDArray[np.float32]) -> set[int]:
        """Read rows in shared memory to where they are wanted, float32 (n, V); returns the numbers of those."""
        segments, began = self._connections.segments, self.loop.time()
        found: set[int] = set()
        if segments.has_any:
            for index, prompt in enumerate(prompts):
                is_cached = self._cache.get(prompt.digest) is not None
                if not is_cached and segments.find(prompt.digest, out.shape[1], out[index]) is not None:
                    found.add(index)
                if index % _FEW == _FEW - 1:
                    await asyncio.sleep(0)
            self._count_found(len(found), self.loop.time() - began)
        return found

    def begin(self, prompt: Prompt, until: float, seconds: float, *, warm: bool = False) -> SingleWaiter:
        """Ask for a row; the caller awaits the waiter's future and then calls `end`, however that ends.

        Args:
            prompt: what is asked.
            until: loop time of the deadline.
            seconds: how long that is, for its message.
            warm: as for `answer`.
        """
        waiter = SingleWaiter(self.loop, seconds)
        waiter.request = self._ask(prompt, waiter, until, warm=warm)
        self._deadlines.add(waiter, until)
        return waiter

    def end(self, waiter: SingleWaiter) -> None:
        """Forget a wait that has ended; a request that nobody waits for any more is cancelled."""
        self._deadlines.remove(waiter)
        request = waiter.request
        if request.waiters:
            self._remove_waiter(request, waiter)
        # Only with the last wait: until then the answer is not there, or another caller has not read it.
        if request.is_private and self._requests.get(request.prompt.digest) is None:
            self._pool_cache.discard([request])

    def _ask(self, prompt: Prompt, waiter: Waiter, until: float, *, warm: bool = False) -> PendingRequest:
        """Let `waiter` wait for a prompt's row; joins the request that is under way, or starts one."""
        self._stats.requests += 1
        request, is_new = self._requests.add(prompt, waiter, until=until, warm=warm)
        if is_new:
            self._submitter.add(request)
        if self._traces is not None:
            self._traces.note(request, is_new)
        return request

    def _remove_waiter(self, request: PendingRequest, waiter: Waiter, why: str = "cancelled") -> None:
        """Take a waiter off its request, if it is still on it; a request without waiters is cancelled."""
        if waiter in request.waiters and self._requests.remove_waiter(request, waiter, why):
            self._submitter.cancel(request)

    def _on_deadline(self, waiter: SingleWaiter) -> None:
        self._expire(waiter.request, waiter, waiter.seconds)

    def _expire_first(self, waits: Sequence[tuple[PendingRequest, Waiter]], seconds: float) -> None:
        """A batch's deadline: the first prompt that is still under way says why."""
        for request, waiter in waits:
            if waiter in request.waiters:
                self._expire(request, waiter, seconds)
                return

    def _expire(self, request: PendingRequest, waiter: Waiter, timeout: float) -> None:
        """End a wait whose deadline has passed, with the exception that says why."""
        if waiter in request.waiters:
            error = self._reason(request, f"no row within {timeout:g} s")
            self._remove_waiter(request, waiter, type(error).__name__)
            waiter(error)

    def _reason(self, request: PendingRequest, text: str) -> LMPoolError:
        """The exception that says why a request has no row yet; its message begins with `text`."""
        connections = self._connections
        if connections.trouble is not None:
            return type(connections.trouble)(f"{text}: {connections.trouble}")
        is_refused = request.stage in (Stage.REFUSED, Stage.SENDING_AGAIN)
        if is_refused or (self._submitter.is_full and request.stage is not Stage.WAITING):
            return QueueFull(f"{text}: {connections.describe_full_queue()}")
        # Before the workers: a server that evicts rows evicts heartbeats too.
        if times := self._requests.times_lost(request):
            why = connections.describe_lost_row(times, len(self._requests), request.prompt.length)
            return DeadlineExceeded(f"{text}: {why}")
        return self._liveness.deadline_error(text)

    async def close(self) -> None:
        """End all requests and connections, and leave nothing on the server."""
        if self._supervisor is None:
            self._end()
            await self._connections.close()
        elif not self.closed:
            self.close_soon()
            await asyncio.wait([self._supervisor])

    def close_soon(self) -> None:
        """As `close`, without waiting for it; of a session that is open."""
        if self._supervisor is not None:
            self._supervisor.cancel()

    async def _find_info(self, model: str | None) -> ModelInfo:
        try:
            return await self._discovery.info(model)
        except UnknownModel as error:
            if not error.is_loading:
                # A server that takes no writes has refused a worker's info too, and no further worker helps.
                await self._connections.check_writes(model or "")
            if model and self._waits_when_absent:
                await self._discovery.want(model)
            raise

    async def _supervise(self) -> None:
        """Run the background parts until cancelled, by `close` or by the end of `asyncio.run`."""
        parts = [self._receiver.read(), self._watch(), self._connections.follow_segments()]
        parts += [self._receiver.collect() for _ in range(_COLLECTORS)]
        try:
            await asyncio.gather(*map(self._tasks.spawn, parts))
        except asyncio.CancelledError:
            raise
        except BaseException:
            _log.exception("the connection to the pool ends because of an error in it")
            raise
        finally:
            self._end()
            # A loop that was closed without cancelling its tasks can do nothing any more.
            if not self.loop.is_closed():
                await self._shut_down()

    def _end(self) -> None:
        """From now on nothing may be asked."""
        self.closed = self._connections.closed = True

    async def _shut_down(self) -> None:
        await self._tasks.cancel()
        try:
            async with asyncio.timeout(_GOODBYE_S):
                await self._submitter.cancel_all()
                await self._connections.redis.unlink(self._connections.model.reply)
        except (*TROUBLE, TimeoutError):
            pass  # The server is away; what stays there expires.
        for request in self._requests:
            self._requests.resolve(request, ProducerClosed(CLOSED))
        await self._connections.close()

    async def _watch(self) -> None:
        """The slow timer: notifications are hints, so look at the truth from time to time."""
        while True:
            await asyncio.sleep(_WATCH_S)
            absence = None
            try:
                # redis-py's client was opened before the lease was known.
                async with silence_limit(reply_timeout(self.info.lease_s)):
                    await self._reload_info()
                    await self.adapters.renew()
                    if self._requests:
                        absence = await self._liveness.look(self.loop.time())
                        self._on_absence(absence)
                    else:
                        self._liveness.pause()
                    await self._look_after_homes()
                if self._requests:
                    await self._recheck()
                # What cannot be sent is tried again, and tells itself: the info may be there, and the rows elsewhere.
                if not self._submitter.is_retrying:
                    self._connections.trouble = None
            except TROUBLE as error:
                self._liveness.pause()  # Who could not be seen is not missed.
                self._connections.note(error)
                await self._connections.reconnect(error)
            self._end_endless(absence or self._connections.trouble)

    async def _look_after_homes(self) -> None:
        """Forget what workers that have gone had computed: of a few in each look, for there may be many."""
        self._homes.has_choice = self._liveness.count > 1
        known = list(self._homes.workers)
        if known:
            asked = random.sample(known, min(len(known), _MAX_LOOKED_FOR))
            self._homes.forget(await self._discovery.gone(self.info.name, asked))

    async def _recheck(self) -> None:
        """Look for rows that were never announced; resubmit what has been silent for a lease."""
        now, lease = self.loop.time(), self.info.lease_s
        waiting = (request for request in self._requests if request.stage is Stage.WAITING)
        late = [request for request in waiting if now - request.since > _WATCH_S]
        # Not always the first ones: while these wait for long, the rows of others may be there.
        at = self._next_recheck if self._next_recheck < len(late) else 0
        late = late[at : at + _MAX_RECHECKED]
        self._next_recheck = at + len(late)
        await self._pool_cache.fetch([request.prompt.digest for request in late])
        pending = filter(self._requests.is_open, late)
        # Whether a row that is only to be in the cache is there the script alone can tell.
        silent = [request for request in pending if request.warm or now - request.since > lease]
        if silent:
            await self._submitter.submit(silent, again=True)

    def _on_absence(self, absence: LMPoolError | None) -> None:
        """Nobody has served the model for long, or somebody does: requests end, or wait as they were told."""
        if absence is None:
            self._has_told_of_absence = False
        elif not self._waits_when_absent:
            self._give_up(list(self._requests), absence)
        elif not self._has_told_of_absence:
            self._has_told_of_absence = True
            _log.warning("%s; requests wait until their deadlines", absence)

    def _end_endless(self, why: LMPoolError | None) -> None:
        """End the requests without a deadline when they could not have been answered for long, for this reason."""
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

    def _adopt(self, info: ModelInfo) -> None:
        """Use a model, or the same one with other weights."""
        self._connections.adopt(info)
        self._requests.restart(self.fingerprint)
        self._homes.clear()
        self._requests.counters.model = info.name
        self.info = info

    def _renew(self, info: ModelInfo) -> None:
        """Take over the info of the same weights."""
        self._connections.renew(info)
        self.info = info

    def _follow_model(self) -> None:
        """The model has changed under us: read its info and send everything again."""
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
            return  # Between two workers; requests wait for the next one.
        if info.fingerprint == self.info.fingerprint:
            self._renew(info)
            return
        _log.info("the model %r has changed: asking again for %d prompts", info.name, len(self._requests))
        self._adopt(info)
        self._submitter.retry_soon()
        await self._connections.look_for_segments()
