"""A failover may lose a change of an adapter: clients that have read the change never get rows of the old weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from lmpool.embedded import EmbeddedServer
from lmpool.errors import ServerError
from lmpool.producer import Producer
from tests.shared.broker.adapters.adapter_changes import QUICK, check, write
from tests.shared.broker.adapters.replicated import Replicated
from tests.support.pool import Pool, until_async
from tests.support.servers.proxy import Proxy

pytestmark = pytest.mark.usefixtures("short_memory")


@pytest.fixture
async def servers(own_server: EmbeddedServer, short_dir: Path) -> AsyncIterator[Replicated]:
    """A primary server and its replica."""
    async with (
        Proxy(short_dir / "s" / "redis.sock", short_dir / "p.sock") as proxy,
        Replicated(own_server, short_dir / "r", proxy).running() as servers,
    ):
        yield servers


@pytest.fixture
def far(servers: Replicated, tmp_path: Path, short_dir: Path) -> Iterator[Pool]:
    """A pool whose workers and clients reach the replica after a failover, because they connect through a proxy."""
    pool = Pool(f"unix://{short_dir / 'p.sock'}", "far", tmp_path)
    yield pool
    pool.end()


async def served(far: Pool, servers: Replicated, folder: Path, *clients: Producer) -> str:
    """Add an adapter, and wait until the replica has its rows too; return the adapter's revision."""
    revision = await clients[0].add_adapter("poet", write(folder, "old", "1"))
    for client in clients:
        await check(client, "poet", revision)

    async def has_rows() -> bool:
        return sum(1 for _ in servers.replica.scan_iter(f"{far.prefix}:row:*")) >= 2

    await until_async(has_rows, "the replica has the rows")
    servers.lag()
    return revision


async def test_a_client_that_has_read_a_replacement_gets_no_row_of_the_old_weights(
    far: Pool, servers: Replicated, tmp_path: Path
) -> None:
    await asyncio.to_thread(far.start, *QUICK)
    async with far.producer("syn", cache_bytes=0) as client, far.producer("syn", cache_bytes=0) as other:
        old = await served(far, servers, tmp_path, client, other)
        new = await client.add_adapter("poet", write(tmp_path, "new", "2"))
        for producer in (client, other):
            await check(producer, "poet", new)
        await servers.fail_over()
        for producer in (client, other):
            session = producer._sessions.session
            assert session is not None
            session.adapters.doubt()
            for _ in range(2):
                with pytest.raises(ServerError, match="has lost a change of the adapter 'poet' that this client has"):
                    await producer.logprobs([1], adapter="poet")
            await check(producer, "", "")
        async with far.producer("syn") as late:
            assert await late.adapters() == {"poet": old}, "it has not read the replacement"
        judge = await client.add_adapter("judge", write(tmp_path, "judge", "3"))
        for producer in (client, other):
            await check(producer, "judge", judge)
            with pytest.raises(ServerError, match="make the change once more"):
                await producer.logprobs([1], adapter="poet")
        assert await client.add_adapter("poet", tmp_path / "new") == new
        for producer in (client, other):
            await check(producer, "poet", new)


async def test_a_client_that_has_removed_an_adapter_gets_no_row_of_it(
    far: Pool, servers: Replicated, tmp_path: Path
) -> None:
    await asyncio.to_thread(far.start, *QUICK)
    async with far.producer("syn", cache_bytes=0) as client:
        await served(far, servers, tmp_path, client)
        await client.remove_adapter("poet")
        assert await client.adapters() == {}
        await servers.fail_over()
        with pytest.raises(ServerError, match="make the change once more"):
            await client.logprobs([1], adapter="poet")
        await client.remove_adapter("poet")
        assert await client.adapters() == {}
