"""A producer's connections, and the names that it uses for one model."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from time import monotonic

import numpy as np
from redis.exceptions import NoPermissionError, RedisError, ResponseError

from lmpool.broker.connection import CommandConnection, reply_timeout
from lmpool.broker.server import Server
from lmpool.broker.server_checks import ServerMemory, read_memory
from lmpool.errors import LMPoolError, ProducerClosed
from lmpool.producer.client.requests import PendingRequest, PendingRequests
from lmpool.protocol.keys import Keys, ModelKeys
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.row import encoded_size
from lmpool.rows.cache import Found, RowCache
from lmpool.rows.cluster import rows_on

TROUBLE = (RedisError, OSError, LMPoolError)
"""What any use of the server may raise."""

CLOSED = "the producer was closed while the request was under way"

_NO_ROW = np.empty(0, np.float32)
_MEMORY_LOOK_S = 5.0


@dataclass(frozen=True, slots=True)
class Adopted:
    """The model that a session uses.

    Attributes:
        info: as it was read last.
        fingerprint: of the info.
        keys: the model's keys.
        reply: this client's reply stream.
        rows: where the model's rows are.
    """

    info: ModelInfo
    fingerprint: str
    keys: ModelKeys
    reply: bytes
    rows: RowCache


class Connections:
    """Connections of one session.

    Args:
        server: the pool's Redis.
        keys: the deployment's key names.
        requests: take the rows that are fetched.

    Attributes:
        line: connection for the scripts on the path of a request.
        redis: client for what is off that path.
        reader: connection for the blocking reads of the reply stream, used by nothing else.
        adopted: the model; None until it is known.
        closed: whether the session has ended; nothing may be asked any more.
        trouble: why the server cannot be used at present, or None.
    """

    def __init__(self, server: Server, keys: Keys, requests: PendingRequests) -> None:
        self._server = server
        self._keys = keys
        self._requests = requests
        self._client_id = secrets.token_hex(8)
        self.adopted: Adopted | None = None
        self.redis = server.client()
        self.reader = CommandConnection(server)
        self.line = CommandConnection(server)
        self.closed = False
        self._memory: ServerMemory | None = None
        self._next_memory_look = 0.0
        self.trouble: LMPoolError | None = None

    def adopt(self, info: ModelInfo) -> None:
        """Use a model, or the same one with other weights."""
        if self.adopted is not None:
            self.adopted.rows.close()
        self.reader.reply_timeout_s = self.line.reply_timeout_s = reply_timeout(info.lease_s)
        fingerprint, keys = info.fingerprint, self._keys.model(info.name)
        self._requests.follow(fingerprint)
        self.line.key = self.reader.key = keys.jobs
        rows = rows_on(self._server, self._keys, info)
        self.adopted = Adopted(info, fingerprint, keys, keys.reply(self._client_id), rows)
        self._requests.counters.model = info.name

    def renew(self, info: ModelInfo) -> None:
        """Take over the info of the same weights: what it promises may have changed."""
        self.adopted = replace(self.model, info=info)

    def own_line(self) -> CommandConnection:
        """One more connection to who has the model's keys; its user closes it."""
        return CommandConnection(self._server, self.model.keys.adapters)

    @property
    def model(self) -> Adopted:
        """The model.

        Raises:
            LMPoolError: none has been adopted yet.
        """
        if self.adopted is None:
            raise LMPoolError("the model is not known yet")
        return self.adopted

    async def fetch(self, digests: Sequence[bytes]) -> None:
        """Look for rows in the cache and give what is found to the requests.

        Raises:
            ServerError: the server cannot be used.
        """
        adopted, lengths, wanted = self.adopted, {}, []
        for digest in digests:
            request = self._requests.get(digest)
            if request is not None and not request.is_touch:
                wanted.append(digest)
                if request.prompt.length:
                    lengths[digest] = request.prompt.length
        if not wanted or adopted is None:
            return
        rows = adopted.rows

        def deliver(digests: Sequence[bytes], found: Sequence[Found]) -> None:
            # What was fetched from the namespace of other weights must not land after the change.
            if self.model.rows is rows:
                self._requests.deliver(digests, found)

        fetched = await rows.get_many(wanted, deliver, lengths)
        self._requests.counters.fetched_bytes += fetched
        self.trouble = None

    async def settle(self, digests: Sequence[bytes]) -> None:
        """As `fetch`, for rows that the server says are there: who does not want the row itself is done.

        Raises:
            ServerError: the server cannot be used.
        """
        for digest in digests:
            request = self._requests.get(digest)
            if request is not None and request.is_touch:
                self._requests.land(request, _NO_ROW)
        await self.fetch(digests)

    async def upload(self, requests: Sequence[PendingRequest]) -> bool:
        """Store the weights of those requests that have some and are still under way; returns whether there were any.

        Raises:
            ServerError: the server cannot be used, or refuses.
        """
        loaded = [request.weights for request in requests if request.weights is not None and request.waiters]
        if not loaded or self.adopted is None:
            return False
        refused = await self.adopted.rows.put_weights(loaded)
        if refused:
            raise self._server.explain(ResponseError(next(iter(refused.values()))))
        for request in requests:
            request.weights = None
        return True

    def spent(self, requests: Sequence[PendingRequest]) -> list[bytes]:
        """The keys that nobody needs once these requests have ended: private answers, and weights; told once."""
        keys: list[bytes] = []
        for request in requests:
            if request.is_private:
                keys += self.model.rows.keys_of([request.prompt.digest])
                request.is_private = False
            if request.weights_name:
                keys += self.model.rows.keys_of_weights([request.weights_name])
                request.weights_name = b""
        return keys

    async def unlink(self, keys: Sequence[bytes]) -> None:
        """Remove answers and weights.

        Raises:
            ServerError: the server cannot be used.
        """
        if keys and self.adopted is not None:
            await self.adopted.rows.drop(keys)

    def check_open(self) -> None:
        """Raise ProducerClosed if the session has ended."""
        if self.closed:
            raise ProducerClosed(CLOSED)

    def full(self) -> str:
        """What to say when the queue has no room for a prompt."""
        info = self.model.info
        return (
            f"the queue of {info.name!r} is at its limit of {info.queue_limit} prompts; "
            "ask for less at once, add workers, or raise the workers' --queue-limit"
        )

    def note_lost(self, requests: Iterable[PendingRequest]) -> bool:
        """Remember that jobs had ended and their rows were gone; returns whether to look at the server's memory."""
        lost = [one for one in requests if not one.damaged and self._requests.is_open(one)]
        self._requests.count_lost(lost)
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

    def lost(self, request: PendingRequest) -> str:
        """What to say of a row that was gone before it could be fetched, as evicted ones are; "" when it was not."""
        times = self._requests.times_lost(request)
        if not times:
            return ""
        gone = f"the row was gone from the server before it could be fetched{'' if times == 1 else f', {times} times'}"
        if self._memory is not None and not (self._memory.evicted_keys and self._memory.is_nearly_full):
            but = "the server's memory is not full" if self._memory.evicted_keys else "the server has evicted nothing"
            why = "was it started anew, or does somebody drop rows?"
            return f"{gone}, although {but} ({self._memory}): {why}"
        memory = f" ({self._memory})" if self._memory is not None else ""
        info = self.model.info
        size = encoded_size(info.vocab_size, info.row_encoding) / 1e6
        rows = "" if info.is_trie else f" A row takes {size:.3g} MB, and {len(self._requests)} are under way here."
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
        if self.adopted is not None:
            self.adopted.rows.close()
        self.line.close()
        self.reader.close()
        await self.redis.aclose()
