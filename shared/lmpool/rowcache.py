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

from lmpool import scripts
from lmpool.card import ModelCard
from lmpool.errors import CorruptRow, ProtocolError
from lmpool.keys import Keys
from lmpool.line import CommandLine, RowLine, reply_timeout
from lmpool.rowlink import Bulk, RowLink, RowWrite, fresh_bulk
from lmpool.rows import Block, Encoding, RowBlock, VectorBlock, check_row, decode_row, decode_rows, encoded_size
from lmpool.scripts import Call
from lmpool.server import Server
from lmpool.weights import SentWeights

Row = NDArray[np.float32]
Found = Row | CorruptRow | None
"""A row, None when there is none, or why what is there is no row (an error is a value here)."""
Deliver = Callable[[Sequence[bytes], Sequence[Found]], None]
"""Called with digests and what was found of each; once for each digest."""

Then = Callable[[Call, Collection[bytes]], Awaitable[None]]
"""Called with what calls scripts on the model's queue, and with the digests that are known to be refused."""

# A chunk costs its client some 90 µs, whatever is in it; what is under way takes memory of the server.
_CHUNK_BYTES = 4 * 1024 * 1024
_CHUNK_ROWS = 512
_CHUNKS_UNDER_WAY = 2
_MOST_SPARE = 64
_WEIGHTS_TTL_MS = 120_000
_ANSWER_TTL_MS = 60_000
"""Answers to asks live shorter than rows: computed again from the row in no time."""


class RowCache(Protocol):
    """Stores the rows of one model under one fingerprint."""

    @property
    def is_seen(self) -> bool:
        """Whether scripts on the model's queue can look at the rows."""
        ...

    @property
    def queue(self) -> Call:
        """Calls scripts on the model's queue; where they can look at rows, behind those that are being stored."""
        ...

    async def put(self, block: Block, overwrite: Collection[bytes] = (), then: Then | None = None) -> dict[bytes, str]:
        """Store a block; the first stored row of a digest stays, except for those in `overwrite`.

        Args:
            block: the rows; must not change meanwhile.
            overwrite: digests whose rows are replaced.
            then: sends more right behind the rows; what it calls finds the rows, or fails together with them. Where
                scripts can look at the rows it is called without waiting for them to be stored.

        Returns:
            digest -> reason, for the rows that were refused.
        """
        ...

    async def get_many(
        self, digests: Sequence[bytes], deliver: Deliver, lengths: Mapping[bytes, int] | None = None
    ) -> int:
        """Fetch rows in chunks bounded by bytes and deliver each as it comes; returns the bytes that were fetched.

        Args:
            digests: whose rows.
            deliver: takes them.
            lengths: digest -> entries, of those that are no rows but answers to asks.
        """
        ...

    async def put_weights(self, weights: Sequence[SentWeights]) -> dict[bytes, str]:
        """Store what trie jobs work on, in a place of its own and for a shorter time than rows.

        Returns:
            name -> reason, for the weights that were refused.
        """
        ...

    async def there(self, digests: Sequence[bytes]) -> list[bytes]:
        """Those digests whose rows are there."""
        ...

    async def entries(
        self, digests: Sequence[bytes], encoding: Encoding, ranges: Sequence[bytes]
    ) -> list[bytes | None]:
        """Some entries of rows, as `entries.lua` gives them.

        Args:
            digests: whose rows.
            encoding: that of the rows, as far as is known.
            ranges: where the entries of each are (`lmpool.rows.entry_ranges`).
        """
        ...

    async def drop(self, keys: Sequence[bytes]) -> None:
        """Remove answers and weights."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


class RedisRows:
    """Rows as Redis strings with a TTL, on one server.

    Args:
        server: where they are.
        keys: the deployment's key names.
        card: the model; decides the namespace, the size and the lifetime of rows.

    Attributes:
        is_seen: see `RowCache.is_seen`.
    """

    is_seen = True

    def __init__(self, server: Server, keys: Keys, card: ModelCard) -> None:
        self._server = server
        self._prefix = keys.row(card.fingerprint)
        self._weights_prefix = keys.weights()
        self._vocab_size = card.vocab_size
        self._ttl_ms = int(card.row_ttl_s * 1000)
        # A script's reply must fit too where rows are tiny.
        # And a row that is too long must be told from one of the right length.
        self._line = RowLine(server, max(4096, encoded_size(card.vocab_size, Encoding.F32) + 1), self._allocate)
        self._commands = CommandLine(server)
        self._line.reply_timeout_s = self._commands.reply_timeout_s = reply_timeout(card.lease_s)
        self._spare: list[Bulk] = []
        self._row_size = encoded_size(card.vocab_size, card.row_encoding)
        self._window = asyncio.Semaphore(_CHUNKS_UNDER_WAY)

    async def put(
        self,
        block: Block,
        overwrite: Collection[bytes] = (),
        then: Then | None = None,
        some: Sequence[int] | None = None,
    ) -> dict[bytes, str]:
        """See `RowCache.put`; `some`: the numbers of those rows of the block that are to be stored, None for all.

        Raises:
            ServerError: the server cannot be used; nothing is known of the rows.
        """
        link = await self._line.open()
        writes = _writes(self._prefix, block, overwrite, some)
        ttl_ms = self._ttl_ms if isinstance(block, RowBlock) else min(self._ttl_ms, _ANSWER_TTL_MS)
        stored = link.set(writes, ttl_ms)
        if then is not None:
            await then(partial(self._line.call_on, link), ())
        digests = block.digests if some is None else [block.digests[index] for index in some]
        return self._refused(link, digests, await self._line.wait_for(link, stored))

    async def put_weights(self, weights: Sequence[SentWeights]) -> dict[bytes, str]:
        """See `RowCache.put_weights`.

        Raises:
            ServerError: the server cannot be used.
        """
        link = await self._line.open()
        block = VectorBlock([one.name for one in weights], [one.values for one in weights])
        writes = [
            write._replace(header=one.secret + write.header)
            for one, write in zip(weights, _writes(self._weights_prefix, block, block.digests, None), strict=True)
        ]
        stored = link.set(writes, _WEIGHTS_TTL_MS)
        return self._refused(link, block.digests, await self._line.wait_for(link, stored))

    def _refused(self, link: RowLink, digests: Sequence[bytes], replies: Sequence[object]) -> dict[bytes, str]:
        """What the server refused for good; raises ServerError when it refused something for now."""
        refused = {
            digest: reply for digest, reply in zip(digests, replies, strict=True) if isinstance(reply, ResponseError)
        }
        for reply in refused.values():
            if self._line.check(link, reply):
                raise self._server.explain(reply)
        return {digest: str(reply) for digest, reply in refused.items()}

    @property
    def queue(self) -> Call:
        """See `RowCache.queue`."""
        return self._line.call

    async def there(self, digests: Sequence[bytes]) -> list[bytes]:
        """See `RowCache.there`.

        Raises:
            ServerError: the server cannot be used.
        """
        sizes = await asyncio.gather(*(self._line.call(b"STRLEN", self._prefix + digest) for digest in digests))
        return [digest for digest, size in zip(digests, sizes, strict=True) if size]

    async def entries(
        self, digests: Sequence[bytes], encoding: Encoding, ranges: Sequence[bytes]
    ) -> list[bytes | None]:
        """See `RowCache.entries`.

        Raises:
            ServerError: the server cannot be used.
        """
        keys = [self._prefix + digest for digest in digests]
        found: list[bytes | None] = await scripts.ENTRIES.on(self._commands.call, keys, [int(encoding), *ranges])
        return found

    async def drop(self, keys: Sequence[bytes]) -> None:
        """See `RowCache.drop`.

        Raises:
            ServerError: the server cannot be used.
        """
        # On the connection that weights take: behind those that are still on their way.
        await self._line.call(b"UNLINK", *keys)

    async def get_many(
        self, digests: Sequence[bytes], deliver: Deliver, lengths: Mapping[bytes, int] | None = None
    ) -> int:
        """See `RowCache.get_many`.

        Raises:
            ServerError: the server cannot be used; the rest is not delivered.
        """
        lengths = lengths or {}
        if lengths:
            self._line.allow(encoded_size(max(lengths.values()), Encoding.F32) + 1)
        chunks = list(self._chunks(digests, lengths))
        if len(chunks) == 1:
            return await self._get_chunk(chunks[0], deliver, lengths)
        return sum(await asyncio.gather(*(self._get_chunk(chunk, deliver, lengths) for chunk in chunks)))

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

    async def _get_chunk(self, digests: Sequence[bytes], deliver: Deliver, lengths: Mapping[bytes, int]) -> int:
        prefix = self._prefix
        async with self._window:
            link = await self._line.open()
            try:
                values = await self._line.wait_for(link, link.mget([prefix + digest for digest in digests]))
            except ProtocolError:  # What a value over the limit ends the link with, for all that are under way.
                values = await self._get_bounded(digests)
        for value in values:
            if isinstance(value, ResponseError) and self._line.check(link, value):
                raise self._server.explain(value)
        # Read when all have come: the server would have to wait for room in the socket with each.
        rows = None if lengths else decode_rows(values, self._vocab_size)
        if rows is None:
            found = [self._found(digest, value, lengths) for digest, value in zip(digests, values, strict=True)]
            deliver(digests, found)
        else:
            deliver(digests, rows)
        return sum(len(value) for value in values if isinstance(value, (bytes, np.ndarray)))

    async def _get_bounded(self, digests: Sequence[bytes]) -> list[object]:
        """As MGET, for values of which some may be of any size: no more of each than shows that it is too large."""
        link, most = await self._line.open(), self._line.max_bulk - 1
        replies = [link.call((b"GETRANGE", self._prefix + digest, 0, most)) for digest in digests]
        found = [await self._line.wait_for(link, reply) for reply in replies]
        # An empty string is what GETRANGE finds where there is nothing.
        return [bytes(value) or None if isinstance(value, (bytes, np.ndarray)) else value for (value,) in found]

    def _found(self, digest: bytes, value: object, lengths: Mapping[bytes, int]) -> Found:
        """What was found of one row, or one answer."""
        if isinstance(value, (bytes, np.ndarray)):
            return self._decode(digest, value, lengths.get(digest, self._vocab_size), is_answer=digest in lengths)
        if isinstance(value, ResponseError):
            return CorruptRow(f"what the cache holds for prompt {digest.hex()} is no row: {value}")
        return None

    def _decode(self, digest: bytes, value: bytes | Bulk, length: int, *, is_answer: bool) -> Row | CorruptRow:
        if isinstance(value, bytes):
            value = np.frombuffer(value, np.uint8)
        try:
            row = decode_row(value, length)
            if not is_answer:
                check_row(row)
        except ProtocolError as error:
            return CorruptRow(f"the cached row of prompt {digest.hex()} is damaged: {error}")
        received = value.base  # No array for a value that had come whole: its memory is of another size.
        if isinstance(received, np.ndarray) and received.flags.writeable and len(self._spare) < _MOST_SPARE:
            # The row does not live in it. Memory that the processor has in its cache is worth keeping.
            self._spare.append(received)
        return row

    def _allocate(self, size: int) -> Bulk:
        if self._spare and self._spare[-1].size == size:
            return self._spare.pop()
        return fresh_bulk(size)

    def close(self) -> None:
        """Close the connections; what is under way fails."""
        self._line.close()
        self._commands.close()


def _writes(prefix: bytes, block: Block, overwrite: Collection[bytes], some: Sequence[int] | None) -> list[RowWrite]:
    digests = block.digests if some is None else [block.digests[index] for index in some]
    pairs = zip(digests, block.encoded(some), strict=True)
    return [RowWrite(prefix + digest, header, numbers, digest in overwrite) for digest, (header, numbers) in pairs]
