"""Redis connections for rows: `RawRowCommands` writes rows and runs commands, `RawRowReceiver` receives large values.

hiredis parses the replies to `RawRowCommands`. Redis runs commands in their order, so a script that is sent after a
write finds the row. hiredis makes two more copies of a received value than `RawRowReceiver`: rows of 128 KiB and above
would take about twice the processor time, while rows up to 4 KiB take about 15 % less time with hiredis.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ResponseError

from lmpool.broker.connection import CRLF, Argument, RawCommandConnection, RawConnection, pack_command
from lmpool.errors import ProtocolError

Bulk = NDArray[np.uint8]
Value = bytes | Bulk | ResponseError | None
"""A stored value: `bytes` or a uint8 array, the error that the server returned for its key, or None for no value."""

_LARGE_BYTES = 32 * 1024  # Min bytes of a value whose copy costs more than a system call.
_WINDOW_BYTES = 64 * 1024  # Max bytes per receive while no large value is expected; also the longest reply line.
_NARROW_BYTES = 1024  # Max bytes per receive after a large value: the received start of the next value must be copied.
_OK, _OK_REPLY = b"OK", b"+OK\r\n"


class RowWrite(NamedTuple):
    """One SET of a row. `numbers` are sent without a copy; without `overwrite` a row that is stored already stays."""

    key: bytes
    header: bytes
    numbers: memoryview
    overwrite: bool


class _Stored(asyncio.Future[list[ResponseError | None]]):
    """The replies of several SETs: None for each success, or the server's error."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.missing = count
        self._replies: list[ResponseError | None] = []

    def set_result(self, reply: object) -> None:
        """Add the reply of the next SET."""
        if reply is not None and reply != _OK:
            error = ProtocolError(f"a SET cannot have the reply {reply!r:.80}")
            super().set_exception(error)
            raise error  # The error closes the connection: an earlier reply was lost.
        self.add([None])

    def set_exception(self, error: Any) -> None:
        """Add the error of the next SET, or fail all SETs when the connection is lost."""
        if isinstance(error, ResponseError):
            self.add([error])
        else:
            super().set_exception(error)

    def add(self, replies: Sequence[ResponseError | None]) -> None:
        """Add the replies of the next SETs."""
        self._replies += replies
        self.missing -= len(replies)
        if not self.missing:
            super().set_result(self._replies)


class RawRowCommands(RawCommandConnection):
    """A connection for commands and for writes of rows."""

    def set(self, writes: Sequence[RowWrite], ttl_ms: int) -> asyncio.Future[list[ResponseError | None]]:
        """Store rows, whose memory must not change before the future is done.

        Large rows are sent without a copy; small rows are joined into one buffer.
        """
        future = _Stored(len(writes))
        if self._closed is not None:
            future.set_exception(self._closed)
            return future
        ttl = b"%d" % ttl_ms
        expiry = b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)
        chunks: list[bytes | memoryview] = []
        tail, largest = b"", 0
        for key, header, numbers, overwrite in writes:
            size = len(header) + numbers.nbytes
            largest = max(largest, size)
            words = 5 if overwrite else 6
            head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % (words, len(key), key, size, header)
            chunks += (tail + head, numbers)
            tail = expiry if overwrite else expiry + b"$2\r\nNX\r\n"
        if not writes:
            future.add([])
        else:
            self._pending.extend([future] * len(writes))
            chunks.append(tail)
            self._transport.writelines([b"".join(chunks)] if largest < _LARGE_BYTES else chunks)
        return future

    def data_received(self, data: bytes) -> None:
        """Process replies. Successful replies to several SETs are handled together: hiredis would return each alone."""
        first = self._pending[0] if self._pending and not self.received else None
        if isinstance(first, _Stored) and not first.done():
            count = min(first.missing, len(data) // len(_OK_REPLY))
            if count and data.startswith(_OK_REPLY * count):
                for _ in range(count):
                    self._pending.popleft()
                first.add([None] * count)
                data = data[count * len(_OK_REPLY) :]
        if data:
            super().data_received(data)


@dataclass(slots=True)
class _Awaited:
    """A command whose reply is awaited: `count` values in an array, or one value where `count` is None."""

    future: asyncio.Future[Any]
    count: int | None
    max_bytes: int
    values: list[bytes | Bulk | None] = field(default_factory=list)
    is_begun: bool = False


class RawRowReceiver(RawConnection, asyncio.BufferedProtocol):
    """A connection that receives large values in place; for MGET, GET and GETRANGE only.

    A value is accepted only once the line end after it has arrived. The object owns the redis-py connection.

    Attributes:
        received: number of received bytes.
    """

    def __init__(self, connection: AbstractConnection) -> None:
        self.received = 0
        self._awaited: deque[_Awaited] = deque()
        self._scratch = bytearray(_WINDOW_BYTES)
        self._view = memoryview(self._scratch)
        self._end, self._window = 0, _WINDOW_BYTES
        self._bulk: Bulk | None = None
        self._missing = self._view[:0]  # The part of `_bulk` that has yet to arrive.
        super().__init__(connection)

    def call(self, arguments: Sequence[Argument], max_bytes: int) -> asyncio.Future[Any]:
        """Send a command; its future raises ResponseError or ConnectionError.

        A value of more than `max_bytes` closes the connection before memory is allocated for the value.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._closed is not None:
            future.set_exception(self._closed)
        else:
            count = len(arguments) - 1 if arguments[0] == b"MGET" else None
            self._awaited.append(_Awaited(future, count, max_bytes))
            self._transport.write(pack_command(arguments))
        return future

    def _give_up(self) -> Iterable[asyncio.Future[Any]]:
        awaited, self._awaited = self._awaited, deque()
        return [command.future for command in awaited]

    def get_buffer(self, sizehint: int) -> memoryview:
        """The memory for the next bytes: the rest of a value, or the scratch buffer."""
        return self._missing or self._view[self._end : self._window]

    def buffer_updated(self, nbytes: int) -> None:
        """Process bytes that have arrived."""
        self.received += nbytes
        if self._closed is not None:
            return
        try:
            if self._bulk is None:
                self._end += nbytes
                self._parse()
                return
            self._missing = self._missing[nbytes:]
            if not self._missing:
                bulk, self._bulk = self._bulk, None
                _check_line_end(bulk[-2:].tobytes())
                # Return a small value as `bytes`: callers recognise small values, such as references, by this type.
                self._take(bulk[:-2] if bulk.size > _LARGE_BYTES else bulk[:-2].tobytes())
        except (ValueError, IndexError) as error:
            self._end = 0
            self.close(error if isinstance(error, ProtocolError) else ProtocolError(f"not a RESP reply: {error}"))

    def _parse(self) -> None:
        """Read all whole lines and small values in the scratch buffer, and begin a large value."""
        scratch, view, end = self._scratch, self._view, self._end
        start = 0
        while self._bulk is None and (stop := scratch.find(CRLF, start, end)) >= 0:
            kind, line = scratch[start], scratch[start + 1 : stop]
            start = stop + 2
            command = self._awaited[0]
            if kind != 0x24 or line == b"-1":  # The line is not the size of a value.
                if kind in (0x24, 0x5F):  # "$-1" and "_" stand for no value.
                    self._take(None)
                elif kind == 0x2A and int(line) == command.count and not command.is_begun:  # "*" begins an array.
                    command.is_begun = True
                elif kind == 0x2D and not command.is_begun:  # "-" begins an error.
                    self._awaited.popleft()
                    if not command.future.done():
                        command.future.set_exception(ResponseError(line.decode("utf-8", "replace")))
                else:
                    raise ProtocolError(f"a reply of another kind was expected: {chr(kind)}{line!r:.80}")
                continue
            size, limit = int(line), command.max_bytes
            if not 0 <= size <= limit:
                raise ProtocolError(f"a value of {size} bytes; the limit is {limit}")
            self._window = _NARROW_BYTES if size >= _LARGE_BYTES else _WINDOW_BYTES
            behind = start + size + 2
            if behind <= end:
                _check_line_end(scratch[behind - 2 : behind])
                self._take(bytes(view[start : behind - 2]))
                start = behind
            else:
                self._bulk = np.empty(size + 2, np.uint8)
                self._bulk.data[: end - start] = view[start:end]
                self._missing = self._bulk.data[end - start :]
                start = end
        self._end = end - start
        scratch[: self._end] = scratch[start:end]
        if self._end == _WINDOW_BYTES:
            raise ProtocolError(f"a reply line of more than {_WINDOW_BYTES} bytes")
        if self._end >= self._window:
            self._window = _WINDOW_BYTES

    def _take(self, value: bytes | Bulk | None) -> None:
        command = self._awaited[0]
        if command.is_begun != (command.count is not None):
            raise ProtocolError("a value outside of the array that was requested")
        command.values.append(value)
        if len(command.values) == (command.count or 1):
            self._awaited.popleft()
            if not command.future.done():
                command.future.set_result(command.values if command.is_begun else value)


def _check_line_end(data: bytes | bytearray) -> None:
    """Check the line end after a value: if bytes were lost on the way, bytes of the next reply are in its place."""
    if data != CRLF:
        raise ProtocolError("a value does not end where it should")
