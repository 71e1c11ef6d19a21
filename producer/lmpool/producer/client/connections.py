"""The connections of a producer's session, the model that it uses, and the errors that explain the server's state."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from redis.exceptions import NoPermissionError, RedisError

from lmpool.aio import end_tasks
from lmpool.broker.connection import CommandConnection, reply_timeout
from lmpool.broker.server import Server
from lmpool.errors import LMPoolError, ProducerClosed
from lmpool.protocol.keys import Keys, ModelKeys
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.row import encoded_size
from lmpool.rows.cache import RowCache
from lmpool.rows.shared_memory import SegmentReader, is_shared

TROUBLE = (RedisError, OSError, LMPoolError)
"""The exceptions that any use of the server may raise."""

CLOSED = "the producer was closed while the request was in flight"

# Seconds between two scans for shared memory: a new worker's rows are read from memory after at most this time.
_SCAN_S = 1.0


@dataclass(frozen=True, slots=True)
class AdoptedModel:
    """The model that a session uses, under one fingerprint.

    Attributes:
        info: the model info that was read last.
        reply: this client's reply stream.
        host: token of this machine's shared memory; b"" if rows are too small for it.
    """

    info: ModelInfo
    fingerprint: str
    keys: ModelKeys
    reply: bytes
    rows: RowCache
    host: bytes = b""


class Tasks:
    """The background tasks of one session."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` as a task; keeps the reference that asyncio does not keep."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def end_tasks(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        await end_tasks(self._tasks)


class Connections(Tasks):
    """The connections and background tasks of one session.

    Args:
        server: the pool's Redis server.
        keys: the key names of the deployment.
        is_bulk: whether this client's prompts have the priority "bulk".

    Attributes:
        commands: connection for the scripts of requests.
        reader: connection for the blocking reads of the reply stream only.
        redis: client for all other commands.
        closed: whether the session has ended.
        trouble: why the server cannot be used now, or None.
        segments: reads rows in shared memory.
        model: the model; set by `adopt`, which comes before any request.
    """

    model: AdoptedModel

    def __init__(self, server: Server, keys: Keys, *, is_bulk: bool = False) -> None:
        super().__init__()
        self._server = server
        self._keys = keys
        self._is_bulk = is_bulk
        self._client_id = secrets.token_hex(8)
        self.segments = SegmentReader()
        self.redis = server.client()
        self.reader = CommandConnection(server)
        self.commands = CommandConnection(server)
        self.closed = False
        self.trouble: LMPoolError | None = None

    def adopt(self, info: ModelInfo) -> None:
        """Use a model, or the same model with other weights."""
        self._close_rows()
        keys = self._keys.model(info.name)
        for connection in (self.reader, self.commands):
            connection.reply_timeout_s = reply_timeout(info.lease_s)
            connection.key = keys.jobs
        rows = RowCache(self._server, self._keys, info, self.segments)
        # The reply key includes the host, so that scripts see which shared rows this client can read.
        host = self.segments.host if is_shared(info.vocab_size) else b""
        reply = keys.reply(f"{self._client_id}{host.decode()}", is_bulk=self._is_bulk)
        self.model = AdoptedModel(info, info.fingerprint, keys, reply, rows, host)

    async def scan_segments(self) -> None:
        """Find the shared-memory segments of workers on this machine."""
        if self.model.host:
            await self.segments.refresh(self.model.fingerprint)

    async def follow_segments(self) -> None:
        """Scan for segments once a second, forever.

        This is a task of its own because a scan needs a thread, and the program may keep all threads busy.
        """
        while True:
            await asyncio.sleep(_SCAN_S)
            # RuntimeError: no thread can start, because there are too many or because the main thread has ended.
            with suppress(RuntimeError):
                await self.scan_segments()

    def check_open(self) -> None:
        """Raise ProducerClosed if the session has ended."""
        if self.closed:
            raise ProducerClosed(CLOSED)

    async def check_writes(self, model: str) -> None:
        """Write a key that expires at once, to check that the server accepts writes. Missing rights are ignored."""
        with suppress(NoPermissionError):
            await self.redis.set(self._keys.probe(model, self._client_id), b"", px=1)

    def note(self, error: BaseException) -> None:
        """Record why the server cannot be used, for the error of requests that time out."""
        self.trouble = self._server.explain(error)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Suppress errors of the server, and record them as `note` does."""
        try:
            yield
        except TROUBLE as error:
            self.note(error)

    async def reconnect(self, error: BaseException) -> None:
        """Open new connections if the error requires that."""
        await self._server.reconnect(self.redis, error)

    def explain(self, error: BaseException) -> LMPoolError:
        """Convert an exception of redis-py or of the operating system."""
        return self._server.explain(error)

    def describe_full_queue(self) -> str:
        """Return the error text for a full queue."""
        info = self.model.info
        return (
            f"the queue of {info.name!r} is at its limit of {info.queue_limit} prompts; "
            "ask for less at once, add workers, or raise the workers' --queue-limit"
        )

    def describe_lost_row(self, times: int, length: int = 0) -> str:
        """Return the error text for a row, or a result of `length` entries, that was lost before it was fetched."""
        gone = f"the row was gone from the server before it could be fetched{'' if times == 1 else f', {times} times'}"
        size = encoded_size(length or self.model.info.vocab_size, self.model.info.row_encoding)
        return (
            f"{gone}. Either its memory is full, so that it evicts rows of {size / 1e6:.3g} MB (see `lmpool status`): "
            "then raise maxmemory or have fewer rows pending. Or it restarted, or another client deletes rows"
        )

    def _close_rows(self) -> None:
        if hasattr(self, "model"):
            self.model.rows.close()

    async def close(self) -> None:
        """Close all connections."""
        self._close_rows()
        self.segments.close()
        self.commands.close()
        self.reader.close()
        await self.redis.aclose()
