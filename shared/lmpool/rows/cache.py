"""The cache of rows: Redis strings with a lifetime, on one server or on all masters of a cluster.

A string holds a row, the answer to a query, the weights of a trie job, or a reference to a row in shared memory
(`lmpool.rows.shared_memory`). If this process cannot read the referenced memory, the reference counts as no row, so
that the client gets the row itself.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
from redis.exceptions import ResponseError

from lmpool.broker import scripts
from lmpool.broker.connection import Argument, CommandConnection, Connection, reply_timeout
from lmpool.broker.scripts import Call
from lmpool.broker.server import Server
from lmpool.errors import CorruptRow, LMPoolError, ProtocolError, ServerError
from lmpool.protocol import row as wire
from lmpool.protocol.job import DIGEST_SIZE
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import SentWeights
from lmpool.protocol.row import Block, Encoding, Row, RowBlock, VectorBlock
from lmpool.rows.connection import RawRowCommands, RawRowReceiver, RowWrite, Value
from lmpool.rows.direct import DirectReader, RowPlace
from lmpool.rows.shared_memory import (
    MAX_REFERENCE,
    NOT_SHARED,
    Reference,
    SegmentReader,
    Shared,
    is_reference,
    unpack_reference,
)

T = TypeVar("T")

Errors = tuple[type[LMPoolError], ...]
Found = Row | CorruptRow | None
"""The result of a read: a row, None if no row is stored, or an error that says why the stored value is no row."""

Deliver = Callable[[Sequence[bytes], Sequence[Found]], None]
"""Callback that receives digests and the result for each digest; every digest is delivered once."""

Then = Callable[[Call, Collection[bytes]], Awaitable[None]]
"""Callback that receives a function to call scripts on the model's queue, and the digests of the refused rows."""

CHUNK_BYTES = 4 * 1024 * 1024  # Max bytes of values per MGET; each request costs its client about 90 µs.
CHUNK_ROWS = 512  # Max keys per MGET, so that tiny values do not make one request arbitrarily long.

_MAX_REPLY_BYTES = 16 * 1024 * 1024  # Max bytes of a reply; the longest reply has 4 million entries of rows.
_CHUNKS_IN_FLIGHT = 2  # Max chunks in flight per server: the second chunk arrives while the first is decoded.
_SMALL_BYTES = 4 * 1024  # Max bytes of values that hiredis receives faster than `RawRowReceiver`.
_WEIGHTS_TTL_MS = 120_000  # Lifetime in ms of a trie job's weights, unless the client removes the weights earlier.
_ANSWER_TTL_MS = 60_000  # Max lifetime in ms of an answer to a query: an answer can be computed again from its row.
_GLOB = re.compile(rb"[\\*?\[\]]")
_NOTHING = memoryview(b"")


class RowConnection(Connection[RawRowCommands]):
    """The connections to one server, or to one master of a cluster; each connection opens at its first use.

    Commands, writes and small values share one connection. Large values have a second connection, so that no script
    waits behind them. A connection without a reply for `reply_timeout_s` counts as broken. If a chunk fails with one of
    the errors `apart`, each value of the chunk is requested alone.
    """

    def __init__(self, server: Server, reply_timeout_s: float, apart: Errors = (ProtocolError,)) -> None:
        async def open_commands() -> RawRowCommands:
            return RawRowCommands(await server.open(), _MAX_REPLY_BYTES)

        async def open_receiver() -> RawRowReceiver:
            return RawRowReceiver(await server.open())

        super().__init__(server, open_commands)
        self._large = Connection[RawRowReceiver](server, open_receiver)
        self._apart = apart
        self._chunks = asyncio.Semaphore(_CHUNKS_IN_FLIGHT)
        self.reply_timeout_s = self._large.reply_timeout_s = reply_timeout_s

    async def call(self, *arguments: Argument) -> Any:
        """Run a command; raises `NoScriptError` and `ServerError` as `wait_for`."""
        raw = await self.open()
        return await self.wait_for(raw, raw.call(arguments))

    async def set(self, writes: Sequence[RowWrite], ttl_ms: int, then: Then | None) -> list[ResponseError | None]:
        """Store rows; returns the error of each row that the server refused for good.

        `then` sends commands after the writes, on the same connection or not at all. Raises `ServerError` if the server
        cannot be used, or temporarily refuses a row.
        """
        raw = await self.open()
        stored = raw.set(writes, ttl_ms)
        if then is not None:
            await then(lambda *arguments: self.wait_for(raw, raw.call(arguments)), ())
        replies: list[ResponseError | None] = await self.wait_for(raw, stored)
        for error in filter(None, replies):
            if self.check(raw, error):
                raise self._server.explain(error)
        return replies

    async def get(self, keys: Sequence[bytes], max_bytes: Sequence[int], *, by_getrange: bool = False) -> list[Value]:
        """Fetch one chunk of values. A value that is longer than its limit is returned whole or cut to that length.

        `by_getrange`: fetch each value alone, because the user may not run MGET on these keys.
        Raises `ServerError` if the server cannot be used.
        """
        async with self._chunks:
            if not by_getrange:
                with suppress(*self._apart):
                    # A master of a cluster refuses an MGET of keys in several slots.
                    if self._server.is_node:
                        return await self._get_each(keys, max_bytes, by_getrange=False)
                    if (largest := max(max_bytes)) > _SMALL_BYTES:
                        large = await self._large.open()
                        values: list[Value] = await self._large.wait_for(large, large.call((b"MGET", *keys), largest))
                    else:
                        values = await self.call(b"MGET", *keys)
                        if not isinstance(values, list) or len(values) != len(keys):
                            raise self.distrust(values)
                    return values
            return await self._get_each(keys, max_bytes, by_getrange=True)

    async def _get_each(self, keys: Sequence[bytes], max_bytes: Sequence[int], *, by_getrange: bool) -> list[Value]:
        """Fetch each value alone, by GETRANGE or by GET. Only GET distinguishes an empty string from a missing key."""
        raw = await self._large.open()

        async def read(key: bytes, most: int) -> Value:
            command = (b"GETRANGE", key, 0, most - 1) if by_getrange else (b"GET", key)
            try:
                value: Any = await self._large.wait_for(raw, raw.call(command, most))
            except LMPoolError as error:
                if isinstance(error.__cause__, ResponseError) and not self._server.is_not_now(error.__cause__):
                    return error.__cause__
                raise
            return None if by_getrange and not len(value) else value

        return await asyncio.gather(*map(read, keys, max_bytes))

    def close(self) -> None:
        """Close the connections; pending requests fail."""
        super().close()
        self._large.close()


class RowConnections:
    """The connections for rows to one server, or to each master of a cluster; arguments as for `RowConnection`."""

    def __init__(self, server: Server, reply_timeout_s: float, apart: Errors = (ProtocolError,)) -> None:
        self._server = server
        self._connect = partial(RowConnection, reply_timeout_s=reply_timeout_s, apart=apart)
        self._connections: dict[Server, RowConnection] = {}

    def to(self, server: Server) -> RowConnection:
        """The connection to a server."""
        if server not in self._connections:
            self._connections[server] = self._connect(server)
        return self._connections[server]

    async def split(self, keys: Sequence[bytes], *, each: bool = False) -> list[tuple[RowConnection, Sequence[int]]]:
        """Split keys by server: each connection with the indices of the keys that its server stores.

        With `each`, each part has one key on a cluster, because scripts and UNLINK accept keys of one slot only. Raises
        `ServerError` if the cluster does not answer.
        """
        if not self._server.is_cluster:
            return [(self.to(self._server), range(len(keys)))]
        parts: dict[object, tuple[RowConnection, list[int]]] = {}
        for index, key in enumerate(keys):
            server = await self._server.at(key)
            parts.setdefault(index if each else server, (self.to(server), []))[1].append(index)
        return list(parts.values())

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.close()


def cut_chunks(sizes: Sequence[int]) -> Iterator[slice]:
    """Cut values of these sizes into chunks of at most `CHUNK_BYTES` and `CHUNK_ROWS`."""
    begin = size = 0
    for at, value_size in enumerate(sizes):
        if at > begin and (size + value_size > CHUNK_BYTES or at - begin == CHUNK_ROWS):
            yield slice(begin, at)
            begin, size = at, 0
        size += value_size
    if begin < len(sizes):
        yield slice(begin, len(sizes))


class RowCache:
    """The rows of one model under one fingerprint.

    Every method that waits raises `ServerError` when a server that it needs cannot be used. `info` decides the
    namespace, size and lifetime of the rows; `segments` reads referenced rows from shared memory, and `direct` from the
    row servers of workers on other hosts.

    Attributes:
        is_seen: whether scripts on the model's queue can read the rows; on a cluster, rows are on other masters.
        weights_prefix: beginning of the Redis key of weights that a client has sent for a trie; the name follows.
        queue: calls scripts on the model's queue, after all pending writes of rows if scripts can read rows.
    """

    def __init__(
        self, server: Server, keys: Keys, info: ModelInfo, segments: SegmentReader, direct: DirectReader | None = None
    ) -> None:
        self.is_seen = not server.is_cluster
        self._prefix = keys.row(info.fingerprint)
        self.weights_prefix = keys.weights()
        self._vocab_size = info.vocab_size
        self._row_bytes = wire.encoded_size(info.vocab_size, info.row_encoding)
        # Read one byte more than a row may have, to notice a value that is too long.
        self._max_row_bytes = wire.encoded_size(info.vocab_size, Encoding.F32) + 1
        self._ttl_ms = int(info.row_ttl_s * 1000)
        self._segments = segments
        self._direct = direct
        reply_timeout_s = reply_timeout(info.lease_s)
        self._connections = RowConnections(server, reply_timeout_s)
        self._queue: CommandConnection | RowConnection = self._connections.to(server)
        if server.is_cluster:
            self._queue = CommandConnection(server, keys.model(info.name).jobs)
            self._queue.reply_timeout_s = reply_timeout_s
        self.queue: Call = self._queue.call

    def use_queue(self, key: bytes) -> None:
        """Call scripts on the master of `key`, because the worker serves another partition of the model's queue."""
        if isinstance(self._queue, CommandConnection) and self._queue.key != key:
            self._queue.key = key
            self._queue.hang_up(ConnectionError("the worker serves another partition"))

    def ttl_ms(self, block: Block) -> int:
        """How long Redis keeps the results of a block, in milliseconds."""
        return self._ttl_ms if isinstance(block, RowBlock) else min(self._ttl_ms, _ANSWER_TTL_MS)

    async def put(
        self, block: Block, overwrite: Collection[bytes] = (), then: Then | None = None, shared: Shared = NOT_SHARED
    ) -> dict[bytes, str]:
        """Store a block. The first stored row of a digest stays, except for digests in `overwrite`.

        The rows must not change before this method returns. `then` sends commands directly after the rows: the commands
        find the rows or fail together with the rows. For rows in shared memory (`shared`), Redis stores references.

        Returns digest -> reason, for the rows that the server refused.
        """
        references, replaced = shared.references, set(overwrite)
        # Encode no rows if all rows are in shared memory.
        encoded = block.encoded() if len(references) < len(block.digests) else [(b"", _NOTHING)] * len(references)
        writes = [
            RowWrite(self._prefix + digest, references[digest], _NOTHING, digest in replaced)
            if digest in references
            else RowWrite(self._prefix + digest, header, numbers, digest in replaced)
            for digest, (header, numbers) in zip(block.digests, encoded, strict=True)
        ]
        refused = await self._set(writes, self.ttl_ms(block), then if self.is_seen else None)
        if then is not None and not self.is_seen:
            await then(self.queue, refused)
        return refused

    async def put_weights(self, weights: Sequence[SentWeights]) -> dict[bytes, str]:
        """Store the weights of trie jobs; returns name -> reason, for the weights that the server refused."""
        writes = [
            RowWrite(self.weights_prefix + sent.name, sent.secret + header, numbers, True)
            for sent in weights
            for header, numbers in VectorBlock([sent.name], [sent.values]).encoded()
        ]
        return await self._set(writes, _WEIGHTS_TTL_MS, None)

    async def _set(self, writes: Sequence[RowWrite], ttl_ms: int, then: Then | None) -> dict[bytes, str]:
        parts = await self._connections.split([write.key for write in writes])
        replies = await _all([to.set([writes[at] for at in indices], ttl_ms, then) for to, indices in parts])
        return {
            writes[at].key[-DIGEST_SIZE:]: str(error)
            for (_, indices), errors in zip(parts, replies, strict=True)
            for at, error in zip(indices, errors, strict=True)
            if error is not None
        }

    async def existing(self, digests: Sequence[bytes]) -> list[bytes]:
        """The digests whose rows are stored whole, or are in shared memory of this host.

        Removes values of another type, because no row can be stored over them.
        """

        async def find(connection: RowConnection, digest: bytes) -> list[bytes]:
            try:
                head = await connection.call(b"GETRANGE", self._prefix + digest, 0, MAX_REFERENCE - 1)
                reference = unpack_reference(head) if is_reference(head) else None
                is_here = reference is not None and reference.host == self._segments.host
                is_readable = not is_reference(head) or is_here or (reference and self._is_direct(reference))
                return [digest] if head and is_readable else []
            except ServerError as error:
                if "WRONGTYPE" not in str(error):
                    raise
                await connection.call(b"UNLINK", self._prefix + digest)
                return []

        parts = await self._connections.split(self.keys_of(digests))
        found = await _all([find(connection, digests[at]) for connection, indices in parts for at in indices])
        return [digest for digests in found for digest in digests]

    async def entries(
        self, digests: Sequence[bytes], encoding: Encoding, ids: Sequence[Sequence[int]]
    ) -> list[bytes | None]:
        """Read some entries of each row: the header of the row and the stored numbers of `ids`, or None for no row.

        `encoding` is the most likely encoding of the rows.
        """
        found: list[bytes | None] = [None] * len(digests)
        parts = await self._connections.split(self.keys_of(digests), each=True)

        async def read(connection: RowConnection, indices: Sequence[int]) -> None:
            keys = [self._prefix + digests[at] for at in indices]
            arguments: list[Argument] = [int(encoding), *(wire.entry_ranges(ids[at], encoding) for at in indices)]
            replies = await scripts.ENTRIES.on(connection.call, keys, arguments)
            if not isinstance(replies, list) or len(replies) != len(indices):
                raise connection.distrust(replies)
            for at, reply in zip(indices, replies, strict=True):
                if reply is None:
                    continue
                if not isinstance(reply, bytes) or not reply.endswith(digests[at]):
                    raise connection.distrust(reply)
                found[at] = entries = reply[:-DIGEST_SIZE]
                if is_reference(entries):
                    (row,) = await self._follow([entries], [digests[at]])
                    found[at] = None if row is None else wire.f32_header(len(row)) + row[list(ids[at])].tobytes()

        await _all([read(connection, indices) for connection, indices in parts])
        return found

    def keys_of(self, digests: Iterable[bytes]) -> list[bytes]:
        """The keys of rows and answers, which scripts and `drop` receive."""
        prefix = self._prefix
        return [prefix + digest for digest in digests]

    async def drop(self, keys: Sequence[bytes]) -> None:
        """Remove answers, weights and references, of any model.

        The command uses the connection of the writes, so it also removes weights whose write is still in flight.
        """
        parts = await self._connections.split(keys, each=True)
        await _all([connection.call(b"UNLINK", *(keys[at] for at in indices)) for connection, indices in parts])

    async def get_many(
        self, digests: Sequence[bytes], deliver: Deliver, lengths: Mapping[bytes, int] | None = None
    ) -> int:
        """Fetch rows in chunks and deliver each chunk as it arrives; returns the number of fetched bytes.

        `lengths`: digest -> number of entries, for answers to queries. After a `ServerError` the remaining rows
        are not delivered.
        """
        chunks = []
        if self._direct is not None and self._direct.is_on and (placed := self._direct.take(digests)):
            sizes = dict.fromkeys(digests, self._row_bytes)
            for place, held in placed.items():
                cuts = cut_chunks([sizes.pop(digest) for digest in held])
                chunks += [self._get_placed(place, held[part], deliver) for part in cuts]
            digests = list(sizes)
        for connection, indices in await self._connections.split(self.keys_of(digests)):
            held = [digests[at] for at in indices]
            cuts = cut_chunks(_sizes(held, lengths or {}, self._row_bytes))
            chunks += [self._get_chunk(connection, held[part], deliver, lengths or {}) for part in cuts]
        return sum(await _all(chunks))

    async def _get_chunk(
        self, connection: RowConnection, digests: Sequence[bytes], deliver: Deliver, lengths: Mapping[bytes, int]
    ) -> int:
        limits = _sizes(digests, lengths, self._max_row_bytes)
        values: Sequence[Value | Row] = await connection.get(self.keys_of(digests), limits)
        if any(map(is_reference, values)):
            values, stale = list(values), list[bytes]()
            indices = [at for at, value in enumerate(values) if is_reference(value)]
            references = [bytes(cast(bytes, values[at])) for at in indices]
            rows = await self._follow(references, [digests[at] for at in indices])
            for at, value, row in zip(indices, references, rows, strict=True):
                values[at], reference = row, unpack_reference(value)
                # Remove references of this host, and of row servers, whose rows no longer exist.
                is_known = reference is None or reference.host == self._segments.host or self._is_direct(reference)
                if row is None and is_known:
                    stale.append(self._prefix + digests[at])
            await _all([connection.call(b"UNLINK", key) for key in stale])
        # Decode after the whole chunk has arrived: pauses in receiving would make the server wait for socket buffers.
        deliver(digests, read_values(digests, values, lengths, self._vocab_size))
        return sum(len(value) for value in values if isinstance(value, (bytes, np.ndarray)))

    async def _get_placed(self, place: RowPlace, digests: Sequence[bytes], deliver: Deliver) -> int:
        """Fetch rows from a row server and deliver them; fetch rows that it does not have from Redis."""
        rows = await self._read_direct(place, digests)
        found = {digest: row for digest, row in zip(digests, rows, strict=True) if row is not None}
        deliver(list(found), list(found.values()))
        missing = [digest for digest in digests if digest not in found]
        return sum(row.nbytes for row in found.values()) + (await self.get_many(missing, deliver) if missing else 0)

    async def _read_direct(self, place: RowPlace, digests: Sequence[bytes]) -> list[Row | None]:
        if self._direct is None:
            return [None] * len(digests)
        values = await self._direct.read(place, digests, self._max_row_bytes)
        found = read_values(digests, values, {}, self._vocab_size)
        return [None if isinstance(row, CorruptRow) else row for row in found]

    async def _follow(self, references: Sequence[bytes], digests: Sequence[bytes]) -> list[Row | None]:
        """The rows of references, from shared memory or from row servers; None for rows that cannot be read."""
        rows: list[Row | None] = [None] * len(digests)
        elsewhere: dict[RowPlace, list[int]] = {}
        for at, (value, digest) in enumerate(zip(references, digests, strict=True)):
            reference = unpack_reference(value)
            if reference is not None and self._is_direct(reference):
                elsewhere.setdefault(RowPlace(reference.address, reference.nonce), []).append(at)
            else:
                rows[at] = self._segments.follow(value, digest, self._vocab_size)
        parts = [self._read_direct(place, [digests[at] for at in indices]) for place, indices in elsewhere.items()]
        for indices, found in zip(elsewhere.values(), await _all(parts), strict=True):
            for at, row in zip(indices, found, strict=True):
                rows[at] = row
        return rows

    def _is_direct(self, reference: Reference) -> bool:
        """Whether this client reads the row of a reference from a row server."""
        is_elsewhere = bool(reference.address) and reference.host != self._segments.host
        return is_elsewhere and self._direct is not None and self._direct.is_on

    def close(self) -> None:
        """Close all connections; pending requests fail."""
        self._queue.close()
        self._connections.close()


def scan_pattern(keys: Keys, info: ModelInfo | None = None) -> bytes:
    """The SCAN pattern of all rows and answers of a model, or of all models."""
    prefix = keys.rows() if info is None else keys.row(info.fingerprint)
    return _GLOB.sub(rb"\\\g<0>", prefix) + b"*"


def _sizes(digests: Sequence[bytes], lengths: Mapping[bytes, int], row_bytes: int) -> list[int]:
    """Bytes to read for rows and answers; one byte more than an answer has, to notice an answer that is too long."""
    if not lengths:
        return [row_bytes] * len(digests)
    answers = {digest: wire.encoded_size(lengths[digest], Encoding.F32) + 1 for digest in digests if digest in lengths}
    return [answers.get(digest, row_bytes) for digest in digests]


def read_values(
    digests: Sequence[bytes], values: Sequence[Any], lengths: Mapping[bytes, int], vocab_size: int
) -> Sequence[Found]:
    """Decode stored rows and answers; `lengths` as for `RowCache.get_many`. A float32 array is a decoded row."""
    if not lengths and (rows := wire.decode_rows(values, vocab_size)) is not None:
        return rows
    pairs = zip(digests, values, strict=True)
    return [_read(digest, value, vocab_size, lengths.get(digest)) for digest, value in pairs]


def _read(digest: bytes, value: Any, vocab_size: int, length: int | None) -> Found:
    """Decode a stored row, or an answer if its `length` is given."""
    if value is None or (isinstance(value, np.ndarray) and value.dtype == np.float32):
        return value
    try:
        if isinstance(value, ResponseError):
            raise value
        data = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value
        row = wire.decode_row(data, length or vocab_size)
        return wire.check_row(row) if length is None else row
    except (ProtocolError, ResponseError) as error:
        return CorruptRow(f"the cached row of prompt {digest.hex()} is damaged: {error}")


async def _all(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of several coroutines; a single coroutine runs without a task of its own."""
    return [await works[0]] if len(works) == 1 else list(await asyncio.gather(*works))
