"""Publishing: rows to the cache, then one script that ends the jobs and tells the clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from redis.exceptions import RedisError

from lmpool import scripts
from lmpool.backoff import delays
from lmpool.errors import LMPoolError, ServerError
from lmpool.keys import GROUP, ModelKeys
from lmpool.messages import Failure
from lmpool.rowcache import RowCache
from lmpool.rows import RowBlock
from lmpool.server import Server

_log = logging.getLogger("lmpool.worker")

_REPLY_CAP = 1000
_REPLY_TTL_MS = 120_000
_DEAD_CAP = 10_000
_NOT_STORED = Failure(
    ServerError.__name__,
    "the server did not store the row; the worker's log has its reason. Is its memory full, with a policy that "
    "evicts nothing (maxmemory-policy volatile-lru evicts rows)?",
).pack()


class Ending(NamedTuple):
    """How one entry of the queue ends: with a row in the cache, or with a failure."""

    entry: bytes
    digest: bytes
    failure: Failure | None = None
    is_dead: bool = False


class Publisher:
    """Publishes for one model.

    Args:
        server: to explain errors.
        rows: the cache.
        keys: the model's keys.
        row_prefix: prefix of the model's rows.
        fingerprint: the model's fingerprint, told to clients with each digest.
    """

    def __init__(self, server: Server, rows: RowCache, keys: ModelKeys, row_prefix: bytes, fingerprint: str) -> None:
        self._server = server
        self._rows = rows
        self._keys = keys
        self._row_prefix = row_prefix
        self._fingerprint = fingerprint

    async def publish(
        self, block: RowBlock, entries: Mapping[bytes, Sequence[bytes]], overwrite: Collection[bytes]
    ) -> None:
        """Store a block of rows and end their jobs; tries until the server takes them.

        Args:
            block: the rows.
            entries: digest -> the entries of the queue that asked for it.
            overwrite: digests whose stored rows must be replaced.
        """
        endings = [Ending(entry, digest) for digest in block.digests for entry in entries.get(digest, ())]

        async def attempt() -> None:
            # Sent together: the script itself looks whether the rows are there.
            refused = await self._rows.put(block, overwrite, then=lambda: self._end(endings))
            if refused:
                reason = next(iter(refused.values()))
                _log.warning("the server refused %d rows: %s", len(refused), reason)

        await self._insist(attempt)

    async def end(self, endings: Sequence[Ending]) -> None:
        """End jobs that failed; tries until the server has done it."""
        await self._insist(lambda: self._end(endings))

    async def _end(self, endings: Sequence[Ending]) -> None:
        for at in range(0, len(endings), scripts.MOST_AT_ONCE):
            part = endings[at : at + scripts.MOST_AT_ONCE]
            keys = [self._keys.jobs, self._keys.dead]
            keys += [self._keys.waiting + ending.digest for ending in part]
            keys += [self._row_prefix + ending.digest for ending in part]
            args: list[bytes | str | int] = [GROUP, self._fingerprint, _REPLY_CAP, _REPLY_TTL_MS, _DEAD_CAP]
            for ending in part:
                args += (ending.entry, ending.failure.pack() if ending.failure else b"", int(ending.is_dead))
            args.append(_NOT_STORED)
            await scripts.FINISH.on(self._rows.line, keys, args)

    async def _insist(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Try until the server answers. Repeating is harmless: the first stored row stays the row."""
        waits = delays()
        while True:
            try:
                return await attempt()
            except (RedisError, OSError, LMPoolError) as error:
                _log.warning("cannot publish, will try again: %s", self._server.explain(error))
                await asyncio.sleep(next(waits))
