"""Requests under way: one flight per prompt, any number of waiters on it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto
from time import monotonic

from lmpool.errors import CorruptRow
from lmpool.producer.client.lru import RowLRU
from lmpool.producer.figures import Figures
from lmpool.producer.stats import ProducerStats
from lmpool.producer.together import own
from lmpool.protocol.prompt import Prompt
from lmpool.rows.cache import Found, Row
from lmpool.trie.weights import SentWeights

_MOST_OVERWRITES = 2
_MOST_AWAY = 8192
_MOST_AWAY_BYTES = 64 * 1024 * 1024

Answer = Row | Exception
Waiter = Callable[[Answer], None]
"""Called once, with the row or with an exception of its own; never after it was taken off its flight."""


class Stage(Enum):
    """How far a flight has come."""

    UNSENT = auto()
    SENDING = auto()
    REFUSED = auto()
    WAITING = auto()


_UNSENT = Stage.UNSENT
"""To look a member up in its class costs as much as the rest of a new flight."""


class Flight:
    """One prompt that this process waits for.

    Attributes:
        prompt: ids and digest.
        waiters: who waits for it here.
        began: since when the first of them does, by `monotonic`.
        joined: since when the others do; None for none. (One list less for each flight: the garbage collector counts.)
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


class FlightTable:
    """All flights of one session, by digest.

    Args:
        cache: the producer's own rows; what lands is added.
        stats: the producer's counters.
        figures: count how requests end.

    Attributes:
        figures: as above.
        on_end: called whenever a flight has ended; None for nobody.
    """

    def __init__(self, cache: RowLRU, stats: ProducerStats, figures: Figures | None = None) -> None:
        self._flights: dict[bytes, Flight] = {}
        self._cache = cache
        self._stats = stats
        # Flights that the server has, and the bytes of their prompts.
        self._away = self._away_bytes = 0
        # How often a row was to be there and was not: of those flights alone, for there are hardly ever any.
        self._lost: dict[bytes, int] = {}
        self.on_end: Callable[[], None] | None = None
        self.figures = figures or Figures(stats, cache)

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(list(self._flights.values()))

    def get(self, digest: bytes) -> Flight | None:
        """The flight of a prompt, if it is under way."""
        return self._flights.get(digest)

    def is_open(self, flight: Flight) -> bool:
        """Whether a flight is still under way."""
        return self._flights.get(flight.prompt.digest) is flight

    def board(
        self, prompt: Prompt, waiter: Waiter, *, until: float = math.inf, touch: bool = False
    ) -> tuple[Flight, bool]:
        """Let a waiter wait for a prompt; returns its flight, and whether that is a new one.

        Args:
            prompt: what is asked.
            waiter: who asks.
            until: loop time at which the waiter gives up.
            touch: the waiter does not want the row, just that it be in the cache.
        """
        flight = self._flights.get(prompt.digest)
        is_new = flight is None
        if flight is None:
            flight = self._flights[prompt.digest] = Flight(prompt)
            flight.is_touch = touch
        else:
            if flight.joined is None:
                flight.joined = []
            flight.joined.append(monotonic())
            flight.is_touch = flight.is_touch and touch
        if until > flight.until:
            flight.until = until
        flight.waiters.append(waiter)
        return flight, is_new

    def send(self, unsent: deque[Flight]) -> list[Flight]:
        """Take flights to be sent, those that are waited for, as far as the server is to have so many at once.

        Args:
            unsent: in their order; what is taken is removed. A flight counts as one that the server has until it ends.
        """
        taken = []
        while unsent and self._away < _MOST_AWAY and self._away_bytes < _MOST_AWAY_BYTES:
            flight = unsent.popleft()
            if flight.waiters:
                taken.append(flight)
                if not flight.is_away:
                    flight.is_away = True
                    self._away += 1
                    self._away_bytes += len(flight.prompt.ids)
        return taken

    def _end(self, flight: Flight) -> None:
        self._take_off(flight)
        if self.on_end is not None:
            self.on_end()

    def _take_off(self, flight: Flight) -> None:
        prompt = flight.prompt
        del self._flights[prompt.digest]
        if self._lost:
            self._lost.pop(prompt.digest, None)
        if flight.is_away:
            flight.is_away = False
            self._away -= 1
            self._away_bytes -= len(prompt.ids)

    def count_lost(self, flights: Iterable[Flight]) -> None:
        """Count that jobs had ended, and their rows were gone before they could be fetched."""
        for flight in flights:
            digest = flight.prompt.digest
            self._lost[digest] = self._lost.get(digest, 0) + 1

    def times_lost(self, flight: Flight) -> int:
        """How often that has happened to a flight under way."""
        return self._lost.get(flight.prompt.digest, 0)

    def leave(self, flight: Flight, waiter: Waiter, why: str = "cancelled") -> bool:
        """Take a waiter off its flight; True when that ended the flight, for nobody else waits here."""
        at = flight.waiters.index(waiter)
        del flight.waiters[at]
        began = flight.joined.pop(at - 1) if at and flight.joined else flight.began
        if not at and flight.joined:
            flight.began = flight.joined.pop(0)
        self.figures.failed(why, began)
        self._stats.failed += 1
        if flight.waiters or not self.is_open(flight):
            return False
        self._end(flight)
        return True

    def deliver(self, digests: Sequence[bytes], found: Sequence[Found]) -> None:
        """Take what the cache holds for some prompts."""
        now, ended = monotonic(), 0
        for digest, row in zip(digests, found, strict=True):
            flight = self._flights.get(digest)
            if row is None or flight is None:
                continue
            if isinstance(row, CorruptRow):
                flight.damaged = True
                if flight.overwrites >= _MOST_OVERWRITES:
                    self.land(flight, row)
                continue
            if not flight.prompt.ask:
                self._cache.put(digest, row)
            self._take_off(flight)
            self._answer(flight, row, now)
            ended += 1
        if ended and self.on_end is not None:
            self.on_end()

    def land(self, flight: Flight, answer: Answer) -> None:
        """End a flight and tell its waiters; a newer flight of the same prompt goes on."""
        if self.is_open(flight):
            self._end(flight)
        if flight.waiters:
            self._tell(flight, answer)

    def _tell(self, flight: Flight, answer: Answer) -> None:
        if not isinstance(answer, Exception):
            self._answer(flight, answer, monotonic())
            return
        waiters, flight.waiters = flight.waiters, []
        self._stats.failed += len(waiters)
        for since in (flight.began, *(flight.joined or ())):
            self.figures.failed(type(answer).__name__, since)
        for waiter in waiters:
            waiter(own(answer))

    def _answer(self, flight: Flight, row: Row, now: float) -> None:
        waiters, flight.waiters = flight.waiters, []
        # What no script has told of was found by looking.
        origin = flight.origin = flight.origin or "cache_hits"
        self._stats.add(origin)
        self._stats.joined += len(waiters) - 1
        self.figures.landed(origin, flight.began, flight.joined, now)
        for waiter in waiters:
            waiter(row)

    def follow(self, fingerprint: str) -> None:
        """Ask for the rows of this model: rows of another are forgotten, and flights begin anew."""
        self._cache.belong_to(fingerprint)
        for flight in self._flights.values():
            flight.stage = Stage.UNSENT
            flight.origin = None
