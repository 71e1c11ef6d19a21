"""A producer's connections, and the names that it uses for one model."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import inf
from time import monotonic

import numpy as np
from redis.exceptions import NoPermissionError, RedisError, ResponseError

from lmpool.card import ModelCard
from lmpool.clusterrows import rows_on
from lmpool.errors import LMPoolError, ProducerClosed
from lmpool.keys import Keys, ModelKeys
from lmpool.line import CommandLine, reply_timeout
from lmpool.producer.flights import Flight, FlightTable
from lmpool.producer.lobby import Lobby
from lmpool.rowcache import Found, RowCache
from lmpool.rows import encoded_size
from lmpool.server import Server
from lmpool.server_memory import ServerMemory, read_memory

TROUBLE = (RedisError, OSError, LMPoolError)
"""What any use of the server may raise."""

CLOSED = "the producer was closed while the request was under way"

_NO_ROW = np.empty(0, np.float32)
_MEMORY_LOOK_S = 5.0


class Channel:
    """Connections of one session.

    Args:
        server: the pool's Redis.
        keys: the deployment's key names.
        flights: take the rows that are fetched.

    Attributes:
        line: connection for the scripts on the path of a request.
        redis: client for what is off that path.
        reader: connection for the blocking reads of the reply stream, used by nothing else.
        lobby: what is served.
        card: the model.
        model: the model's keys.
        reply: this client's reply stream.
        closed: whether the session has ended; nothing may be asked any more.
        trouble: why the server cannot be used at present, or None.
    """

    card: ModelCard
    model: ModelKeys
    reply: bytes

    def __init__(self, server: Server, keys: Keys, flights: FlightTable) -> None:
        self._server = server
        self._keys = keys
        self._flights = flights
        self._client_id = secrets.token_hex(8)
        self._rows: RowCache | None = None
        self.redis = server.client()
        self.reader = CommandLine(server)
        self.line = CommandLine(server)
        self.lobby = Lobby(self.redis, keys)
        self.closed = False
        self._memory: ServerMemory | None = None
        self._next_memory_look = 0.0
        self.trouble: LMPoolError | None = None

    def adopt(self, card: ModelCard) -> None:
        """Use a model, or the same one with other weights."""
        if self._rows is not None:
            self._rows.close()
        self.card = card
        self.reader.reply_timeout_s = self.line.reply_timeout_s = reply_timeout(card.lease_s)
        self._flights.follow(card.fingerprint)
        self.fingerprint = card.fingerprint
        self.model = self._keys.model(card.name)
        self.reply = self.model.reply(self._client_id)
        self.row_prefix = self._keys.row(self.fingerprint)
        self.line.key = self.reader.key = self.model.jobs
        self._rows = rows_on(self._server, self._keys, card)
        self._flights.figures.model = card.name

    def own_line(self) -> CommandLine:
        """One more connection to who has the model's keys; its user closes it."""
        return CommandLine(self._server, self.model.adapters)

    @property
    def rows(self) -> RowCache:
        """Where the model's rows are.

        Raises:
            LMPoolError: no model has been adopted yet.
        """
        if self._rows is None:
            raise LMPoolError("the model is not known yet")
        return self._rows

    async def fetch(self, digests: Sequence[bytes]) -> None:
        """Look for rows in the cache and give what is found to the flights.

        Raises:
            ServerError: the server cannot be used.
        """
        rows, lengths, wanted = self._rows, {}, []
        for digest in digests:
            flight = self._flights.get(digest)
            if flight is not None and not flight.is_touch:
                wanted.append(digest)
                if flight.prompt.length:
                    lengths[digest] = flight.prompt.length
        if not wanted or rows is None:
            return

        def deliver(digests: Sequence[bytes], found: Sequence[Found]) -> None:
            # What was fetched from the namespace of other weights must not land after the change.
            if self._rows is rows:
                self._flights.deliver(digests, found)

        fetched = await rows.get_many(wanted, deliver, lengths)
        self._flights.figures.fetched_bytes += fetched
        self.trouble = None

    async def settle(self, digests: Sequence[bytes]) -> None:
        """As `fetch`, for rows that the server says are there: who does not want the row itself is done.

        Raises:
            ServerError: the server cannot be used.
        """
        for digest in digests:
            flight = self._flights.get(digest)
            if flight is not None and flight.is_touch:
                self._flights.land(flight, _NO_ROW)
        await self.fetch(digests)

    async def upload(self, flights: Sequence[Flight]) -> bool:
        """Store the weights of those flights that have some and are still under way; returns whether there were any.

        Raises:
            ServerError: the server cannot be used, or refuses.
        """
        loaded = [flight.weights for flight in flights if flight.weights is not None and flight.waiters]
        if not loaded or self._rows is None:
            return False
        refused = await self._rows.put_weights(loaded)
        if refused:
            raise self._server.explain(ResponseError(next(iter(refused.values()))))
        for flight in flights:
            flight.weights = None
        return True

    def spent(self, flights: Sequence[Flight]) -> list[bytes]:
        """The keys that nobody needs once these flights have ended: private answers, and weights; told once."""
        keys = []
        for flight in flights:
            if flight.is_private:
                keys.append(self.row_prefix + flight.prompt.digest)
                flight.is_private = False
            if flight.weights_name:
                keys.append(self._keys.weights() + flight.weights_name)
                flight.weights_name = b""
        return keys

    async def unlink(self, keys: Sequence[bytes]) -> None:
        """Remove answers and weights.

        Raises:
            ServerError: the server cannot be used.
        """
        if keys and self._rows is not None:
            await self._rows.drop(keys)

    def check_open(self) -> None:
        """Raise ProducerClosed if the session has ended."""
        if self.closed:
            raise ProducerClosed(CLOSED)

    def full(self) -> str:
        """What to say when the queue has no room for a prompt."""
        return (
            f"the queue of {self.card.name!r} is at its limit of {self.card.queue_limit} prompts; "
            "ask for less at once, add workers, or raise the workers' --queue-limit"
        )

    def note_lost(self, flights: Iterable[Flight]) -> bool:
        """Remember that jobs had ended and their rows were gone; returns whether to look at the server's memory."""
        lost = [one for one in flights if not one.damaged and self._flights.is_open(one)]
        self._flights.count_lost(lost)
        if not lost or (now := monotonic()) < self._next_memory_look:
            return False
        self._next_memory_look = now + _MEMORY_LOOK_S
        return True

    async def look_at_memory(self) -> None:
        """Read how full the server is, for the end of requests whose rows were gone."""
        with suppress(*TROUBLE):
            self._memory = await read_memory(self.redis)
            if self._memory is None:
                self._next_memory_look = inf  # This user is not told.

    def lost(self, flight: Flight) -> str:
        """What to say of a row that was gone before it could be fetched, as evicted ones are; "" when it was not."""
        times = self._flights.times_lost(flight)
        if not times:
            return ""
        gone = f"the row was gone from the server before it could be fetched{'' if times == 1 else f', {times} times'}"
        if self._memory is not None and not (self._memory.evicted_keys and self._memory.is_nearly_full):
            but = "the server's memory is not full" if self._memory.evicted_keys else "the server has evicted nothing"
            why = "was it started anew, or does somebody drop rows?"
            return f"{gone}, although {but} ({self._memory}): {why}"
        memory = f" ({self._memory})" if self._memory is not None else ""
        size = encoded_size(self.card.vocab_size, self.card.row_encoding) / 1e6
        rows = "" if self.card.is_trie else f" A row takes {size:.3g} MB, and {len(self._flights)} are under way here."
        return (
            f"{gone}: most likely evicted, for the server's memory is full{memory}.{rows} Raise maxmemory, have fewer "
            "rows under way at once, or serve rows of a smaller dtype"
        )

    async def check_writes(self, model: str) -> None:
        """Write something that is gone at once, to see whether the server takes writes; a user's rights do not count.

        Args:
            model: whose server is meant.

        Raises:
            RedisError, OSError: it does not, or cannot be used.
        """
        with suppress(NoPermissionError):
            await self.redis.set(self._keys.probe(model, self._client_id), b"", px=1)

    def note(self, error: BaseException) -> None:
        """Remember why the server cannot be used; a request whose deadline passes tells it."""
        self.trouble = self._server.explain(error)

    async def reconnect(self, error: BaseException) -> None:
        """Open new connections, if that is what the server's answer means."""
        await self._server.reconnect(self.redis, error)

    def explain(self, error: BaseException) -> LMPoolError:
        """The exception of our tree for one of redis-py's or the system's."""
        return self._server.explain(error)

    async def close(self) -> None:
        """Close all connections."""
        if self._rows is not None:
            self._rows.close()
        self.line.close()
        self.reader.close()
        await self.redis.aclose()
