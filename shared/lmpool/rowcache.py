"""Where rows live: one small interface, and the Redis strings behind it today.

Neither the producer nor the worker's loop knows that a row is a Redis string; a shared-memory plane for
clients on the worker's own host can stand behind the same interface.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from redis.exceptions import ResponseError

from lmpool.card import ModelCard
from lmpool.errors import CorruptRow, ProtocolError
from lmpool.keys import Keys
from lmpool.line import RowLine
from lmpool.rowlink import Bulk, RowWrite, fresh_bulk
from lmpool.rows import Encoding, RowBlock, decode_row, encoded_size
from lmpool.scripts import Call
from lmpool.server import Server

Row = NDArray[np.float32]
Deliver = Callable[[bytes, Row | CorruptRow | None], None]
"""Called once per digest with its row, None when there is none, or CorruptRow (an error is a value here)."""

_CHUNK_BYTES = 1024 * 1024
_CHUNK_ROWS = 512
_CHUNKS_UNDER_WAY = 3
_MOST_SPARE = 32


class RowCache(Protocol):
    """Stores the rows of one model under one fingerprint."""

    @property
    def line(self) -> RowLine:
        """The connection that rows take."""
        ...

    async def put(
        self, block: RowBlock, overwrite: Collection[bytes] = (), then: Callable[[Call], Awaitable[None]] | None = None
    ) -> dict[bytes, str]:
        """Store a block; the first stored row of a digest stays, except for those in `overwrite`.

        Args:
            block: the rows; must not change meanwhile.
            overwrite: digests whose rows are replaced.
            then: sends more right behind the rows, without waiting for them to be stored; what it calls finds
                the rows, or fails together with them.

        Returns:
            digest -> reason, for the rows that were refused.
        """
        ...

    async def get_many(self, digests: Sequence[bytes], deliver: Deliver) -> None:
        """Fetch rows in chunks bounded by bytes and deliver each as it comes."""
        ...

    def close(self) -> None:
        """Close the connection, if there is one."""
        ...


class RedisRows:
    """Rows as Redis strings with a TTL.

    Args:
        server: where they are.
        keys: the deployment's key names.
        card: the model; decides the namespace, the size and the lifetime of rows.

    Attributes:
        line: the connection that rows take.
    """

    def __init__(self, server: Server, keys: Keys, card: ModelCard) -> None:
        self._prefix = keys.row(card.fingerprint)
        self._vocab_size = card.vocab_size
        self._ttl_ms = int(card.row_ttl_s * 1000)
        # A script's reply must fit too where rows are tiny.
        self.line = RowLine(server, max(4096, encoded_size(card.vocab_size, Encoding.F32)), self._allocate)
        self._spare: list[Bulk] = []
        size = encoded_size(card.vocab_size, card.row_encoding)
        self._chunk = max(1, min(_CHUNK_ROWS, _CHUNK_BYTES // size))
        self._window = asyncio.Semaphore(_CHUNKS_UNDER_WAY)

    async def put(
        self, block: RowBlock, overwrite: Collection[bytes] = (), then: Callable[[Call], Awaitable[None]] | None = None
    ) -> dict[bytes, str]:
        """See `RowCache.put`.

        Raises:
            ServerError: the server cannot be used; nothing is known of the rows.
        """
        link = await self.line.open()
        writes = [
            RowWrite(self._prefix + digest, block.header(index), numbers, digest in overwrite)
            for index, (digest, numbers) in enumerate(zip(block.digests, _as_bytes(block), strict=True))
        ]
        stored = link.set(writes, self._ttl_ms)
        if then is not None:
            await then(partial(self.line.call_on, link))
        replies = await self.line.wait_for(link, stored)
        return {
            digest: str(reply)
            for digest, reply in zip(block.digests, replies, strict=True)
            if isinstance(reply, ResponseError)
        }

    async def get_many(self, digests: Sequence[bytes], deliver: Deliver) -> None:
        """See `RowCache.get_many`.

        Raises:
            ServerError: the server cannot be used; the rest is not delivered.
        """
        chunks = [digests[at : at + self._chunk] for at in range(0, len(digests), self._chunk)]
        if len(chunks) == 1:
            await self._get_chunk(chunks[0], deliver)
        elif chunks:
            await asyncio.gather(*(self._get_chunk(chunk, deliver) for chunk in chunks))

    async def _get_chunk(self, digests: Sequence[bytes], deliver: Deliver) -> None:
        prefix = self._prefix
        async with self._window:
            link = await self.line.open()
            values = await self.line.wait_for(link, link.mget([prefix + digest for digest in digests]))
        for digest, value in zip(digests, values, strict=True):
            deliver(digest, self._decode(digest, value))

    def _decode(self, digest: bytes, value: object) -> Row | CorruptRow | None:
        if not isinstance(value, np.ndarray):
            return None
        try:
            row = decode_row(value, self._vocab_size)
            if value.flags.writeable and len(self._spare) < _MOST_SPARE:
                # The row does not live in it. Memory that the processor has in its cache is worth keeping.
                self._spare.append(value)
            return row
        except ProtocolError as error:
            return CorruptRow(f"the cached row of prompt {digest.hex()} is damaged: {error}")

    def _allocate(self, size: int) -> Bulk:
        if self._spare and self._spare[-1].size == size:
            return self._spare.pop()
        return fresh_bulk(size)

    def close(self) -> None:
        """Close the connection; what is under way fails."""
        self.line.close()


def _as_bytes(block: RowBlock) -> list[memoryview]:
    """The numbers of each row of a block as bytes, in place."""
    # By way of integers of the same width: memoryview cannot cast every float format.
    numbers = block.numbers.view(np.uint16 if block.numbers.itemsize == 2 else np.uint32)
    return [row.data.cast("B") for row in numbers]
