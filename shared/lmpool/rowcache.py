"""Where rows live: one small interface, and the Redis strings behind it today.

Neither the producer nor the worker's loop knows that a row is a Redis string; a shared-memory plane for
clients on the worker's own host can stand behind the same interface.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
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
from lmpool.rows import Block, Encoding, RowBlock, VectorBlock, check_logprobs, decode_row, encoded_size
from lmpool.scripts import Call
from lmpool.server import Server

Row = NDArray[np.float32]
Deliver = Callable[[bytes, Row | CorruptRow | None], None]
"""Called once per digest with its row, None when there is none, or CorruptRow (an error is a value here)."""

_CHUNK_BYTES = 1024 * 1024
_CHUNK_ROWS = 512
_CHUNKS_UNDER_WAY = 3
_MOST_SPARE = 32
_WEIGHTS_TTL_MS = 120_000
_ANSWER_TTL_MS = 60_000
"""Answers to asks live shorter than rows: computed again from the row in no time."""


class RowCache(Protocol):
    """Stores the rows of one model under one fingerprint."""

    @property
    def line(self) -> RowLine:
        """The connection that rows take."""
        ...

    async def put(
        self, block: Block, overwrite: Collection[bytes] = (), then: Callable[[Call], Awaitable[None]] | None = None
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

    async def get_many(
        self, digests: Sequence[bytes], deliver: Deliver, lengths: Mapping[bytes, int] | None = None
    ) -> None:
        """Fetch rows in chunks bounded by bytes and deliver each as it comes.

        Args:
            digests: whose rows.
            deliver: takes them.
            lengths: digest -> entries, of those that are no rows but answers to asks.
        """
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
        self._weights_prefix = keys.weights()
        self._vocab_size = card.vocab_size
        self._ttl_ms = int(card.row_ttl_s * 1000)
        # A script's reply must fit too where rows are tiny.
        self.line = RowLine(server, max(4096, encoded_size(card.vocab_size, Encoding.F32)), self._allocate)
        self._spare: list[Bulk] = []
        self._row_size = encoded_size(card.vocab_size, card.row_encoding)
        self._window = asyncio.Semaphore(_CHUNKS_UNDER_WAY)

    async def put(
        self, block: Block, overwrite: Collection[bytes] = (), then: Callable[[Call], Awaitable[None]] | None = None
    ) -> dict[bytes, str]:
        """See `RowCache.put`.

        Raises:
            ServerError: the server cannot be used; nothing is known of the rows.
        """
        link = await self.line.open()
        writes = _writes(self._prefix, block, overwrite)
        ttl_ms = self._ttl_ms if isinstance(block, RowBlock) else min(self._ttl_ms, _ANSWER_TTL_MS)
        stored = link.set(writes, ttl_ms)
        if then is not None:
            await then(partial(self.line.call_on, link))
        return _refused(block, await self.line.wait_for(link, stored))

    async def put_weights(self, block: VectorBlock) -> dict[bytes, str]:
        """Store what trie jobs work on; as `put`, but in a place of its own and for a shorter time.

        Raises:
            ServerError: the server cannot be used.
        """
        link = await self.line.open()
        writes = _writes(self._weights_prefix, block, block.digests)
        return _refused(block, await self.line.wait_for(link, link.set(writes, _WEIGHTS_TTL_MS)))

    async def get_many(
        self, digests: Sequence[bytes], deliver: Deliver, lengths: Mapping[bytes, int] | None = None
    ) -> None:
        """See `RowCache.get_many`.

        Raises:
            ServerError: the server cannot be used; the rest is not delivered.
        """
        lengths = lengths or {}
        if lengths:
            self.line.allow(encoded_size(max(lengths.values()), Encoding.F32))
        chunks = list(self._chunks(digests, lengths))
        if len(chunks) == 1:
            await self._get_chunk(chunks[0], deliver, lengths)
        elif chunks:
            await asyncio.gather(*(self._get_chunk(chunk, deliver, lengths) for chunk in chunks))

    def _chunks(self, digests: Sequence[bytes], lengths: Mapping[bytes, int]) -> Iterator[Sequence[bytes]]:
        if not lengths:
            count = max(1, min(_CHUNK_ROWS, _CHUNK_BYTES // self._row_size))
            yield from (digests[at : at + count] for at in range(0, len(digests), count))
            return
        begin = size = 0
        for at, digest in enumerate(digests):
            own = encoded_size(lengths[digest], Encoding.F32) if digest in lengths else self._row_size
            if at > begin and (size + own > _CHUNK_BYTES or at - begin == _CHUNK_ROWS):
                yield digests[begin:at]
                begin, size = at, 0
            size += own
        if begin < len(digests):
            yield digests[begin:]

    async def _get_chunk(self, digests: Sequence[bytes], deliver: Deliver, lengths: Mapping[bytes, int]) -> None:
        prefix = self._prefix
        async with self._window:
            link = await self.line.open()
            values = await self.line.wait_for(link, link.mget([prefix + digest for digest in digests]))
        for digest, value in zip(digests, values, strict=True):
            length = lengths.get(digest, self._vocab_size)
            deliver(digest, self._decode(digest, value, length, is_answer=digest in lengths))

    def _decode(self, digest: bytes, value: object, length: int, *, is_answer: bool) -> Row | CorruptRow | None:
        if not isinstance(value, np.ndarray):
            return None
        try:
            row = decode_row(value, length)
            if not is_answer:
                check_logprobs(row)
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


def _writes(prefix: bytes, block: Block, overwrite: Collection[bytes]) -> list[RowWrite]:
    return [
        RowWrite(prefix + digest, block.header(index), block.payload(index), digest in overwrite)
        for index, digest in enumerate(block.digests)
    ]


def _refused(block: Block, replies: Sequence[object]) -> dict[bytes, str]:
    pairs = zip(block.digests, replies, strict=True)
    return {digest: str(reply) for digest, reply in pairs if isinstance(reply, ResponseError)}
