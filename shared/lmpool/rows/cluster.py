"""The cache of rows on a Redis Cluster: on all of its masters, each row where its key belongs."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence

from lmpool.broker.connection import CommandConnection
from lmpool.broker.scripts import Call
from lmpool.broker.server import Server
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import SentWeights
from lmpool.protocol.row import Block, Encoding
from lmpool.rows.cache import Deliver, RedisRows, RowCache, RowSpace, Then
from lmpool.rows.shared_memory import NOT_SHARED, SegmentReader, Shared


def rows_on(server: Server, keys: Keys, info: ModelInfo, segments: SegmentReader) -> RowCache:
    """The cache of a model's rows on a server or cluster; `segments` reads those that lie in shared memory."""
    space = RowSpace.of(keys, info, segments)
    return ClusterRows(server, space) if server.is_cluster else RedisRows(server, space)


class ClusterRows:
    """Rows as Redis strings with a TTL, on the masters of a cluster; see `RowCache` for the methods.

    All of them raise ServerError when a master that is needed cannot be used.

    Args:
        server: the cluster.
        space: names the rows, and says what they are like.

    Attributes:
        is_seen: see `RowCache.is_seen`: the queue is on one master, most rows on others.
    """

    is_seen = False

    def __init__(self, server: Server, space: RowSpace) -> None:
        self._server = server
        self._space = space
        self._queue = CommandConnection(server, space.jobs)
        self._queue.reply_timeout_s = space.reply_timeout_s
        self._masters: dict[Server, RedisRows] = {}

    @property
    def queue(self) -> Call:
        """See `RowCache.queue`."""
        return self._queue.call

    async def _split(self, keys: Sequence[bytes]) -> list[tuple[RedisRows, list[int]]]:
        """The masters that have some keys, each with the numbers of its keys."""
        parts: dict[Server, list[int]] = {}
        for index, key in enumerate(keys):
            parts.setdefault(await self._server.at(key), []).append(index)
        return [(self._on(master), numbers) for master, numbers in parts.items()]

    def _on(self, master: Server) -> RedisRows:
        rows = self._masters.get(master)
        if rows is None:
            rows = self._masters[master] = RedisRows(master, self._space)
        return rows

    async def put(
        self, block: Block, overwrite: Collection[bytes] = (), then: Then | None = None, shared: Shared = NOT_SHARED
    ) -> dict[bytes, str]:
        """See `RowCache.put`."""
        parts = await self._split(self.keys_of(block.digests))
        stored = [rows.put(block, overwrite, shared=shared, some=numbers) for rows, numbers in parts]
        refused = _merged(await asyncio.gather(*stored))
        if then is not None:
            await then(self._queue.call, refused)
        return refused

    def ttl_ms(self, block: Block) -> int:
        """See `RowCache.ttl_ms`."""
        return self._space.ttl_of(block)

    async def put_weights(self, weights: Sequence[SentWeights]) -> dict[bytes, str]:
        """See `RowCache.put_weights`."""
        parts = await self._split(self.keys_of_weights(sent.name for sent in weights))
        stored = [rows.put_weights([weights[index] for index in numbers]) for rows, numbers in parts]
        return _merged(await asyncio.gather(*stored))

    async def get_many(
        self, digests: Sequence[bytes], deliver: Deliver, lengths: Mapping[bytes, int] | None = None
    ) -> int:
        """See `RowCache.get_many`."""
        lengths = lengths or {}

        async def get(rows: RedisRows, some: list[bytes]) -> int:
            return await rows.get_many(some, deliver, {digest: lengths[digest] for digest in some if digest in lengths})

        parts = await self._split(self.keys_of(digests))
        fetched = await asyncio.gather(*(get(rows, [digests[number] for number in numbers]) for rows, numbers in parts))
        return sum(fetched)

    async def there(self, digests: Sequence[bytes]) -> list[bytes]:
        """See `RowCache.there`."""
        parts = await self._split(self.keys_of(digests))
        there = await asyncio.gather(*(rows.there([digests[at] for at in numbers]) for rows, numbers in parts))
        return [digest for some in there for digest in some]

    async def entries(
        self, digests: Sequence[bytes], encoding: Encoding, ranges: Sequence[bytes]
    ) -> list[bytes | None]:
        """See `RowCache.entries`; one call for each row, for a script may look at keys of one slot only."""
        parts = await self._split(self.keys_of(digests))
        owners = {number: rows for rows, numbers in parts for number in numbers}
        calls = (owners[at].entries([digests[at]], encoding, [ranges[at]]) for at in range(len(digests)))
        return [entries for (entries,) in await asyncio.gather(*calls)]

    def keys_of(self, digests: Iterable[bytes]) -> list[bytes]:
        """See `RowCache.keys_of`."""
        return [self._space.prefix + digest for digest in digests]

    def keys_of_weights(self, names: Iterable[bytes]) -> list[bytes]:
        """See `RowCache.keys_of_weights`."""
        return [self._space.weights_prefix + name for name in names]

    async def drop(self, keys: Sequence[bytes]) -> None:
        """See `RowCache.drop`; one call for each key, for the same reason."""
        parts = await self._split(keys)
        await asyncio.gather(*(rows.drop([keys[number]]) for rows, numbers in parts for number in numbers))

    def close(self) -> None:
        """Close all connections; what is under way fails."""
        self._queue.close()
        for rows in self._masters.values():
            rows.close()


def _merged(refused: Sequence[dict[bytes, str]]) -> dict[bytes, str]:
    return {digest: reason for some in refused for digest, reason in some.items()}
