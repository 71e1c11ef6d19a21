"""Publishing: rows to the cache, then one script that ends the jobs and tells the clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from redis.asyncio import Redis
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
        redis: a client for control messages.
        rows: the cache.
        keys: the model's keys.
        fingerprint: the model's fingerprint, told to clients with each digest.
    """

    def __init__(self, server: Server, redis: Redis, rows: RowCache, keys: ModelKeys, fingerprint: str) -> None:
        self._server = server
        self._redis = redis
        self._rows = rows
        self._keys = keys
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
        refused = await self._insist(lambda: self._rows.put(block, overwrite))
        endings = []
        for digest in block.digests:
            reason = refused.get(digest)
            failure = Failure(ServerError.__name__, f"the server refused the row: {reason}") if reason else None
            endings += [Ending(entry, digest, failure) for entry in entries.get(digest, ())]
        if refused:
            _log.warning("%d rows were refused by the server: %s", len(refused), next(iter(refused.values())))
        await self.end(endings)

    async def end(self, endings: Sequence[Ending]) -> None:
        """End jobs whose rows are stored, or that failed; tries until the server has done it."""
        for at in range(0, len(endings), scripts.MOST_AT_ONCE):
            part = endings[at : at + scripts.MOST_AT_ONCE]
            keys = [self._keys.jobs, self._keys.dead]
            keys += [self._keys.waiting + ending.digest for ending in part]
            args: list[Any] = [GROUP, self._fingerprint, _REPLY_CAP, _REPLY_TTL_MS, _DEAD_CAP]
            for ending in part:
                args += (ending.entry, ending.failure.pack() if ending.failure else b"", int(ending.is_dead))
            await self._insist(lambda keys=keys, args=args: scripts.FINISH(self._redis, keys, args))

    async def _insist(self, attempt: Any) -> Any:
        """Try until the server answers. Repeating is harmless: the first stored row stays the row."""
        waits = delays()
        while True:
            try:
                return await attempt()
            except (RedisError, OSError, LMPoolError) as error:
                _log.warning("cannot publish, will try again: %s", self._server.explain(error))
                await asyncio.sleep(next(waits))
