"""A proxy between a pool and its Redis server that delays, drops or truncates bytes, and cuts connections.

The proxy listens on a Unix socket and forwards to the server's socket. Each direction of a connection can have a fault:

- delay: the proxy forwards every chunk later, in order.
- drop: the proxy loses some bytes in the middle of the next chunk, and forwards later bytes.
- swallow: the proxy loses all later bytes, and the connection stays open.
- truncate: the proxy forwards part of the next chunk, then closes the connection.

`cut` closes connections at once, and `refuse` also closes new connections. Faults affect open connections; `delay`,
`refuse` and `stall` also affect connections that clients open later, until the test calls `heal`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Self

from lmpool.embedded import socket_url

_CHUNK = 64 * 1024
_MAX_DROPPED = 64


class Way(Enum):
    """A direction of a connection."""

    TO_SERVER = "to the server"
    TO_CLIENT = "to the client"


class Lane:
    """One direction of one connection.

    Args:
        reader: source of bytes.
        writer: destination of bytes.
        delay_s: seconds for which each chunk is held back.
        draw: random numbers for the places where chunks are damaged.

    Attributes:
        delay_s: seconds for which each chunk is held back; a test may change them at any time.
        is_hole: whether all bytes are lost.
        drops: whether the next chunk loses some bytes.
        truncates: whether only part of the next chunk is forwarded, before the connection closes.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float, draw: random.Random
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._draw = draw
        self.delay_s = delay_s
        self.is_hole = self.drops = self.truncates = False

    async def run(self) -> None:
        """Forward bytes until the source closes the connection."""
        while chunk := await self._reader.read(_CHUNK):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if self.is_hole:
                continue
            if self.drops:
                self.drops = False
                at = self._draw.randrange(len(chunk))
                chunk = chunk[:at] + chunk[at + self._draw.randint(1, _MAX_DROPPED) :]
            if self.truncates:
                chunk = chunk[: self._draw.randrange(len(chunk))]
            self._writer.write(chunk)
            await self._writer.drain()
            if self.truncates:
                return


class Connection:
    """One connection through the proxy.

    Args:
        lanes: the two directions of the connection.
        writers: the writers to the client and to the server.
    """

    def __init__(self, lanes: dict[Way, Lane], writers: tuple[asyncio.StreamWriter, ...]) -> None:
        self.lanes = lanes
        self._writers = writers

    async def run(self) -> None:
        """Forward bytes in both directions until the client or the server closes the connection."""
        tasks = [asyncio.ensure_future(lane.run()) for lane in self.lanes.values()]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception) and not isinstance(outcome, OSError):
                    raise outcome
            self.close()

    def close(self) -> None:
        """Close the connections to client and server, after the buffered bytes are sent."""
        for writer in self._writers:
            writer.close()

    def abort(self) -> None:
        """Close the connections to client and server at once; buffered bytes are lost."""
        for writer in self._writers:
            writer.transport.abort()


class Proxy:
    """Forwards connections from its own Unix socket to the socket of a server.

    Args:
        target: the server's socket.
        socket: the socket to listen on.
        seed: seed of the random choice of connections and of bytes that faults damage.

    Attributes:
        made: number of connections that clients have opened since the start.
    """

    def __init__(self, target: Path, socket: Path, seed: int = 0) -> None:
        self._target = target
        self._socket = socket
        self._draw = random.Random(seed)
        self.made = 0
        self._connections: list[Connection] = []  # In the order of creation, so that a seed gives equal faults.
        self._tasks: set[asyncio.Task[None]] = set()
        self._delays = dict.fromkeys(Way, 0.0)
        self._refuses = self._stalls = False

    @property
    def url(self) -> str:
        """The address of the proxy for clients."""
        return socket_url(self._socket)

    def __len__(self) -> int:
        return len(self._connections)

    def delay(self, way: Way, seconds: float) -> None:
        """Hold back every chunk of open and later connections."""
        self._delays[way] = seconds
        for lane in self._lanes(way):
            lane.delay_s = seconds

    def drop(self, way: Way, share: float = 1.0) -> None:
        """Lose some bytes in the middle of the next chunk of each connection, or of a share of the connections."""
        for lane in self._lanes(way, share):
            lane.drops = True

    def swallow(self, way: Way, share: float = 1.0) -> None:
        """Lose all later bytes of the open connections, or of a share of the connections."""
        for lane in self._lanes(way, share):
            lane.is_hole = True

    def truncate(self, way: Way, share: float = 1.0) -> None:
        """Forward part of the next chunk of each connection, or of a share of the connections, then close them."""
        for lane in self._lanes(way, share):
            lane.truncates = True

    def cut(self, share: float = 1.0) -> None:
        """Close all connections, or a share of the connections, at once."""
        for connection in self._some(share):
            connection.abort()

    def refuse(self) -> None:
        """Close all connections, and close new connections as soon as clients open them."""
        self._refuses = True
        self.cut()

    def stall(self) -> None:
        """Accept connections, but lose all bytes of open and new connections."""
        self._stalls = True
        for way in Way:
            self.swallow(way)

    def redirect(self, target: Path) -> None:
        """Forward new connections to another server."""
        self._target = target

    def heal(self) -> None:
        """Forward new connections again, without delay; bytes that were lost on open connections stay lost."""
        self._refuses = self._stalls = False
        for way in Way:
            self.delay(way, 0.0)

    async def start(self) -> None:
        """Start to listen on the proxy's socket."""
        self._listener = await asyncio.start_unix_server(self._on_connect, self._socket, limit=_CHUNK)

    async def stop(self) -> None:
        """Stop listening, and close all connections."""
        self._listener.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _some(self, share: float) -> list[Connection]:
        return [connection for connection in self._connections if share >= 1 or self._draw.random() < share]

    def _lanes(self, way: Way, share: float = 1.0) -> Iterator[Lane]:
        return (connection.lanes[way] for connection in self._some(share))

    async def _on_connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._refuses:
            writer.transport.abort()
            return
        try:
            up_reader, up_writer = await asyncio.open_unix_connection(self._target, limit=_CHUNK)
        except OSError:  # Behave like the server, which is down.
            writer.transport.abort()
            return
        lanes = {
            Way.TO_SERVER: Lane(reader, up_writer, self._delays[Way.TO_SERVER], self._draw),
            Way.TO_CLIENT: Lane(up_reader, writer, self._delays[Way.TO_CLIENT], self._draw),
        }
        for lane in lanes.values():
            lane.is_hole = self._stalls
        connection = Connection(lanes, (writer, up_writer))
        self._connections.append(connection)
        self.made += 1
        try:
            with contextlib.suppress(asyncio.CancelledError):  # Hide `stop`'s cancellation from logs.
                await connection.run()
        finally:
            connection.close()
            self._connections.remove(connection)
