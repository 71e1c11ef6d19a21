"""Fast connections for requests: raw connections, and connections that open again after they broke.

redis-py handles addresses, TLS, users and databases, but its cost per command is higher than the cost of a whole
request. So redis-py opens a connection, and then this module takes over its transport.
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

Argument = bytes | str | int  # One argument of a command, or the command's name.
CRLF = b"\r\n"  # The end of a line of RESP.
# Max bytes of a reply: larger than the reply to a batch of the longest prompts, or of the largest queries for nodes.
MAX_REPLY = 256 * 1024 * 1024
_MIN_REPLY_TIMEOUT_S = 2.0  # Min seconds to wait for a reply: blocking reads take up to a second.
_MAX_REPLY_TIMEOUT_S = 30.0  # Max seconds to wait for a reply: a request must survive a broken connection.


def pack_command(arguments: Sequence[Argument]) -> bytes:
    """A command in RESP."""
    packed: bytes = hiredis.pack_command(tuple(arguments))  # type: ignore[arg-type]  # its stub wants fixed lengths
    return packed


class RawConnection(asyncio.BaseProtocol):
    """An open connection whose transport was taken over from redis-py's `connection`, which it owns."""

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
        """Whether the connection is closed."""
        return self._closed is not None

    @property
    def local_host(self) -> str:
        """The address of this machine from which the connection was opened; "" for a Unix socket."""
        name = self._transport.get_extra_info("sockname")
        return str(name[0]) if isinstance(name, tuple) else ""

    def _give_up(self) -> Iterable[asyncio.Future[Any]]:
        """Return the futures of all pending commands, and discard them."""
        raise NotImplementedError

    def close(self, reason: Exception | None = None) -> None:
        """Close the connection; pending commands fail with `reason`."""
        if self._closed is None:
            self._closed = reason or ConnectionError("the connection was closed")
            self._transport.abort()
            # redis-py warns when a connection that still has a writer is freed.
            self._connection._writer = None
            for future in self._give_up():
                if not future.done():
                    future.set_exception(self._closed)
                    # Retrieve the exception: asyncio would log it if no caller awaits the future.
                    future.exception()

    def connection_lost(self, exc: Exception | None) -> None:
        self.close(ConnectionError(f"the connection was lost: {exc}" if exc else "the server closed the connection"))


class RawCommandConnection(RawConnection, asyncio.Protocol):
    """A raw connection for any commands, whose replies hiredis parses.

    A reply of more than `max_reply` bytes closes the connection, because stored values may have any size.
    """

    def __init__(self, connection: AbstractConnection, max_reply: int = MAX_REPLY) -> None:
        self._max_reply = max_reply
        self.received = 0  # Bytes received of the current, incomplete reply.
        self._reader = hiredis.Reader(protocolError=ProtocolError, replyError=ResponseError)
        self._pending: deque[asyncio.Future[Any]] = deque()
        super().__init__(connection)

    def call(self, arguments: Sequence[Argument]) -> asyncio.Future[Any]:
        """Send a command; the future returns its reply, or raises ResponseError or ConnectionError."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._closed is not None:
            future.set_exception(self._closed)
        else:
            self._pending.append(future)
            self._transport.write(pack_command(arguments))
        return future

    def data_received(self, data: bytes) -> None:
        if self._closed is not None:
            return
        self.received += len(data)
        try:
            if self.received > self._max_reply:
                raise ProtocolError(f"a reply has more than {self._max_reply} bytes")
            self._reader.feed(data)
            # hiredis checks no line ends: if a faulty proxy has lost bytes of a reply, hiredis completes the reply with
            # bytes of the next reply, and usually finds the rest of these bytes invalid. So parse all bytes first.
            replies: list[Any] = []
            while (reply := self._reader.gets()) is not False:
                replies.append(reply)
                self.received = 0
            for reply in replies:
                if not self._pending:
                    raise ProtocolError(f"a reply without a command: {reply!r:.80}")
                if (future := self._pending.popleft()).done():
                    continue
                settle = future.set_exception if isinstance(reply, Exception) else future.set_result
                settle(reply)
        except ProtocolError as error:
            self.close(error)

    def _give_up(self) -> Iterable[asyncio.Future[Any]]:
        pending, self._pending = self._pending, deque()
        return pending


Raw = TypeVar("Raw", bound=RawConnection)


def reply_timeout(lease_s: float) -> float:
    """Seconds without a reply after which a connection counts as broken: a lease, within bounds.

    After a lease other workers take over jobs, so waiting longer helps no client.
    """
    return min(_MAX_REPLY_TIMEOUT_S, max(_MIN_REPLY_TIMEOUT_S, lease_s))


class Connection(Generic[Raw]):
    """A connection that opens on demand by `connect`, and opens again after it broke."""

    def __init__(self, server: Server, connect: Callable[[], Awaitable[Raw]]) -> None:
        self.reply_timeout_s = REPLY_TIMEOUT_S  # Max seconds without a reply before the connection is closed.
        self._server = server
        self._connect = connect
        self._raw: Raw | None = None
        self._opening = asyncio.Lock()
        self._queued = 0
        self._closed = False
        # Pending reply -> its raw connection, its deadline in loop time, whether the deadline was extended. One timer
        # serves all replies: a timer per reply would cost more than the command.
        self._awaited: dict[asyncio.Future[Any], tuple[Raw, float, bool]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    async def open(self) -> Raw:
        """Return the open raw connection; open one if none is open."""
        # Wait behind other callers even if the connection is open by now, so that commands keep the order of the calls.
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
        """Wait for a reply, at most `reply_timeout_s`.

        Raises:
            NoScriptError: the server has not cached the script.
            ServerError: the server refuses, or cannot be used.
        """
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
        """Close the connection after a reply that does not fit its command: no later reply fits. Returns the error."""
        error = ProtocolError(f"{self._server} sent a reply that does not fit the command: {shown(reply)}")
        self.hang_up(error)
        return error

    def hang_up(self, reason: Exception) -> None:
        """Close the raw connection; the next command opens another."""
        if self._raw is not None:
            self._raw.close(reason)
            self._raw = None

    def check(self, raw: Raw, error: ResponseError) -> bool:
        """Close the raw connection and return True if, after the error, the command must be repeated on a new one."""
        if is_not_now := self._server.is_not_now(error):
            raw.close(self._server.explain(error))
        return is_not_now

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = asyncio.get_running_loop().call_at(when, self._close_late)

    def _close_late(self) -> None:
        """Close connections whose replies are late, and set the timer for the next deadline.

        While the event loop was blocked no reply could be received, so each reply then gets one more timeout.
        """
        self._timer = None
        now, due = asyncio.get_running_loop().time(), self._timer_at
        for reply, (raw, until, was_extended) in list(self._awaited.items()):
            if until > due or reply.done():
                continue
            if now - due > MAX_LATENESS_S and not was_extended:
                self._awaited[reply] = raw, now + self.reply_timeout_s, True
            else:
                raw.close(ServerUnreachable(f"{self._server} has not answered for {self.reply_timeout_s:g} s"))
        later = [until for reply, (_, until, _) in self._awaited.items() if until > due and not reply.done()]
        if later:
            self._set_timer(min(later))

    def close(self) -> None:
        """Close the connection for good; pending commands fail."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._raw is not None:
            self._raw.close()


class CommandConnection(Connection[RawCommandConnection]):
    """A connection for any commands that opens on demand.

    On a cluster it connects to the master of `key`; a changed `key` takes effect when the connection opens next.
    """

    def __init__(self, server: Server, key: bytes = b"") -> None:
        async def connect() -> RawCommandConnection:
            return RawCommandConnection(await (await server.at(self.key)).open())

        super().__init__(server, connect)
        self.key = key

    @property
    def ended_within_reply(self) -> bool:
        """Whether the last raw connection ended within a reply, perhaps because the reply took too long."""
        return self._raw is not None and self._raw.closed and self._raw.received > 0

    async def call(self, *arguments: Argument) -> Any:
        """Run a command."""
        raw = await self.open()
        return await self.wait_for(raw, raw.call(arguments))
