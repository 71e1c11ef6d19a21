"""Faults of the server and of the network while requests run: the requests still return their rows."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import shutil
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from lmpool.broker import connection
from lmpool.broker.connection import Argument, CommandConnection, RawCommandConnection
from lmpool.broker.server import Server
from lmpool.embedded import BINARY_VARIABLE, EmbeddedServer, server_binary
from lmpool.errors import DeadlineExceeded, LMPoolError, NoWorker
from lmpool.producer import Producer
from lmpool.producer.client import discovery, session
from lmpool.protocol.job import encode_prompt
from lmpool.protocol.keys import Keys
from lmpool.protocol.row import Encoding, RowBlock
from lmpool.rows.cache import RowCache
from lmpool.rows.shared_memory import SegmentReader
from lmpool.synthetic import synthetic_row
from lmpool.workers.membership.heartbeat import loading
from lmpool.workers.settings import WorkerSettings
from tests.support.gate import Gate
from tests.support.pool import DEADLINE_S, PATIENCE, Pool, V, is_held, until_async
from tests.support.servers.proxy import Proxy, Way

LEASE = ("--lease-s", 1)
SLOW = (*LEASE, "--step-ms", 40, "--max-batch", 8)
"""Options of a slow worker, which computes the 150 prompts of a test in less than a second."""
PATIENT = ("--lease-s", 2, *SLOW[2:])
"""Options with a longer lease, in which a worker can repeat a heartbeat that was lost with its connection."""

_numbers = itertools.count()


def prompts(count: int = 150) -> list[list[int]]:
    """Return prompts that no test has requested before."""
    return [[next(_numbers) % V, number // 500 % V, number % 500] for number in range(count)]


async def ask(producer: Producer, asked: Sequence[list[int]]) -> None:
    """Request many prompts concurrently and check every value."""
    rows = await asyncio.gather(*map(producer.logprobs, asked))
    for prompt, got in zip(asked, rows, strict=True):
        assert np.array_equal(got, synthetic_row(prompt, vocab_size=V))


def gate_of(pool: Pool) -> Gate:
    """The gate at which the steps of the pool's workers wait."""
    return Gate(pool.folder / "gate")


async def ask_during(producer: Producer, pool: Pool, trouble: Callable[[], Awaitable[None]]) -> None:
    """Send requests, cause a fault while a worker computes them, and send requests again after the fault."""
    gate_of(pool).shut()
    asked = asyncio.create_task(ask(producer, prompts()))
    await until_async(lambda: is_held(pool), "the worker holds prompts")
    gate_of(pool).open()
    await trouble()
    await asked
    await ask(producer, prompts(8))


async def refused(pool: Pool, text: str) -> None:
    """Wait until the worker logs `text` once more."""
    before = pool.workers[0].text.count(text)

    async def is_said() -> bool:
        return pool.workers[0].text.count(text) > before

    await until_async(is_said, f"the worker says {text!r}")


@pytest.fixture
async def proxy(own_server: EmbeddedServer, short_dir: Path) -> AsyncIterator[Proxy]:
    """A proxy between the pool and the test's own server."""
    async with Proxy(short_dir / "s" / "redis.sock", short_dir / "p.sock") as proxy:
        yield proxy


@pytest.fixture
async def far_pool(own_server: EmbeddedServer, proxy: Proxy, tmp_path: Path) -> AsyncIterator[Pool]:
    """A pool whose workers and producers connect through the proxy."""
    pool = Pool(own_server.url, "far", tmp_path)
    pool.url = proxy.url
    yield pool
    pool.end()


@pytest.fixture(scope="module")
def shaken_server() -> Iterator[EmbeddedServer]:
    """A server that only the tests of this file use; each test undoes its changes."""
    folder = Path(tempfile.mkdtemp(prefix="lmp"))
    with EmbeddedServer(memory_bytes=1 << 28, folder=folder / "s") as server:
        yield server
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def shaken(shaken_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool with a worker on the server `shaken_server`."""
    pool = Pool(shaken_server.url, "shaken", tmp_path_factory.mktemp("shaken"))
    gate_of(pool).open()
    pool.start(*SLOW, command=gate_of(pool).command)
    yield pool
    pool.end()


async def start(pool: Pool, *options: str | float) -> None:
    """Start a worker in a thread, so that the proxy in this event loop can run."""
    gate_of(pool).open()
    await asyncio.to_thread(lambda: pool.start(*(options or SLOW), command=gate_of(pool).command))


# The proxy


async def test_the_proxy_forwards_all_bytes(proxy: Proxy) -> None:
    client = Redis.from_url(proxy.url)
    value = bytes(range(256)) * 4096
    assert await client.set("key", value)
    assert await client.get("key") == value
    assert len(proxy) == 1
    await client.aclose()


@pytest.mark.parametrize("way", list(Way))
async def test_the_proxy_applies_faults_to_a_connection(proxy: Proxy, way: Way) -> None:
    client = Redis.from_url(proxy.url, single_connection_client=True, socket_timeout=3, retry=None)
    await client.ping()
    proxy.swallow(way)
    with pytest.raises(redis.TimeoutError):
        await client.ping()
    strikes: list[Callable[[], None]] = [proxy.cut, lambda: proxy.truncate(way)]
    for strike in strikes:
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


# The network


async def test_a_slow_network_only_delays_requests(far_pool: Pool, proxy: Proxy) -> None:
    await start(far_pool)
    async with far_pool.producer() as producer:

        async def trouble() -> None:
            for way in Way:
                proxy.delay(way, 0.03)

        await ask_during(producer, far_pool, trouble)
        assert producer.stats().failed == 0


async def test_a_reply_stream_that_arrives_too_late_is_dropped(
    own_server: EmbeddedServer, far_pool: Pool, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A foreign program writes 15 MB to the stream: too much for a slow connection to transfer within a lease."""
    monkeypatch.setattr(connection, "_MIN_REPLY_TIMEOUT_S", 0.5)
    await start(far_pool, *LEASE)
    async with far_pool.producer() as producer:
        await ask(producer, prompts(1))
        with redis.Redis.from_url(own_server.url, **PATIENCE) as server:
            (reply,) = server.scan_iter("*:reply:*")
            proxy.delay(Way.TO_CLIENT, 0.02)
            proxy.cut()  # The delay applies to new connections only, so close the open connections.
            fields: list[Any] = ["x", bytes(2**20)] * 15
            await asyncio.to_thread(server.execute_command, "XADD", reply, "*", *fields)

            async def is_dropped() -> bool:
                return (server.memory_usage(reply) or 0) < 2**20  # None after the stream is deleted.

            await until_async(is_dropped, "the stream is dropped")
        await ask(producer, prompts(1))


async def test_damaged_and_cut_connections_cost_no_row(far_pool: Pool, proxy: Proxy) -> None:
    await start(far_pool, *PATIENT)
    async with far_pool.producer() as producer:

        async def trouble() -> None:
            for share in (0.5, 1.0):
                for way in Way:
                    for strike in (proxy.truncate, proxy.drop, lambda _, share: proxy.cut(share)):
                        strike(way, share)
                        await asyncio.sleep(0.05)  # Sleep between two faults; there is no condition to wait for.

        await ask_during(producer, far_pool, trouble)


@pytest.mark.parametrize("wrong", [b"", b"QQ", 7, None])
async def test_a_wrong_reply_to_a_submission_costs_no_row(
    shaken: Pool, monkeypatch: pytest.MonkeyPatch, wrong: object
) -> None:
    async with shaken.producer() as producer:
        call, wrongs = CommandConnection.call, [wrong]

        async def lossy(connection: CommandConnection, *arguments: Argument) -> Any:
            reply = await call(connection, *arguments)
            return wrongs.pop() if arguments[0] in ("EVALSHA", "EVAL") and wrongs else reply

        monkeypatch.setattr(CommandConnection, "call", lossy)
        await ask(producer, prompts(3))
        assert not wrongs


async def test_a_client_leaves_a_black_hole_after_a_lease(far_pool: Pool, proxy: Proxy) -> None:
    await start(far_pool, *PATIENT)
    async with far_pool.producer() as producer:
        for way in Way:

            async def trouble(way: Way = way) -> None:
                proxy.swallow(way)

            await ask_during(producer, far_pool, trouble)


async def test_a_client_leaves_a_server_that_accepts_connections_and_never_replies(
    far_pool: Pool, proxy: Proxy
) -> None:
    far_pool.url += "?socket_connect_timeout=2"
    await start(far_pool, *PATIENT)
    async with far_pool.producer() as producer:

        async def trouble() -> None:
            proxy.stall()
            made = proxy.made
            proxy.cut()
            await until_async(lambda: _has_made(proxy, made + 4), "they connect again")
            proxy.heal()  # New connections work again; open connections stay stalled.

        await ask_during(producer, far_pool, trouble)


async def test_a_loading_worker_leaves_a_black_hole_before_its_lease_expires(
    own_server: EmbeddedServer, proxy: Proxy
) -> None:
    settings, key = WorkerSettings("far", lease_s=8.0), Keys("far").worker("w")
    async with Server(own_server.url).connected() as direct, loading(Server(proxy.url), settings, "w", "syn"):
        await until_async(lambda: direct.exists(key), "the worker has a heartbeat")
        for way in Way:
            proxy.swallow(way)
        made = proxy.made

        async def is_renewed() -> bool:
            left_ms = await direct.pttl(key)
            assert left_ms > 0, "the lease has expired"
            return proxy.made > made and left_ms > 7_000

        await until_async(is_renewed, "the worker sends a heartbeat on a new connection")


async def test_a_request_into_a_black_hole_ends_with_its_deadline(
    far_pool: Pool, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    await start(far_pool)
    for limit in ("_MIN_REPLY_TIMEOUT_S", "_MAX_REPLY_TIMEOUT_S"):
        monkeypatch.setattr(connection, limit, 3600.0)  # No reply timeout closes a connection during this test.
    async with far_pool.producer() as producer:
        await ask(producer, prompts(1))
        proxy.stall()
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(LMPoolError, match="no row within 0.5 s"):
                await producer.logprobs([1], timeout=0.5)
            with pytest.raises(DeadlineExceeded, match="no worker has served version 1 of 'syn' within 0.5 s"):
                await producer.logprobs([1], min_version=1, timeout=0.5)
        proxy.cut()


async def _has_made(proxy: Proxy, connections: int) -> bool:
    return proxy.made >= connections


async def test_connections_killed_at_random_cost_no_row(shaken: Pool) -> None:
    draw = random.Random(1)
    async with shaken.producer() as producer:

        async def trouble() -> None:
            own_id = int(shaken.redis.client_id())
            for _ in range(10):
                for client in shaken.redis.client_list():
                    if int(client["id"]) != own_id and draw.random() < 0.5:
                        shaken.redis.client_kill_filter(_id=client["id"])
                await asyncio.sleep(draw.uniform(0, 0.1))  # Kill connections at random moments.
            for kind in ("normal", "pubsub", "replica", "master"):
                # Do not use `client_kill_filter`: in redis-py 5.3 it does not accept the type replica.
                shaken.redis.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")  # type: ignore[no-untyped-call]

        await ask_during(producer, shaken, trouble)


# Notifications


async def test_rows_without_a_notification_are_found_behind_many_stalled_rows(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_MAX_RECHECKED", 50)
    await start(pool, *LEASE, "--step-ms", 600_000, "--max-batch", 1)
    async with pool.producer() as producer:
        stalled = [asyncio.ensure_future(producer.logprobs([1, i])) for i in range(120)]
        last = asyncio.ensure_future(producer.logprobs([2]))
        await until_async(lambda: is_held(pool), "the worker holds a prompt")
        rows = RowCache(Server(pool.url), pool.keys, producer.model, SegmentReader())
        digest = encode_prompt([2], vocab_size=V, max_tokens=10).digest
        block = RowBlock([digest], synthetic_row([2], vocab_size=V)[np.newaxis], None, Encoding.F32)
        assert not await rows.put(block)
        rows.close()
        assert np.array_equal(await last, synthetic_row([2], vocab_size=V))
        assert not any(request.done() for request in stalled)
        for request in stalled:
            request.cancel()


# The server


async def test_rows_that_are_evicted_before_they_are_fetched_are_computed_again(shaken: Pool) -> None:
    most = str(shaken.redis.config_get("maxmemory")["maxmemory"])
    async with shaken.producer(cache_bytes=0) as producer:
        # Send requests before measuring memory: the first requests allocate scripts and buffers that stay.
        # The limit below must leave memory for some rows only.
        await ask(producer, prompts())
        evicted = shaken.redis.info("stats")["evicted_keys"]
        shaken.redis.config_set("maxmemory", shaken.redis.info("memory")["used_memory"] + 100_000)
        try:
            await ask(producer, prompts())
        finally:
            shaken.redis.config_set("maxmemory", most)
    assert shaken.redis.info("stats")["evicted_keys"] > evicted


async def test_requests_survive_a_server_that_is_read_only_for_a_while(shaken: Pool) -> None:
    async with shaken.producer() as producer:

        async def trouble() -> None:
            # Make the server the replica of a primary that does not exist: it serves reads and refuses writes.
            shaken.redis.replicaof("127.0.0.1", "1")
            try:
                late = asyncio.create_task(ask(producer, prompts(8)))
                await refused(shaken, "READONLY")
            finally:
                shaken.redis.replicaof("NO", "ONE")
            await late

        await ask_during(producer, shaken, trouble)


async def test_requests_survive_a_failover(
    far_pool: Pool, proxy: Proxy, own_server: EmbeddedServer, short_dir: Path
) -> None:
    """The primary crashes, its address leads to a replica, and a later command promotes the replica."""
    await start(far_pool)
    replica = EmbeddedServer(memory_bytes=1 << 28, folder=short_dir / "r")
    with replica, redis.Redis.from_url(replica.url, **PATIENCE) as other:
        port = _free_port()
        far_pool.redis.config_set("port", port)
        far_pool.redis.config_set("repl-diskless-sync-delay", 0)
        other.replicaof("127.0.0.1", str(port))
        await until_async(lambda: _is_in_sync(other), "the replica has everything")
        async with far_pool.producer() as producer:

            async def trouble() -> None:
                proxy.redirect(short_dir / "r" / "redis.sock")
                os.kill(own_server.pid, signal.SIGKILL)
                proxy.cut()
                await refused(far_pool, "READONLY")
                other.replicaof("NO", "ONE")
                far_pool.redis = other

            await ask_during(producer, far_pool, trouble)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _is_in_sync(replica: redis.Redis) -> bool:
    return bool(replica.info("replication").get("master_link_status") == "up")


async def test_requests_survive_a_script_that_keeps_the_server_busy(shaken: Pool) -> None:
    (usual,) = shaken.redis.config_get("lua-time-limit").values()
    shaken.redis.config_set("lua-time-limit", 50)
    async with shaken.producer() as producer:

        async def trouble() -> None:
            endless = asyncio.create_task(asyncio.to_thread(_never_ends, shaken.url))
            late = asyncio.create_task(ask(producer, prompts(8)))
            try:
                await refused(shaken, "BUSY")
            finally:
                shaken.redis.script_kill()
                await endless
                shaken.redis.config_set("lua-time-limit", str(usual))
            await late

        await ask_during(producer, shaken, trouble)


def _never_ends(url: str) -> None:
    with redis.Redis.from_url(url, **PATIENCE) as client, pytest.raises(redis.ResponseError, match="killed"):
        client.eval("while true do end", 0)


async def test_requests_survive_a_server_that_loses_its_scripts(shaken: Pool) -> None:
    async with shaken.producer() as producer:

        async def trouble() -> None:
            for _ in range(4):
                shaken.redis.script_flush()
                await ask(producer, prompts(1))

        await ask_during(producer, shaken, trouble)


async def test_requests_survive_a_server_that_cannot_save(shaken: Pool, shaken_server: EmbeddedServer) -> None:
    in_the_way = shaken_server.log_path.with_name("dump.rdb")
    async with shaken.producer() as producer:

        async def trouble() -> None:
            shaken.redis.config_set("save", "3600 1")
            in_the_way.mkdir()
            shaken.redis.bgsave()
            try:
                await refused(shaken, "MISCONF")
            finally:
                in_the_way.rmdir()
                shaken.redis.config_set("save", "")

        await ask_during(producer, shaken, trouble)


async def test_a_vocabulary_is_read_from_a_server_that_restarts(short_dir: Path, tmp_path: Path) -> None:
    with EmbeddedServer(memory_bytes=1 << 28, folder=short_dir / "s", appendonly=True) as server:
        pool = Pool(server.url, "restarts", tmp_path)
        try:
            await start(pool)
            async with pool.producer() as producer:
                await asyncio.to_thread(server.stop)
                opening = asyncio.create_task(producer.trie())
                await asyncio.to_thread(server.start)
                assert (await opening).structure.n_tokens == producer.model.vocab_size
        finally:
            pool.end()


async def test_requests_survive_a_server_that_loads(
    short_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A server that loads its append-only file slowly until the test changes `key-load-delay`.
    slow = tmp_path / "slow-server"
    slow.write_text(f'#!/bin/sh\nexec "{server_binary()}" "$@" --key-load-delay 1000\n')
    slow.chmod(0o755)
    monkeypatch.setenv(BINARY_VARIABLE, str(slow))
    with EmbeddedServer(memory_bytes=1 << 28, folder=short_dir / "s", appendonly=True) as server:
        pool = Pool(server.url, "loading", tmp_path)
        try:
            await start(pool)
            many = pool.redis.pipeline(transaction=False)
            for number in range(10_000):  # A loading server replies only after every 1,024 keys.
                many.set(f"other:{number}", b"")
            many.execute()
            async with pool.producer() as producer:

                async def trouble() -> None:
                    await asyncio.to_thread(server.stop)
                    starting = asyncio.create_task(asyncio.to_thread(server.start))
                    await refused(pool, "LOADING")
                    pool.redis.config_set("key-load-delay", 0)
                    await starting

                await ask_during(producer, pool, trouble)
        finally:
            pool.end()


@pytest.mark.parametrize(
    ("text", "is_not_now"),
    [
        ("READONLY You can't write against a read only replica.", True),
        ("READONLY You can't write against a read only replica. script: 2fae, on @user_script:1.", True),
        # Error text of Redis 6.2 for a script that writes to a replica.
        ("ERR Error running script (call to f_2fae): @user_script:9: @user_script: 9: -READONLY You can't write", True),
        ("MOVED 12182 127.0.0.1:7002", True),
        ("BUSY Redis is busy running a script", True),
        ("BUSYGROUP Consumer Group name already exists", False),
        ("OOM command not allowed when used memory > 'maxmemory'.", False),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", False),
    ],
)
def test_temporary_refusals_of_a_server_are_distinguished_from_permanent_ones(text: str, is_not_now: bool) -> None:
    assert Server("redis://localhost").is_not_now(ResponseError(text)) is is_not_now


async def test_a_failed_poll_for_workers_does_not_count_as_no_worker(
    own_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_RESTART_S", 0.0)
    look, seen = discovery.Liveness.check, list[int]()

    async def noted(self: discovery.Liveness, now: float) -> NoWorker | None:
        end = await look(self, now)
        seen.append(self.count)
        return end

    async def nobody_is_seen() -> bool:
        return seen[-1:] == [0]

    monkeypatch.setattr(discovery.Liveness, "check", noted)
    pool = Pool(own_server.url, "unseen", tmp_path)
    try:
        gate = gate_of(pool)
        worker = await asyncio.to_thread(lambda: pool.start("--lease-s", 3, command=gate.command))
        async with pool.producer() as producer:
            asked = asyncio.create_task(ask(producer, prompts(1)))
            await until_async(lambda: is_held(pool), "the worker holds the prompt")
            worker.signal(signal.SIGSTOP)
            await until_async(nobody_is_seen, "the worker's heartbeat has expired")
            os.kill(own_server.pid, signal.SIGSTOP)
            await asyncio.sleep(7)  # Stop the server for more than two leases of 3 s: the duration is what is tested.
            assert not asked.done()
            seen.clear()
            os.kill(own_server.pid, signal.SIGCONT)
            await until_async(nobody_is_seen, "the producer has looked again")
            monkeypatch.setattr(discovery, "_RESTART_S", DEADLINE_S)  # Wait longer for the worker from here on.
            gate.open()
            worker.signal(signal.SIGCONT)
            await asked
    finally:
        pool.end()


async def test_entries_that_lose_bytes_are_requested_again(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply that lost some bytes must not be filled up with bytes of the next reply."""
    pool.start()
    receive, entry, lossy = RawCommandConnection.data_received, 4, list[bytes]()

    def lose(connection: RawCommandConnection, data: bytes) -> None:
        head, line_end, value = data.partition(b"\r\n")[2].partition(b"\r\n")
        if not lossy and data.startswith(b"*1\r\n$") and value.startswith(stored[:16]):
            lossy.append(data)
            data = b"*1\r\n" + head + line_end + value[: -2 * entry] + value[-entry:] + b"*1\r\n$1"
        receive(connection, data)

    targets, row = [3, 1, 2], synthetic_row([1], vocab_size=V)
    async with pool.producer(cache_bytes=0) as producer:
        await producer.logprobs([1])
        key = pool.keys.row(producer.model.fingerprint) + encode_prompt([1], vocab_size=V, max_tokens=1).digest
        stored: bytes = pool.redis.get(key)  # type: ignore[assignment]
        monkeypatch.setattr(RawCommandConnection, "data_received", lose)
        assert np.array_equal(await producer.logprobs([1], targets=targets), row[targets])
    assert lossy
