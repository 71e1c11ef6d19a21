"""A Redis server in memory: fakeredis behind a Unix socket.

lmpool does not use fakeredis's TCP server, which sends short strings as status replies (lmpool refuses such replies),
polls for input 100 times a second, and needs a thread per connection. This server runs in an event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from fakeredis import FakeServer
from fakeredis._helpers import NoResponse, SimpleError, SimpleString
from fakeredis.aioredis import AsyncFakeSocket
from redis.asyncio import Redis

_NOTHING: tuple[Any, ...] = (None, {})  # fakeredis's values for "no result": {} for XREADGROUP, else None.


def encode_reply(value: Any, protocol: int) -> bytes:
    """Encode a reply of fakeredis in RESP (the protocol of Redis), version 2 or 3.

    Raises:
        TypeError: RESP has no form for the value.
    """
    is_3 = protocol == 3
    match value:
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(value), value)
        case None:
            return b"_\r\n" if is_3 else b"$-1\r\n"
        case bool() if is_3:
            return b"#t\r\n" if value else b"#f\r\n"
        case int():
            return b":%d\r\n" % value
        case SimpleString():
            return b"+%b\r\n" % value.value
        case SimpleError():
            return b"-%b\r\n" % value.value.replace("\r", " ").replace("\n", " ").encode()
        case float() if is_3:
            return b",%.17g\r\n" % value
        case str() | float():
            return encode_reply(str(value).encode(), protocol)
        case dict():
            items = [part for item in value.items() for part in item]
            head = b"%%%d\r\n" % len(value) if is_3 else b"*%d\r\n" % len(items)
        case list() | tuple() | set() | frozenset():
            items = list(value)
            head = (b"~%d\r\n" if is_3 and isinstance(value, (set, frozenset)) else b"*%d\r\n") % len(items)
        case _:
            raise TypeError(f"a reply of the type {type(value).__name__} cannot be sent")
    return head + b"".join(encode_reply(item, protocol) for item in items)


class FakeClient(AsyncFakeSocket, asyncio.Protocol):
    """A connected client of fakeredis. Its replies are written to an asyncio transport, not to fakeredis's queue.

    Args:
        front: the server that the client is connected to.
    """

    transport: asyncio.Transport

    def __init__(self, front: Front) -> None:
        super().__init__(front.engine, 0, client_class=Redis, client_info={})
        self._front = front
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self.transport = cast(asyncio.Transport, transport)
        self._front.clients[self] = None

    def data_received(self, data: bytes) -> None:
        """Run the commands in `data`."""
        if not self._killed:
            self.sendall(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._front.clients.pop(self, None)
        self._stop_waiting()
        self.close()

    def put_response(self, msg: Any) -> None:
        """Send a reply."""
        if not self.transport.is_closing():
            self.transport.write(encode_reply(msg, self._client_info.protocol_version))

    def _decode_result(self, result: Any) -> Any:
        """Return the result unchanged: the client must see whether the result is a status, an error or a string."""
        return result

    def _blocking(
        self, timeout: float | None, func: Callable[[bool], Any], shape: Callable[[Any], Any] | None = None
    ) -> Any:
        """Reply to a blocking command as soon as there is a result, or after `timeout` seconds (0: no limit).

        Unlike in fakeredis, the command ends when its client disconnects, as a closed client must not receive jobs;
        the client that has waited longest is served first; and XREADGROUP with COUNT blocks too.
        """
        shaped = shape or (lambda value: value)

        def retry(is_over: bool = False) -> None:
            try:
                with self._server.lock:
                    result = None if is_over else func(False)
                    is_done = is_over or result not in _NOTHING
                    reply = shaped(result) if is_done else None
            except SimpleError as error:
                is_done, reply = True, error
            if is_done:
                self._stop_waiting()
                self.put_response(reply)
                self.resume()

        result = func(True)
        if result not in _NOTHING or self._in_transaction:
            return shaped(result)
        self.pause()
        self._blocked = True
        self._timer = asyncio.get_running_loop().call_later(timeout, retry, True) if timeout else None
        self._front.waiting[self] = retry
        self._db.add_change_callback(self._front.retry_soon)
        return NoResponse()

    def _stop_waiting(self) -> None:
        """Discard the client's pending blocking command, if there is one."""
        self._blocked = False
        self._front.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()

    def xreadgroup(self, *args: bytes) -> Any:
        """Run XREADGROUP as fakeredis does, but return the error of real servers for a missing stream."""
        try:
            return super().xreadgroup(*args)
        except SimpleError as error:
            if "requires the key to exist" not in error.value:
                raise
            raise SimpleError("NOGROUP No such key or consumer group in XREADGROUP with GROUP option") from error

    def kill(self) -> None:
        """CLIENT KILL: close the connection now, not when the client next sends something."""
        super().kill()
        # Close the connection in the next tick of the event loop, so that a client that kills itself gets its reply.
        asyncio.get_running_loop().call_soon(self.transport.close)


class Front:
    """A server on a Unix socket that listens in the running event loop while its context is open.

    Attributes:
        engine: stores the keys and runs the commands.
        clients: the connected clients, the oldest first.
        waiting: client -> function that runs its blocking command again and replies if there is a result; oldest first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_retrying = False
        self.engine = FakeServer(version=(7, 4))
        self.clients: dict[FakeClient, None] = {}
        self.waiting: dict[FakeClient, Callable[[], None]] = {}

    async def __aenter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._server = await self._loop.create_unix_server(lambda: FakeClient(self), self._path)

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for client in list(self.clients):
            client.transport.abort()
        await asyncio.sleep(0)  # Wait for the next tick of the event loop, in which aborted transports close.
        await self._server.wait_closed()

    def retry_soon(self) -> None:
        """Run the blocking commands again, because a key has changed."""
        # Run these commands in the next tick: the command that changes the key has not ended, and holds a lock.
        if self.waiting and not self._is_retrying:
            self._is_retrying = True
            self._loop.call_soon(self._retry_all)

    def _retry_all(self) -> None:
        self._is_retrying = False
        for client, retry in list(self.waiting.items()):
            if self.waiting.get(client) is retry:
                retry()
