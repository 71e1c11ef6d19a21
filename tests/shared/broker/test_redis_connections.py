"""lmpool's connections, subclasses of redis-py's: no cancellation and no time limit is lost."""

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
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from lmpool.broker.server import UNNAMED, Server, connection_class
from lmpool.errors import SettingsError
from tests.shared.broker.adapters.adapter_changes import QUICK, write
from tests.support.pool import DEADLINE_S, Pool
from tests.support.servers.cluster import LocalCluster

MOMENTS = 40


def plain(url: str) -> str:
    """The URL of a server, or of one node if the server is a cluster."""
    return url.replace("+cluster", "")


async def ask_long(client: redis_async.Redis) -> None:
    for _ in range(2000):
        await client.get("nothing")


async def check_that_it_is_heard(server: Server) -> None:
    """Cancel a task at many moments; check that the task ends and another task can use the connection."""
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


async def test_a_command_can_be_cancelled_at_any_moment(server_url: str) -> None:
    """lmpool avoids redis-py's `asyncio.wait_for`, which in Python 3.11 loses most cancellations while it sends."""
    await check_that_it_is_heard(Server(server_url))


async def test_a_change_of_adapters_can_be_cancelled_at_any_moment(pool: Pool, tmp_path: Path) -> None:
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
        assert await producer.adapters() in ({}, {"poet": await producer.add_adapter("poet", folder)})


async def test_a_command_to_a_cluster_can_be_cancelled_at_any_moment(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "c") as cluster:
        await check_that_it_is_heard(Server(cluster.url))


@pytest.fixture
def deaf() -> Iterator[str]:
    """The URL of a server that accepts connections and reads nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=8) as listening:
        yield f"redis://127.0.0.1:{listening.getsockname()[1]}"


async def test_sending_has_a_time_limit(deaf: str) -> None:
    async with Server(deaf).client(reply_timeout_s=0.2) as client:
        for _ in range(2):  # The time limit holds for each command.
            with pytest.raises(redis.TimeoutError, match="writing to socket"):
                await asyncio.wait_for(client.set("key", bytes(64 << 20)), DEADLINE_S)
            with pytest.raises(redis.TimeoutError, match="reading"):
                await asyncio.wait_for(client.get("key"), DEADLINE_S)


def connection_to(url: str, kind: type = connections.Connection, **options: Any) -> Any:
    """A closed connection that sends no greeting when it opens."""
    named: dict[str, Any] = {**connections.parse_url(url), **UNNAMED, "protocol": 2, "retry": Retry(NoBackoff(), 0)}
    return connection_class(named.pop("connection_class", kind))(**named, **options)


async def test_connecting_has_its_own_time_limit(server_url: str) -> None:
    limit = 0.01

    async def be_slow(connection: connections.AbstractConnection) -> None:
        await asyncio.sleep(5 * limit)
        connection.socket_timeout = DEADLINE_S  # Lift the time limit.

    connection = connection_to(plain(server_url), socket_timeout=limit, redis_connect_func=be_slow)
    await connection.send_command("PING")
    assert await connection.read_response() == b"PONG"
    await connection.disconnect()


async def test_a_timeout_of_the_caller_is_not_replaced(server_url: str) -> None:
    async def ask_another(connection: connections.AbstractConnection) -> None:
        raise TimeoutError("the vault does not answer")

    connection = connection_to(plain(server_url), socket_timeout=60.0, redis_connect_func=ask_another)
    with pytest.raises(TimeoutError, match="the vault"):
        await connection.send_command("PING")
    assert not connection.is_connected


async def test_a_connection_that_is_cancelled_while_it_opens_is_closed(server_url: str) -> None:
    is_asking = asyncio.Event()

    async def ask_another(connection: connections.AbstractConnection) -> None:
        is_asking.set()
        await asyncio.Event().wait()

    connection = connection_to(plain(server_url), redis_connect_func=ask_another)
    sending = asyncio.create_task(connection.send_command("PING"))
    await is_asking.wait()
    assert connection.is_connected
    sending.cancel()
    await asyncio.wait([sending])
    assert sending.cancelled()
    assert not connection.is_connected


async def test_a_silent_server_and_one_that_reads_nothing_have_different_errors(deaf: str) -> None:
    """A server that sends no reply to redis-py's health check causes an error about reading, not about writing."""
    connection = connection_to(deaf, socket_timeout=0.2, health_check_interval=1)
    await connection.connect()
    connection.next_health_check = 0
    with pytest.raises(redis.RedisError, match="reading"):
        await connection.send_command("PING")
    await connection.disconnect()


class Moving(connections.Connection):
    """A connection that sets another time limit while it sends, as redis-py does when the server announces a move."""

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        self.socket_timeout = 30.0
        await super().send_packed_command(command, check_health)


async def test_a_limit_that_changes_during_a_command_stays_changed(deaf: str) -> None:
    connection = connection_to(deaf, Moving, socket_timeout=5.0)
    await connection.send_command("PING")
    assert connection.socket_timeout == 30.0
    await connection.disconnect()


class Traced(connections.Connection):
    """A connection class that a user has derived."""


def test_each_connection_class_of_redis_py_has_a_counterpart() -> None:
    pairs: list[tuple[type, Any]] = [
        (redis.Connection, connections.Connection),
        (redis.SSLConnection, connections.SSLConnection),
        (redis.UnixDomainSocketConnection, connections.UnixDomainSocketConnection),
        (connections.Connection, connections.Connection),
        (Traced, Traced),
    ]
    for kind, base in pairs:
        ours: Any = connection_class(kind)
        assert issubclass(ours, base)
        assert ours.send_packed_command is not base.send_packed_command
        assert connection_class(ours) is ours is connection_class(kind)
    with pytest.raises(SettingsError, match="cannot use a client whose connections are of the type int"):
        connection_class(int)


async def test_a_client_with_lmpool_s_connections_can_name_a_server(server_url: str) -> None:
    if "+cluster" not in server_url:
        async with Server(server_url).client() as client, Server(client).client() as other:
            assert await other.ping()
    with contextlib.closing(redis.Redis.from_url(plain(server_url))) as sync:
        async with Server(sync).client() as other:
            assert await other.ping()
