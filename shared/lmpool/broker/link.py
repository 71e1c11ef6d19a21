"""Connections of our own for the path of a request: redis-py opens them, its transport is taken over.

redis-py knows addresses, TLS, users and databases; what it does per command (pooling, retrying, decoding for
any command there is) costs more than a whole request may.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, cast

import hiredis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ResponseError

from lmpool.errors import ProtocolError

Argument = bytes | str | int
CRLF = b"\r\n"
MAX_REPLY = 256 * 1024 * 1024
"""Bytes: a batch of the longest prompts, or of the largest asks for nodes, is smaller."""


def pack_command(arguments: Sequence[Argument]) -> bytes:
    """A command as RESP puts it on the wire."""
    packed: bytes = hiredis.pack_command(tuple(arguments))  # type: ignore[arg-type]  # its stub means any number of them
    return packed


class Link(asyncio.BaseProtocol):
    """An open connection whose bytes are ours.

    Args:
        connection: an open redis-py connection; the link owns it from now on.
    """

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection
        self._closed: Exception | None = None
        writer = connection._writer
        if writer is None:
            raise ConnectionError("the connection is not open")
        self._transport = cast(asyncio.Transport, writer.transport)
        self._transport.pause_reading()
        self._transport.set_protocol(self)
        self._transport.resume_reading()

    @property
    def closed(self) -> bool:
        """True when nothing can be sent any more."""
        return self._closed is not None

    def _give_up(self) -> Iterable[asyncio.Future[Any]]:
        """Forget what is under way; returns the futures."""
        raise NotImplementedError

    def close(self, reason: Exception | None = None) -> None:
        """Close the connection; what is under way fails with `reason`."""
        if self._closed is None:
            self._closed = reason or ConnectionError("the connection was closed")
            self._transport.abort()
            # redis-py warns of a connection that still has a writer when it is freed.
            self._connection._writer = None
            for future in self._give_up():
                if not future.done():
                    future.set_exception(self._closed)
                    # Its owner may be gone already; an unread exception must not be logged at exit.
                    future.exception()

    def connection_lost(self, exc: Exception | None) -> None:
        """The server or the network closed the connection."""
        self.close(ConnectionError(f"the connection was lost: {exc}" if exc else "the server closed the connection"))

    def eof_received(self) -> bool:
        """The server will send no more."""
        return False


class CommandLink(Link, asyncio.Protocol):
    """Any commands, their replies parsed by hiredis; replies come in order.

    Args:
        connection: an open redis-py connection; the link owns it from now on.
        max_reply: most bytes of a reply; a larger one closes the link, for what others have stored may be of any size.
    """

    def __init__(self, connection: AbstractConnection, max_reply: int = MAX_REPLY) -> None:
        self._max_reply = max_reply
        self._got = 0
        self._reader = hiredis.Reader(protocolError=ProtocolError, replyError=ResponseError)
        self._pending: deque[asyncio.Future[Any]] = deque()
        super().__init__(connection)

    def call(self, arguments: Sequence[Argument]) -> asyncio.Future[Any]:
        """Send a command; the future has its reply, or raises ResponseError or ConnectionError."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._closed is not None:
            future.set_exception(self._closed)
        else:
            self._pending.append(future)
            self._transport.write(pack_command(arguments))
        return future

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        if self._closed is not None:
            return
        self._got += len(data)
        try:
            if self._got > self._max_reply:
                raise ProtocolError(f"a reply of over {self._max_reply} bytes")
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not False:
                self._got = 0
                if not self._pending:
                    raise ProtocolError(f"a reply that was not asked for: {reply!r:.80}")
                future = self._pending.popleft()
                if future.done():
                    continue
                if isinstance(reply, Exception):
                    future.set_exception(reply)
                else:
                    future.set_result(reply)
        except ProtocolError as error:
            self.close(error)

    def _give_up(self) -> Iterable[asyncio.Future[Any]]:
        pending, self._pending = self._pending, deque()
        return pending
