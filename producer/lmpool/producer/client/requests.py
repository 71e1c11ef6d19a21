"""Pending requests: the callers that wait for each prompt, timers of their deadlines, and the producer's row cache.

Calls for the same prompt share one request: the first call starts a `PendingRequest`, later calls join it. Nothing in
this file uses the server; `submit.py` sends requests and `receive.py` resolves requests.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum, auto
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmpool.aio import copy_error, end_tasks, silence_limit
from lmpool.errors import CorruptRow, DeadlineExceeded, ModelMismatch, SettingsError, argument, of_prompt
from lmpool.producer.metrics import Counters, TracedCall, Traces
from lmpool.protocol.job import Prompt
from lmpool.protocol.keys import Keys
from lmpool.protocol.query import SentWeights
from lmpool.protocol.row import Row
from lmpool.rows.cache import Found
from lmpool.settings import shown

Answer = Row | Exception
Waiter = Callable[[Answer], None]
"""A function that a request calls once, with the row or a copy of the exception; a removed waiter is not called."""

ENDLESS_S = 9e8
"""Timeout in seconds that means "no deadline". It is finite, because infinity breaks the arithmetic of deadlines."""

ALONE_S = 60.0
"""Seconds that a request without a deadline waits while the server or all workers are missing."""

MAX_OVERWRITES = 2
"""Max requests to a worker to overwrite a damaged row or result, before the caller's request fails."""

# Max requests of one client that the server holds at once, so that a huge batch does not fill the server's memory.
_MAX_IN_FLIGHT = 8192
# Max bytes of the token ids of the requests that the server holds for one client.
_MAX_IN_FLIGHT_BYTES = 64 * 1024 * 1024
# Timer buckets per second. Requests of one 10 ms bucket share a timer, so requests time out up to 10 ms late.
_BUCKETS_PER_S = 100
# Max rows, and max bytes of rows, that are read before their callers run, so that rows stay in the CPU's cache.
_MAX_ROWS_AT_ONCE, _MAX_BYTES_AT_ONCE = 8, 1_250_000


def check_timeout(timeout: float) -> float:
    """Return a timeout in seconds as a float."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < 1e9:
        raise SettingsError(f"timeout: {shown(timeout)} must be a number of seconds above 0")
    return float(timeout)


class Deadline:
    """The time by which a request must end, shared by all steps of the request.

    Attributes:
        seconds: duration from the start of the request.
        end: loop time of the deadline.
        loop: the running event loop. Before Python 3.12, each lookup of this loop costs a system call.
        is_of_caller: whether the caller set the deadline. A default deadline lets each step take `seconds`, and
            hardly counts time in which the event loop was blocked.
    """

    __slots__ = ("end", "is_of_caller", "loop", "seconds")

    def __init__(self, seconds: float, *, is_of_caller: bool = True) -> None:
        self.seconds = seconds
        self.is_of_caller = is_of_caller
        self.loop = asyncio.get_running_loop()
        self.end = self.loop.time() + seconds

    @classmethod
    def of(cls, timeout: float | Deadline | None, default: float) -> Deadline:
        """Start a deadline of `timeout` seconds, or of `default` seconds for None; a deadline is returned unchanged."""
        if isinstance(timeout, Deadline):
            return timeout
        return cls(default if timeout is None else check_timeout(timeout))

    @property
    def left(self) -> float:
        """Seconds until the deadline; raises DeadlineExceeded if it has passed."""
        if (left := self.end - self.loop.time()) <= 0:
            raise DeadlineExceeded(f"no answer within {self.seconds:g} s: allow more time ({argument('timeout')})")
        return left

    def bounded(self) -> Deadline:
        """Return a deadline for steps that need no worker: this deadline, or `ALONE_S` if this one is endless."""
        return Deadline(ALONE_S, is_of_caller=False) if self.seconds > ENDLESS_S / 2 else self

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Cancel the body at the deadline and raise DeadlineExceeded, without a cause if it had passed at the start."""
        limit = asyncio.timeout(self.left) if self.is_of_caller else silence_limit(self.seconds)
        try:
            async with limit as timer:
                yield
        except TimeoutError as error:
            if not timer.expired():
                raise  # The timeout belongs to a connection, not to this deadline.
            raise DeadlineExceeded(f"no answer within {self.seconds:g} s") from error


class Tasks:
    """The background tasks of one session."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` as a task, and keep a reference to the task, because asyncio keeps only a weak reference."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def end_tasks(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        await end_tasks(self._tasks)


class RowLRU:
    """The producer's own cache: digest -> read-only row, evicted in least-recently-used order.

    A row from shared memory is kept only from its second use on. The next row reuses the memory of a row that is
    not kept, so this memory stays in the CPU's cache; copying a row again takes a few µs.

    Attributes:
        owner: fingerprint of the model.
        size: bytes of all rows.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.owner = ""
        self._rows: OrderedDict[bytes, Row] = OrderedDict()
        self.size = 0
        # Digests of rows from shared memory that were used once; their number is limited to the rows that fit here.
        self._used_once: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, digest: bytes) -> Row | None:
        """Return the row of a digest, which then counts as recently used, or None."""
        row = self._rows.get(digest)
        if row is not None:
            self._rows.move_to_end(digest)
        return row

    def put(self, digest: bytes, row: Row, *, is_shared: bool = False) -> None:
        """Store a read-only row, which may lie in shared memory, and evict the oldest rows above the limit."""
        size, rows = row.nbytes, self._rows
        if size > self._limit:
            return
        if is_shared:
            used = self._used_once
            if digest not in used:
                used[digest] = None
                if len(used) > self._limit // size:
                    used.popitem(last=False)
                return
            del used[digest]
        if digest in rows:
            self.size -= rows.pop(digest).nbytes
        rows[digest] = row
        self.size += size
        while self.size > self._limit:
            self.size -= rows.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        """Drop all rows of the cache."""
        self._rows.clear()
        self._used_once.clear()
        self.size = 0


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """The parts and options of a producer that all its sessions share; `Producer` describes the options."""

    keys: Keys
    counters: Counters
    traces: Traces | None
    when_full: str
    when_absent: str
    priority: str
    keep_answers: bool
    direct: bool


class Stage(Enum):
    """The progress of a request."""

    UNSENT = auto()
    SENDING = auto()
    WAITING = auto()


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A prompt for whose row or result this process waits.

    Attributes:
        waiters: function to call with the result -> time by `monotonic` when the function's caller began to wait.
        until: loop time of the latest deadline among the waiters.
        warm: whether no waiter needs the row itself, only its presence in the pool's cache.
        since: loop time of the server's last reply about this prompt.
        is_refused: whether the full queue refused the request at its last submission.
        in_flight: whether the request counts towards the per-client limit.
        damaged: whether the cache holds a damaged row that a worker must overwrite.
        overwrites: number of times that a worker was asked to overwrite the damaged row.
        lost: number of times that the pool evicted the row before this process fetched the row.
        partition: number of the partition of the queue to which the request was sent last; None before.
        origin: the `ProducerStats` attribute for the request's first waiter; None while the row's source is unknown.
        is_private: whether no other client can make this request; its result leaves the cache once it has been read.
        stored: whether a waiter needs the result in the cache; then no datagram or shared memory may end the request.
        whole: whether the cache must hold the row itself instead of a reference to shared memory.
        weights: the weights of a trie job, or None once the server has the weights.
        weights_name: name of the stored weights, or b"".
        call: the traced call that started the request.
        ended_early: whether a datagram has ended the request, perhaps before the reply to its submission.
    """

    prompt: Prompt
    waiters: dict[Waiter, float]
    until: float = math.inf
    warm: bool = False
    stage: Stage = Stage.UNSENT
    since: float = 0.0
    is_refused: bool = False
    in_flight: bool = False
    damaged: bool = False
    overwrites: int = 0
    lost: int = 0
    partition: int | None = None
    origin: str | None = None
    is_private: bool = False
    stored: bool = False
    whole: bool = False
    weights: SentWeights | None = None
    weights_name: bytes = b""
    call: TracedCall | None = None
    ended_early: bool = False

    @property
    def may_end_early(self) -> bool:
        """Whether a datagram may end the request, shortly before the worker stores the result in Redis."""
        return not (self.stored or self.is_private or self.whole or self.damaged)


class PendingRequests:
    """All pending requests of one session, by digest.

    Attributes:
        get: returns the pending request of a digest, or None.
        on_end: function to call when a request ends, or None while no request waits for a free slot.
        reading: whether "unsent" requests, or rows "announced" by workers, are being looked up in shared memory.
    """

    def __init__(self, counters: Counters) -> None:
        self._requests: dict[bytes, PendingRequest] = {}
        self.get = self._requests.get
        self.counters = counters
        self.on_end: Callable[[], None] | None = None
        self.reading: set[str] = set()
        self._cache: RowLRU = counters.cache
        self._owner = ""  # Fingerprint of the session's model.
        self._stats = counters.stats
        self._in_flight = self._in_flight_bytes = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[PendingRequest]:
        return iter(list(self._requests.values()))

    def is_open(self, request: PendingRequest) -> bool:
        """Return whether a request is still pending."""
        return self.get(request.prompt.digest) is request

    def add(
        self, prompt: Prompt, waiter: Waiter, until: float = math.inf, warm: bool = False
    ) -> tuple[PendingRequest, bool]:
        """Add a waiter with a deadline for a prompt; returns the request, and whether the request is new.

        `warm` means that the waiter does not need the row itself.
        """
        request = self.get(prompt.digest)
        if is_new := request is None:
            request = self._requests[prompt.digest] = PendingRequest(prompt, {}, until, warm)
        request.waiters[waiter] = monotonic()
        request.warm = request.warm and warm
        request.stored = request.stored or warm
        request.until = max(request.until, until)
        return request, is_new

    def admit(self, unsent: deque[PendingRequest]) -> list[PendingRequest]:
        """Remove requests from `unsent` up to the per-client limit; returns the removed requests that have waiters."""
        admitted, count, size = list[PendingRequest](), self._in_flight, self._in_flight_bytes
        while unsent and count < _MAX_IN_FLIGHT and size < _MAX_IN_FLIGHT_BYTES:
            request = unsent.popleft()
            if request.waiters:
                admitted.append(request)
                if not request.in_flight:
                    request.in_flight = True
                    count += 1
                    size += len(request.prompt.ids)
        self._in_flight, self._in_flight_bytes = count, size
        return admitted

    def remove_waiter(self, request: PendingRequest, waiter: Waiter, why: str = "cancelled") -> bool:
        """Remove a waiter; returns whether the request has ended because no other waiter is left."""
        self._count_failure(why, request.waiters.pop(waiter))
        if request.waiters or not self.is_open(request):
            return False
        self._end(request)
        return True

    def resolve_found(self, digests: Sequence[bytes], rows: Sequence[Found], *, are_shared: bool = False) -> None:
        """Resolve the requests whose rows were found; mark the requests whose rows are damaged."""
        now, ended, get = monotonic(), False, self.get
        for digest, row in zip(digests, rows, strict=True):
            if row is None or (request := get(digest)) is None:
                continue
            if isinstance(row, CorruptRow):
                request.damaged = True
                if request.overwrites >= MAX_OVERWRITES:
                    self.resolve(request, row)
                continue
            if not request.prompt.query and self.owns_cache:
                self._cache.put(digest, row, is_shared=are_shared)
            self._remove(request)
            self._answer(request, row, now)
            ended = True
        if ended and self.on_end is not None:
            self.on_end()

    async def resolve_by(self, digests: Sequence[bytes], read: Callable[[bytes], Row | None], kind: str) -> None:
        """Resolve the requests whose rows `read` returns, a few at a time.

        After every few rows, the callers of these rows run: they use the rows while the CPU's cache contains the rows,
        and release memory for the next rows.
        """
        # Read the first row alone, to measure the size of rows.
        at, size, owner = 0, 1, self._owner
        self.reading.add(kind)
        try:
            while at < len(digests) and self._owner == owner:  # The callers may change to other weights.
                begin, at = at, at + size
                pending = [digest for digest in digests[begin:at] if digest in self._requests]
                pairs = zip(pending, map(read, pending), strict=True)
                found = {digest: row for digest, row in pairs if row is not None}
                if found:
                    size = max(1, min(_MAX_ROWS_AT_ONCE, _MAX_BYTES_AT_ONCE // next(iter(found.values())).nbytes))
                    self.resolve_found(list(found), list(found.values()), are_shared=True)
                    found.clear()
                    await asyncio.sleep(0)
        finally:
            self.reading.discard(kind)

    def resolve(self, request: PendingRequest, answer: Answer) -> None:
        """End a request and call its waiters. A newer request for the same prompt stays pending."""
        if self.is_open(request):
            self._end(request)
        if not request.waiters:
            return
        if not isinstance(answer, Exception):
            self._answer(request, answer, monotonic())
            return
        waiters, request.waiters = request.waiters, {}
        for waiter, began in waiters.items():
            self._count_failure(type(answer).__name__, began)
            waiter(copy_error(answer))

    @property
    def owns_cache(self) -> bool:
        """Whether the producer's cache has rows of this session's weights: sessions of other loops share the cache."""
        return self._cache.owner == self._owner

    def restart(self, fingerprint: str) -> None:
        """Mark all requests as unsent, because the model has changed to this fingerprint."""
        self._owner = fingerprint
        if fingerprint != self._cache.owner:
            self._cache.clear()
            self._cache.owner = fingerprint
        for request in self._requests.values():
            request.stage, request.is_refused, request.origin = Stage.UNSENT, False, None

    def _end(self, request: PendingRequest) -> None:
        self._remove(request)
        if self.on_end is not None:
            self.on_end()

    def _remove(self, request: PendingRequest) -> None:
        del self._requests[request.prompt.digest]
        if request.in_flight:
            request.in_flight = False
            self._in_flight -= 1
            self._in_flight_bytes -= len(request.prompt.ids)

    def _answer(self, request: PendingRequest, row: Row, now: float) -> None:
        waiters, request.waiters = request.waiters, {}
        # A request that has no origin yet found its row in the cache before it was submitted.
        origin = request.origin = request.origin or "cache_hits"
        stats, seconds = self._stats, self.counters.seconds
        for waiter, began in waiters.items():
            setattr(stats, origin, getattr(stats, origin) + 1)
            seconds[origin].observe(now - began)
            origin = "joined"
            waiter(row)

    def _count_failure(self, why: str, began: float) -> None:
        self._stats.failed += 1
        self.counters.failures[why] += 1
        self.counters.seconds["failed"].observe(monotonic() - began)


class SingleWaiter:
    """A waiter for one row, with a future.

    Attributes:
        seconds: timeout, for the error text.
        request: the request whose row the waiter gets; `Requester.begin` sets this attribute.
        bucket: number of the 10 ms bucket in `DeadlineTimers` that contains the waiter.
    """

    __slots__ = ("bucket", "future", "request", "seconds")

    request: PendingRequest

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self.future: asyncio.Future[Row] = loop.create_future()
        self.seconds = seconds
        self.bucket = 0

    def __call__(self, answer: Answer) -> None:
        if not self.future.done():
            if isinstance(answer, Exception):
                self.future.set_exception(answer)
            else:
                self.future.set_result(answer)


class DeadlineTimers:
    """The timers of waiters' deadlines, which fire up to 10 ms late.

    One timer per waiter would cost more than the rest of a request, so all waiters of a 10 ms bucket share a timer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, expire: Callable[[SingleWaiter], None]) -> None:
        self._loop = loop
        self._expire = expire
        self._buckets: dict[int, tuple[dict[SingleWaiter, None], asyncio.TimerHandle]] = {}

    def add(self, waiter: SingleWaiter, until: float) -> None:
        """Call `expire` with the waiter at the loop time `until`; a waiter that was removed does not expire."""
        number = waiter.bucket = int(until * _BUCKETS_PER_S) + 1
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = {}, self._loop.call_at(number / _BUCKETS_PER_S, self._end, number)
        bucket[0][waiter] = None

    def remove(self, waiter: SingleWaiter) -> None:
        """Remove a waiter that has ended."""
        bucket = self._buckets.get(waiter.bucket)
        if bucket is not None:
            waiters, timer = bucket
            waiters.pop(waiter, None)
            if not waiters:
                timer.cancel()
                del self._buckets[waiter.bucket]

    def _end(self, number: int) -> None:
        waiters, _ = self._buckets.pop(number)
        for waiter in waiters:
            self._expire(waiter)


class BatchWaiter:
    """Collects the rows of a batch in one array.

    Attributes:
        future: resolved when all rows are in the array, or with the first failure.
    """

    __slots__ = ("future", "left", "rows")

    def __init__(self, loop: asyncio.AbstractEventLoop, rows: NDArray[np.float32]) -> None:
        self.future: asyncio.Future[None] = loop.create_future()
        self.rows = rows
        self.left = len(rows)
        if not self.left:
            self.future.set_result(None)

    def put(self, index: int, answer: Answer) -> None:
        """Receive the result for the row at `index`."""
        if self.future.done():
            return
        if isinstance(answer, Exception):
            self.future.set_exception(of_prompt(answer, "prompts", index, len(self.rows)))
        elif answer.shape != self.rows.shape[1:]:
            text = f"the model's V was {self.rows.shape[1]} and is {answer.size} now: ask again"
            self.future.set_exception(ModelMismatch(text))
        else:
            self.rows[index] = answer
            self.count()

    def count(self) -> None:
        """Count a row that was written to the array; the last row resolves the future."""
        self.left -= 1
        if self.left == 0:
            self.future.set_result(None)
