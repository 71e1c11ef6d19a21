"""The cache of rows: one small interface, and the Redis strings behind it.

A string is a row, or a reference to one that lies in shared memory (`lmpool.rows.shared_memory`). One that cannot be
read here counts as no row: who asks for it is given the row itself.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from redis.exceptions import ResponseError

from lmpool.broker import scripts
from lmpool.broker.connection import CommandConnection, reply_timeout
from lmpool.broker.scripts import Call
from lmpool.broker.server import Server
from lmpool.errors import CorruptRow, LMPoolError, ProtocolError, ServerError, SourceMissing
from lmpool.protocol.job import DIGEST_SIZE
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import SECRET_SIZE, SentWeights, weights_name
from lmpool.protocol.row import (
    HEADER_SIZE,
    Block,
    Encoding,
    Row,
    RowBlock,
    VectorBlock,
    check_row,
    decode_row,
    decode_rows,
    encoded_size,
)
from lmpool.rows.connection import (
    CHUNK_BYTES,
    CHUNK_ROWS,
    Bulk,
    ChunkReader,
    RawRowConnection,
    RowConnection,
    RowConnections,
    RowWrite,
    cut_chunks,
    fresh_bulk,
)
from lmpool.rows.shared_memory import NOT_SHARED, SegmentReader, Shared, is_reference, unpack_reference

Found = Row | CorruptRow | None
"""A row, None when there is none, or why what is there is no row (an error is a value here)."""

Deliver = Callable[[Sequence[bytes], Sequence[Found]], None]
"""Called with digests and what was found of each; once for each digest."""

Then = Callable[[Call, Collection[bytes]], Awaitable[None]]
"""Called with what calls scripts on the model's queue, and with the digests whose rows are known to be refused."""

_MAX_SPARE = 64
_WEIGHTS_TTL_MS = 120_000
_ANSWER_TTL_MS = 60_000
_GLOB = re.compile(rb"[\\*?\[\]]")
_NOTHING = memoryview(b"")


@dataclass(frozen=True, slots=True)
class RowSpace:
    """Where the rows of one fingerprint are, and what they are like.

    Attributes:
        prefix: what their keys start with.
        weights_prefix: what the keys of weights start with.
        jobs: the job stream of the model, whose scripts may look at rows.
        vocab_size: V.
        encoding: how rows travel, as far as is known.
        ttl_ms: milliseconds that a row stays.
        reply_timeout_s: seconds after which a server that is silent counts as gone.
        segments: reads what references stand for.
    """

    prefix: bytes
    weights_prefix: bytes
    jobs: bytes
    vocab_size: int
    encoding: Encoding
    ttl_ms: int
    reply_timeout_s: float
    segments: SegmentReader

    @classmethod
    def of(cls, keys: Keys, info: ModelInfo, segments: SegmentReader) -> RowSpace:
        """The place of the rows of a model.

        Args:
            keys: the deployment's key names.
            info: decides the namespace, the size and the lifetime of rows.
            segments: see the attribute.
        """
        return cls(
            prefix=keys.row(info.fingerprint),
            weights_prefix=keys.weights(),
            jobs=keys.model(info.name).jobs,
            vocab_size=info.vocab_size,
            encoding=info.row_encoding,
            ttl_ms=int(info.row_ttl_s * 1000),
            reply_timeout_s=reply_timeout(info.lease_s),
            segments=segments,
        )

    def ttl_of(self, block: Block) -> int:
        """Milliseconds that a block stays: answers live shorter than rows, for they are made again from these."""
        return self.ttl_ms if isinstance(block, RowBlock) else min(self.ttl_ms, _ANSWER_TTL_MS)


def scan_pattern(keys: Keys, info: ModelInfo | None = None) -> bytes:
    """The pattern that SCAN finds all rows and answers of a model by; without a model, those of all."""
    prefix = keys.rows() if info is None else keys.row(info.fingerprint)
    return _GLOB.sub(rb"\\\g<0>", prefix) + b"*"


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

    async def put(
        self, block: Block, overwrite: Collection[bytes] = (), then: Then | None = None, shared: Shared = NOT_SHARED
    ) -> dict[bytes, str]:
        """Store a block; the first stored row of a digest stays, except for those in `overwrite`.

        Args:
            block: the rows; must not change meanwhile.
            overwrite: digests whose rows are replaced.
            then: sends more right behind the rows; what it calls finds the rows, or fails together with them. Where
                scripts can look at the rows it is called without waiting for them to be stored.
            shared: which rows of the block lie in shared memory: references to them are stored.

        Returns:
            digest -> reason, for the rows that were refused.
        """
        ...

    def ttl_ms(self, block: Block) -> int:
        """For how many milliseconds a block is stored."""
        ...

    async def get_many(
        self, digests: Sequence[bytes], deliver: Deliver, lengths: Mapping[bytes, int] | None = None
    ) -> int:
        """Fetch rows in chunks bounded by bytes and deliver each as it comes; returns the bytes that were fetched.

        Args:
            digests: whose rows.
            deliver: takes them.
            lengths: digest -> entries, of those that are no rows but answers to queries.
        """
        ...

    async def put_weights(self, weights: Sequence[SentWeights]) -> dict[bytes, str]:
        """Store what trie jobs work on, in a place of its own and for a shorter time than rows.

        Returns:
            name -> reason, for the weights that were refused.
        """
        ...

    async def there(self, digests: Sequence[bytes]) -> list[bytes]:
        """The digests whose rows are in the cache."""
        ...

    async def entries(
        self, digests: Sequence[bytes], encoding: Encoding, ranges: Sequence[bytes]
    ) -> list[bytes | None]:
        """Some entries of rows, as `entries.lua` gives them.

        Args:
            digests: whose rows.
            encoding: that of the rows, as far as is known.
            ranges: where the entries of each are (`lmpool.protocol.row.entry_ranges`).
        """
        ...

    def keys_of(self, digests: Iterable[bytes]) -> list[bytes]:
        """The keys of rows and answers: for scripts that look at them, and for `drop`."""
        ...

    def keys_of_weights(self, names: Iterable[bytes]) -> list[bytes]:
        """The keys of weights, for `drop`."""
        ...

    async def drop(self, keys: Sequence[bytes]) -> None:
        """Remove answers and weights, of any model, and references."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


class RedisRows:
    """Rows as Redis strings with a TTL, on one server.

    Args:
        server: where they are.
        space: names them, and says what they are like.
    """

    is_seen = True

    def __init__(self, server: Server, space: RowSpace) -> None:
        self._server = server
        self._prefix = space.prefix
        self._weights_prefix = space.weights_prefix
        self._vocab_size = space.vocab_size
        self._space = space
        # Where rows are tiny a script's reply must fit too, and a row that is too long must be told from a right one.
        self._connection = RowConnection(
            server, max(4096, encoded_size(space.vocab_size, Encoding.F32) + 1), self._allocate
        )
        self._commands = CommandConnection(server)
        self._connection.reply_timeout_s = self._commands.reply_timeout_s = space.reply_timeout_s
        self._spare: list[Bulk] = []
        self._row_size = encoded_size(space.vocab_size, space.encoding)
        self._reader = ChunkReader(server, self._connection)
        self._segments = space.segments

    async def put(
        self,
        block: Block,
        overwrite: Collection[bytes] = (),
        then: Then | None = None,
        shared: Shared = NOT_SHARED,
        some: Sequence[int] | None = None,
    ) -> dict[bytes, str]:
        """See `RowCache.put`; `some`: the numbers of those rows of the block that are to be stored, None for all.

        Raises:
            ServerError: the server cannot be used; nothing is known of the rows.
        """
        raw = await self._connection.open()
        writes = _writes(self._prefix, block, overwrite, some, shared.references)
        stored = raw.set(writes, self.ttl_ms(block))
        if then is not None:
            await then(partial(self._connection.call_on, raw), ())
        digests = block.digests if some is None else [block.digests[index] for index in some]
        return self._refused(raw, digests, await self._connection.wait_for(raw, stored))

    def ttl_ms(self, block: Block) -> int:
        """See `RowCache.ttl_ms`."""
        return self._space.ttl_of(block)

    async def put_weights(self, weights: Sequence[SentWeights]) -> dict[bytes, str]:
        """See `RowCache.put_weights`.

        Raises:
            ServerError: the server cannot be used.
        """
        raw = await self._connection.open()
        block = VectorBlock([sent.name for sent in weights], [sent.values for sent in weights])
        writes = [
            write._replace(header=sent.secret + write.header)
            for sent, write in zip(weights, _writes(self._weights_prefix, block, block.digests), strict=True)
        ]
        stored = raw.set(writes, _WEIGHTS_TTL_MS)
        return self._refused(raw, block.digests, await self._connection.wait_for(raw, stored))

    def _refused(self, raw: RawRowConnection, digests: Sequence[bytes], replies: Sequence[object]) -> dict[bytes, str]:
        """The rows that the server refused for good, with its reasons.

        Raises:
            ServerError: it refused one for now.
        """
        refused = {
            digest: reply for digest, reply in zip(digests, replies, strict=True) if isinstance(reply, ResponseError)
        }
        for reply in refused.values():
            if self._connection.check(raw, reply):
                raise self._server.explain(reply)
        return {digest: str(reply) for digest, reply in refused.items()}

    @property
    def queue(self) -> Call:
        """See `RowCache.queue`."""
        return self._connection.call

    async def there(self, digests: Sequence[bytes]) -> list[bytes]:
        """See `RowCache.there`.

        Raises:
            ServerError: the server cannot be used.
        """
        sizes = await asyncio.gather(*(self._connection.call(b"STRLEN", self._prefix + digest) for digest in digests))
        return [digest for digest, size in zip(digests, sizes, strict=True) if size]

    async def entries(
        self, digests: Sequence[bytes], encoding: Encoding, ranges: Sequence[bytes]
    ) -> list[bytes | None]:
        """See `RowCache.entries`.

        Raises:
            ServerError: the server cannot be used.
        """
        keys = [self._prefix + digest for digest in digests]
        replies = await scripts.ENTRIES.on(self._commands.call, keys, [int(encoding), *ranges])
        try:
            are_whole = all(
                reply is None or reply.endswith(digest) for reply, digest in zip(replies, digests, strict=True)
            )
        except (TypeError, ValueError, AttributeError):
            are_whole = False  # Not even a list of so many values.
        if not are_whole:
            raise self._commands.distrust(replies)
        return [
            None if reply is None else self._entries_of(digest, reply[:-DIGEST_SIZE], part)
            for digest, reply, part in zip(digests, replies, ranges, strict=True)
        ]

    def _entries_of(self, digest: bytes, reply: bytes, ranges: bytes) -> bytes | None:
        """Some entries of a row as the script gives them, also where it has found a reference."""
        if not is_reference(reply):
            return reply
        reference = unpack_reference(reply)
        row = None if reference is None else self._segments.read(reference, digest, self._vocab_size)
        if row is None:
            return None
        encoded = RowBlock([digest], row[None], None, Encoding.F32)
        places = [int(place) for place in ranges.split()]
        width = places[1] - places[0] + 1
        chosen = [(place - HEADER_SIZE) // width for place in places[::2]]
        return encoded.encoded()[0][0] + row[chosen].tobytes()

    def keys_of(self, digests: Iterable[bytes]) -> list[bytes]:
        """See `RowCache.keys_of`."""
        prefix = self._prefix
        return [prefix + digest for digest in digests]

    def keys_of_weights(self, names: Iterable[bytes]) -> list[bytes]:
        """See `RowCache.keys_of_weights`."""
        return [self._weights_prefix + name for name in names]

    async def drop(self, keys: Sequence[bytes]) -> None:
        """See `RowCache.drop`.

        Raises:
            ServerError: the server cannot be used.
        """
        # On the connection that weights take: behind those that are still on their way.
        await self._connection.call(b"UNLINK", *keys)

    async def get_many(
        self, digests: Sequence[bytes], deliver: Deliver, lengths: Mapping[bytes, int] | None = None
    ) -> int:
        """See `RowCache.get_many`.

        Raises:
            ServerError: the server cannot be used; the rest is not delivered.
        """
        lengths = lengths or {}
        if lengths:
            self._connection.allow(encoded_size(max(lengths.values()), Encoding.F32) + 1)
        chunks = list(self._chunks(digests, lengths))
        if len(chunks) == 1:
            return await self._get_chunk(chunks[0], deliver, lengths)
        return sum(await asyncio.gather(*(self._get_chunk(chunk, deliver, lengths) for chunk in chunks)))

    def _chunks(self, digests: Sequence[bytes], lengths: Mapping[bytes, int]) -> Iterator[Sequence[bytes]]:
        if not lengths:
            count = max(1, min(CHUNK_ROWS, CHUNK_BYTES // self._row_size))
            yield from (digests[at : at + count] for at in range(0, len(digests), count))
            return
        sizes = [
            encoded_size(lengths[digest], Encoding.F32) if digest in lengths else self._row_size for digest in digests
        ]
        yield from (digests[part] for part in cut_chunks(sizes))

    async def _get_chunk(self, digests: Sequence[bytes], deliver: Deliver, lengths: Mapping[bytes, int]) -> int:
        values = await self._reader.read(self.keys_of(digests))
        if any(map(is_reference, values)):
            values = await self._follow(digests, values)
        # Decoded when all have come: else the server would have to wait for a free socket buffer with each.
        rows = None if lengths else decode_rows(values, self._vocab_size)
        if rows is None:
            deliver(
                digests, [self._read(digest, value, lengths) for digest, value in zip(digests, values, strict=True)]
            )
        else:
            deliver(digests, rows)
        return sum(len(value) for value in values if isinstance(value, (bytes, np.ndarray)))

    async def _follow(self, digests: Sequence[bytes], values: Sequence[object]) -> list[object]:
        """Values with the rows in place of references to them; those that lead nowhere are removed."""
        followed, stale = list(values), []
        for at, value in enumerate(values):
            if isinstance(value, bytes) and is_reference(value):
                reference = unpack_reference(value)
                row = None if reference is None else self._segments.read(reference, digests[at], self._vocab_size)
                followed[at] = row
                if row is None and (reference is None or reference.host == self._segments.host):
                    stale.append(digests[at])
        # One by one: on a master of a cluster they lie in several slots.
        await asyncio.gather(*(self.drop([key]) for key in self.keys_of(stale)))
        return followed

    def _read(self, digest: bytes, value: object, lengths: Mapping[bytes, int]) -> Found:
        """Read a value of the server as a row, or as an answer."""
        if isinstance(value, np.ndarray) and value.dtype == np.float32:
            return value  # From shared memory.
        if isinstance(value, (bytes, np.ndarray)):
            return self._decode(digest, value, lengths.get(digest, self._vocab_size), is_answer=digest in lengths)
        if isinstance(value, ResponseError):
            return CorruptRow(f"what the cache holds for prompt {digest.hex()} is no row: {value}")
        return None

    def _decode(self, digest: bytes, value: bytes | Bulk, length: int, *, is_answer: bool) -> Row | CorruptRow:
        if isinstance(value, bytes):
            value = np.frombuffer(value, np.uint8)
        row = _read_row(digest, value, length, is_answer=is_answer)
        if isinstance(row, CorruptRow):
            return row
        received = value.base  # No array for a value that had come whole: its memory is of another size.
        if isinstance(received, np.ndarray) and received.flags.writeable and len(self._spare) < _MAX_SPARE:
            # The row does not live in it. Memory that the processor has in its cache is worth keeping.
            self._spare.append(received)
        return row

    def _allocate(self, size: int) -> Bulk:
        if self._spare and self._spare[-1].size == size:
            return self._spare.pop()
        return fresh_bulk(size)

    def close(self) -> None:
        """Close the connections; what is under way fails."""
        self._connection.close()
        self._commands.close()


def read_carried(
    digests: Sequence[bytes], values: Sequence[bytes], lengths: Mapping[bytes, int], vocab_size: int
) -> Sequence[Found]:
    """Read rows and answers that a notification has carried.

    Args:
        digests: whose they are.
        values: as they are stored.
        lengths: see `RowCache.get_many`.
        vocab_size: V.
    """
    if not lengths and (rows := decode_rows(values, vocab_size)) is not None:
        return rows
    found: list[Found] = []
    for digest, value in zip(digests, values, strict=True):
        length, is_answer = lengths.get(digest, vocab_size), digest in lengths
        found.append(_read_row(digest, np.frombuffer(value, np.uint8), length, is_answer=is_answer))
    return found


def _read_row(digest: bytes, value: Bulk, length: int, *, is_answer: bool) -> Row | CorruptRow:
    try:
        row = decode_row(value, length)
        return row if is_answer else check_row(row)
    except ProtocolError as error:
        return CorruptRow(f"the cached row of prompt {digest.hex()} is damaged: {error}")


def _writes(
    prefix: bytes,
    block: Block,
    overwrite: Collection[bytes],
    some: Sequence[int] | None = None,
    references: Mapping[bytes, bytes] = NOT_SHARED.references,
) -> list[RowWrite]:
    digests = block.digests if some is None else [block.digests[index] for index in some]
    if references and len(references) == len(block.digests):
        return [RowWrite(prefix + digest, references[digest], _NOTHING, digest in overwrite) for digest in digests]
    pairs = zip(digests, block.encoded(some), strict=True)
    return [
        RowWrite(prefix + digest, references[digest], _NOTHING, digest in overwrite)
        if digest in references
        else RowWrite(prefix + digest, header, numbers, digest in overwrite)
        for digest, (header, numbers) in pairs
    ]


class Source(NamedTuple):
    """A row or weights that a trie job may name.

    Attributes:
        fingerprint: of the model whose row it is; "" for weights.
        name: digest of the prompt, or name of the weights.
        length: how many numbers it must have.
    """

    fingerprint: str
    name: bytes
    length: int

    @property
    def most_bytes(self) -> int:
        """Most bytes of it, and one more: a value that is too long must be told from one that is right."""
        return SECRET_SIZE + encoded_size(self.length, Encoding.F32) + 1


class Sources:
    """Rows of any models, and weights, on a server or on all masters of a cluster.

    Args:
        server: where they are.
        keys: the deployment's key names.
        reply_timeout_s: seconds after which a server that is silent counts as gone.
        segments: reads what references stand for.
    """

    def __init__(self, server: Server, keys: Keys, reply_timeout_s: float, segments: SegmentReader) -> None:
        self._server = server
        self._keys = keys
        self._segments = segments
        self._connections = RowConnections(server, 0, reply_timeout_s)
        self._readers: dict[RowConnection, ChunkReader] = {}

    async def get_many(self, sources: Sequence[Source]) -> tuple[dict[Source, Row | LMPoolError], int]:
        """Fetch sources in chunks bounded by bytes.

        Args:
            sources: which; each once.

        Returns:
            each with its numbers, or with why they cannot be used (an error is a value here); and the bytes fetched.

        Raises:
            ServerError: the server cannot be used.
        """
        if not sources:
            return {}, 0
        self._connections.allow(max(source.most_bytes for source in sources))
        parts: list[tuple[RowConnection, list[Source]]] = []
        for connection, numbers in await self._connections.of([self._key(source) for source in sources]):
            held = [sources[number] for number in numbers]
            parts += [(connection, held[part]) for part in cut_chunks([source.most_bytes for source in held])]
        chunks = await asyncio.gather(*(self._read(connection, part) for connection, part in parts))
        values = [value for chunk in chunks for value in chunk]
        size = sum(len(value) for value in values if isinstance(value, (bytes, np.ndarray)))
        fetched = [source for _, part in parts for source in part]
        return {source: self._decode(source, value) for source, value in zip(fetched, values, strict=True)}, size

    async def _read(self, connection: RowConnection, part: Sequence[Source]) -> Sequence[object]:
        reader = self._readers.get(connection)
        if reader is None:
            # A source that this worker may not read must not keep it from those that other jobs name.
            reader = self._readers[connection] = ChunkReader(self._server, connection, (ServerError, ProtocolError))
        return await reader.read([self._key(source) for source in part], [source.most_bytes for source in part])

    def _decode(self, source: Source, value: object) -> Row | LMPoolError:
        if source.fingerprint and isinstance(value, bytes) and is_reference(value):
            reference = unpack_reference(value)
            row = None if reference is None else self._segments.read(reference, source.name, source.length)
            return _decoded(source, None) if row is None else row
        return _decoded(source, value)

    def _key(self, source: Source) -> bytes:
        return (self._keys.row(source.fingerprint) if source.fingerprint else self._keys.weights()) + source.name

    def close(self) -> None:
        """Close the connections."""
        self._connections.close()


def _decoded(source: Source, value: object) -> Row | LMPoolError:
    is_row = bool(source.fingerprint)
    label = f"the row of prompt {source.name.hex()}" if is_row else f"the weights {source.name.hex()}"
    if isinstance(value, bytes):
        value = np.frombuffer(value, np.uint8)
    if not isinstance(value, np.ndarray):
        return SourceMissing(f"{label} is not in the cache" if is_row else f"{label} are not in the cache")
    try:
        if is_row:
            return check_row(decode_row(value, source.length))
        if weights_name(value[:SECRET_SIZE].tobytes()) != source.name:
            return SourceMissing(f"{label} are not in the cache: somebody else has written there")
        return decode_row(value[SECRET_SIZE:], source.length)
    except ProtocolError as error:
        return CorruptRow(f"{label}: {error}")
