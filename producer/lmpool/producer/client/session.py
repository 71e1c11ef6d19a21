"""A producer's life in one event loop: connect, ask, watch, close."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lmpool.aio import Tasks
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
from lmpool.producer.client.connections import CLOSED, TROUBLE, Channel
from lmpool.producer.client.discovery import Crew, Lobby, Vocabularies, WorkerInfo
from lmpool.producer.client.receive import EntryReader, Found, Inbox, WantedEntries
from lmpool.producer.client.requests import (
    BatchWaiter,
    Deadlines,
    Figures,
    Flight,
    FlightTable,
    ProducerStats,
    RowLRU,
    SingleWaiter,
    Stage,
    Waiter,
)
from lmpool.producer.client.submit import Outbox
from lmpool.producer.deadline import ALONE_S, ENDLESS_S, Deadline
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import ModelCard
from lmpool.protocol.prompt import Prompt, encode_prompt
from lmpool.rows.cache import Row
from lmpool.trie.weights import SentWeights

WhenFull = Literal["wait", "raise"]
"""What requests do while the queue is at its limit."""
WhenAbsent = Literal["wait", "raise"]
"""What opening and asking do while no worker serves the model: wait until their deadlines, or end."""

_log = logging.getLogger("lmpool.producer")

_COLLECTORS = 2
_WATCH_S = 1.0
_MOST_RECHECKED = 2000
_GOODBYE_S = 1.0


class Session:
    """Asks for rows and waits for them, in one event loop.

    Args:
        server: the pool's Redis.
        keys: the deployment's key names.
        cache: the producer's own rows.
        stats: the producer's counters.
        figures: count how requests end.
        when_full: what requests do while the queue is at its limit.
        when_absent: what requests do while no worker serves the model.

    Attributes:
        loop: the event loop.
        vocabularies: what the tokens of models and tries stand for.
        adapters: which weights the model's adapters have.
    """

    def __init__(
        self,
        server: Server,
        keys: Keys,
        cache: RowLRU,
        stats: ProducerStats,
        figures: Figures | None = None,
        when_full: WhenFull = "wait",
        when_absent: WhenAbsent = "raise",
    ) -> None:
        self._supervisor: asyncio.Task[None] | None = None
        self._waits_when_absent = when_absent == "wait"
        self._has_told_of_absence = False
        self._alone_since: float | None = None
        self._tasks = Tasks()
        self.loop = self._tasks.loop
        self._cache = cache
        self._stats = stats
        self._flights = FlightTable(cache, stats, figures)
        self._deadlines = Deadlines(self.loop, self._on_deadline)
        self._channel = Channel(server, keys, self._flights)
        self._lobby = Lobby(self._channel.redis, keys)
        self.vocabularies = Vocabularies(self._channel, keys)
        self._entries = EntryReader(self._channel, self._tasks)
        self.adapters = Adapters(self._channel)
        self._outbox = Outbox(self._channel, self._flights, self._tasks, waits_when_full=when_full == "wait")
        self._inbox = Inbox(self._channel, self._flights, self._outbox, self._follow_model)
        self._is_following = False
        self._next_recheck = 0
        self._crew = Crew(self._channel, self._lobby)

    async def open(self, model: str | None) -> None:
        """Connect and read the model's card; may be tried again after a failure, until it is closed.

        Args:
            model: name of the model, or None for the only one.

        Raises:
            ServerError: the server cannot be used.
            UnknownModel, AmbiguousModel: there is not exactly the model that was asked for.
        """
        channel = self._channel
        try:
            card = await self._find_card(model)
            await self._crew.meet(card.name)
        except TROUBLE as error:
            raise channel.explain(error) from error
        channel.adopt(card)
        self._supervisor = self.loop.create_task(self._supervise(), name="lmpool-producer")
        # A task that is cancelled before its first step does not run at all, and this one closes the connections.
        await asyncio.sleep(0)

    async def _find_card(self, model: str | None) -> ModelCard:
        try:
            return await self._lobby.card(model)
        except UnknownModel as error:
            if not error.is_loading:
                # A server that takes no writes has refused a worker's card too, and no further worker helps.
                await self._channel.check_writes(model or "")
            raise

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return self._channel.closed

    def check_open(self) -> None:
        """Raise ProducerClosed if it has ended."""
        self._channel.check_open()

    @property
    def card(self) -> ModelCard:
        """The model's card."""
        try:
            # Not by way of `model`, nor with a look first: this is read for every request.
            return self._channel.adopted.card  # type: ignore[union-attr]
        except AttributeError:
            return self._channel.model.card  # Says that it is not known yet.

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the card."""
        return self._channel.model.fingerprint

    async def workers(self) -> list[WorkerInfo]:
        """The live workers of the model.

        Raises:
            RedisError, OSError: the server cannot be used.
        """
        return await self._lobby.workers(self.card.name)

    def explain(self, error: BaseException) -> LMPoolError:
        """The exception of our tree for one of redis-py's or the system's."""
        return self._channel.explain(error)

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
        card = self.card
        return encode_prompt(ids, vocab_size=card.vocab_size, max_tokens=card.max_prompt_tokens, adapter=adapter)

    def kept(self, prompt: Prompt) -> Row | None:
        """A prompt's row, if the producer has it itself: a request that ends here."""
        row = self._cache.get(prompt.digest)
        if row is not None:
            self._stats.requests += 1
            self._stats.local_hits += 1
        return row

    def read_entries(self, wanted: WantedEntries, deadline: Deadline) -> asyncio.Future[Found]:
        """Entries of a row in the cache; None when it is not there, or cannot be read in time."""
        return self._entries.read(wanted, deadline.end)

    def count_hit(self, deadline: Deadline) -> None:
        """Count a request that entries in the cache have answered."""
        self._stats.requests += 1
        self._stats.cache_hits += 1
        self._flights.figures.seconds["cache_hits"].observe(self.loop.time() - deadline.end + deadline.seconds)

    def ask(self, prompt: Prompt, waiter: Waiter, until: float, *, touch: bool = False) -> Flight:
        """Let `waiter` wait for a prompt's row; joins the flight that is under way, or starts one.

        Args:
            prompt: what is asked.
            waiter: who asks.
            until: loop time at which the waiter gives up.
            touch: the row itself is not wanted, just that it be in the cache; the answer is empty.
        """
        self._stats.requests += 1
        flight, is_new = self._flights.board(prompt, waiter, until=until, touch=touch)
        if is_new:
            self._outbox.add(flight)
        return flight

    async def answer(
        self,
        prompt: Prompt,
        deadline: Deadline,
        *,
        touch: bool = False,
        private: bool = False,
        damaged: bool = False,
        weights: SentWeights | None = None,
    ) -> Row:
        """Ask and wait.

        Args:
            prompt: what is asked.
            deadline: for how long.
            touch: as for `ask`.
            private: nobody else can ask for this: the answer is removed from the cache when it has been read.
            damaged: what the cache holds as the answer is damaged: have it replaced.
            weights: what a trie job works on, which must not change meanwhile. Such an answer is private too.
        """
        self.check_open()
        waiter = self.begin(prompt, deadline.end, deadline.seconds, touch=touch)
        flight = waiter.flight
        if weights is not None:
            flight.weights_name, flight.weights = weights.name, weights
        flight.is_private = private or weights is not None
        flight.damaged = flight.damaged or damaged
        try:
            return await waiter.future
        finally:
            self.end(waiter)

    async def answer_all(self, prompts: Sequence[Prompt], deadline: Deadline) -> NDArray[np.float32]:
        """The rows of several prompts, float32 (n, V); the first failure ends the others."""
        batch = BatchWaiter(self.loop, len(prompts), self.card.vocab_size)
        waits: list[tuple[Flight, Waiter]] = []
        for index, prompt in enumerate(prompts):
            waiter = batch.at(index)
            row = self.kept(prompt)
            if row is None:
                waits.append((self.ask(prompt, waiter, deadline.end), waiter))
            else:
                waiter(row)
        timer = self.loop.call_at(deadline.end, self._expire_first, waits, deadline.seconds)
        try:
            await batch.future
        finally:
            timer.cancel()
            for flight, waiter in waits:
                if flight.waiters:
                    self.leave(flight, waiter)
        return batch.rows

    def _expire_first(self, waits: Sequence[tuple[Flight, Waiter]], seconds: float) -> None:
        """A batch's deadline: the first prompt that is still under way says why."""
        for flight, waiter in waits:
            if waiter in flight.waiters:
                self.expire(flight, waiter, seconds)
                return

    def begin(self, prompt: Prompt, until: float, seconds: float, *, touch: bool = False) -> SingleWaiter:
        """Ask, for who awaits the future and calls `end`, however that ends.

        Args:
            prompt: what is asked.
            until: loop time of the deadline.
            seconds: how long that is, for its message.
            touch: as for `ask`.
        """
        waiter = SingleWaiter(self.loop, seconds)
        waiter.flight = self.ask(prompt, waiter, until, touch=touch)
        self._deadlines.add(waiter, until)
        return waiter

    def end(self, waiter: SingleWaiter) -> None:
        """Nobody waits there any more."""
        self._deadlines.remove(waiter)
        flight = waiter.flight
        if flight.waiters:
            self.leave(flight, waiter)
        if flight.is_private:
            self._outbox.discard([flight])

    def leave(self, flight: Flight, waiter: Waiter, why: str = "cancelled") -> None:
        """Take a waiter off its flight, if it is still on it."""
        if waiter in flight.waiters and self._flights.leave(flight, waiter, why):
            self._outbox.take_back(flight)

    def _on_deadline(self, waiter: SingleWaiter) -> None:
        self.expire(waiter.flight, waiter, waiter.seconds)

    def expire(self, flight: Flight, waiter: Waiter, timeout: float) -> None:
        """End a wait whose deadline has passed, with the exception that says why."""
        if waiter in flight.waiters:
            error = self._reason(flight, f"no row within {timeout:g} s")
            self.leave(flight, waiter, type(error).__name__)
            waiter(error)

    def _reason(self, flight: Flight, what: str) -> LMPoolError:
        channel = self._channel
        if channel.trouble is not None:
            return type(channel.trouble)(f"{what}: {channel.trouble}")
        if flight.stage is Stage.REFUSED:
            return QueueFull(f"{what}: {channel.full()}")
        # Before the workers: a server that evicts rows evicts heartbeats too.
        if lost := channel.lost(flight):
            return DeadlineExceeded(f"{what}: {lost}")
        return self._crew.late(what)

    async def close(self) -> None:
        """End all requests and connections, and leave nothing on the server."""
        if self._supervisor is None:
            self._channel.closed = True
            await self._channel.close()
        elif not self.closed:
            self.close_soon()
            await asyncio.wait([self._supervisor])

    def close_soon(self) -> None:
        """As `close`, without waiting for it; of a session that is open."""
        if self._supervisor is not None:
            self._supervisor.cancel()

    async def _supervise(self) -> None:
        """Run the background parts until cancelled, by `close` or by the end of `asyncio.run`."""
        parts = [self._inbox.read(), self._watch(), *(self._inbox.collect() for _ in range(_COLLECTORS))]
        try:
            await asyncio.gather(*map(self._tasks.spawn, parts))
        except asyncio.CancelledError:
            raise
        except BaseException:
            _log.exception("the connection to the pool ends because of an error in it")
            raise
        finally:
            self._channel.closed = True
            # A loop that was closed without cancelling its tasks can do nothing any more.
            if not self.loop.is_closed():
                await self._shut_down()

    async def _shut_down(self) -> None:
        await self._tasks.cancel()
        try:
            async with asyncio.timeout(_GOODBYE_S):
                await self._outbox.cancel_all()
                await self._channel.redis.unlink(self._channel.model.reply)
        except (*TROUBLE, TimeoutError):
            pass  # The server is away; what stays there expires.
        for flight in self._flights:
            self._flights.land(flight, ProducerClosed(CLOSED))
        await self._channel.close()

    async def _watch(self) -> None:
        """The slow timer: notifications are hints, so look at the truth from time to time."""
        while True:
            await asyncio.sleep(_WATCH_S)
            absence = None
            try:
                # redis-py's client was opened before the lease was known.
                async with asyncio.timeout(reply_timeout(self.card.lease_s)):
                    await self._reload_card()
                    await self.adapters.renew()
                    if self._flights:
                        absence = await self._crew.look(self.loop.time())
                        self._on_look(absence)
                    else:
                        self._crew.rest()
                if self._flights:
                    await self._recheck()
                # What cannot be sent is tried again, and tells itself: the card may be there, and the rows elsewhere.
                if not self._outbox.is_retrying:
                    self._channel.trouble = None
            except TROUBLE as error:
                self._crew.rest()  # Who could not be seen is not missed.
                self._channel.note(error)
                await self._channel.reconnect(error)
            self._bear(absence or self._channel.trouble)

    async def _recheck(self) -> None:
        """Look for rows that were never announced; resubmit what has been silent for a lease."""
        now, lease = self.loop.time(), self.card.lease_s
        late = [f for f in self._flights if f.stage is Stage.WAITING and now - f.since > _WATCH_S]
        # Not always the first ones: while these wait for long, the rows of others may be there.
        at = self._next_recheck if self._next_recheck < len(late) else 0
        late = late[at : at + _MOST_RECHECKED]
        self._next_recheck = at + len(late)
        await self._channel.fetch([flight.prompt.digest for flight in late])
        # Whether the row of a touch is there only the script can tell.
        silent = [f for f in late if self._flights.is_open(f) and (f.is_touch or now - f.since > lease)]
        if silent:
            await self._outbox.submit(silent, again=True)

    def _on_look(self, absence: LMPoolError | None) -> None:
        """Nobody has served the model for long, or somebody does: requests end, or wait as they were told."""
        if absence is None:
            self._has_told_of_absence = False
        elif not self._waits_when_absent:
            self._give_up(list(self._flights), absence)
        elif not self._has_told_of_absence:
            self._has_told_of_absence = True
            _log.warning("%s; requests wait until their deadlines", absence)

    def _bear(self, why: LMPoolError | None) -> None:
        """End the requests without a deadline when they could not have been answered for long, for this reason."""
        now = self.loop.time()
        if why is None or not self._flights:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        elif (seconds := now - self._alone_since) >= ALONE_S:
            error = type(why)(f"no row could be had for {seconds:.0f} s: {why}")
            self._give_up([flight for flight in self._flights if flight.until - now > ENDLESS_S / 2], error)

    def _give_up(self, flights: list[Flight], error: LMPoolError) -> None:
        for flight in flights:
            self._flights.land(flight, error)
            self._outbox.take_back(flight)

    def _follow_model(self) -> None:
        """The model has changed under us: read its card and send everything again."""
        if not self._is_following:
            self._is_following = True
            self._tasks.spawn(self._reload_quietly())
        self._outbox.retry_soon()

    async def _reload_quietly(self) -> None:
        try:
            await self._reload_card()
        except TROUBLE as error:
            self._channel.note(error)
        finally:
            self._is_following = False

    async def _reload_card(self) -> None:
        card = await self._lobby.find(self.card.name)
        if card is None:
            return  # Between two workers; requests wait for the next one.
        if card.fingerprint == self.card.fingerprint:
            self._channel.renew(card)
            return
        _log.info("the model %r has changed: asking again for %d prompts", card.name, len(self._flights))
        self._channel.adopt(card)
        self._outbox.retry_soon()
