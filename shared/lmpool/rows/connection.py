"""Connections for rows: SET and MGET without copying rows more often than the kernel does.

Rows are written straight from the backend's block, and each is received into the buffer that becomes the row,
together with the line end behind it: a value counts only when that has been seen, for bytes that were lost on the way
would be replaced by those that follow. A general client copies a received row twice more, and every copy of 200 KB is
paid in page faults too. The script that ends jobs runs here as well: what is sent first is done first, so it finds the
rows of the SETs before it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import NoScriptError, ResponseError

from lmpool.broker.connection import CRLF, Argument, Connection, RawConnection, pack_command
from lmpool.broker.server import REPLY_TIMEOUT_S, Server
from lmpool.errors import LMPoolError, ProtocolError

CHUNK_BYTES, CHUNK_ROWS = 4 * 1024 * 1024, 512
"""Most of a chunk: it costs its client some 90 µs, whatever is in it; what is under way takes memory of the server."""

Bulk = NDArray[np.uint8]
Reply = Bulk | bytes | int | ResponseError | None
"""What comes of one command; a value is `bytes` where it is small, else a uint8 array."""

_CHUNKS_UNDER_WAY = 2
_WINDOW = 64 * 1024
_NARROW_WINDOW = 1024
_LARGE_BULK = 32 * 1024
_SMALL_BULK = 4 * 1024
_LINE_END = len(CRLF)
_ALIGNMENT = 64
_NONE = np.empty(0, np.uint8)
_OK = b"+OK" + CRLF
_CRLF = np.frombuffer(CRLF, np.uint8)
_NO_LINE_END = "a value does not end where it should"


def fresh_bulk(size: int) -> Bulk:
    """New memory to receive into."""
    return np.empty(size, np.uint8)


class RowWrite(NamedTuple):
    """One SET of a row.

    Attributes:
        key: the row's key.
        header: first bytes of the value.
        numbers: the rest of the value, sent from where it lies.
        overwrite: replace a row that is there already; otherwise the first stored row stays.
    """

    key: bytes
    header: bytes
    numbers: memoryview
    overwrite: bool


@dataclass(slots=True)
class _Pending:
    """A command (or a run of SETs) whose replies are awaited; an MGET's replies are the array's elements."""

    replies: int
    future: asyncio.Future[list[Any]]
    is_array: bool
    is_set: bool = False
    begun: bool = False
    values: list[Any] = field(default_factory=list)


class RawRowConnection(RawConnection, asyncio.BufferedProtocol):
    """Speaks RESP for rows on one connection. Replies come in order; any number may be under way.

    Args:
        connection: an open redis-py connection, which is owned from now on.
        max_bulk: largest value in bytes that is accepted; a larger one closes the connection.
        allocate: gives the uint8 array of shape (size,) that a value which comes in parts is received into, with its
            first line and its line end; the value is a view of it.
        one_by_one: fetch values with a GET each: a master of a cluster refuses an MGET of keys in several slots.

    Attributes:
        max_bulk: as above; may be changed at any time.
    """

    def __init__(
        self,
        connection: AbstractConnection,
        max_bulk: int,
        allocate: Callable[[int], Bulk] = fresh_bulk,
        *,
        one_by_one: bool = False,
    ) -> None:
        self.max_bulk = max_bulk
        self._one_by_one = one_by_one
        self._allocate = allocate
        self._pending: deque[_Pending] = deque()
        self._scratch = bytearray(_WINDOW)
        self._view = memoryview(self._scratch)
        self._bytes = np.frombuffer(self._scratch, np.uint8)
        self._start = self._end = 0
        self._window = _WINDOW
        # The value that is being received, how much of it has come and where it begins; and its first line, as long as
        # that has not come.
        self._bulk: Bulk = _NONE
        self._bulk_got = self._bulk_start = 0
        self._expected_line = b""
        super().__init__(connection)

    def mget(self, keys: Sequence[bytes]) -> asyncio.Future[list[Any]]:
        """Fetch values; each is a fresh uint8 array of shape (size,) or `bytes`, or None where there is none.

        The future raises ConnectionError when the connection breaks and ResponseError when the server refuses; fetched
        one by one, a value may be the error with which the server refused it.
        """
        future = self._expect(len(keys), is_array=not self._one_by_one)
        if future.done():
            return future
        if self._one_by_one:
            gets = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key) for key in keys]
            self._transport.write(b"".join(gets))
            return future
        parts = [b"*%d\r\n$4\r\nMGET" % (len(keys) + 1)]
        parts += [b"$%d\r\n%b" % (len(key), key) for key in keys]
        parts.append(b"")
        self._transport.write(CRLF.join(parts))
        return future

    def set(self, writes: Sequence[RowWrite], ttl_ms: int) -> asyncio.Future[list[Reply]]:
        """Store rows; per row None, or the error with which the server refused it.

        The blocks must not change before the future is done.
        """
        future = self._expect(len(writes), is_array=False, is_set=True)
        if future.done():
            return future
        ttl = b"%d" % ttl_ms
        expiry = b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)
        chunks: list[bytes | memoryview] = []
        tail, largest = b"", 0
        for write in writes:
            size = len(write.header) + write.numbers.nbytes
            largest = max(largest, size)
            head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % (
                5 if write.overwrite else 6,
                len(write.key),
                write.key,
                size,
                write.header,
            )
            chunks += (tail + head, write.numbers)
            tail = expiry if write.overwrite else expiry + b"$2\r\nNX\r\n"
        chunks.append(tail)
        if largest < _LARGE_BULK:
            self._transport.write(b"".join(chunks))
        else:
            self._transport.writelines(chunks)
        return future

    def call(self, arguments: Sequence[Argument]) -> asyncio.Future[list[Reply]]:
        """Send a command whose reply is neither an array nor a status; the future has a list of that one reply."""
        future = self._expect(1, is_array=False)
        if future.done():
            return future
        self._transport.write(pack_command(arguments))
        return future

    def _expect(self, replies: int, *, is_array: bool, is_set: bool = False) -> asyncio.Future[list[Any]]:
        future = asyncio.get_running_loop().create_future()
        if self._closed is not None:
            future.set_exception(self._closed)
        elif replies == 0:
            future.set_result([])
        else:
            self._pending.append(_Pending(replies, future, is_array, is_set))
        return future

    def _give_up(self) -> Iterable[asyncio.Future[Any]]:
        pending, self._pending = self._pending, deque()
        return [command.future for command in pending]

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: into the row that is being received, else into the scratch buffer."""
        if self._bulk.size:
            return self._bulk.data[self._bulk_got :]
        if self._start:
            rest = self._end - self._start
            self._scratch[:rest] = self._scratch[self._start : self._end]
            self._start, self._end = 0, rest
        if self._end >= self._window:
            self._window = _WINDOW
        if self._end >= _WINDOW:
            self.close(ProtocolError(f"a reply line of over {_WINDOW} bytes"))
        return self._view[self._end : self._window] if self._end < self._window else memoryview(bytearray(1))

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have come."""
        if self._closed is not None:
            return
        try:
            if self._bulk.size:
                self._bulk_got += nbytes
                if (not self._expected_line or self._check_expected_line()) and self._bulk_got == self._bulk.size:
                    self._end_bulk()
                return
            self._end += nbytes
            self._parse()
        except (ValueError, IndexError) as error:
            self.close(error if isinstance(error, ProtocolError) else ProtocolError(f"not a RESP reply: {error}"))

    def _parse(self) -> None:
        scratch = self._scratch
        while self._start < self._end and not self._bulk.size and self._closed is None:
            stop = scratch.find(CRLF, self._start, self._end)
            if stop < 0:
                return
            kind, line = scratch[self._start], scratch[self._start + 1 : stop]
            if kind == 0x2B and self._take_stored():
                continue
            if kind == 0x24 and self._take_alike(int(line), stop + 2):
                continue
            self._start = stop + 2
            self._reply(kind, line)

    def _take_stored(self) -> bool:
        """Take the answers of SETs that were all done, one and the same line each; returns whether there were any."""
        pending = self._pending[0] if self._pending else None
        if pending is None or not pending.is_set:
            return False
        most = min(pending.replies - len(pending.values), (self._end - self._start) // len(_OK))
        if most < 2 or not self._scratch.startswith(_OK * most, self._start):
            return False
        pending.values += [None] * most
        self._start += most * len(_OK)
        if len(pending.values) == pending.replies:
            self._complete()
        return True

    def _take_alike(self, size: int, start: int) -> bool:
        """Take small values of one size that have come whole, as tiny rows mostly do: much faster than one by one.

        Args:
            size: of the first one.
            start: where that begins, behind its first line.

        Returns:
            whether any were taken. If not, `_reply` knows what the matter is.
        """
        pending = self._pending[0] if self._pending else None
        if pending is None or pending.is_set or pending.begun != pending.is_array or not 0 < size <= _SMALL_BULK:
            return False
        head = start - self._start
        step = head + size + _LINE_END
        most = min(pending.replies - len(pending.values), (self._end - self._start) // step)
        # Where sizes change, or rows are missing between, a table of all that follows would be laid out for each.
        line = self._view[self._start : start]
        if most < 2 or size > self.max_bulk or not self._scratch.startswith(line, self._start + step):
            return False
        data = bytes(self._view[self._start : self._start + most * step])
        table = np.frombuffer(data, np.uint8).reshape(most, step)
        is_alike = (table[:, :head] == table[0, :head]).all(axis=1) & (table[:, -_LINE_END:] == _CRLF).all(axis=1)
        count = most if is_alike.all() else int(is_alike.argmin())
        pending.values += [data[at : at + size] for at in range(head, count * step, step)]
        self._start += count * step
        self._window = _WINDOW
        if len(pending.values) == pending.replies:
            self._complete()
        return count > 0

    def _reply(self, kind: int, line: bytearray) -> None:
        if kind == 0x24:  # $ bulk
            size = int(line)
            self._check(is_scalar=False)
            if size == -1:
                self._element(None)
            elif size < 0 or self._pending[0].is_set:
                raise ProtocolError(f"a value of {size} bytes was not asked for")
            else:
                self._begin_bulk(size)
        elif kind == 0x2A:  # * array
            count = int(line)
            first = self._pending[0] if self._pending else None
            if first is None or not first.is_array or first.begun or first.replies != count:
                raise ProtocolError(f"an array of {count} values was not asked for")
            first.begun = True
        elif kind == 0x5F:  # _ null
            self._check(is_scalar=False)
            self._element(None)
        elif kind == 0x2B:  # + simple
            self._check(is_scalar=True, is_set=True)
            self._element(None)
        elif kind == 0x3A:  # : integer
            self._check(is_scalar=True, is_set=False)
            self._element(int(line))
        elif kind == 0x2D:  # - error
            self._error(ResponseError(line.decode("utf-8", "replace")))
        else:
            raise ProtocolError(f"reply type {chr(kind)!r} was not asked for")

    def _check(self, *, is_scalar: bool, is_set: bool | None = None) -> None:
        """Refuse a reply that the command at the head cannot have: its values would go to another prompt."""
        first = self._pending[0] if self._pending else None
        if first is None or (first.is_array and (is_scalar or not first.begun)):
            raise ProtocolError("a reply was not asked for")
        if is_set is not None and first.is_set != is_set:
            raise ProtocolError("a reply of another kind was asked for: some were lost")

    def _begin_bulk(self, size: int) -> None:
        if size > self.max_bulk:
            raise ProtocolError(f"a value of {size} bytes is over the limit of {self.max_bulk}")
        start, stop = self._start, self._start + size
        # A row is received in place but for what came along with its first line: keep that short.
        self._window = _NARROW_WINDOW if size >= _LARGE_BULK else _WINDOW
        if stop + _LINE_END <= self._end:
            # It is there already, as tiny rows mostly are.
            if not self._scratch.startswith(CRLF, stop):
                raise ProtocolError(_NO_LINE_END)
            self._start = stop + _LINE_END
            self._value(self._bytes[start:stop].copy())
            return
        self._receive(size)
        have, begin = self._end - start, self._bulk_got
        self._bulk[begin : begin + have] = self._bytes[start : self._end]
        self._start = self._end
        self._bulk_got += have

    def _receive(self, size: int, *, is_line_expected: bool = False) -> None:
        """Have a value received into memory of its own.

        Args:
            size: of the value.
            is_line_expected: its first line has not come yet, and may turn out to be another one.
        """
        line = b"$%d\r\n" % size
        # Numbers are read where they lie, which must not cost more than elsewhere.
        self._bulk_start = len(line) + -len(line) % _ALIGNMENT
        self._bulk = self._allocate(self._bulk_start + size + _LINE_END)
        self._expected_line = line if is_line_expected else b""
        self._bulk_got = self._bulk_start - len(self._expected_line)

    def _check_expected_line(self) -> bool:
        """Whether what has come of a value is what was expected; if not, it goes where it belongs."""
        begin, stop = self._bulk_start - len(self._expected_line), min(self._bulk_got, self._bulk_start)
        if self._expected_line.startswith(self._bulk.data[begin:stop]):
            if stop == self._bulk_start:
                self._expected_line = b""
            return True
        rest = self._bulk[begin : self._bulk_got].data
        self._bulk, self._expected_line = _NONE, b""
        while rest.nbytes and self._closed is None:
            buffer = self.get_buffer(-1)
            count = min(len(buffer), rest.nbytes)
            buffer[:count] = rest[:count]
            self.buffer_updated(count)
            rest = rest[count:]
        return False

    def _end_bulk(self) -> None:
        bulk, self._bulk = self._bulk, _NONE
        if bulk[-2] != CRLF[0] or bulk[-1] != CRLF[1]:
            raise ProtocolError(_NO_LINE_END)
        pending, value = self._pending[0], bulk[self._bulk_start : -_LINE_END]
        self._value(value)
        if value.size >= _LARGE_BULK and len(pending.values) < pending.replies:
            # The next one is mostly another row: it comes in one go, with its first line.
            self._receive(value.size, is_line_expected=True)

    def _value(self, value: Bulk) -> None:
        self._element(value.tobytes() if value.size <= _SMALL_BULK else value)

    def _error(self, error: ResponseError) -> None:
        if not self._pending or self._pending[0].begun:
            raise ProtocolError(f"an error that was not asked for: {error}")
        pending = self._pending[0]
        if pending.is_array:
            self._pending.popleft()
            if not pending.future.done():
                pending.future.set_exception(error)
        else:
            self._element(error)

    def _element(self, value: Any) -> None:
        pending = self._pending[0]
        pending.values.append(value)
        if len(pending.values) == pending.replies:
            self._complete()

    def _complete(self) -> None:
        pending = self._pending.popleft()
        if not pending.future.done():
            pending.future.set_result(pending.values)


class RowConnection(Connection[RawRowConnection]):
    """A connection for rows, and for scripts that must find them, that opens itself.

    Args:
        server: where to.
        max_bulk: largest value in bytes that is accepted.
        allocate: gives the array that a value is received into.
    """

    def __init__(self, server: Server, max_bulk: int, allocate: Callable[[int], Bulk] = fresh_bulk) -> None:
        super().__init__(server, self._connect_for_rows)
        self._max_bulk = max_bulk
        self._allocate = allocate

    async def _connect_for_rows(self) -> RawRowConnection:
        connection = await self._server.open()
        return RawRowConnection(connection, self._max_bulk, self._allocate, one_by_one=self._server.is_node)

    @property
    def max_bulk(self) -> int:
        """Largest value in bytes that is accepted."""
        return self._max_bulk

    def allow(self, size: int) -> None:
        """Accept values of up to `size` bytes from now on, if that is more than until now."""
        if size > self._max_bulk:
            self._max_bulk = size
            if self._raw is not None:
                self._raw.max_bulk = size

    async def call(self, *arguments: Argument) -> Any:
        """Run a command whose reply is not an array.

        Raises:
            NoScriptError: the server does not know the script.
            ServerError: the server refuses, or cannot be used.
        """
        return await self.call_on(await self.open(), *arguments)

    async def get_ranges(self, keys: Sequence[bytes], most: Sequence[int]) -> list[object]:
        """The first bytes of values that may be of any size, or what the server says of one (an error is a value here).

        Args:
            keys: whose values; what is not there is empty.
            most: how many bytes of each, no more than `max_bulk`.

        Raises:
            ServerError: the server cannot be used.
        """
        raw = await self.open()
        replies = [raw.call((b"GETRANGE", key, 0, size - 1)) for key, size in zip(keys, most, strict=True)]
        values = [value for reply in replies for value in await self.wait_for(raw, reply)]
        for value in values:
            if isinstance(value, ResponseError) and self.check(raw, value):
                raise self._server.explain(value)
        return values

    async def call_on(self, raw: RawRowConnection, *arguments: Argument) -> Any:
        """Run a command on this very raw connection: behind what was sent there, or not at all."""
        (reply,) = await self.wait_for(raw, raw.call(arguments))
        if isinstance(reply, ResponseError):
            self.check(raw, reply)
            raise NoScriptError(str(reply)) if str(reply).startswith("NOSCRIPT") else self._server.explain(reply)
        return reply.tobytes() if isinstance(reply, np.ndarray) else reply


class RowConnections:
    """Connections for rows: one, or one to each master of a cluster.

    Args:
        server: where to.
        max_bulk: largest value in bytes that is accepted.
        reply_timeout_s: as `Connection.reply_timeout_s`.
    """

    def __init__(self, server: Server, max_bulk: int, reply_timeout_s: float = REPLY_TIMEOUT_S) -> None:
        self._server = server
        self._reply_timeout_s = reply_timeout_s
        self._max_bulk = max_bulk
        self._connections: dict[Server, RowConnection] = {}

    async def of(self, keys: Sequence[bytes]) -> list[tuple[RowConnection, list[int]]]:
        """Which connection goes to which of some keys, by their numbers.

        Raises:
            ServerError: the cluster does not say.
        """
        parts: dict[Server, list[int]] = {}
        for number, key in enumerate(keys):
            parts.setdefault(await self._server.at(key), []).append(number)
        return [(self._to(server), numbers) for server, numbers in parts.items()]

    def allow(self, size: int) -> None:
        """Accept values of up to `size` bytes from now on, if that is more than until now."""
        self._max_bulk = max(self._max_bulk, size)
        for connection in self._connections.values():
            connection.allow(size)

    def _to(self, server: Server) -> RowConnection:
        connection = self._connections.get(server)
        if connection is None:
            connection = self._connections[server] = RowConnection(server, self._max_bulk)
            connection.reply_timeout_s = self._reply_timeout_s
        return connection

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.close()


class ChunkReader:
    """Reads values in chunks, of which two are under way at a time, over one connection.

    Args:
        server: what explains errors.
        connection: where to; values that are larger than it accepts are cut.
        apart: what refuses a whole chunk for the sake of one value: each is then asked for by itself.
    """

    def __init__(
        self,
        server: Server,
        connection: RowConnection,
        apart: type[LMPoolError] | tuple[type[LMPoolError], ...] = ProtocolError,
    ) -> None:
        self._server = server
        self._connection = connection
        self._apart = apart
        self._window = asyncio.Semaphore(_CHUNKS_UNDER_WAY)

    async def read(self, keys: Sequence[bytes], most: Sequence[int] | None = None) -> Sequence[object]:
        """One chunk: bytes or an array for each key, None where there is nothing, or what the server says of it.

        Args:
            keys: whose values.
            most: bytes that each may have, and one more; a longer value may be cut to that. None for the connection's
                limit.

        Raises:
            ServerError: the server cannot be used.
        """
        async with self._window:
            raw = await self._connection.open()
            try:
                values: Sequence[object] = await self._connection.wait_for(raw, raw.mget(keys))
            except self._apart:
                # A value over the limit ends the connection with a ProtocolError, for the others too.
                bounded = await self._connection.get_ranges(keys, most or [self._connection.max_bulk] * len(keys))
                # An empty string is what GETRANGE finds where there is nothing.
                values = [
                    bytes(value) or None if isinstance(value, (bytes, np.ndarray)) else value for value in bounded
                ]
        for value in values:
            if isinstance(value, ResponseError) and self._connection.check(raw, value):
                raise self._server.explain(value)
        return values


def cut_chunks(sizes: Sequence[int]) -> Iterator[slice]:
    """Parts of values of these sizes, each as large as one chunk may be."""
    begin = size = 0
    for at, value_size in enumerate(sizes):
        if at > begin and (size + value_size > CHUNK_BYTES or at - begin == CHUNK_ROWS):
            yield slice(begin, at)
            begin, size = at, 0
        size += value_size
    if begin < len(sizes):
        yield slice(begin, len(sizes))
