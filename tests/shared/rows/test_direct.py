"""The reader of rows from row servers, with row servers that behave badly."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from lmpool.broker.server import Server
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.row import Encoding, RowBlock
from lmpool.rows import direct
from lmpool.rows.cache import RowCache
from lmpool.rows.direct import DirectReader, RowPlace
from lmpool.rows.shared_memory import PLACE_SIZE, SegmentReader
from tests.support.pool import DEADLINE_S, Pool

NONCE, DIGEST = bytes(8), bytes(16)


async def read_token() -> bytes:
    return b"0" * 32


def make_reader(redis: str = "redis://127.0.0.1:1") -> DirectReader:
    return DirectReader(Server(redis), read_token, lambda: None)


@asynccontextmanager
async def row_server(replies: Iterable[bytes]) -> AsyncIterator[bytes]:
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


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer for a row server: on a busy machine, it may send nothing for 2 s."""
    monkeypatch.setattr(direct, "_SILENT_S", DEADLINE_S)


ROW = b"*1\r\n$3\r\nrow\r\n"


async def test_an_error_that_arrives_after_the_callers_deadline_is_not_logged() -> None:
    reader, unread, is_asked, is_over = make_reader(), list[object](), asyncio.Event(), asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context))

    async def serve(source: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await source.read(65536)
        writer.write(b"+OK\r\n")
        await source.read(65536)
        is_asked.set()
        await is_over.wait()
        writer.write(b"-ERR no\r\n")
        await source.read(65536)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    place = RowPlace(b"127.0.0.1:%d" % server.sockets[0].getsockname()[1], NONCE)
    reading = asyncio.create_task(reader.read(place, [DIGEST], 1000))
    await asyncio.wait_for(is_asked.wait(), DEADLINE_S)
    reading.cancel()
    await asyncio.wait([reading])
    (peer,) = reader._peers.values()
    assert peer.connection is not None
    raw = await peer.connection.open()
    received = raw.received
    is_over.set()
    async with asyncio.timeout(DEADLINE_S):
        while raw.received == received:  # noqa: ASYNC110  # The error must have arrived.
            await asyncio.sleep(0)
    del reading
    reader.close()
    server.close()
    gc.collect()
    assert not unread


@pytest.mark.usefixtures("patient")
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


@pytest.mark.usefixtures("patient")
async def test_a_connection_with_a_request_in_flight_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, has_request = make_reader(), asyncio.Event()

    def replies() -> Iterator[bytes]:
        yield b"+OK\r\n"
        has_request.set()
        yield b""
        yield 2 * ROW

    async with row_server(replies()) as address:
        place = RowPlace(address, NONCE)
        first = asyncio.create_task(reader.read(place, [DIGEST], 1000))
        await asyncio.wait_for(has_request.wait(), DEADLINE_S)
        monkeypatch.setattr(direct, "_IDLE_S", -1)
        monkeypatch.setattr(direct, "_MAX_PEERS", 0)
        reader.close_idle()
        second = reader.read(place, [DIGEST], 1000)
        rows = await asyncio.wait_for(asyncio.gather(first, second), DEADLINE_S)
        assert [list(found) for found in rows] == [[b"row"], [b"row"]]
        reader.close_idle()
        (peer,) = reader._peers.values()
        assert peer.connection is None


@pytest.mark.usefixtures("patient")
async def test_a_row_that_its_row_server_lacks_is_read_from_redis_and_not_removed(pool: Pool) -> None:
    info = ModelInfo("m", "synthetic", 3, 10, "seed", "float32")
    reader, row = make_reader(), np.log(np.array([0.5, 0.25, 0.25], np.float32))
    cache = RowCache(Server(pool.url), pool.keys, info, SegmentReader(), reader)
    (key,) = cache.keys_of([DIGEST])
    pool.redis.set(key, RowBlock([DIGEST], row[None], None, Encoding.F32).encode(0))
    found: dict[bytes, object] = {}
    async with row_server([b"+OK\r\n", b"*1\r\n$-1\r\n"]) as address:
        await reader.try_on(address)
        reader.note(address, [DIGEST], b"p" * PLACE_SIZE, {DIGEST})
        await cache.get_many([DIGEST], lambda digests, rows: found.update(zip(digests, rows, strict=True)))
        assert reader.take_missed(DIGEST), "the row server was asked first"
    assert np.array_equal(np.asarray(found[DIGEST]), row)
    assert pool.redis.exists(key)
    reader.close()
    cache.close()


async def test_places_are_recorded_only_of_awaited_rows() -> None:
    reader, warming = make_reader(), b"w" * 16
    reader.note(b"host:1", [DIGEST, warming], b"p" * 2 * PLACE_SIZE, {DIGEST})
    assert reader.take([DIGEST, warming]) == {RowPlace(b"host:1", b"p" * 8): [DIGEST]}
