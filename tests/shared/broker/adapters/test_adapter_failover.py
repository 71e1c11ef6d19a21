"""A failover forgets changes of adapters that had returned: nobody who knows of them believes it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from lmpool.embedded import EmbeddedServer
from lmpool.errors import DeadlineExceeded, ServerError, UnknownAdapter
from lmpool.producer import Producer
from tests.shared.broker.adapters.adapter_changes import QUICK, check, write
from tests.shared.broker.adapters.replicated import Replicated
from tests.support.pool import Pool, until_async
from tests.support.servers.proxy import Proxy

pytestmark = pytest.mark.usefixtures("short_memory")


@pytest.fixture
async def pair(own_server: EmbeddedServer, short_dir: Path) -> AsyncIterator[tuple[Replicated, Proxy]]:
    """A server with a replica, and the proxy through which clients reach them."""
    async with (
        Proxy(short_dir / "s" / "redis.sock", short_dir / "p.sock") as proxy,
        Replicated(own_server, short_dir / "r", proxy).running() as servers,
    ):
        yield servers, proxy


@pytest.fixture
def servers(pair: tuple[Replicated, Proxy]) -> Replicated:
    """The primary and its replica."""
    return pair[0]


@pytest.fixture
def far(pair: tuple[Replicated, Proxy], tmp_path: Path) -> Iterator[Pool]:
    """A pool whose workers and clients follow failovers."""
    pool = Pool(pair[1].url, "far", tmp_path)
    yield pool
    pool.end()


async def replaced_and_forgotten(far: Pool, servers: Replicated, folder: Path, *clients: Producer) -> tuple[str, str]:
    """An adapter that clients use, and its replacement, which the replica does not hear of; returns both revisions."""
    old = await clients[0].add_adapter("poet", write(folder, "old", "1"))
    for client in clients:
        await check(client, "poet", old)
    await until_async(lambda: has_rows(far, servers), "the replica has the rows")
    servers.lag()
    new = await clients[0].add_adapter("poet", write(folder, "new", "2"))
    for client in clients:
        await check(client, "poet", new)
    return old, new


async def has_rows(far: Pool, servers: Replicated) -> bool:
    return sum(1 for _ in servers.replica.scan_iter(f"{far.prefix}:row:*")) >= 2


async def start(far: Pool, *options: str) -> None:
    await asyncio.to_thread(far.start, *QUICK, *options)


async def test_a_replacement_outlives_a_failover_that_has_forgotten_it(
    far: Pool, servers: Replicated, tmp_path: Path
) -> None:
    for _ in range(2):
        await start(far)
    async with far.producer("syn", cache_bytes=0) as producer, far.producer("syn", cache_bytes=0) as other:
        old, new = await replaced_and_forgotten(far, servers, tmp_path, producer, other)
        await servers.fail_over()
        written, asked = 0, 0
        while written < 10:
            # Prompts that the cache of the replica has with the old weights, and one that is computed.
            for client in (producer, other):
                await check(client, "poet", new, [1], [2, 3], [3, asked % 64])
            asked += 1
            written += (await producer.adapters()) == {"poet": new}
        async with far.producer("syn") as late:
            assert await late.adapters() == {"poet": new}
            await check(late, "poet", new)
    serving = [worker.text.count(f"revision {old}") for worker in far.workers]
    assert serving == [1, 1], "no worker has gone back"
    assert any("had forgotten changes of the adapters" in worker.text for worker in far.workers)


async def test_a_client_does_not_believe_a_server_that_has_forgotten_a_change(
    far: Pool, servers: Replicated, tmp_path: Path
) -> None:
    """While no worker can tell it; the rows of the old weights are still in the cache."""
    await start(far)
    (worker,) = far.workers
    async with far.producer("syn", cache_bytes=0) as client:
        _, new = await replaced_and_forgotten(far, servers, tmp_path, client)
        worker.signal(signal.SIGSTOP)
        await servers.fail_over()
        session = client._sessions.session
        assert session is not None
        for _ in range(2):
            session.adapters.doubt()
            with pytest.raises(ServerError, match=r"^within 4 s: the server has forgotten a change of the adapters"):
                await client.logprobs([1], adapter="poet", timeout=4)
        worker.signal(signal.SIGCONT)
        await check(client, "poet", new)


async def test_a_removal_outlives_a_failover_that_has_forgotten_it(
    far: Pool, servers: Replicated, tmp_path: Path
) -> None:
    await start(far)
    async with far.producer("syn", cache_bytes=0) as client:
        revision = await client.add_adapter("poet", write(tmp_path, "old", "1"))
        await check(client, "poet", revision)
        await until_async(lambda: has_rows(far, servers), "the replica has the rows")
        servers.lag()
        await client.remove_adapter("poet")
        await servers.fail_over()
        for _ in range(10):
            with pytest.raises(UnknownAdapter, match="it has: none"):
                await client.logprobs([1], adapter="poet")
        async with far.producer("syn") as late:
            assert await late.adapters() == {}


async def test_a_change_after_a_failover_does_not_undo_one_that_was_forgotten(
    far: Pool, servers: Replicated, tmp_path: Path
) -> None:
    """Though neither who makes it nor a worker that has started since knows of that one."""
    await start(far)
    (knowing,) = far.workers
    async with far.producer("syn", cache_bytes=0) as client:
        _, new = await replaced_and_forgotten(far, servers, tmp_path, client)
        knowing.signal(signal.SIGSTOP)
        await servers.fail_over()
        await start(far)
        async with far.producer("syn") as late:
            change = asyncio.create_task(late.add_adapter("judge", write(tmp_path, "judge", "3")))

            async def is_offered() -> bool:
                return bool(servers.replica.exists(far.keys.model("syn").offers))

            await until_async(is_offered, "the change is under way")
            knowing.signal(signal.SIGCONT)
            judge = await change
            assert await client.adapters() == {"poet": new, "judge": judge}
            for producer in (client, late):
                await check(producer, "poet", new)
                await check(producer, "judge", judge)


async def test_weights_that_a_failover_has_forgotten_keep_their_adapters(
    far: Pool, servers: Replicated, tmp_path: Path
) -> None:
    """The replica has the adapters of those that had the model's name before."""
    await start(far)
    (before,) = far.workers
    async with far.producer("syn", cache_bytes=0) as client:
        await client.add_adapter("poet", write(tmp_path, "old", "1"))
        servers.lag()
        before.signal(signal.SIGTERM)
        assert await asyncio.to_thread(before.wait) == 0
        fingerprint = client.model.fingerprint
        await start(far, "--seed", "7")

        async def follows() -> bool:
            return client.model.fingerprint != fingerprint

        await until_async(follows, "the client sees the new weights")
        revision = await client.add_adapter("judge", write(tmp_path, "judge", "3"))
        await servers.fail_over()

        async def is_served() -> bool:
            return await client.adapters() == {"judge": revision}

        await until_async(is_served, "the worker has written down its info, and its adapters")
        assert len(await client.logprobs([1], adapter="judge")) == client.model.vocab_size


async def test_a_change_returns_when_so_many_replicas_have_it(far: Pool, servers: Replicated, tmp_path: Path) -> None:
    await start(far)
    async with far.producer("syn", cache_bytes=0) as client:
        servers.lag()
        told = r"a failover could undo that \(0 of 1 replicas have it: is any connected\?\); allow more time"
        # The second time nothing but the replica is waited for.
        await client.add_adapter("poet", write(tmp_path, "poet", "1"))
        with pytest.raises(DeadlineExceeded, match=told):
            await client.add_adapter("poet", tmp_path / "poet", replicas=1, timeout=6)
        await servers.follow()
        await client.add_adapter("poet", tmp_path / "poet", replicas=1)
        assert has_adapter(far, servers)
        await client.remove_adapter("poet", replicas=1)
        assert not has_adapter(far, servers)
        servers.lag()
        await client.add_adapter("poet", tmp_path / "poet")
        with pytest.raises(DeadlineExceeded, match=r"it is not in service any more, but .* \(0 of 1 replicas have"):
            await client.remove_adapter("poet", replicas=1, timeout=6)


def has_adapter(far: Pool, servers: Replicated) -> bool:
    return bool(servers.replica.hexists(far.keys.model("syn").adapters, "poet"))
