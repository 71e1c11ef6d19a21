"""Connections of redis-py as a pool uses them: whoever gives a command up, or sets a limit to it, is heard."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio as redis_async
from redis.asyncio import connection as connections

from lmpool.broker.connection_classes import connection_class
from lmpool.broker.server import Server
from lmpool.errors import SettingsError
from tests.shared.broker.adapters.adapter_changes import QUICK, no_offers, write
from tests.support.pool import DEADLINE_S, Pool, until_async

MOMENTS = 40


async def ask_long(client: redis_async.Redis) -> None:
    for _ in range(2000):
        await client.get("nothing")


async def check_that_it_is_heard(server: Server) -> None:
    """A task that asks is cancelled at each of many moments, and ends; another goes on with the connection."""
    async with server.client() as client:
        await client.set("something", b"else")
        for moment in range(MOMENTS):
            task = asyncio.create_task(ask_long(client))
            for _ in range(moment):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait_for(asyncio.wait([task]), DEADLINE_S)
            assert task.cancelled()
            assert await client.get("something") == b"else"


async def test_a_command_may_be_given_up_at_any_moment(server_url: str) -> None:
    """`asyncio.wait_for` of Python 3.11, by which redis-py sends, loses a third of these cancellations."""
    await check_that_it_is_heard(Server(server_url))


async def test_a_change_of_adapters_may_be_given_up_at_any_moment(pool: Pool, tmp_path: Path) -> None:
    pool.start(*QUICK)
    folder = write(tmp_path, "a", "1")
    async with pool.producer("syn") as producer:
        for moment in range(MOMENTS):
            change = asyncio.create_task(producer.add_adapter("poet", folder, timeout=10 * DEADLINE_S))
            for _ in range(moment):
                await asyncio.sleep(0)
            change.cancel()
            await asyncio.wait_for(asyncio.wait([change]), DEADLINE_S)
            assert change.cancelled()
        await until_async(no_offers(pool), "all offers are taken back")


@pytest.fixture
def deaf() -> Iterator[int]:
    """The port of a server that takes connections and reads nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=8) as listening:
        yield listening.getsockname()[1]


async def test_what_cannot_be_sent_in_time_is_given_up(deaf: int) -> None:
    async with Server(f"redis://127.0.0.1:{deaf}").client(reply_timeout_s=0.2) as client:
        for _ in range(2):  # The limit holds for the next command too.
            with pytest.raises(redis.TimeoutError, match="writing to socket"):
                await asyncio.wait_for(client.set("key", bytes(64 << 20)), DEADLINE_S)
            with pytest.raises(redis.TimeoutError, match="reading"):
                await asyncio.wait_for(client.get("key"), DEADLINE_S)


class Traced(connections.Connection):
    """A user's own."""


def test_each_class_of_redis_py_has_one_here() -> None:
    pairs: list[tuple[type, type]] = [
        (redis.Connection, connections.Connection),
        (redis.SSLConnection, connections.SSLConnection),
        (redis.UnixDomainSocketConnection, connections.UnixDomainSocketConnection),
        (connections.Connection, connections.Connection),
        (Traced, Traced),
    ]
    for kind, base in pairs:
        ours: Any = connection_class(kind)
        assert issubclass(ours, base)
        assert connection_class(ours) is ours is connection_class(kind)
    with pytest.raises(SettingsError, match="of the type int cannot be used here"):
        connection_class(int)


async def test_a_client_with_our_connections_names_a_server_too(server_url: str) -> None:
    if "+cluster" not in server_url:
        async with Server(server_url).client() as client, Server(client).client() as other:
            assert await other.ping()
    with contextlib.closing(redis.Redis.from_url(server_url.replace("+cluster", ""))) as sync:
        async with Server(sync).client() as other:
            assert await other.ping()
