"""Connections for the path of a request: raw ones, and ones that open themselves again when they broke.

redis-py knows addresses, TLS, users and databases; what it does per command (pooling, retrying, decoding for
any command there is) costs more than a whole request may. So it opens a connection, and its transport is taken over.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar, cast

import hiredis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import NoScriptError, RedisError, ResponseError

from lmpool.aio import MAX_LATENESS_S
from lmpool.broker.server import REPLY_TIMEOUT_S, Server
from lmpool.errors import LMPoolError, ProtocolError, ServerUnreachable
from lmpool.settings import shown

Argument = bytes | str | int
"""One word of a command."""

CRLF = b"\r\n"
"""The end of a line of RESP."""

MAX_REPLY = 256 * 1024 * 1024
"""Most bytes of a reply: a batch of the longest prompts, or of the largest queries for nodes, is smaller."""

_MIN_REPLY_TIMEOUT_S = 2.0
_MAX_REPLY_TIMEOUT_S = 30.0


def pack_command(arguments: Sequence[Argument]) -> bytes:
    """A command as RESP puts it on the wire."""
    packed: bytes = hiredis.pack_command(tuple(arguments))  # type: ignore[arg-type]  # its stub means any number of them
    return packed


class RawConnection(asyncio.BaseProtocol):
    """An open connection to the server, whose transport was taken over from redis-py.

    Args:
        connection: an open redis-py connection, which is owned from now on.
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


class RawCommandConnection(RawConnection, asyncio.Protocol):
    """A connection for any commands; hiredis parses the replies, which come in order.

    Args:
        connection: an open redis-py connection, which is owned from now on.
        max_reply: most bytes of a reply; a larger one closes the connection, for values that others have stored may be
            of any size.

    Attributes:
        received: bytes that have been received of a reply that is not complete.
    """

    def __init__(self, connection: AbstractConnection, max_reply: int = MAX_REPLY) -> None:
        self._max_reply = max_reply
        self.received = 0
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
        self.received += len(data)
        try:
            if self.received > self._max_reply:
                raise ProtocolError(f"a reply of over {self._max_reply} bytes")
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not False:
                self.received = 0
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


Raw = TypeVar("Raw", bound=RawConnection)


def reply_timeout(lease_s: float) -> float:
    """Seconds after which a server that is silent counts as gone, in a pool whose workers have such a lease.

    A lease: who waits longer for a reply that never comes holds up what others have taken over already. Blocking
    reads take up to a second.
    """
    return min(_MAX_REPLY_TIMEOUT_S, max(_MIN_REPLY_TIMEOUT_S, lease_s))


class Connection(Generic[Raw]):
    """A connection that is opened on demand, and again after it broke.

    Args:
        server: where to, and what explains errors.
        connect: opens a raw connection.

    Attributes:
        reply_timeout_s: seconds of silence after which the raw connection counts as broken and is opened anew;
            may be changed at any time.
    """

    def __init__(self, server: Server, connect: Callable[[], Awaitable[Raw]]) -> None:
        self.reply_timeout_s = REPLY_TIMEOUT_S
        self._server = server
        self._connect = connect
        self._raw: Raw | None = None
        self._opening = asyncio.Lock()
        self._queued = 0
        self._closed = False
        # Reply that is awaited -> its raw connection, until which loop time, and whether that was put off already. One
        # timer serves all of them.
        self._awaited: dict[asyncio.Future[Any], tuple[Raw, float, bool]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    async def open(self) -> Raw:
        """The open raw connection.

        Raises:
            ServerUnreachable, AuthenticationFailed: it cannot be opened.
        """
        # Behind the callers that wait even when it is open by now, so that commands go in the order of the calls.
        if self._raw is None or self._raw.closed or self._queued:
            self._queued += 1
            try:
                async with self._opening:
                    if self._closed:
                        raise ServerUnreachable(f"the connection to {self._server} was closed on our side")
                    if self._raw is None or self._raw.closed:
                        raw = await self._connect()
                        if self._closed:
                            raw.close()
                        self._raw = raw
            finally:
                self._queued -= 1
        return self._raw

    async def wait_for(self, raw: Raw, reply: asyncio.Future[Any]) -> Any:
        """Wait for a reply; a server that is silent for `reply_timeout_s` counts as gone.

        Raises:
            NoScriptError: the server does not know the script.
            ServerError: the server refuses, or cannot be used.
        """
        # A timer for each would cost more than the command itself.
        until = asyncio.get_running_loop().time() + self.reply_timeout_s
        self._awaited[reply] = raw, until, False
        if self._timer is None or until < self._timer_at:
            self._set_timer(until)
        try:
            return await reply
        except (RedisError, OSError, LMPoolError) as error:
            if isinstance(error, ResponseError) and str(error).startswith("NOSCRIPT"):
                raise NoScriptError(str(error)) from error
            if isinstance(error, ResponseError):
                self.check(raw, error)
            raise self._server.explain(error) from error
        finally:
            del self._awaited[reply]

    def distrust(self, reply: object) -> ProtocolError:
        """A reply cannot be that of its command, so no later one can be either: closes the connection; returns why."""
        error = ProtocolError(f"{self._server} sent a reply that does not fit the command: {shown(reply)}")
        self.hang_up(error)
        return error

    def hang_up(self, reason: Exception) -> None:
        """Close the raw connection, to open another when it is needed next."""
        if self._raw is not None:
            self._raw.close(reason)
            self._raw = None

    def check(self, raw: Raw, error: ResponseError) -> bool:
        """Whether an error means to ask again, on another connection: then this one is closed."""
        is_not_now = self._server.is_not_now(error)
        if is_not_now:
            raw.close(self._server.explain(error))
        return is_not_now

    def _set_timer(self, when: float) -> None:
        """Check at a loop time whether a reply is late, instead of at a later one."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = asyncio.get_running_loop().call_at(when, self._close_late)

    def _close_late(self) -> None:
        """Close connections whose replies are late; check again when the next one may be.

        After a pause of the event loop, in which nothing was received, each reply may take as long again, once.
        """
        self._timer = None
        now, due = asyncio.get_running_loop().time(), self._timer_at
        for reply, (raw, until, was_put_off) in list(self._awaited.items()):
            if until > due or reply.done():
                continue
            if now - due > MAX_LATENESS_S and not was_put_off:
                self._awaited[reply] = raw, now + self.reply_timeout_s, True
            else:
                raw.close(ServerUnreachable(f"{self._server} has not answered for {self.reply_timeout_s:g} s"))
        later = [until for reply, (_, until, _) in self._awaited.items() if until > due and not reply.done()]
        if later:
            self._set_timer(min(later))

    def close(self) -> None:
        """Close the connection for good; what is under way fails."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._raw is not None:
            self._raw.close()


class CommandConnection(Connection[RawCommandConnection]):
    """A connection for any commands that opens itself.

    Args:
        server: where to.
        key: the connection goes to the master that has this key, which commands must be about; b"" where there is no
            cluster.

    Attributes:
        key: as above; counts from the next time that the connection opens.
    """

    def __init__(self, server: Server, key: bytes = b"") -> None:
        super().__init__(server, self._connect_to_key)
        self.key = key

    @property
    def ended_within_reply(self) -> bool:
        """Whether the last raw connection ended while it received a reply: one that takes too long, perhaps."""
        return self._raw is not None and self._raw.closed and self._raw.received > 0

    async def _connect_to_key(self) -> RawCommandConnection:
        return RawCommandConnection(await (await self._server.at(self.key)).open())

    async def call(self, *arguments: Argument) -> Any:
        """Run a command.

        Raises:
            NoScriptError: the server does not know the script.
            ServerError: the server refuses, or cannot be used.
        """
        raw = await self.open()
        return await self.wait_for(raw, raw.call(arguments))
