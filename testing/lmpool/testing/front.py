"""What a Redis server is to its clients: fakeredis behind a socket.

fakeredis brings a server for TCP, but it answers short strings as status replies, which `RowLink` rightly drops,
looks for input a hundred times a second, and takes a thread for each connection. This one runs in an event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from fakeredis import FakeServer
from fakeredis._helpers import NoResponse
from fakeredis.aioredis import AsyncFakeSocket
from redis.asyncio import Redis

from lmpool.testing.resp import encode_reply

Shape = Callable[[Any], Any]


def _as_it_is(value: Any) -> Any:
    return value


class _Session(AsyncFakeSocket):
    """One client's state in fakeredis; its replies go to a transport instead of into a queue.

    Args:
        server: the engine.
        transport: the client's connection.
    """

    def __init__(self, server: FakeServer, transport: asyncio.Transport) -> None:
        super().__init__(server, 0, client_class=Redis, client_info={})
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._stop_waiting: Callable[[], None] | None = None

    def put_response(self, msg: Any) -> None:
        """Send a reply."""
        if not self._transport.is_closing():
            self._transport.write(encode_reply(msg, self._client_info.protocol_version))

    def _decode_result(self, result: Any) -> Any:
        """Nothing: whether a reply is a status, an error or a string must reach the wire."""
        return result

    def _blocking(self, timeout: float | None, func: Callable[[bool], Any], shape: Shape | None = None) -> Any:
        """Answer a blocking command at once, or when there is something, or after `timeout` seconds (0: never).

        Unlike the original it ends with the client: one that has gone must not be given jobs.
        """
        finish_with = shape or _as_it_is
        found = func(True)
        if found is not None or self._in_transaction:
            return finish_with(found)
        loop, database, lock = self._loop, self._db, self._server.lock
        due: asyncio.Handle | None = None

        def changed() -> None:
            nonlocal due
            if due is None:
                # Later: the lock is held here, and the command that changes something is not through.
                due = loop.call_soon(look)

        def look() -> None:
            nonlocal due
            due = None
            with lock:
                found = func(False)
            if found is not None:
                answer(found)

        def answer(found: Any) -> None:
            stop()
            with lock:
                reply = finish_with(found)
            self.put_response(reply)
            self.resume()

        def stop() -> None:
            database.remove_change_callback(changed)
            self._blocked, self._stop_waiting = False, None
            for handle in (due, timer):
                if handle is not None:
                    handle.cancel()

        timer = loop.call_later(timeout, answer, None) if timeout else None
        database.add_change_callback(changed)
        self._blocked, self._stop_waiting = True, stop
        self.pause()
        return NoResponse()

    def end(self) -> None:
        """The client has gone."""
        if self._stop_waiting is not None:
            self._stop_waiting()
        self.close()


class _Connection(asyncio.Protocol):
    """Hands a client's bytes to its session."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._session = _Session(self._front.engine, self.transport)
        self._front.connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._session.sendall(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._front.connections.discard(self)
        self._session.end()


class Front:
    """A server on a Unix socket that listens in the running event loop while its context is open.

    Args:
        path: where the socket is made.

    Attributes:
        engine: keeps the keys and runs the commands.
        connections: the clients.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.engine = FakeServer(version=(7, 4))
        self.connections: set[_Connection] = set()

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Connection(self), self._path)

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for connection in list(self.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # A transport that is aborted leaves in the next round of the loop.
        await self._server.wait_closed()
