"""A producer's connections in one event loop, and the requests that are under way on them."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from redis.exceptions import RedisError

from lmpool import errors, scripts
from lmpool.backoff import delays
from lmpool.card import ModelCard
from lmpool.errors import (
    CorruptRow,
    DeadlineExceeded,
    LMPoolError,
    ModelMismatch,
    NoWorker,
    ProducerClosed,
    QueueFull,
    UnknownModel,
    WorkerError,
)
from lmpool.keys import GROUP, Keys
from lmpool.messages import Job, unpack_failure
from lmpool.producer.flights import Answer, Flight, ProducerStats, Stage, Waiter
from lmpool.producer.lobby import Lobby
from lmpool.producer.lru import RowLRU
from lmpool.prompts import DIGEST_SIZE, Prompt
from lmpool.rowcache import RedisRows, Row
from lmpool.server import Server

_log = logging.getLogger("lmpool.producer")

_BLOCK_MS = 1000
_WATCH_S = 1.0
_COLLECTORS = 2
_WAITING_TTL_MS = 3_600_000
_MOST_RECHECKED = 2000
_TRIES_AT_DAMAGED_ROWS = 2


class Session:
    """Asks for rows and waits for them, in one event loop.

    Args:
        server: the pool's Redis.
        keys: the deployment's key names.
        model: name of the model, or None for the only one.
        cache: the producer's own rows.
        stats: the producer's counters.
    """

    def __init__(self, server: Server, keys: Keys, model: str | None, cache: RowLRU, stats: ProducerStats) -> None:
        self.loop = asyncio.get_running_loop()
        self.closed = False
        self._server = server
        self._keys = keys
        self._model = model
        self._cache = cache
        self._stats = stats
        self._client_id = secrets.token_hex(8)
        self._flights: dict[bytes, Flight] = {}
        self._unsent: list[Flight] = []
        self._left: list[bytes] = []
        self._arrived: list[bytes] = []
        self._has_arrived = asyncio.Event()
        self._retrying = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._trouble: LMPoolError | None = None
        self._workers = 0
        self._no_worker_since: float | None = None

    async def open(self) -> None:
        """Connect and read the model's card.

        Raises:
            ServerError: the server cannot be used.
            UnknownModel, AmbiguousModel: there is not exactly the model that was asked for.
        """
        self._redis = self._server.client()
        self._reader = self._server.client()
        self._lobby = Lobby(self._redis, self._keys)
        try:
            card = await self._lobby.card(self._model)
            self._workers = len(await self._lobby.workers(card.name))
        except (RedisError, OSError) as error:
            raise self._server.explain(error) from error
        finally:
            if not self._tasks:
                await self._redis.aclose()
        self._rows: RedisRows | None = None
        self._adopt(card)
        self._supervisor = self.loop.create_task(self._supervise(), name="lmpool-producer")

    @property
    def card(self) -> ModelCard:
        """The model's card."""
        return self._card

    # What the producer calls

    def ask(self, prompt: Prompt, waiter: Waiter) -> Flight:
        """Let `waiter` wait for a prompt's row; joins the flight that is under way, or starts one."""
        flight = self._flights.get(prompt.digest)
        if flight is None:
            flight = self._flights[prompt.digest] = Flight(prompt, self.loop.time())
            if not self._unsent:
                # After everything that is ready to run in this tick has added its requests.
                self.loop.call_soon(self._flush)
            self._unsent.append(flight)
        else:
            self._stats.joined += 1
        flight.waiters.append(waiter)
        return flight

    def leave(self, flight: Flight, waiter: Waiter) -> None:
        """Take a waiter off its flight; when it was the last, take this client off the job."""
        if waiter not in flight.waiters:
            return
        flight.waiters.remove(waiter)
        self._stats.failed += 1
        if not flight.waiters and self._flights.get(flight.prompt.digest) is flight:
            del self._flights[flight.prompt.digest]
            if flight.stage is Stage.WAITING:
                if not self._left:
                    self.loop.call_soon(self._flush_left)
                self._left.append(flight.prompt.digest)

    def expire(self, flight: Flight, waiter: Waiter, timeout: float) -> None:
        """End a wait whose deadline has passed, with the exception that says why."""
        if waiter in flight.waiters:
            error = self._reason(flight, timeout)
            self.leave(flight, waiter)
            waiter(error)

    def _reason(self, flight: Flight, timeout: float) -> LMPoolError:
        name, within = self._card.name, f"no row within {timeout:g} s"
        if self._trouble is not None:
            return type(self._trouble)(f"{within}: {self._trouble}")
        if flight.stage is Stage.REFUSED:
            return QueueFull(
                f"{within}: the queue of {name!r} stayed at its limit of {self._card.queue_limit} prompts; "
                "ask for less at once, add workers, or raise the workers' --queue-limit"
            )
        if self._workers == 0:
            return NoWorker(f"{within}: no live worker serves {name!r}; start one with `lmpool worker`")
        return DeadlineExceeded(
            f"{within}: {self._workers} live worker(s) serve {name!r} and have not answered yet; "
            "allow more time (timeout=), ask for less at once, or add workers"
        )

    async def close(self) -> None:
        """End all requests and connections, and leave nothing on the server."""
        if not self.closed:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)

    # Sending

    def _flush(self) -> None:
        batch, self._unsent = self._unsent, []
        self._spawn(self._send([flight for flight in batch if flight.waiters]))

    async def _send(self, flights: Sequence[Flight]) -> None:
        """Look for rows in the cache; ask workers for the rest."""
        try:
            await self._fetch([flight.prompt.digest for flight in flights])
            await self._submit([flight for flight in flights if self._is_open(flight)])
        except (RedisError, OSError, LMPoolError) as error:
            self._note_trouble(error)
            self._retry_soon()

    async def _submit(self, flights: Sequence[Flight], *, again: bool = False) -> None:
        """Register for prompts and queue those that nobody computes yet."""
        stored: list[bytes] = []
        for at in range(0, len(flights), scripts.MOST_AT_ONCE):
            stored += await self._submit_part(flights[at : at + scripts.MOST_AT_ONCE], again)
        self._trouble = None
        if stored:
            await self._fetch(stored)
        if any(flight.stage is Stage.REFUSED for flight in flights):
            self._retry_soon()

    async def _submit_part(self, flights: Sequence[Flight], again: bool) -> list[bytes]:
        """Returns the digests whose rows have appeared in the cache meanwhile."""
        model, fingerprint = self._model_keys, self._card.fingerprint
        overwrite = any(flight.damaged for flight in flights)
        keys = [model.jobs, self._reply]
        keys += [model.waiting + flight.prompt.digest for flight in flights]
        if not overwrite:
            row = self._keys.row(fingerprint)
            keys += [row + flight.prompt.digest for flight in flights]
        args: list[Any] = [self._card.queue_limit, _WAITING_TTL_MS, int(not overwrite), int(again)]
        args += [Job(f.prompt.ids, self._card.adapter, fingerprint, bool(f.damaged)).pack() for f in flights]
        outcome: bytes = await scripts.SUBMIT(self._redis, keys, args)
        stored = []
        now = self.loop.time()
        for flight, code in zip(flights, outcome.decode(), strict=True):
            flight.since = now
            flight.stage = Stage.REFUSED if code == "F" else Stage.WAITING
            if code == "R":
                stored.append(flight.prompt.digest)
            elif code == "Q":
                flight.origin = "computed"
            elif code == "J" and not again:
                flight.origin = "joined"
        gone = [f.prompt.digest for f in flights if not self._is_open(f) and f.stage is Stage.WAITING]
        if gone:
            await self._cancel(gone)
        return stored

    def _retry_soon(self) -> None:
        if not self._retrying:
            self._retrying = True
            self._spawn(self._retry())

    async def _retry(self) -> None:
        """Send what could not be sent, until the server takes it."""
        waits = delays()
        try:
            while pending := [f for f in self._flights.values() if f.stage is not Stage.WAITING]:
                await asyncio.sleep(next(waits))
                try:
                    await self._fetch([flight.prompt.digest for flight in pending])
                    await self._submit([flight for flight in pending if self._is_open(flight)])
                except (RedisError, OSError, LMPoolError) as error:
                    self._note_trouble(error)
        finally:
            self._retrying = False

    def _flush_left(self) -> None:
        digests, self._left = self._left, []
        self._spawn(self._guarded(self._cancel([d for d in digests if d not in self._flights])))

    async def _cancel(self, digests: Sequence[bytes]) -> None:
        model = self._model_keys
        for at in range(0, len(digests), scripts.MOST_AT_ONCE):
            part = digests[at : at + scripts.MOST_AT_ONCE]
            keys = [model.jobs, self._reply, *(model.waiting + digest for digest in part)]
            await scripts.CANCEL(self._redis, keys, [GROUP])

    # Receiving

    async def _read(self) -> None:
        """The one reader of this client's reply stream."""
        last: bytes = b"0-0"
        waits = delays()
        while True:
            try:
                reply = await self._reader.xread({self._reply: last}, count=1000, block=_BLOCK_MS)
            except (RedisError, OSError) as error:
                self._note_trouble(error)
                await asyncio.sleep(next(waits))
                # Notifications may have been lost with the connection.
                self._has_arrived.set()
                self._arrived.extend(self._flights)
                continue
            waits = delays()
            for entry, fields in _entries(reply):
                last = entry
                self._on_message(fields)

    def _on_message(self, fields: dict[bytes, bytes]) -> None:
        digests = fields.get(b"d", b"")
        if (failure := fields.get(b"e")) is not None:
            self._on_failure(digests, failure)
        elif fields.get(b"f") != self._card.fingerprint.encode():
            self._spawn(self._guarded(self._reload_card()))
        else:
            self._arrived += [
                digest
                for at in range(0, len(digests), DIGEST_SIZE)
                if (digest := digests[at : at + DIGEST_SIZE]) in self._flights
            ]
            self._has_arrived.set()

    def _on_failure(self, digest: bytes, packed: bytes) -> None:
        flight = self._flights.get(digest)
        if flight is None:
            return
        try:
            kind, text = unpack_failure(packed)
        except errors.ProtocolError as error:
            kind, text = WorkerError.__name__, f"a worker failed, and its message does not decode: {error}"
        if kind == ModelMismatch.__name__:
            flight.stage = Stage.UNSENT
            self._spawn(self._guarded(self._reload_card()))
            return
        found = getattr(errors, kind, None)
        is_ours = isinstance(found, type) and issubclass(found, LMPoolError)
        self._land(flight, found(text) if is_ours else WorkerError(text))  # type: ignore[misc]

    async def _collect(self) -> None:
        """Fetch the rows that have been announced; what comes meanwhile makes the next fetch."""
        while True:
            await self._has_arrived.wait()
            digests, self._arrived = self._arrived, []
            self._has_arrived.clear()
            try:
                await self._fetch(digests)
                lost = [flight for digest in digests if (flight := self._flights.get(digest)) is not None]
                if lost:
                    # Announced, but evicted or damaged: a row is a pure function, so ask again.
                    await self._submit(lost, again=True)
            except (RedisError, OSError, LMPoolError) as error:
                self._note_trouble(error)

    async def _fetch(self, digests: Sequence[bytes]) -> None:
        if digests and self._rows is not None:
            await self._rows.get_many(digests, self._deliver)

    def _deliver(self, digest: bytes, found: Row | CorruptRow | None) -> None:
        flight = self._flights.get(digest)
        if found is None or flight is None:
            return
        if isinstance(found, CorruptRow):
            flight.damaged += 1
            if flight.damaged > _TRIES_AT_DAMAGED_ROWS:
                self._land(flight, found)
            return
        self._trouble = None
        self._cache.put(digest, found)
        self._land(flight, found)

    def _land(self, flight: Flight, answer: Answer) -> None:
        """End a flight and tell its waiters."""
        self._flights.pop(flight.prompt.digest, None)
        self._stats.add("failed" if isinstance(answer, Exception) else flight.origin)
        waiters, flight.waiters = flight.waiters, []
        for waiter in waiters:
            waiter(answer)

    def _is_open(self, flight: Flight) -> bool:
        return self._flights.get(flight.prompt.digest) is flight

    # Watching

    async def _watch(self) -> None:
        """The slow timer: notifications are hints, so look at the truth from time to time."""
        while True:
            await asyncio.sleep(_WATCH_S)
            try:
                await self._reload_card()
                if self._flights:
                    await self._look_for_workers()
                    await self._recheck()
            except (RedisError, OSError, LMPoolError) as error:
                self._note_trouble(error)

    async def _recheck(self) -> None:
        """Look for rows that were never announced; resubmit what has been silent for a lease."""
        now, lease = self.loop.time(), self._card.lease_s
        late = [
            flight
            for flight in self._flights.values()
            if flight.stage is Stage.WAITING and now - flight.since > _WATCH_S
        ][:_MOST_RECHECKED]
        await self._fetch([flight.prompt.digest for flight in late])
        silent = [f for f in late if self._is_open(f) and now - f.since > lease]
        if silent:
            await self._submit(silent, again=True)

    async def _look_for_workers(self) -> None:
        self._workers = len(await self._lobby.workers(self._card.name))
        if self._workers:
            self._no_worker_since = None
            return
        now = self.loop.time()
        self._no_worker_since = self._no_worker_since or now
        gone = now - self._no_worker_since
        if gone >= self._card.lease_s:
            error = NoWorker(
                f"no live worker has served {self._card.name!r} for {gone:.0f} s: start one with `lmpool worker`"
            )
            for flight in list(self._flights.values()):
                self._abandon(flight, error)

    def _abandon(self, flight: Flight, error: LMPoolError) -> None:
        digest = flight.prompt.digest
        if flight.stage is Stage.WAITING:
            if not self._left:
                self.loop.call_soon(self._flush_left)
            self._left.append(digest)
        self._land(flight, error)

    async def _reload_card(self) -> None:
        """Follow a model whose weights were replaced: other fingerprint, other rows."""
        try:
            card = await self._lobby.card(self._card.name)
        except UnknownModel:
            return  # Between two workers; requests wait for the next one.
        self._trouble = None
        if card.fingerprint != self._card.fingerprint:
            _log.info("the model %r has changed: asking again for %d prompts", card.name, len(self._flights))
            self._cache.clear()
            self._adopt(card)
            for flight in self._flights.values():
                flight.stage = Stage.UNSENT
            self._retry_soon()
        else:
            if any(flight.stage is Stage.UNSENT for flight in self._flights.values()) and not self._unsent:
                self._retry_soon()
            self._card = card

    def _adopt(self, card: ModelCard) -> None:
        if self._rows is not None:
            self._rows.close()
        self._card = card
        self._model_keys = self._keys.model(card.name)
        self._reply = self._model_keys.reply(self._client_id)
        self._rows = RedisRows(self._server, self._keys, card)

    def _note_trouble(self, error: BaseException) -> None:
        self._trouble = self._server.explain(error)

    # Life

    def _spawn(self, work: Awaitable[None]) -> None:
        task = self.loop.create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Awaitable[None]) -> None:
        try:
            await work
        except (RedisError, OSError, LMPoolError) as error:
            self._note_trouble(error)

    async def _supervise(self) -> None:
        """Run the background parts until cancelled, by `close` or by the end of `asyncio.run`."""
        parts: Iterable[Callable[[], Awaitable[None]]] = [
            self._read,
            self._watch,
            *[self._collect] * _COLLECTORS,
        ]
        for part in parts:
            self._spawn(part())
        try:
            await asyncio.gather(*self._tasks)
        finally:
            await self._shut_down()

    async def _shut_down(self) -> None:
        self.closed = True
        waiting = [f.prompt.digest for f in self._flights.values() if f.stage is Stage.WAITING]
        for flight in list(self._flights.values()):
            self._land(flight, ProducerClosed("the producer was closed while the request was under way"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(1):
                await self._cancel(waiting + self._left)
                await self._redis.unlink(self._reply)
        except (RedisError, OSError, TimeoutError):
            pass  # The server is away; what is left there expires.
        if self._rows is not None:
            self._rows.close()
        await self._reader.aclose()
        await self._redis.aclose()


def _entries(reply: Any) -> Sequence[tuple[bytes, dict[bytes, bytes]]]:
    """The entries of an XREAD of one stream, in whatever shape redis-py returns them."""
    if not reply:
        return []
    entries: Sequence[tuple[bytes, dict[bytes, bytes]]]
    entries = next(iter(reply.values()))[0] if isinstance(reply, dict) else reply[0][1]
    return entries
