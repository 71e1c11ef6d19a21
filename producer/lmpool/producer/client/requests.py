"""Requests under way: one for each prompt, whoever waits for it, what is counted of it, and the rows that are kept."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from lmpool.aio import own
from lmpool.errors import CorruptRow, ModelMismatch
from lmpool.metrics import Histogram
from lmpool.protocol.prompt import Prompt
from lmpool.rows.cache import Found, Row
from lmpool.trie.weights import SentWeights


class RowLRU:
    """Digest -> read-only row.

    Args:
        limit: bytes that the rows may take together; 0 keeps nothing.
    """

    __slots__ = ("_limit", "_owner", "_rows", "_size")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._owner = ""
        self._rows: OrderedDict[bytes, Row] = OrderedDict()
        self._size = 0

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

    def put(self, digest: bytes, row: Row) -> None:
        """Keep a row, and drop the oldest ones as long as the limit asks for it."""
        size = row.nbytes
        if size > self._limit:
            return
        if digest in self._rows:
            self._size -= self._rows.pop(digest).nbytes
        self._rows[digest] = row
        self._size += size
        while self._size > self._limit:
            self._size -= self._rows.popitem(last=False)[1].nbytes

    def belong_to(self, fingerprint: str) -> None:
        """Keep rows of this model only; those of another are forgotten."""
        if fingerprint != self._owner:
            self._owner = fingerprint
            self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self._rows.clear()
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
        cache_hits: answered from the cache in Redis.
        joined: answered with a request for the same prompt that was under way here or in another process.
        computed: queued for a worker, and answered.
        failed: ended with an exception, or cancelled.
    """

    requests: int = 0
    local_hits: int = 0
    cache_hits: int = 0
    joined: int = 0
    computed: int = 0
    failed: int = 0

    def add(self, name: str, count: int = 1) -> None:
        """Count."""
        setattr(self, name, getattr(self, name) + count)

    def copy(self) -> ProducerStats:
        """A snapshot."""
        return replace(self)


OUTCOMES = ("cache_hits", "joined", "computed", "failed")
"""How a request ends that the producer's own memory does not answer: see `ProducerStats`."""


class Counters:
    """Numbers of one producer. Its event loop counts them up, anybody reads them.

    Args:
        stats: its counters.
        cache: its own rows.

    Attributes:
        model: the model's name, once the producer has connected.
        stats: as above.
        cache: as above.
        seconds: outcome, of `OUTCOMES` -> seconds of the requests that ended so. Each request is in one of them.
        failures: name of the exception, or "cancelled" -> requests.
        fetched_bytes: bytes of rows and answers fetched from the cache, in the encoding that the model's info names.
    """

    def __init__(self, stats: ProducerStats, cache: RowLRU) -> None:
        self.model = ""
        self.stats = stats
        self.cache = cache
        self.seconds = {outcome: Histogram() for outcome in OUTCOMES}
        self.failures: Counter[str] = Counter()
        self.fetched_bytes = 0

    @property
    def under_way(self) -> int:
        """Requests that wait for an answer."""
        ended = sum(sum(histogram.counts) for histogram in self.seconds.values())
        return max(0, self.stats.requests - self.stats.local_hits - ended)

    def landed(self, origin: str, began: float, joined: Sequence[float] | None, now: float) -> None:
        """Count requests that were answered together.

        Args:
            origin: where the row came from for the first of them.
            began: since when the first has waited; a time of `monotonic`.
            joined: since when the others have; None for no others.
            now: when they were answered.
        """
        self.seconds[origin].observe(now - began)
        for since in joined or ():
            self.seconds["joined"].observe(now - since)

    def failed(self, why: str, began: float) -> None:
        """Count a request that ended without an answer; `began` is a time of `monotonic`."""
        self.failures[why] += 1
        self.seconds["failed"].observe(monotonic() - began)


_MOST_OVERWRITES = 2
_MOST_AWAY = 8192
_MOST_AWAY_BYTES = 64 * 1024 * 1024

Answer = Row | Exception
Waiter = Callable[[Answer], None]
"""Called once, with the row or with an exception of its own; never after it was taken off its request."""


class Stage(Enum):
    """How far a request has come."""

    UNSENT = auto()
    SENDING = auto()
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
        joined: since when the others do; None for none. (One list less for each request: the garbage collector counts.)
        stage: whether the server knows that we wait.
        since: loop time of the last sign from the server about this prompt.
        until: loop time at which the most patient waiter gives up.
        is_away: whether it counts as one that the server has.
        damaged: the cache holds something else than a row; it must be overwritten.
        overwrites: how often a worker was asked to do that.
        origin: counter of `ProducerStats` that the first waiter's request adds to; None until something has answered.
        is_touch: nobody here wants the row itself, just that it be in the cache.
        is_private: nobody else can ask for this, so nobody needs the answer once it has been read.
        weights: what a trie job works on, until it has been sent.
        weights_name: where they are stored, or b"".
    """

    __slots__ = (
        "began",
        "damaged",
        "is_away",
        "is_private",
        "is_touch",
        "joined",
        "origin",
        "overwrites",
        "prompt",
        "since",
        "stage",
        "until",
        "waiters",
        "weights",
        "weights_name",
    )

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.is_touch = False
        self.is_private = False
        self.weights: SentWeights | None = None
        self.weights_name = b""
        self.waiters: list[Waiter] = []
        self.began = monotonic()
        self.joined: list[float] | None = None
        self.stage = _UNSENT
        self.since = 0.0
        self.until = 0.0
        self.is_away = False
        self.damaged = False
        self.overwrites = 0
        self.origin: str | None = None


class PendingRequests:
    """All flights of one session, by digest.

    Args:
        cache: the producer's own rows; what lands is added.
        stats: the producer's counters.
        counters: count how requests end.

    Attributes:
        counters: as above.
        on_end: called whenever a request has ended; None for nobody.
    """

    def __init__(self, cache: RowLRU, stats: ProducerStats, counters: Counters | None = None) -> None:
        self._requests: dict[bytes, PendingRequest] = {}
        self._cache = cache
        self._stats = stats
        # Flights that the server has, and the bytes of their prompts.
        self._away = self._away_bytes = 0
        # How often a row was to be there and was not: of those requests alone, for there are hardly ever any.
        self._lost: dict[bytes, int] = {}
        self.on_end: Callable[[], None] | None = None
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

    def board(
        self, prompt: Prompt, waiter: Waiter, *, until: float = math.inf, touch: bool = False
    ) -> tuple[PendingRequest, bool]:
        """Let a waiter wait for a prompt; returns its request, and whether that is a new one.

        Args:
            prompt: what is asked.
            waiter: who asks.
            until: loop time at which the waiter gives up.
            touch: the waiter does not want the row, just that it be in the cache.
        """
        request = self._requests.get(prompt.digest)
        is_new = request is None
        if request is None:
            request = self._requests[prompt.digest] = PendingRequest(prompt)
            request.is_touch = touch
        else:
            if request.joined is None:
                request.joined = []
            request.joined.append(monotonic())
            request.is_touch = request.is_touch and touch
        if until > request.until:
            request.until = until
        request.waiters.append(waiter)
        return request, is_new

    def send(self, unsent: deque[PendingRequest]) -> list[PendingRequest]:
        """Take requests to be sent, those that are waited for, as far as the server is to have so many at once.

        Args:
            unsent: in their order; what is taken is removed. A request counts as one that the server has until it ends.
        """
        taken = []
        while unsent and self._away < _MOST_AWAY and self._away_bytes < _MOST_AWAY_BYTES:
            request = unsent.popleft()
            if request.waiters:
                taken.append(request)
                if not request.is_away:
                    request.is_away = True
                    self._away += 1
                    self._away_bytes += len(request.prompt.ids)
        return taken

    def _end(self, request: PendingRequest) -> None:
        self._take_off(request)
        if self.on_end is not None:
            self.on_end()

    def _take_off(self, request: PendingRequest) -> None:
        prompt = request.prompt
        del self._requests[prompt.digest]
        if self._lost:
            self._lost.pop(prompt.digest, None)
        if request.is_away:
            request.is_away = False
            self._away -= 1
            self._away_bytes -= len(prompt.ids)

    def count_lost(self, requests: Iterable[PendingRequest]) -> None:
        """Count that jobs had ended, and their rows were gone before they could be fetched."""
        for request in requests:
            digest = request.prompt.digest
            self._lost[digest] = self._lost.get(digest, 0) + 1

    def times_lost(self, request: PendingRequest) -> int:
        """How often that has happened to a request under way."""
        return self._lost.get(request.prompt.digest, 0)

    def leave(self, request: PendingRequest, waiter: Waiter, why: str = "cancelled") -> bool:
        """Take a waiter off its request; True when that ended the request, for nobody else waits here."""
        at = request.waiters.index(waiter)
        del request.waiters[at]
        began = request.joined.pop(at - 1) if at and request.joined else request.began
        if not at and request.joined:
            request.began = request.joined.pop(0)
        self.counters.failed(why, began)
        self._stats.failed += 1
        if request.waiters or not self.is_open(request):
            return False
        self._end(request)
        return True

    def deliver(self, digests: Sequence[bytes], found: Sequence[Found]) -> None:
        """Take what the cache holds for some prompts."""
        now, ended = monotonic(), 0
        for digest, row in zip(digests, found, strict=True):
            request = self._requests.get(digest)
            if row is None or request is None:
                continue
            if isinstance(row, CorruptRow):
                request.damaged = True
                if request.overwrites >= _MOST_OVERWRITES:
                    self.land(request, row)
                continue
            if not request.prompt.query:
                self._cache.put(digest, row)
            self._take_off(request)
            self._answer(request, row, now)
            ended += 1
        if ended and self.on_end is not None:
            self.on_end()

    def land(self, request: PendingRequest, answer: Answer) -> None:
        """End a request and tell its waiters; a newer request of the same prompt goes on."""
        if self.is_open(request):
            self._end(request)
        if request.waiters:
            self._tell(request, answer)

    def _tell(self, request: PendingRequest, answer: Answer) -> None:
        if not isinstance(answer, Exception):
            self._answer(request, answer, monotonic())
            return
        waiters, request.waiters = request.waiters, []
        self._stats.failed += len(waiters)
        for since in (request.began, *(request.joined or ())):
            self.counters.failed(type(answer).__name__, since)
        for waiter in waiters:
            waiter(own(answer))

    def _answer(self, request: PendingRequest, row: Row, now: float) -> None:
        waiters, request.waiters = request.waiters, []
        # What no script has told of was found by looking.
        origin = request.origin = request.origin or "cache_hits"
        self._stats.add(origin)
        self._stats.joined += len(waiters) - 1
        self.counters.landed(origin, request.began, request.joined, now)
        for waiter in waiters:
            waiter(row)

    def follow(self, fingerprint: str) -> None:
        """Ask for the rows of this model: rows of another are forgotten, and requests begin anew."""
        self._cache.belong_to(fingerprint)
        for request in self._requests.values():
            request.stage = Stage.UNSENT
            request.origin = None


_SLOTS_PER_S = 100


class SingleWaiter:
    """Waits for one row with a future.

    Args:
        loop: the running event loop.
        seconds: how long it waits, for who is told that they have passed.

    Attributes:
        future: has the row.
        request: what it waits for.
        seconds: as above.
        slot: which of the `Deadlines` it is in.
    """

    __slots__ = ("future", "request", "seconds", "slot")

    request: PendingRequest

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self.future: asyncio.Future[Row] = loop.create_future()
        self.seconds = seconds
        self.slot = 0

    def __call__(self, answer: Answer) -> None:
        if not self.future.done():
            if isinstance(answer, Exception):
                self.future.set_exception(answer)
            else:
                self.future.set_result(answer)


class Deadlines:
    """Ends waits whose time has passed, at most 10 ms later.

    A timer for each would cost more than anything else of a request that is answered in time; one for all those
    that end within the same hundredth of a second costs next to nothing.

    Args:
        loop: the running event loop.
        expire: called with each waiter whose time has passed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, expire: Callable[[SingleWaiter], None]) -> None:
        self._loop = loop
        self._expire = expire
        self._slots: dict[int, tuple[set[SingleWaiter], asyncio.TimerHandle]] = {}

    def add(self, waiter: SingleWaiter, until: float) -> None:
        """End a wait at the loop time `until`, unless it is removed before."""
        number = waiter.slot = int(until * _SLOTS_PER_S) + 1
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = set(), self._loop.call_at(number / _SLOTS_PER_S, self._end, number)
        slot[0].add(waiter)

    def remove(self, waiter: SingleWaiter) -> None:
        """Forget a wait that has ended, in whichever way."""
        slot = self._slots.get(waiter.slot)
        if slot is not None:
            waiters, timer = slot
            waiters.discard(waiter)
            if not waiters:
                timer.cancel()
                del self._slots[waiter.slot]

    def _end(self, number: int) -> None:
        waiters, _ = self._slots.pop(number)
        for waiter in waiters:
            self._expire(waiter)


class BatchWaiter:
    """Collects the rows of a batch in one array, so that no row is kept twice.

    Attributes:
        rows: float32 of shape (n, V); complete when `future` is done.
    """

    __slots__ = ("future", "left", "rows")

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int, vocab_size: int) -> None:
        self.future: asyncio.Future[None] = loop.create_future()
        self.rows: NDArray[np.float32] = np.empty((count, vocab_size), np.float32)
        self.left = count
        if count == 0:
            self.future.set_result(None)

    def at(self, index: int) -> Waiter:
        """The waiter for one row of the batch."""

        def deliver(answer: Answer) -> None:
            if self.future.done():
                return
            if isinstance(answer, Exception):
                self.future.set_exception(answer)
                return
            if answer.shape != self.rows.shape[1:]:
                v = self.rows.shape[1]
                self.future.set_exception(ModelMismatch(f"the model's V was {v} and is {answer.size} now: ask again"))
                return
            self.rows[index] = answer
            self.left -= 1
            if self.left == 0:
                self.future.set_result(None)

        return deliver
