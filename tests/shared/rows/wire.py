"""Helpers for tests of connections: encoded replies of a server, and connections that receive these replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from hypothesis import strategies as st
from redis.asyncio.connection import AbstractConnection

from lmpool.rows.connection import RawRowCommands, RawRowReceiver, RowWrite

MAX_BYTES = 1_000_000
LARGE = 200_000  # Bytes of a large value; more than the receiver's window of 64 KiB.
Reply = asyncio.Future[Any]


class Transport:
    """Records the bytes that a connection writes, and feeds replies to it with `get_buffer` and `buffer_updated`."""

    def __init__(self) -> None:
        self.protocol: asyncio.BufferedProtocol | None = None
        self.written = b""
        self.calls: list[str] = []

    def set_protocol(self, protocol: asyncio.BufferedProtocol) -> None:
        self.calls.append("set_protocol")
        self.protocol = protocol

    def pause_reading(self) -> None:
        self.calls.append("pause_reading")

    def resume_reading(self) -> None:
        self.calls.append("resume_reading")

    def abort(self) -> None:
        self.calls.append("abort")

    def write(self, data: bytes) -> None:
        self.written += bytes(data)

    def writelines(self, chunks: Iterable[bytes | memoryview]) -> None:
        for chunk in chunks:
            self.calls.append("write")
            self.write(bytes(chunk))

    def feed(self, data: bytes, sizes: Iterable[int] = ()) -> None:
        """Feed bytes in pieces of at most `sizes`, then in pieces as large as the connection's buffer."""
        assert self.protocol is not None
        steps = iter(sizes)
        at = 0
        while at < len(data) and "abort" not in self.calls:
            buffer = cast(memoryview, self.protocol.get_buffer(-1))
            assert len(buffer) > 0
            count = min(len(buffer), next(steps, len(data)), len(data) - at)
            buffer[:count] = data[at : at + count]
            self.protocol.buffer_updated(count)
            at += count


def opened(transport: Transport) -> AbstractConnection:
    """An open connection of redis-py that uses the given transport."""
    return cast(AbstractConnection, SimpleNamespace(_writer=SimpleNamespace(transport=transport)))


class Receiver:
    """A connection for large values, on a `Transport`."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.transport = Transport()
        self.raw = RawRowReceiver(opened(self.transport))

    def mget(self, count: int) -> Reply:
        return self.raw.call([b"MGET", *(b"key-%d" % index for index in range(count))], self.max_bytes)

    def get(self) -> Reply:
        return self.raw.call([b"GET", b"key"], self.max_bytes)

    def feed(self, data: bytes, sizes: Iterable[int] = ()) -> None:
        self.transport.feed(data, sizes)


class Commands:
    """A connection for commands and writes, on a `Transport`."""

    def __init__(self) -> None:
        self.transport = Transport()
        self.raw = RawRowCommands(opened(self.transport))

    def set(self, count: int, *, size: int = 8) -> Reply:
        return self.raw.set([RowWrite(b"key-%d" % i, b"head", memoryview(bytes(size)), False) for i in range(count)], 9)

    def feed(self, data: bytes, sizes: Iterable[int] = ()) -> None:
        """Feed bytes in pieces of at most `sizes`."""
        steps, at = iter(sizes), 0
        while at < len(data) and not self.raw.closed:
            count = next(steps, len(data))
            self.raw.data_received(data[at : at + count])
            at += count


def bulk(value: bytes | None, null: bytes = b"$-1\r\n") -> bytes:
    return null if value is None else b"$%d\r\n%b\r\n" % (len(value), value)


def array(values: list[bytes | None], null: bytes = b"$-1\r\n") -> bytes:
    return b"*%d\r\n" % len(values) + b"".join(bulk(value, null) for value in values)


def plain(reply: Any) -> Any:
    """A reply in comparable form: arrays become bytes, errors become their texts."""
    if isinstance(reply, asyncio.Future):
        assert reply.done()
        return plain(reply.result())
    if isinstance(reply, list):
        return [plain(value) for value in reply]
    if isinstance(reply, Exception):
        return str(reply)
    return reply.tobytes() if isinstance(reply, np.ndarray) else reply


def in_a_loop(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run one example of a Hypothesis property in a new event loop."""
    asyncio.run(work())


values = st.lists(st.none() | st.binary(max_size=30), min_size=1, max_size=6)
nulls = st.sampled_from([b"$-1\r\n", b"_\r\n"])
cuts = st.lists(st.integers(1, 12), max_size=60)


def assert_broken(connection: Receiver | Commands, replies: list[Reply], kind: type[Exception]) -> None:
    assert connection.raw.closed
    assert "abort" in connection.transport.calls
    for reply in replies:
        assert isinstance(reply.exception(), kind)
