"""What a producer's session holds while it lives: its connections, its background tasks, and the model that it uses."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil, inf
from time import monotonic
from typing import Any

from redis.exceptions import NoPermissionError, RedisError

from lmpool.aio import end_tasks
from lmpool.broker.connection import CommandConnection, reply_timeout
from lmpool.broker.server import Server
from lmpool.broker.server_checks import ServerMemory, read_memory
from lmpool.errors import LMPoolError, ProducerClosed
from lmpool.producer.client.tracing import Traces
from lmpool.protocol.keys import Keys, ModelKeys
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.row import Encoding, encoded_size
from lmpool.rows.cache import RowCache
from lmpool.rows.cluster import rows_on
from lmpool.rows.connection import CHUNK_BYTES
from lmpool.rows.shared_memory import SegmentReader, is_shared

TROUBLE = (RedisError, OSError, LMPoolError)
"""What any use of the server may raise."""

CLOSED = "the producer was closed while the request was under way"

_MEMORY_LOOK_S = 5.0
# Seconds between two scans of the folder of segments: a new worker's rows are read from memory from then on.
_SCAN_S = 1.0


class Tasks:
    """Keeps the background tasks of one session.

    Attributes:
        loop: the event loop in which they run.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something in the background; the reference that is kept lets it run to its end."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def cancel(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        await end_tasks(self._tasks)


@dataclass(frozen=True, slots=True)
class AdoptedModel:
    """The model that a session uses, under one fingerprint.

    Attributes:
        info: as it was read last.
        fingerprint: of the info.
        keys: the model's keys.
        reply: this client's reply stream.
        rows: the cache of the model's rows.
        host: whose shared memory this client reads; b"" for none.
    """

    info: ModelInfo
    fingerprint: str
    keys: ModelKeys
    reply: bytes
    rows: RowCache
    host: bytes = b""


class Connections:
    """Connections of one session.

    Args:
        server: the pool's Redis.
        keys: the deployment's key names.
        is_bulk: this client's prompts yield to those of others that do not.

    Attributes:
        commands: connection for the scripts on the path of a request.
        reader: connection for the blocking reads of the reply stream, used by nothing else.
        redis: client for what is off that path.
        closed: whether the session has ended; nothing may be asked any more.
        trouble: why the server cannot be used at present, or None.
        segments: reads rows in shared memory.
        traces: the spans of its requests; None where they are not traced.
    """

    def __init__(self, server: Server, keys: Keys, *, is_bulk: bool = False, traces: Traces | None = None) -> None:
        self._server = server
        self._keys = keys
        self._is_bulk = is_bulk
        self.segments = SegmentReader()
        self.traces = traces
        self._client_id = secrets.token_hex(8)
        self._adopted: AdoptedModel | None = None
        self.redis = server.client()
        self.reader = CommandConnection(server)
        self.commands = CommandConnection(server)
        self.closed = False
        self.trouble: LMPoolError | None = None
        self._memory: ServerMemory | None = None
        self._next_memory_look = 0.0
        # Max requests in flight when a row was gone, since the last check of the memory: their rows need it at once.
        self._pending = 0

    def adopt(self, info: ModelInfo) -> None:
        """Use a model, or the same one with other weights."""
        if self._adopted is not None:
            self._adopted.rows.close()
        keys = self._keys.model(info.name)
        for connection in (self.reader, self.commands):
            connection.reply_timeout_s = reply_timeout(info.lease_s)
            connection.key = keys.jobs
        rows = rows_on(self._server, self._keys, info, self.segments)
        # With the host, so that scripts see which rows in shared memory are for this client.
        host = self.segments.host if is_shared(info.vocab_size) else b""
        reply = keys.reply(f"{self._client_id}{host.decode()}", is_bulk=self._is_bulk)
        self._adopted = AdoptedModel(info, info.fingerprint, keys, reply, rows, host)

    def renew(self, info: ModelInfo) -> None:
        """Take over the info of the same weights: what it promises may have changed."""
        self._adopted = replace(self.model, info=info)

    async def look_for_segments(self) -> None:
        """See which workers of this host have rows of the model in shared memory."""
        if self.model.host:
            await self.segments.look(self.model.fingerprint)

    async def follow_segments(self) -> None:
        """Scan for segments every second; never returns.

        Nothing else waits for this: a scan needs a thread, and the program may keep all threads busy.
        """
        while True:
            await asyncio.sleep(_SCAN_S)
            # No thread can be started: there are too many, or the main thread has ended and others still ask.
            with suppress(RuntimeError):
                await self.look_for_segments()

    @property
    def model(self) -> AdoptedModel:
        """The model.

        Raises:
            LMPoolError: none has been adopted yet.
        """
        if self._adopted is None:
            raise LMPoolError("the model is not known yet")
        return self._adopted

    def check_open(self) -> None:
        """Raise ProducerClosed if the session has ended."""
        if self.closed:
            raise ProducerClosed(CLOSED)

    async def check_writes(self, model: str) -> None:
        """Write a key that is gone at once, to see whether the server takes writes; a user's rights do not count.

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

    def describe_full_queue(self) -> str:
        """Why the queue has no room for a prompt, and what to do."""
        info = self.model.info
        return (
            f"the queue of {info.name!r} is at its limit of {info.queue_limit} prompts; "
            "ask for less at once, add workers, or raise the workers' --queue-limit"
        )

    async def look_at_memory(self, pending: int) -> None:
        """Read how full the server is, at most every few seconds, for the end of requests whose rows were gone.

        Args:
            pending: number of this session's requests under way.
        """
        now = monotonic()
        if now < self._next_memory_look:
            self._pending = max(self._pending, pending)
            return
        self._pending = pending
        self._next_memory_look = now + _MEMORY_LOOK_S
        with suppress(*TROUBLE):
            self._memory = await read_memory(self.redis)
            if self._memory is None:
                self._next_memory_look = inf  # This user is not told.

    def describe_lost_row(self, times: int, pending: int, length: int = 0) -> str:
        """Why a row was gone before it could be fetched, as evicted ones are, and what to do.

        Args:
            times: how often it was.
            pending: number of this session's requests under way.
            length: numbers of an answer; 0 for a row.
        """
        gone = f"the row was gone from the server before it could be fetched{'' if times == 1 else f', {times} times'}"
        info = self.model.info
        size = encoded_size(length or info.vocab_size, Encoding.F32 if length else info.row_encoding)
        if self._memory is not None and not (self._memory.evicted_keys and self._memory.is_full_for(size)):
            but = "the server's memory is not full" if self._memory.evicted_keys else "the server has evicted nothing"
            why = "was it started anew, or does somebody drop rows?"
            return f"{gone}, although {but} ({self._memory}): {why}"
        memory = f" ({self._memory})" if self._memory is not None else ""
        kind = "An answer" if length else "A row"
        # Requests that end at the same deadline are fewer with each that has ended.
        pending = max(pending, self._pending)
        # All of them at once, and those that are being fetched a second time, in the buffers of connections.
        more = ceil((pending * size + 2 * CHUNK_BYTES) / 1e6)
        rows, by = f" {kind} takes {size / 1e6:.3g} MB, and {pending} are under way here.", f" by {more} MB at least"
        if info.is_trie:
            rows = by = ""
        return (
            f"{gone}: most likely evicted, for the server's memory is full{memory}.{rows} Raise maxmemory{by}, have "
            "fewer rows under way at once, or serve rows of a smaller dtype"
        )

    async def close(self) -> None:
        """Close all connections."""
        if self._adopted is not None:
            self._adopted.rows.close()
        self.segments.close()
        self.commands.close()
        self.reader.close()
        await self.redis.aclose()
