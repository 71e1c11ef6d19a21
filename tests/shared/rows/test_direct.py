"""The reader of rows from row servers, with row servers that behave badly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from lmpool.broker.server import Server
from lmpool.rows import direct
from lmpool.rows.direct import DirectReader, RowPlace
from tests.support.pool import DEADLINE_S

NONCE, DIGEST = bytes(8), bytes(16)


async def read_token() -> bytes:
    return b"0" * 32


def make_reader(redis: str = "redis://127.0.0.1:1") -> DirectReader:
    return DirectReader(Server(redis), read_token, lambda: None)


@asynccontextmanager
async def row_server(replies: list[bytes]) -> AsyncIterator[bytes]:
    """A row server that sends these bytes, one item per request, then nothing; yields its address."""
    waiting = iter(replies)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            writer.write(next(waiting, b""))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield b"127.0.0.1:%d" % server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_a_row_server_that_sends_nothing_is_given_up_and_the_row_is_requested_through_redis(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = make_reader()
    async with row_server([b"+OK\r\n", b"*1\r\n$100\r\nbegin"]) as address:
        read = reader.read(RowPlace(address, NONCE), [DIGEST], 1000)
        assert list(await asyncio.wait_for(read, DEADLINE_S)) == [None]
    assert reader.take_missed(DIGEST)
    assert "the row server has sent nothing for 2 s" in caplog.text
    reader.close()


ROW = b"*1\r\n$3\r\nrow\r\n"


@pytest.mark.parametrize(
    ("redis", "is_local"),
    [
        ("redis://127.0.0.1:1", True),
        ("unix:///tmp/redis.sock", True),
        ("redis+cluster://localhost:7000", True),
        ("redis://[::1]:6379", True),
        ("redis://10.0.0.5:6379", False),
        ("redis+cluster://redis-0:6379", False),
    ],
)
async def test_a_loopback_address_is_used_only_by_clients_on_the_host_of_redis(
    redis: str, is_local: bool, caplog: pytest.LogCaptureFixture
) -> None:
    reader = make_reader(redis)
    async with row_server([b"+OK\r\n", ROW]) as address:
        found = await reader.read(RowPlace(address, NONCE), [DIGEST], 1000)
    assert list(found) == ([b"row"] if is_local else [None])
    assert ("is a loopback address: start the worker with --direct-address" in caplog.text) == (not is_local)
    reader.close()


async def test_after_a_failed_try_no_address_is_tried_for_a_while() -> None:
    reader, loop = make_reader(), asyncio.get_running_loop()
    pauses = []
    for port in (1, 2, 3):  # No program listens at these ports.
        await reader.try_on(b"127.0.0.1:%d" % port)
        pauses.append(reader.next_try_at - loop.time())
    assert 0 < pauses[0] < pauses[1] < pauses[2]
    async with row_server([b"+OK\r\n"]) as address:
        await reader.try_on(address)
        assert reader.is_on
        reader.close()


async def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = make_reader()
    async with row_server([b"+OK\r\n"]) as address:
        await reader.try_on(address)
        reader.close_idle()
        (peer,) = reader._peers.values()
        assert peer.connection is not None
        monkeypatch.setattr(direct, "_IDLE_S", -1)
        reader.close_idle()
        assert peer.connection is None
