"""The fake Redis server of `lmpool.testing`. Each test also runs against a real server, to find differences."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from lmpool.broker.connection import RawCommandConnection
from lmpool.broker.server import Server
from lmpool.embedded import socket_url
from lmpool.protocol.keys import GROUP
from lmpool.rows.connection import RawRowCommands, RawRowReceiver, RowWrite
from lmpool.testing.front import Front
from tests.support.pool import until_async

DEADLINE_S = 120.0


@pytest.fixture(params=["in-memory", "real"])
async def server(request: pytest.FixtureRequest, short_dir: Path) -> AsyncIterator[Server]:
    """A fake or a real Redis server, with an empty database number 9."""
    if request.param == "real":
        server = Server(request.getfixturevalue("server_url") + "?db=9")
        client = server.client()
        await client.flushdb()
        yield server
        await client.flushdb()
        await client.aclose()
        return
    path = short_dir / "redis.sock"
    async with Front(path):
        yield Server(socket_url(path) + "?db=9")


@pytest.fixture
async def raw(server: Server) -> AsyncIterator[RawCommandConnection]:
    connection = RawCommandConnection(await server.open())
    yield connection
    connection.close()


async def read_group(raw: RawCommandConnection, consumer: str, count: int = 1, block_ms: int = 120_000) -> Any:
    command = ("XREADGROUP", "GROUP", GROUP, consumer, "COUNT", count, "BLOCK", block_ms, "STREAMS", "jobs", ">")
    return await asyncio.wait_for(raw.call(command), DEADLINE_S)


async def until_reading(raw: RawCommandConnection, *consumers: str) -> None:
    """Wait until these consumers of the group block in XREADGROUP."""

    async def is_so() -> bool:
        reply = await raw.call(("XINFO", "CONSUMERS", "jobs", GROUP))
        return {consumer[1].decode() for consumer in reply} == set(consumers)

    await until_async(is_so, f"{consumers} read")


def entries(reply: Any) -> list[bytes]:
    return [fields[1] for _, fields in reply[0][1]]


async def test_replies_have_the_types_of_a_server(raw: RawCommandConnection) -> None:
    """Replies of the fake server have the Python types of a real server's replies."""
    for command, reply in (
        (("SET", "k", "v"), b"OK"),
        (("GET", "k"), b"v"),
        (("GET", "none"), None),
        (("EVAL", "return 'QJ'", 0), b"QJ"),
        (("EVAL", "return {1, 'a', {}, false}", 0), [1, b"a", [], None]),
        (("MGET", "k", "none"), [b"v", None]),
        (("EXISTS", "k"), 1),
        (("XPENDING", "none", "g", "-", "+", 1), "NOGROUP"),
        (("EVALSHA", "0" * 40, 0), "NOSCRIPT"),
        (("LPUSH", "k", "v"), "WRONGTYPE"),
        (("NOSUCH",), "ERR unknown command"),
    ):
        if isinstance(reply, str):
            with pytest.raises(ResponseError, match=f"^{reply}"):
                await raw.call(command)
        else:
            assert await raw.call(command) == reply


async def test_strings_and_statuses_differ_on_a_connection_for_rows(server: Server) -> None:
    raw = RawRowCommands(await server.open())
    stored, received = raw.set([RowWrite(b"k", b"OK", memoryview(b""), True)], 60_000), raw.call((b"GET", b"k"))
    assert await stored == [None]
    assert await received == b"OK"
    raw.close()


async def test_large_rows_written_without_waiting_arrive_whole(server: Server) -> None:
    raw, receiver = RawRowCommands(await server.open()), RawRowReceiver(await server.open())
    numbers = np.random.default_rng(0).integers(0, 256, (40, 200_000), np.uint8)
    keys = [b"row:\r\n\x00" + bytes([i]) for i in range(40)]
    writes = [
        RowWrite(key, b"h" * 16, row.data, i % 2 == 0) for i, (key, row) in enumerate(zip(keys, numbers, strict=True))
    ]
    await asyncio.gather(*(raw.set(writes[at : at + 10], 60_000) for at in range(0, 40, 10)))
    again = await raw.set([writes[0]._replace(numbers=numbers[1].data), writes[1]._replace(numbers=numbers[0].data)], 9)
    assert again == [None, None]  # No error, but only the first write may overwrite.
    values = await receiver.call([b"MGET", *keys, b"none"], 1 << 20)
    assert values[0] is None or bytes(values[0])[16:] == numbers[1].tobytes()
    for row, got in zip(numbers[1:], values[1:-1], strict=True):
        assert bytes(got)[16:] == row.tobytes()
    assert values[-1] is None
    raw.close()


async def test_the_client_that_waited_longest_is_served_first(server: Server, raw: RawCommandConnection) -> None:
    await raw.call(("XGROUP", "CREATE", "jobs", GROUP, 0, "MKSTREAM"))
    readers = [RawCommandConnection(await server.open()) for _ in range(3)]
    reads = []
    for number, reader in enumerate(readers):
        reads.append(asyncio.ensure_future(read_group(reader, f"c{number}")))
        await until_reading(raw, *(f"c{other}" for other in range(number + 1)))
    for number, read in enumerate(reads):
        await raw.call(("XADD", "jobs", "*", "m", number))
        assert entries(await read) == [str(number).encode()]
        assert not any(other.done() for other in reads[number + 1 :])
    for reader in readers:
        reader.close()


async def test_a_disconnected_client_receives_nothing(server: Server, raw: RawCommandConnection) -> None:
    await raw.call(("XGROUP", "CREATE", "jobs", GROUP, 0, "MKSTREAM"))
    gone = RawCommandConnection(await server.open())
    number = await gone.call(("CLIENT", "ID"))
    gone.call(("XREADGROUP", "GROUP", GROUP, "gone", "COUNT", 1, "BLOCK", 0, "STREAMS", "jobs", ">"))
    await until_reading(raw, "gone")
    gone.close()

    async def is_alone() -> bool:
        return b"id=" not in await raw.call(("CLIENT", "LIST", "ID", number))

    await until_async(is_alone, "the server has closed the connection")
    await raw.call(("XADD", "jobs", "*", "m", "x"))
    assert entries(await read_group(raw, "here")) == [b"x"]


async def test_commands_after_a_blocking_read_run_when_it_times_out(
    raw: RawCommandConnection,
) -> None:
    await raw.call(("XGROUP", "CREATE", "jobs", GROUP, 0, "MKSTREAM"))
    replies = [
        raw.call(("XREAD", "BLOCK", 50, "STREAMS", "jobs", "0")),
        raw.call(("PING",)),
        raw.call(("ECHO", "x")),
    ]
    assert await asyncio.wait_for(asyncio.gather(*replies), DEADLINE_S) == [None, b"PONG", b"x"]


async def test_a_missing_group_is_an_error(raw: RawCommandConnection) -> None:
    for _ in range(2):
        with pytest.raises(ResponseError, match="^NOGROUP"):
            await read_group(raw, "c")
        await raw.call(("XADD", "jobs", "*", "m", "x"))


async def test_a_killed_client_is_disconnected_at_once(server: Server, raw: RawCommandConnection) -> None:
    other = RawCommandConnection(await server.open())
    number = await other.call(("CLIENT", "ID"))
    waiting = other.call(("XREAD", "BLOCK", 0, "STREAMS", "never", "0"))
    assert await raw.call(("CLIENT", "KILL", "ID", number)) == 1
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(waiting, DEADLINE_S)


async def test_clients_can_use_both_versions_of_the_protocol(server: Server) -> None:
    kwargs = server.client().connection_pool.connection_kwargs
    for protocol in (2, 3):
        client: Redis = Redis(unix_socket_path=kwargs["path"], db=9, protocol=protocol)
        await client.hset("h", mapping={"a": "1"})
        assert await client.hgetall("h") == {b"a": b"1"}
        assert await client.get("none") is None
        pipe = client.pipeline()
        pipe.incr(f"n{protocol}")
        pipe.zadd("z", {"m": 1.5})
        pipe.zscore("z", "m")
        assert (await pipe.execute())[::2] == [1, 1.5]
        await client.aclose()
