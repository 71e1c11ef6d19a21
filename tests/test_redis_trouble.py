"""The server and the way to it make trouble while requests run: they still end in their rows."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import redis
from redis.asyncio import Redis

from lmpool.embedded import EmbeddedServer
from lmpool.producer import Producer, session
from lmpool.prompts import encode_prompt
from lmpool.rowcache import RedisRows
from lmpool.rows import Encoding, RowBlock
from lmpool.server import Server
from lmpool.synthetic import synthetic_row
from tests.pool import Pool, V, is_held, until_async
from tests.proxy import Proxy, Way

PROMPTS = [[i, j] for i in range(20) for j in range(10)]
LEASE = ("--lease-s", 1)
SLOW = (*LEASE, "--step-ms", 40, "--max-batch", 8)
"""A second or so for all prompts."""


async def ask(producer: Producer, prompts: Sequence[list[int]]) -> None:
    """Ask for many prompts at once and check every value."""
    rows = await asyncio.gather(*map(producer.logprobs, prompts))
    for prompt, got in zip(prompts, rows, strict=True):
        assert np.array_equal(got, synthetic_row(prompt, vocab_size=V))


async def ask_during(producer: Producer, pool: Pool, trouble: Callable[[], Awaitable[None]]) -> None:
    """Ask, have trouble as soon as a worker holds prompts, and ask again afterwards."""
    asked = asyncio.create_task(ask(producer, PROMPTS))
    await until_async(lambda: is_held(pool), "the worker holds prompts")
    await trouble()
    await asked
    await ask(producer, [[400, i] for i in range(20)])


@pytest.fixture
async def proxy(own_server: EmbeddedServer, short_dir: Path) -> AsyncIterator[Proxy]:
    """A proxy before a server of the test's own."""
    async with Proxy(short_dir / "s" / "redis.sock", short_dir / "p.sock") as proxy:
        yield proxy


@pytest.fixture
async def own_pool(own_server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[Pool]:
    """A pool on a server of the test's own."""
    pool = Pool(own_server.url, "trouble", tmp_path)
    yield pool
    pool.end()


@pytest.fixture
async def far_pool(own_pool: Pool, proxy: Proxy) -> Pool:
    """A pool whose workers and producers connect through the proxy."""
    own_pool.url = proxy.url
    return own_pool


async def start(pool: Pool, *options: str | float) -> None:
    """Start a worker without holding up the proxy."""
    await asyncio.to_thread(pool.start, *(options or SLOW))


# The proxy


async def test_the_proxy_forwards_what_it_is_given(proxy: Proxy) -> None:
    client = Redis.from_url(proxy.url)
    value = bytes(range(256)) * 4096
    assert await client.set("key", value)
    assert await client.get("key") == value
    assert len(proxy) == 1
    await client.aclose()


@pytest.mark.parametrize("way", list(Way))
async def test_the_proxy_does_to_a_connection_what_it_is_told(proxy: Proxy, way: Way) -> None:
    client = Redis.from_url(proxy.url, single_connection_client=True, socket_timeout=0.3, retry=None)
    await client.ping()
    proxy.swallow(way)
    with pytest.raises(redis.TimeoutError):
        await client.ping()
    for strike in (proxy.cut, lambda: proxy.truncate(way)):
        await client.ping()
        strike()
        with pytest.raises(redis.ConnectionError):
            await client.ping()
    await client.set("key", b"x" * 1000)
    proxy.drop(way)
    with pytest.raises((redis.TimeoutError, redis.ConnectionError, redis.ResponseError, redis.InvalidResponse)):
        await client.get("key" * 100)
    await client.connection.disconnect()  # type: ignore[union-attr]
    proxy.refuse()
    with pytest.raises(redis.ConnectionError):
        await client.ping()
    proxy.heal()
    await client.ping()
    await client.aclose()


# The way to the server


@pytest.mark.parametrize("way", list(Way))
async def test_a_slow_way_is_just_slow(far_pool: Pool, proxy: Proxy, way: Way) -> None:
    await start(far_pool)
    async with far_pool.producer(timeout=20) as producer:

        async def trouble() -> None:
            proxy.delay(way, 0.05)

        await ask_during(producer, far_pool, trouble)
        assert producer.stats().failed == 0


@pytest.mark.parametrize("mode", ["cut", "truncate", "drop"])
async def test_damaged_and_cut_connections_cost_no_row(far_pool: Pool, proxy: Proxy, mode: str) -> None:
    await start(far_pool)
    async with far_pool.producer(timeout=20) as producer:

        async def trouble() -> None:
            for way in Way:
                for share in (0.5, 1.0):
                    if mode == "cut":
                        proxy.cut(share)
                    elif mode == "truncate":
                        proxy.truncate(way, share)
                    else:
                        proxy.drop(way, share)
                    await asyncio.sleep(0.2)  # Not for anything to happen: strikes are to come one after the other.

        await ask_during(producer, far_pool, trouble)


@pytest.mark.parametrize("way", list(Way))
async def test_a_black_hole_is_left_after_a_lease(far_pool: Pool, proxy: Proxy, way: Way) -> None:
    await start(far_pool, "--lease-s", 2, "--step-ms", 40, "--max-batch", 8)
    async with far_pool.producer(timeout=12) as producer:

        async def trouble() -> None:
            proxy.swallow(way)

        await ask_during(producer, far_pool, trouble)


async def test_a_server_that_takes_connections_and_never_answers_is_left_too(far_pool: Pool, proxy: Proxy) -> None:
    far_pool.url += "?socket_connect_timeout=0.5"
    await start(far_pool, "--lease-s", 2, "--step-ms", 40, "--max-batch", 8)
    async with far_pool.producer(timeout=15) as producer:

        async def trouble() -> None:
            proxy.stall()
            made = proxy.made
            proxy.cut()
            await until_async(lambda: _has_made(proxy, made + 4), "they connect again")
            proxy.heal()  # But not for those that are open.

        await ask_during(producer, far_pool, trouble)


async def _has_made(proxy: Proxy, connections: int) -> bool:
    return proxy.made >= connections


async def test_connections_killed_at_random_cost_no_row(own_pool: Pool) -> None:
    await start(own_pool)
    draw = random.Random(1)
    async with own_pool.producer(timeout=20) as producer:

        async def trouble() -> None:
            for _ in range(10):
                ours = int(own_pool.redis.client_id())
                for client in own_pool.redis.client_list():
                    if int(client["id"]) != ours and draw.random() < 0.5:
                        own_pool.redis.client_kill_filter(_id=client["id"])
                await asyncio.sleep(draw.uniform(0, 0.2))  # Random moments are what this is about.
            for kind in ("normal", "pubsub", "replica", "master"):
                own_pool.redis.client_kill_filter(_type=kind, skipme=True)

        await ask_during(producer, own_pool, trouble)


# Notifications


async def test_rows_that_were_never_announced_are_found_behind_many_that_stall(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_MOST_RECHECKED", 50)
    await start(pool, *LEASE, "--step-ms", 60_000, "--max-batch", 1)
    async with pool.producer(timeout=20) as producer:
        stalled = [asyncio.ensure_future(producer.logprobs([1, i])) for i in range(120)]
        last = asyncio.ensure_future(producer.logprobs([2]))
        await until_async(lambda: is_held(pool), "the worker holds a prompt")
        rows = RedisRows(Server(pool.url), pool.keys, producer.model)
        digest = encode_prompt([2], vocab_size=V, max_tokens=10).digest
        block = RowBlock([digest], synthetic_row([2], vocab_size=V)[np.newaxis], None, Encoding.F32)
        assert not await rows.put(block)
        rows.close()
        assert np.array_equal(await last, synthetic_row([2], vocab_size=V))
        assert not any(one.done() for one in stalled)
        for one in stalled:
            one.cancel()


# The server


async def test_rows_that_are_evicted_before_they_are_fetched_are_computed_again(own_pool: Pool) -> None:
    await start(own_pool, *LEASE)
    async with own_pool.producer(timeout=25, cache_bytes=0) as producer:
        await ask(producer, PROMPTS[:1])
        own_pool.redis.config_set("maxmemory", own_pool.redis.info("memory")["used_memory"] + 300_000)
        await ask(producer, [[i, j] for i in range(20) for j in range(30)])
    assert own_pool.redis.info("stats")["evicted_keys"] > 0


async def test_requests_survive_a_server_that_is_read_only_for_a_while(own_pool: Pool) -> None:
    await start(own_pool)
    async with own_pool.producer(timeout=20) as producer:

        async def trouble() -> None:
            # Of a master that does not exist: reads are answered, writes refused.
            own_pool.redis.replicaof("127.0.0.1", "1")
            late = asyncio.create_task(ask(producer, [[300, i] for i in range(20)]))
            await until_async(lambda: _says(own_pool, "try again: READONLY"), "rows are refused")
            own_pool.redis.replicaof("NO", "ONE")
            await late

        await ask_during(producer, own_pool, trouble)


async def _says(pool: Pool, text: str) -> bool:
    return text in pool.workers[0].text


async def test_requests_survive_a_failover(
    own_pool: Pool, proxy: Proxy, own_server: EmbeddedServer, short_dir: Path
) -> None:
    """The master dies, its address leads to a replica, and that is promoted only a while later."""
    own_pool.url = proxy.url
    await start(own_pool)
    with (
        EmbeddedServer(memory_bytes=1 << 28, folder=short_dir / "r") as replica,
        redis.Redis.from_url(replica.url) as other,
    ):
        port = _free_port()
        own_pool.redis.config_set("port", port)
        own_pool.redis.config_set("repl-diskless-sync-delay", 0)
        other.replicaof("127.0.0.1", str(port))
        await until_async(lambda: _is_in_sync(other), "the replica has everything")
        async with own_pool.producer(timeout=20) as producer:

            async def trouble() -> None:
                proxy.redirect(short_dir / "r" / "redis.sock")
                os.kill(own_server.pid, signal.SIGKILL)
                proxy.cut()
                await until_async(lambda: _says(own_pool, "READONLY"), "the worker is refused")
                other.replicaof("NO", "ONE")
                own_pool.redis = other

            await ask_during(producer, own_pool, trouble)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _is_in_sync(replica: redis.Redis) -> bool:
    return bool(replica.info("replication").get("master_link_status") == "up")


async def test_requests_survive_a_script_that_keeps_the_server_busy(own_pool: Pool) -> None:
    await start(own_pool)
    own_pool.redis.config_set("busy-reply-threshold", 50)
    async with own_pool.producer(timeout=20) as producer:

        async def trouble() -> None:
            endless = asyncio.create_task(asyncio.to_thread(_never_ends, own_pool))
            late = asyncio.create_task(ask(producer, [[300, i] for i in range(20)]))
            await until_async(lambda: _says(own_pool, "BUSY"), "the worker is refused")
            client = redis.Redis.from_url(own_pool.url)
            client.script_kill()
            client.close()
            await endless
            await late

        await ask_during(producer, own_pool, trouble)


def _never_ends(pool: Pool) -> None:
    client = redis.Redis.from_url(pool.url)
    with pytest.raises(redis.ResponseError, match="killed"):
        client.eval("while true do end", 0)
    client.close()


async def test_requests_survive_a_server_that_forgets_its_scripts(own_pool: Pool) -> None:
    await start(own_pool)
    async with own_pool.producer(timeout=20) as producer:

        async def trouble() -> None:
            for _ in range(5):
                own_pool.redis.script_flush()
                await ask(producer, [[300, _]])

        await ask_during(producer, own_pool, trouble)


async def test_requests_survive_a_server_that_cannot_save(own_pool: Pool, short_dir: Path) -> None:
    await start(own_pool)
    own_pool.redis.config_set("save", "3600 1")
    in_the_way = short_dir / "s" / "dump.rdb"
    async with own_pool.producer(timeout=20) as producer:

        async def trouble() -> None:
            in_the_way.mkdir()
            own_pool.redis.bgsave()
            await until_async(lambda: _says(own_pool, "MISCONF"), "the worker is refused")
            in_the_way.rmdir()
            await until_async(lambda: _saves(own_pool), "the server saves again")

        await ask_during(producer, own_pool, trouble)


async def _saves(pool: Pool) -> bool:
    found = pool.redis.info("persistence")
    if not found["rdb_bgsave_in_progress"] and found["rdb_last_bgsave_status"] != "ok":
        pool.redis.bgsave()
    return found["rdb_last_bgsave_status"] == "ok"


class SlowToLoad(EmbeddedServer):
    """A server that needs a second or so to load its append-only file."""

    def _command(self, binary: str) -> list[str]:
        return [*super()._command(binary), "--key-load-delay", "50"]


async def test_requests_survive_a_server_that_loads(short_dir: Path, tmp_path: Path) -> None:
    with SlowToLoad(memory_bytes=1 << 28, folder=short_dir / "s", appendonly=True) as server:
        pool = Pool(server.url, "loading", tmp_path)
        try:
            await start(pool)
            many = pool.redis.pipeline(transaction=False)
            for number in range(10_000):  # It answers after every 1,024 of them.
                many.set(f"other:{number}", b"")
            many.execute()
            async with pool.producer(timeout=20) as producer:

                async def trouble() -> None:
                    await asyncio.to_thread(server.stop)
                    starting = asyncio.create_task(asyncio.to_thread(server.start))
                    await until_async(lambda: _says(pool, "LOADING"), "the worker is refused")
                    await starting

                await ask_during(producer, pool, trouble)
        finally:
            pool.end()
