"""A Redis server in memory: fakeredis behind a Unix socket.

fakeredis has a TCP server, but it sends short strings as status replies, which lmpool's connections refuse, polls for
input a hundred times a second, and needs a thread per connection. This server runs in an event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

from fakeredis import FakeServer
from fakeredis._helpers import NoResponse, SimpleError, SimpleString
from fakeredis.aioredis import AsyncFakeSocket
from redis.asyncio import Redis


def encode_reply(value: Any, protocol: int) -> bytes:
    """Encode a reply of fakeredis in RESP, version 2 or 3.

    Raises:
        TypeError: RESP has no form for the value.
    """
    parts: list[bytes] = []
    _append(parts, value, protocol)
    return b"".join(parts)


def _append(parts: list[bytes], value: Any, protocol: int) -> None:
    match value:
        case bytes():
            parts += (b"$%d\r\n" % len(value), value, b"\r\n")
        case None:
            parts.append(b"_\r\n" if protocol == 3 else b"$-1\r\n")
        case bool() if protocol == 3:
            parts.append(b"#t\r\n" if value else b"#f\r\n")
        case int():
            parts.append(b":%d\r\n" % value)
        case SimpleString():
            parts.append(b"+%b\r\n" % value.value)
        case SimpleError():
            parts.append(b"-%b\r\n" % value.value.replace("\r", " ").replace("\n", " ").encode())
        case float() if protocol == 3:
            parts.append(b",%.17g\r\n" % value)
        case str() | float():
            _append(parts, str(value).encode(), protocol)
        case dict():
            parts.append(b"%%%d\r\n" % len(value) if protocol == 3 else b"*%d\r\n" % (2 * len(value)))
            for pair in value.items():
                for item in pair:
                    _append(parts, item, protocol)
        case list() | tuple() | set() | frozenset():
            parts.append(
                (b"~%d\r\n" if protocol == 3 and isinstance(value, (set, frozenset)) else b"*%d\r\n") % len(value)
            )
            for item in value:
                _append(parts, item, protocol)
        case _:
            raise TypeError(f"a reply of the type {type(value).__name__} cannot be sent")


def _is_nothing(result: Any) -> bool:
    """Whether a blocking command has found nothing: XREADGROUP then returns no streams, the others None."""
    return result is None or result == {}


class FakeClient(AsyncFakeSocket):
    """One client's state in fakeredis, which sends replies to a transport instead of a queue."""

    def __init__(self, front: Front, transport: asyncio.Transport) -> None:
        super().__init__(front.engine, 0, client_class=Redis, client_info={})
        self._front = front
        self._transport = transport

    def feed(self, data: bytes) -> None:
        """Run the commands in `data`."""
        if not self._killed:
            self.sendall(data)

    def put_response(self, msg: Any) -> None:
        """Send a reply."""
        if not self._transport.is_closing():
            self._transport.write(encode_reply(msg, self._client_info.protocol_version))

    def _decode_result(self, result: Any) -> Any:
        """Return the result unchanged: the client must see whether it is a status, an error or a string."""
        return result

    def _blocking(
        self, timeout: float | None, func: Callable[[bool], Any], shape: Callable[[Any], Any] | None = None
    ) -> Any:
        """Reply to a blocking command at once, when there is a result, or after `timeout` seconds (0: never).

        Unlike the original it ends with the client, which must not receive jobs after that; the client that has waited
        longest is served first; and XREADGROUP with COUNT waits too.
        """
        shaped = shape or (lambda value: value)
        result = func(True)
        if not _is_nothing(result) or self._in_transaction:
            return shaped(result)

        def retry() -> None:
            try:
                with self._server.lock:
                    result = func(False)
                    reply = None if _is_nothing(result) else shaped(result)
            except SimpleError as error:
                answer(error)
            else:
                if not _is_nothing(result):
                    answer(reply)

        def expire() -> None:
            with self._server.lock:
                reply = shaped(None)
            answer(reply)

        def answer(reply: Any) -> None:
            self.stop_waiting()
            self.put_response(reply)
            self.resume()

        self.pause()
        self._blocked = True
        self._front.wait(self, self._db, retry, expire, timeout or None)
        return NoResponse()

    def stop_waiting(self) -> None:
        """Discard the command that waits, if there is one."""
        self._blocked = False
        self._front.forget(self)

    def xreadgroup(self, *args: bytes) -> Any:
        """As the original, but with the error of real servers for a missing stream."""
        try:
            return super().xreadgroup(*args)
        except SimpleError as error:
            if "requires the key to exist" not in error.value:
                raise
            raise SimpleError("NOGROUP No such key or consumer group in XREADGROUP with GROUP option") from error

    def kill(self) -> None:
        """CLIENT KILL: close the connection now, not when the client next sends something."""
        super().kill()
        # In the next tick: a client that kills itself gets its reply.
        asyncio.get_running_loop().call_soon(self._transport.close)

    def end(self) -> None:
        """The client has disconnected."""
        self.stop_waiting()
        self.close()


class _ClientProtocol(asyncio.Protocol):
    """Passes received bytes to a `FakeClient`."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._client = FakeClient(self._front, self.transport)
        self._front.connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._client.feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._front.connections.discard(self)
        self._client.end()


class _BlockedCommand(NamedTuple):
    """A blocking command without a result yet.

    Attributes:
        retry: runs it again, and replies if there is a result.
        timer: replies after the time limit; None without a limit.
    """

    retry: Callable[[], None]
    timer: asyncio.TimerHandle | None


class Front:
    """A server on a Unix socket that listens in the running event loop while its context is open.

    Attributes:
        engine: stores the keys and runs the commands.
        connections: the connected clients.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: dict[FakeClient, _BlockedCommand] = {}
        self._is_retrying = False
        self.engine = FakeServer(version=(7, 4))
        self.connections: set[_ClientProtocol] = set()

    async def __aenter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._server = await self._loop.create_unix_server(lambda: _ClientProtocol(self), self._path)

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for connection in list(self.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # Aborted transports close in the next tick.
        await self._server.wait_closed()

    def wait(
        self,
        client: FakeClient,
        database: Any,
        retry: Callable[[], None],
        expire: Callable[[], None],
        timeout: float | None,
    ) -> None:
        """Run a client's command again whenever a key of its database changes, until `forget`."""
        timer = self._loop.call_later(timeout, expire) if timeout else None
        self._waiting[client] = _BlockedCommand(retry, timer)
        database.add_change_callback(self._on_change)

    def forget(self, client: FakeClient) -> None:
        """Discard the client's command."""
        waiting = self._waiting.pop(client, None)
        if waiting is not None and waiting.timer is not None:
            waiting.timer.cancel()

    def _on_change(self) -> None:
        # In the next tick: the engine's lock is held here, and the command that changes the key has not ended.
        if self._waiting and not self._is_retrying:
            self._is_retrying = True
            self._loop.call_soon(self._retry_all)

    def _retry_all(self) -> None:
        self._is_retrying = False
        for client, waiting in list(self._waiting.items()):
            if self._waiting.get(client) is waiting:
                waiting.retry()
