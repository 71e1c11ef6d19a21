"""What a producer keeps in its memory: its latest rows, the requests under way, who waits for them, and counters.

A prompt is asked for once, however many calls wait for it: the first call starts a `PendingRequest`, and the others
join it. Nothing here talks to the server; `submit` and `receive` do.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from lmpool.aio import copy_error
from lmpool.errors import CorruptRow, ModelMismatch, of_prompt
from lmpool.metrics import Histogram
from lmpool.protocol.job import Prompt
from lmpool.protocol.query import SentWeights
from lmpool.protocol.row import Row
from lmpool.rows.cache import Found
from lmpool.rows.shared_memory import ReadCounts

OUTCOMES = ("cache_hits", "joined", "computed", "failed")
"""How a request ends that the producer's own memory does not answer: see `ProducerStats`."""

Answer = Row | Exception
Waiter = Callable[[Answer], None]
"""Called once, with the row or with an exception of its own; never after it was removed from its request."""

_MAX_OVERWRITES = 2
_MAX_IN_FLIGHT = 8192
_MAX_IN_FLIGHT_BYTES = 64 * 1024 * 1024
_BUCKETS_PER_S = 100
# What is read together, before those who wait go on: no more than is still in the processor's cache then.
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 8, 1_250_000


class RowLRU:
    """The rows that a producer has used last: digest -> read-only row.

    Rows of this host's shared memory are kept from their second use on: to copy one again takes some µs, but the memory
    of one that is not kept, warm in the processor's cache, is the next row's.

    Args:
        limit: bytes that the rows may take together; 0 keeps nothing.
    """

    __slots__ = ("_limit", "_owner", "_rows", "_size", "_used_once")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._owner = ""
        self._rows: OrderedDict[bytes, Row] = OrderedDict()
        self._size = 0
        # Of shared memory, as many as could be kept.
        self._used_once: OrderedDict[bytes, None] = OrderedDict()

    @property
    def size(self) -> int:
        """Bytes that the rows take now."""
        return self._size

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, digest: bytes) -> Row | None:
        """The row, or None; a row that is found is the last to go."""
        row = self._rows.get(digest)
        if row is not None:
            self._rows.move_to_end(digest)
        return row

    def put(self, digest: bytes, row: Row, *, is_shared: bool = False) -> None:
        """Keep a row, and drop the oldest ones as long as the limit asks for it.

        Args:
            digest: of its prompt.
            row: the row.
            is_shared: it lies in shared memory.
        """
        size = row.nbytes
        if size > self._limit or (is_shared and self._is_first_use(digest, self._limit // size)):
            return
        if digest in self._rows:
            self._size -= self._rows.pop(digest).nbytes
        self._rows[digest] = row
        self._size += size
        while self._size > self._limit:
            self._size -= self._rows.popitem(last=False)[1].nbytes

    def _is_first_use(self, digest: bytes, most: int) -> bool:
        used = self._used_once
        if digest in used:
            del used[digest]
            return False
        used[digest] = None
        if len(used) > most:
            used.popitem(last=False)
        return True

    def belong_to(self, fingerprint: str) -> None:
        """Keep rows of this model only; those of another are forgotten."""
        if fingerprint != self._owner:
            self._owner = fingerprint
            self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self._rows.clear()
        self._used_once.clear()
        self._size = 0


@dataclass(slots=True)
class ProducerStats:
    """What became of a producer's requests to the model's workers.

    A request is for a row. A trie's calls make requests too: for a prompt's row where they need one, and for values
    where the model's workers have tries. What trie workers are asked is not counted, nor is a call that ends before
    the producer has connected or because its arguments are wrong.

    Attributes:
        requests: all of them. Each that has ended is counted in one of the others, too.
        local_hits: answered from the producer's own memory.
        cache_hits: answered from the pool's cache, in Redis or in shared memory.
        joined: answered with a request for the same prompt that was under way here or in another process.
        computed: answered by a worker. These are requests: a worker computes one row for all queries about a prompt.
        failed: ended with an exception, or cancelled.
    """

    requests: int = 0
    local_hits: int = 0
    cache_hits: int = 0
    joined: int = 0
    computed: int = 0
    failed: int = 0

    def add(self, name: str, count: int = 1) -> None:
        """Count requests in the attribute `name`."""
        setattr(self, name, getattr(self, name) + count)

    def copy(self) -> ProducerStats:
        """A snapshot."""
        return replace(self)


class Counters:
    """Counters and histograms of one producer. Its event loop counts them up, any thread reads them.

    Args:
        stats: the outcomes of its requests.
        cache: the rows in its own memory.

    Attributes:
        model: the model's name, once the producer has connected.
        stats: as above.
        cache: as above.
        seconds: outcome, of `OUTCOMES` -> seconds of the requests that ended so. Each request is in one of them.
        failures: name of the exception, or "cancelled" -> requests.
        fetched_bytes: bytes of rows and answers that came from the server, by a fetch or with a notification, in the
            encoding that the model's info names.
        shared: reads of rows in shared memory.
    """

    def __init__(self, stats: ProducerStats, cache: RowLRU) -> None:
        self.model = ""
        self.stats = stats
        self.cache = cache
        self.seconds = {outcome: Histogram() for outcome in OUTCOMES}
        self.failures: Counter[str] = Counter()
        self.fetched_bytes = 0
        self.shared = ReadCounts()

    @property
    def under_way(self) -> int:
        """Requests that wait for an answer."""
        ended = sum(sum(histogram.counts) for histogram in self.seconds.values())
        return max(0, self.stats.requests - self.stats.local_hits - ended)

    def answered(self, origin: str, began: float, joined_at: Sequence[float] | None, now: float) -> None:
        """Count requests that were answered together; all times are of `monotonic`.

        Args:
            origin: where the row came from for the first of them.
            began: since when the first has waited.
            joined_at: since when the others have; None for no others.
            now: when they were answered.
        """
        self.seconds[origin].observe(now - began)
        for since in joined_at or ():
            self.seconds["joined"].observe(now - since)

    def failed(self, why: str, began: float) -> None:
        """Count a request that ended without an answer; `began` is a time of `monotonic`."""
        self.failures[why] += 1
        self.seconds["failed"].observe(monotonic() - began)


class Stage(Enum):
    """How far a request has come."""

    UNSENT = auto()
    SENDING = auto()
    # What was refused: nothing else is known of it until the server has answered.
    SENDING_AGAIN = auto()
    REFUSED = auto()
    WAITING = auto()


_UNSENT = Stage.UNSENT
"""To look a member up in its class costs as much as the rest of a new request."""


class PendingRequest:
    """One prompt that this process waits for.

    Attributes:
        prompt: ids and digest.
        waiters: who waits for it here.
        began: since when the first of them does, by `monotonic`.
        joined_at: since when each of the others does; None for none. (One list less for each request: the garbage
            collector counts.)
        stage: whether the server knows that we wait.
        since: loop time of the last sign from the server about this prompt.
        until: loop time at which the most patient waiter gives up.
        in_flight: whether it counts as one that the server has.
        damaged: the cache holds something else than a row; it must be overwritten.
        overwrites: how often a worker was asked to do that.
        origin: counter of `ProducerStats` that the first waiter's request adds to; None until something has answered.
        warm: no waiter wants the row itself, only that it be in the pool's cache.
        is_private: nobody else can ask for this, so nobody needs the answer once it has been read.
        whole: the row itself is to be in the cache, not a reference to where it lies in shared memory.
        weights: what a trie job works on, until it has been sent.
        weights_name: where they are stored, or b"".
    """

    __slots__ = (
        "began",
        "damaged",
        "in_flight",
        "is_private",
        "joined_at",
        "origin",
        "overwrites",
        "prompt",
        "since",
        "stage",
        "until",
        "waiters",
        "warm",
        "weights",
        "weights_name",
        "whole",
    )

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.warm = False
        self.is_private = False
        self.whole = False
        self.weights: SentWeights | None = None
        self.weights_name = b""
        self.waiters: list[Waiter] = []
        self.began = monotonic()
        self.joined_at: list[float] | None = None
        self.stage = _UNSENT
        self.since = 0.0
        self.until = 0.0
        self.in_flight = False
        self.damaged = False
        self.overwrites = 0
        self.origin: str | None = None


class PendingRequests:
    """All requests under way of one session, by digest.

    Args:
        cache: the rows in the producer's own memory; rows that come are added.
        stats: the outcomes of the producer's requests.
        counters: count how requests end, and how long they took.

    Attributes:
        counters: as above.
        on_end: called whenever a request has ended; None for nobody.
        is_resolving: some more rows that have come are about to be given to those who wait.
    """

    def __init__(self, cache: RowLRU, stats: ProducerStats, counters: Counters | None = None) -> None:
        self._requests: dict[bytes, PendingRequest] = {}
        self._cache = cache
        self._stats = stats
        # Requests that the server has, and the bytes of their prompts.
        self._in_flight = self._in_flight_bytes = 0
        # How often a row was to be there and was not: of those requests alone, for there are hardly ever any.
        self._lost: dict[bytes, int] = {}
        self.on_end: Callable[[], None] | None = None
        self.is_resolving = False
        self.counters = counters or Counters(stats, cache)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[PendingRequest]:
        return iter(list(self._requests.values()))

    def get(self, digest: bytes) -> PendingRequest | None:
        """The request of a prompt, if it is under way."""
        return self._requests.get(digest)

    def is_open(self, request: PendingRequest) -> bool:
        """Whether a request is still under way."""
        return self._requests.get(request.prompt.digest) is request

    def add(
        self, prompt: Prompt, waiter: Waiter, *, until: float = math.inf, warm: bool = False
    ) -> tuple[PendingRequest, bool]:
        """Let a waiter wait for a prompt; returns its request, and whether that is a new one.

        Args:
            prompt: what is asked.
            waiter: who asks.
            until: loop time at which the waiter gives up.
            warm: the waiter does not want the row, only that it be in the pool's cache.
        """
        request = self._requests.get(prompt.digest)
        is_new = request is None
        if request is None:
            request = self._requests[prompt.digest] = PendingRequest(prompt)
            request.warm = warm
        else:
            if request.joined_at is None:
                request.joined_at = []
            request.joined_at.append(monotonic())
            request.warm = request.warm and warm
        if until > request.until:
            request.until = until
        request.waiters.append(waiter)
        return request, is_new

    def admit(self, unsent: deque[PendingRequest]) -> list[PendingRequest]:
        """Take the requests that may be sent now: those with waiters, as many as the server may have of one client.

        Args:
            unsent: in their order; what is taken is removed. A request counts as one that the server has until it ends.
        """
        admitted = []
        while unsent and self._in_flight < _MAX_IN_FLIGHT and self._in_flight_bytes < _MAX_IN_FLIGHT_BYTES:
            request = unsent.popleft()
            if request.waiters:
                admitted.append(request)
                if not request.in_flight:
                    request.in_flight = True
                    self._in_flight += 1
                    self._in_flight_bytes += len(request.prompt.ids)
        return admitted

    def count_lost(self, requests: Iterable[PendingRequest]) -> None:
        """Count that jobs had ended, and their rows were gone before they could be fetched."""
        for request in requests:
            digest = request.prompt.digest
            self._lost[digest] = self._lost.get(digest, 0) + 1

    def times_lost(self, request: PendingRequest) -> int:
        """How often that has happened to a request under way."""
        return self._lost.get(request.prompt.digest, 0)

    def remove_waiter(self, request: PendingRequest, waiter: Waiter, why: str = "cancelled") -> bool:
        """Take a waiter off its request; True when that ended the request, for it has no other waiter."""
        at = request.waiters.index(waiter)
        del request.waiters[at]
        began = request.joined_at.pop(at - 1) if at and request.joined_at else request.began
        if not at and request.joined_at:
            request.began = request.joined_at.pop(0)
        self.counters.failed(why, began)
        self._stats.failed += 1
        if request.waiters or not self.is_open(request):
            return False
        self._end(request)
        return True

    def resolve_found(self, digests: Sequence[bytes], rows: Sequence[Found], *, are_shared: bool = False) -> None:
        """End the requests whose rows the pool's cache, or shared memory, holds; what is damaged is overwritten."""
        now, ended = monotonic(), 0
        for digest, row in zip(digests, rows, strict=True):
            request = self._requests.get(digest)
            if row is None or request is None:
                continue
            if isinstance(row, CorruptRow):
                request.damaged = True
                if request.overwrites >= _MAX_OVERWRITES:
                    self.resolve(request, row)
                continue
            if not request.prompt.query:
                self._cache.put(digest, row, is_shared=are_shared)
            self._remove(request)
            self._answer(request, row, now)
            ended += 1
        if ended and self.on_end is not None:
            self.on_end()

    async def resolve_by(
        self, digests: Sequence[bytes], read: Callable[[bytes], Row | None]
    ) -> AsyncIterator[Sequence[bytes]]:
        """End the requests whose rows `read` finds; yields their digests, a few at a time.

        Whoever waits goes on in between: a row that is used at once is still in the processor's cache, and its memory
        takes the next one.
        """
        # One tells how large they are.
        at, size = 0, 1
        while at < len(digests):
            found: dict[bytes, Row] = {}
            begin, at = at, at + size
            for digest in digests[begin:at]:
                if digest in self._requests and (row := read(digest)) is not None:
                    found[digest] = row
            if found:
                self.resolve_found(list(found), list(found.values()), are_shared=True)
                yield list(found)
                size = max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE // next(iter(found.values())).nbytes))
                del row
                found.clear()
                await asyncio.sleep(0)

    def resolve(self, request: PendingRequest, answer: Answer) -> None:
        """End a request and tell its waiters; a newer request of the same prompt goes on."""
        if self.is_open(request):
            self._end(request)
        if not request.waiters:
            return
        if isinstance(answer, Exception):
            self._fail(request, answer)
        else:
            self._answer(request, answer, monotonic())

    def restart(self, fingerprint: str) -> None:
        """Begin all requests anew with the model of this fingerprint; rows of another model are forgotten."""
        self._cache.belong_to(fingerprint)
        for request in self._requests.values():
            request.stage = Stage.UNSENT
            request.origin = None

    def _end(self, request: PendingRequest) -> None:
        self._remove(request)
        if self.on_end is not None:
            self.on_end()

    def _remove(self, request: PendingRequest) -> None:
        prompt = request.prompt
        del self._requests[prompt.digest]
        if self._lost:
            self._lost.pop(prompt.digest, None)
        if request.in_flight:
            request.in_flight = False
            self._in_flight -= 1
            self._in_flight_bytes -= len(prompt.ids)

    def _answer(self, request: PendingRequest, row: Row, now: float) -> None:
        waiters, request.waiters = request.waiters, []
        # What no script has told of was found by looking.
        origin = request.origin = request.origin or "cache_hits"
        self._stats.add(origin)
        self._stats.joined += len(waiters) - 1
        self.counters.answered(origin, request.began, request.joined_at, now)
        for waiter in waiters:
            waiter(row)

    def _fail(self, request: PendingRequest, error: Exception) -> None:
        waiters, request.waiters = request.waiters, []
        self._stats.failed += len(waiters)
        for since in (request.began, *(request.joined_at or ())):
            self.counters.failed(type(error).__name__, since)
        for waiter in waiters:
            waiter(copy_error(error))


class SingleWaiter:
    """Waits for one row with a future.

    Args:
        loop: the running event loop.
        seconds: how long it waits, for the message of the exception that ends it.

    Attributes:
        future: has the row.
        request: what it waits for; set by who adds it there.
        seconds: as above.
        bucket: the number of its bucket in `DeadlineTimers`.
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
    """Ends waits whose deadline has passed, at most 10 ms later.

    A timer for each would cost more than anything else of a request that is answered in time; one for all those
    that end within the same hundredth of a second costs next to nothing.

    Args:
        loop: the running event loop.
        expire: called with each waiter whose time has passed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, expire: Callable[[SingleWaiter], None]) -> None:
        self._loop = loop
        self._expire = expire
        self._buckets: dict[int, tuple[set[SingleWaiter], asyncio.TimerHandle]] = {}

    def add(self, waiter: SingleWaiter, until: float) -> None:
        """End a wait at the loop time `until`, unless it is removed before."""
        number = waiter.bucket = int(until * _BUCKETS_PER_S) + 1
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = set(), self._loop.call_at(number / _BUCKETS_PER_S, self._end, number)
        bucket[0].add(waiter)

    def remove(self, waiter: SingleWaiter) -> None:
        """Forget a wait that has ended, in whichever way."""
        bucket = self._buckets.get(waiter.bucket)
        if bucket is not None:
            waiters, timer = bucket
            waiters.discard(waiter)
            if not waiters:
                timer.cancel()
                del self._buckets[waiter.bucket]

    def _end(self, number: int) -> None:
        waiters, _ = self._buckets.pop(number)
        for waiter in waiters:
            self._expire(waiter)


class BatchWaiter:
    """Collects the rows of a batch in one array, so that no row is kept twice.

    Args:
        loop: the running event loop.
        rows: float32 of shape (n, V), to be filled.

    Attributes:
        future: done when all rows have come, or with the first failure.
        rows: as above; complete when `future` is done.
        left: how many are missing.
    """

    __slots__ = ("future", "left", "rows")

    def __init__(self, loop: asyncio.AbstractEventLoop, rows: NDArray[np.float32]) -> None:
        self.future: asyncio.Future[None] = loop.create_future()
        self.rows = rows
        self.left = len(rows)
        if not self.left:
            self.future.set_result(None)

    def at(self, index: int) -> Waiter:
        """The waiter for one row of the batch."""

        def put(answer: Answer) -> None:
            if self.future.done():
                return
            if isinstance(answer, Exception):
                self.future.set_exception(of_prompt(answer, "prompts", index, len(self.rows)))
                return
            if answer.shape != self.rows.shape[1:]:
                vocab_size = self.rows.shape[1]
                text = f"the model's V was {vocab_size} and is {answer.size} now: ask again"
                self.future.set_exception(ModelMismatch(text))
                return
            self.rows[index] = answer
            self.count()

        return put

    def count(self) -> None:
        """Count a row that is in its place."""
        self.left -= 1
        if self.left == 0:
            self.future.set_result(None)
