"""Workers and commands warn of full servers and of unsuitable settings, and errors name these causes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from lmpool.broker.server import Server
from lmpool.broker.server_checks import ServerMemory, read_memory
from lmpool.embedded import EmbeddedServer
from lmpool.errors import DeadlineExceeded, NoWorker, ServerError
from lmpool.producer.client import discovery
from lmpool.producer.client.submit import Submitter
from lmpool.testing.front import Front
from tests.support.gate import Gate, GatedBackend, gated_worker
from tests.support.pool import Pool, is_held, run_lmpool, until, until_async

WARNING = "the server's memory is not set up for a pool: "


@pytest.fixture
def own_pool(own_server: EmbeddedServer, tmp_path: Path) -> Iterator[Pool]:
    """A pool on a server that no other test uses."""
    pool = Pool(own_server.url, "memory", tmp_path)
    yield pool
    pool.end()


@pytest.mark.parametrize(
    ("limit", "policy", "said"),
    [
        (1 << 30, "volatile-lru", None),
        (1 << 30, "volatile-ttl", None),
        (0, "volatile-lru", "maxmemory is 0"),
        (1 << 30, "noeviction", "maxmemory-policy is noeviction"),
        (0, "noeviction", "noeviction"),
        (1 << 30, "allkeys-lru", "may drop queues"),
    ],
)
def test_unsuitable_settings_cause_a_warning(limit: int, policy: str, said: str | None) -> None:
    doubt = ServerMemory(1 << 20, limit, policy, 3).doubt()
    if said is None:
        assert doubt is None
    else:
        assert doubt is not None
        assert said in doubt
        assert doubt.endswith("set maxmemory, and volatile-lru")


def test_workers_status_and_bench_warn_once_about_default_settings(own_pool: Pool) -> None:
    options = ("--redis", own_pool.url, "--prefix", own_pool.prefix)
    commands = (("status",), ("bench", "--prompts", "5", "--length", "2"))
    assert WARNING not in own_pool.start().text
    for command in commands:
        assert WARNING not in run_lmpool(*command, *options).stderr
    own_pool.redis.config_set("maxmemory-policy", "noeviction")
    own_pool.redis.config_set("maxmemory", 0)
    assert own_pool.start().text.count(WARNING) == 1
    for command in commands:
        done = run_lmpool(*command, *options)
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stderr.splitlines() if WARNING in line]
        assert "maxmemory is 0" in line
        assert "noeviction" in line


def test_status_shows_the_memory_and_the_last_heartbeat_of_each_worker(own_pool: Pool) -> None:
    own_pool.start()
    options = ("--redis", own_pool.url, "--prefix", own_pool.prefix)
    text = run_lmpool("status", *options).stdout
    assert "of 268.4 MB (maxmemory), volatile-lru, 0 keys evicted since its start" in text
    assert "heartbeat" in text
    (model,) = json.loads(run_lmpool("status", "--json", *options).stdout)
    assert model["server_memory"]["limit_bytes"] == 1 << 28
    assert model["server_memory"]["policy"] == "volatile-lru"


def test_bench_reports_evictions(own_pool: Pool) -> None:
    size = 1 << 16
    own_pool.start("--vocab-size", size)
    own_pool.redis.config_set("maxmemory", own_pool.redis.info("memory")["used_memory"] + 8_000_000)
    options = ("--redis", own_pool.url, "--prefix", own_pool.prefix, "--prompts", "60", "--concurrency", "4")
    done = run_lmpool("bench", "--json", *options)
    assert done.returncode == 0, done.stderr
    evicted = json.loads(done.stdout)["evicted_keys"]
    assert evicted > 0
    assert f"the server evicted {evicted} keys during the benchmark" in done.stderr


def make_rows_go(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    """Delete every row just before the producer fetches it."""
    fetch = Submitter.fetch

    async def too_late(submitter: Submitter, digests: Sequence[bytes], **options: bool) -> None:
        for key in pool.redis.scan_iter(f"{pool.prefix}:row:*"):
            pool.redis.delete(key)
        await fetch(submitter, digests, **options)

    monkeypatch.setattr(Submitter, "fetch", too_late)


async def late(pool: Pool, text: str = "the row was gone") -> str:
    """Send requests until one ends without a row for the reason `text`; return the error's text."""
    ends: list[DeadlineExceeded] = []
    async with pool.producer(cache_bytes=0) as producer:

        async def is_told() -> bool:
            # If the event loop is blocked for the whole timeout, no row is lost yet, and the error has another reason.
            with pytest.raises(DeadlineExceeded) as caught:
                await producer.logprobs([1], timeout=2)
            ends.append(caught.value)
            return text in str(caught.value)

        await until_async(is_told, f"it says {text!r}")
    assert type(ends[-1]) is DeadlineExceeded
    return str(ends[-1])


async def test_the_error_for_rows_that_were_lost_before_they_were_fetched_names_the_causes(
    own_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asyncio.to_thread(own_pool.start, "--lease-s", 600)
    make_rows_go(monkeypatch, own_pool)
    said = await late(own_pool, " times. ")
    assert said.startswith("no row within 2 s: the row was gone from the server before it could be fetched, ")
    assert "evicts rows of 0.00206 MB" in said
    assert "raise maxmemory" in said
    assert "add workers" not in said


async def test_a_row_evicted_together_with_its_notification_is_reported(own_pool: Pool, tmp_path: Path) -> None:
    def waiting() -> list[bytes]:
        return list(own_pool.redis.scan_iter(f"{own_pool.prefix}:*waiting*"))

    async def is_asked_again() -> bool:
        return bool(waiting())

    async def is_told_as_gone() -> bool:
        with pytest.raises(DeadlineExceeded) as caught:
            await producer.logprobs([1], timeout=0.1)
        return "the row was gone from the server before it could be fetched" in str(caught.value)

    backend = GatedBackend(Gate(tmp_path / "gate"))
    async with gated_worker(own_pool, backend, lease_s=1.0), own_pool.producer(timeout=3000) as producer:
        patient = asyncio.create_task(producer.logprobs([1]))
        await until_async(lambda: is_held(own_pool), "the worker holds it")
        # Delete the waiting key, as if the server had evicted the row, the reply stream and this key.
        own_pool.redis.delete(*waiting())
        await until_async(is_asked_again, "it is asked for again, after a lease")
        await until_async(is_told_as_gone, "who asks for it hears that it was gone")
        backend.gate.open()
        await patient


@pytest.mark.parametrize("trouble", ["full", "replica"])
@pytest.mark.parametrize("name", ["syn", None])
async def test_a_model_that_could_not_be_registered_has_this_reason(
    own_pool: Pool, trouble: str, name: str | None
) -> None:
    change, undo, word = TROUBLES[trouble]
    change(own_pool)
    try:
        with pytest.raises(ServerError, match=word) as caught:
            await own_pool.producer(name).open()
        assert "start a worker" not in str(caught.value)
    finally:
        undo(own_pool)


@pytest.mark.parametrize("trouble", ["full", "replica"])
async def test_workers_whose_heartbeats_are_refused_are_not_reported_as_ended(
    own_pool: Pool, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.setattr(discovery, "_RESTART_S", 0.0)
    worker = await asyncio.to_thread(own_pool.start, "--lease-s", 5, "--step-ms", 600_000)
    looks: list[NoWorker | None] = []
    refused: list[int] = []
    look = discovery.Liveness.check

    async def noted(self: discovery.Liveness, now: float) -> NoWorker | None:
        try:
            looks.append(await look(self, now))
        except Exception:
            refused.append(1)
            raise
        return looks[-1]

    monkeypatch.setattr(discovery.Liveness, "check", noted)
    change, undo, word = TROUBLES[trouble]
    async with own_pool.producer() as producer:
        asked = asyncio.ensure_future(producer.logprobs([1]))
        await until_async(lambda: is_held(own_pool), "the worker holds the prompt")
        change(own_pool)
        try:
            await asyncio.to_thread(worker.until_says, "its heartbeat is refused: ")

            async def has_missed() -> bool:
                return len(refused) >= 3

            await until_async(has_missed, "the producer has seen no worker for longer than a lease")
            with pytest.raises(ServerError, match=f"no row within 1 s: .*({word})"):
                await producer.logprobs([2, 2], timeout=1)
            assert not asked.done()
        finally:
            undo(own_pool)
        looks.clear()

        async def has_seen_it() -> bool:
            return len(looks) >= 2

        await until_async(has_seen_it, "the worker is seen again")
        assert not asked.done()
        asked.cancel()
    assert not any(looks)


TROUBLES: dict[str, tuple[Callable[[Pool], Any], Callable[[Pool], Any], str]] = {
    "full": (
        lambda pool: (pool.redis.config_set("maxmemory-policy", "noeviction"), pool.redis.config_set("maxmemory", 1)),
        lambda pool: pool.redis.config_set("maxmemory", 1 << 28),
        "maxmemory",
    ),
    # Make the server a replica of a missing master, so that it serves reads and refuses writes.
    "replica": (
        lambda pool: pool.redis.replicaof("127.0.0.1", "1"),
        lambda pool: pool.redis.replicaof("NO", "ONE"),
        "READONLY|replica",
    ),
}


async def test_the_memory_of_a_cluster_is_that_of_its_fullest_master(pool: Pool) -> None:
    redis = Server(pool.url).client()
    memory = await read_memory(redis)
    await redis.aclose()
    assert memory is not None
    assert memory.limit_bytes > memory.used_bytes > 0
    assert memory.policy == "volatile-lru"


async def test_evictions_of_a_cluster_are_summed_over_its_masters(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"maxmemory": 100, "maxmemory_policy": "volatile-lru"}
    nodes = {
        "fuller": {**told, "used_memory": 90, "evicted_keys": 0},
        "emptier": {**told, "used_memory": 50, "evicted_keys": 3},
    }

    async def info(redis: Redis, section: str) -> dict[str, dict[str, Any]]:
        return nodes

    monkeypatch.setattr("lmpool.broker.server_checks._info", info)
    redis: Any = None
    assert await read_memory(redis) == ServerMemory(90, 100, "volatile-lru", 3)


async def test_the_pool_in_memory_causes_no_warning(short_dir: Path) -> None:
    async with Front(short_dir / "s"):
        redis = Server(f"unix://{short_dir}/s").client()
        memory = await read_memory(redis)
        await redis.aclose()
        assert memory is None or memory.doubt() is None


def test_the_queue_of_a_removed_model_expires(own_pool: Pool) -> None:
    own_pool.start("--lease-s", 1).end()
    keys = own_pool.keys.model("syn")
    own_pool.redis.xadd(keys.dead, {"e": "x"})
    assert own_pool.redis.ttl(keys.jobs) == own_pool.redis.ttl(keys.dead) == -1
    own_pool.start("--lease-s", 1, model="other")
    until(lambda: not own_pool.redis.hexists(own_pool.keys.models(), "syn"), "the info is swept")
    queues = (keys.jobs, keys.dead)  # the worker sets the two limits in separate commands
    until(lambda: all(0 < own_pool.redis.ttl(key) <= 7 * 24 * 3600 for key in queues), "the queues expire")
