"""Workers die, servers restart, connections break: requests still end in their rows."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from lmpool.embedded import EmbeddedServer
from lmpool.errors import NoWorker, WorkerError
from lmpool.producer import Producer, SyncProducer, crew
from lmpool.synthetic import synthetic_row
from tests.pool import DEADLINE_S, Pool, V, is_held, lmpool_command, until, until_async
from tests.scrape import free_port


async def ask_all(producer: Producer, prompts: list[list[int]]) -> None:
    """Ask for many prompts at once and check every value."""
    rows = await asyncio.gather(*map(producer.logprobs, prompts))
    for prompt, got in zip(prompts, rows, strict=True):
        assert np.array_equal(got, synthetic_row(prompt, vocab_size=V))


PROMPTS = [[i, j] for i in range(10) for j in range(20)]


async def test_a_killed_worker_loses_nothing(pool: Pool) -> None:
    victim = pool.start("--lease-s", 1, "--step-ms", 200)
    async with pool.producer() as producer:
        asked = asyncio.create_task(ask_all(producer, PROMPTS))
        await until_async(lambda: is_held(pool), "the worker holds prompts")
        victim.end()
        await asyncio.to_thread(pool.start, "--lease-s", 1)
        await asyncio.wait_for(asked, DEADLINE_S)
    assert pool.jobs() == 0
    assert not pool.names("*waiting*")


async def test_a_frozen_worker_that_wakes_up_late_does_no_harm(pool: Pool) -> None:
    frozen = pool.start("--lease-s", 1, "--step-ms", 100)
    async with pool.producer() as producer:
        asked = asyncio.create_task(ask_all(producer, PROMPTS))
        await until_async(lambda: is_held(pool), "the worker holds prompts")
        frozen.signal(signal.SIGSTOP)
        await asyncio.to_thread(pool.start, "--lease-s", 1)
        await asyncio.wait_for(asked, DEADLINE_S)
        frozen.signal(signal.SIGCONT)
        await ask_all(producer, [[500, i] for i in range(50)])
        frozen.signal(signal.SIGTERM)
        assert await asyncio.to_thread(frozen.wait) == 0


async def test_a_slow_step_is_not_stolen(pool: Pool) -> None:
    pool.start("--lease-s", 0.5, "--step-ms", 2500, "--max-batch", 4)
    pool.start("--lease-s", 0.5, "--step-ms", 2500, "--max-batch", 4)
    async with pool.producer() as producer:
        await ask_all(producer, [[i] for i in range(8)])

        async def counted() -> bool:
            return await pool.rows_computed() >= 8

        await until_async(counted, "the heartbeats count the rows")
        assert await pool.rows_computed() == 8


async def test_a_prompt_that_kills_workers_is_given_up_and_the_others_are_served(pool: Pool) -> None:
    # All at once: how long one takes to start is no matter then.
    for _ in range(4):
        pool.start("--lease-s", 1, "--crash-token", 99, "--max-batch", 64, wait=False)
    for worker in pool.workers:
        await asyncio.to_thread(worker.until_says, "serving ")
    async with pool.producer() as producer:
        good = asyncio.create_task(ask_all(producer, [[i] for i in range(40)]))
        poison = asyncio.create_task(producer.logprobs([99, 1]))
        await asyncio.wait_for(good, DEADLINE_S)
        with pytest.raises(WorkerError, match="given up after 3 deliveries"):
            await asyncio.wait_for(poison, DEADLINE_S)
    assert pool.redis.xlen(pool.keys.model("syn").dead) == 1
    await until_async(lambda: count_running(pool, 1), "three have died")
    assert pool.jobs() == 0


async def test_requests_wait_for_a_worker_that_is_loading(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the only worker of a large model has been killed, and a supervisor has started it again."""
    monkeypatch.setattr(crew, "_RESTART_S", 0.0)
    gate = tmp_path / "gate"

    def command() -> list[str]:
        return [sys.executable, "-m", "tests.gated_worker", pool.url, pool.prefix, str(free_port()), str(gate), "2"]

    first = await asyncio.to_thread(pool.start, "--lease-s", 2, "--step-ms", 60_000)
    async with pool.producer() as producer:
        asked = asyncio.create_task(producer.logprobs([1]))
        await until_async(lambda: is_held(pool), "the worker holds the prompt")
        pool._launch(command(), None, wait=False)
        await asyncio.to_thread(until, lambda: pool.names("loading"), "the other is loading")
        first.end()
        with pytest.raises(NoWorker, match="no row within 8 s: a worker is loading 'syn', none serves it yet"):
            await producer.logprobs([2], timeout=8)
        assert not asked.done(), "leases have passed"
        gate.touch()
        assert np.array_equal(await asked, synthetic_row([1], vocab_size=V))


async def count_running(pool: Pool, count: int) -> bool:
    return [worker.is_running for worker in pool.workers].count(True) == count


# The shell and the kernel each send a SIGHUP when a terminal closes.
@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGHUP] * 2], ids=["SIGTERM", "SIGHUP"])
async def test_a_signal_drains_and_deregisters(pool: Pool, numbers: list[signal.Signals]) -> None:
    worker = pool.start("--step-ms", 300, "--max-batch", 8)
    async with pool.producer() as producer:
        asked = asyncio.create_task(ask_all(producer, [[i] for i in range(8)]))
        await until_async(lambda: is_held(pool), "the worker holds prompts")
        for number in numbers:
            worker.signal(number)
            await asyncio.to_thread(worker.until_says, "stopping")
        await asyncio.wait_for(asked, DEADLINE_S)
        assert await asyncio.to_thread(worker.wait) == 0
        assert "nothing was left unfinished" in worker.text
        assert not pool.names("worker:*")
        assert not pool.redis.hlen(pool.keys.models())


def test_nohup_keeps_a_worker_beyond_its_terminal(pool: Pool) -> None:
    worker = pool.start(command=lambda: ["nohup", *lmpool_command()])
    worker.signal(signal.SIGHUP)
    with SyncProducer(redis=pool.url, prefix=pool.prefix) as producer:
        assert producer.logprobs([1]).shape == (V,)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert worker.text.count("stopping") == 1


def test_a_second_signal_stops_at_once(pool: Pool) -> None:
    worker = pool.start("--step-ms", 60_000)
    producer = pool.producer()

    async def ask() -> None:
        async with producer:
            request = asyncio.create_task(producer.logprobs([1]))
            await until_async(lambda: is_held(pool), "the worker holds the prompt")
            worker.signal(signal.SIGINT)
            await asyncio.to_thread(worker.until_says, "stopping")
            worker.signal(signal.SIGINT)
            assert await asyncio.to_thread(worker.wait) == 130
            request.cancel()

    asyncio.run(ask())


async def test_a_rolling_restart_fails_no_request(pool: Pool) -> None:
    options = ("--lease-s", 2, "--step-ms", 10, "--max-batch", 4)
    pool.start(*options)
    async with pool.producer() as producer:
        asked = asyncio.create_task(ask_all(producer, [[i % 500, i // 500] for i in range(2000)]))
        for _ in range(2):
            await until_async(lambda: is_held(pool), "the worker holds prompts")
            await asyncio.to_thread(pool.start, *options)
            pool.workers[-2].signal(signal.SIGTERM)
            assert await asyncio.to_thread(pool.workers[-2].wait) == 0
        await asyncio.wait_for(asked, DEADLINE_S)


@pytest.mark.parametrize("appendonly", [True, False])
async def test_requests_survive_a_restart_of_redis(short_dir: Path, tmp_path: Path, appendonly: bool) -> None:
    server = EmbeddedServer(memory_bytes=1 << 28, folder=short_dir / "s", appendonly=appendonly)
    server.start()
    pool = Pool(server.url, "restart", tmp_path)
    try:
        pool.start("--lease-s", 1, "--step-ms", 50, "--max-batch", 8)
        async with pool.producer() as producer:
            asked = asyncio.create_task(ask_all(producer, PROMPTS))
            await until_async(lambda: is_held(pool), "the worker holds prompts")
            await asyncio.to_thread(server.stop)
            await asyncio.to_thread(server.start)
            await asyncio.wait_for(asked, DEADLINE_S)
            await ask_all(producer, [[400, i] for i in range(50)])
    finally:
        pool.end()
        server.stop()


async def test_requests_survive_flushall_and_cut_connections(own_server: EmbeddedServer, tmp_path: Path) -> None:
    pool = Pool(own_server.url, "cut", tmp_path)
    try:
        pool.start("--lease-s", 1, "--step-ms", 50, "--max-batch", 8)
        async with pool.producer() as producer:
            for trouble in ("FLUSHALL", "CLIENT KILL TYPE normal"):
                prompts = [[len(trouble), i] for i in range(100)]
                asked = asyncio.create_task(ask_all(producer, prompts))
                await until_async(lambda: is_held(pool), "the worker holds prompts")
                pool.redis.execute_command(*trouble.split())  # type: ignore[no-untyped-call]
                await asyncio.wait_for(asked, DEADLINE_S)
    finally:
        pool.end()


async def test_evicted_bookkeeping_costs_no_row(pool: Pool) -> None:
    pool.start("--lease-s", 1, "--step-ms", 100, "--max-batch", 8)
    async with pool.producer() as producer:
        asked = asyncio.create_task(ask_all(producer, PROMPTS[:64]))
        await until_async(lambda: is_held(pool), "the worker holds prompts")
        for pattern in ("*waiting*", "*reply*"):
            for key in pool.redis.scan_iter(match=f"{pool.prefix}:{pattern}", count=1000):
                pool.redis.delete(key)
        await asyncio.wait_for(asked, DEADLINE_S)


async def test_undecodable_jobs_are_set_aside_with_a_reason(pool: Pool) -> None:
    worker = pool.start()
    keys = pool.keys.model("syn")
    for junk in (b"", b"\x80\x04K\x01.", b"\xdd\xff\xff\xff\xff", b"\x95\x02" + b"\xc0" * 4, b"x" * 100):
        pool.redis.xadd(keys.jobs, {"m": junk})
    pool.redis.xadd(keys.jobs, {"other": b"field"})

    async def set_aside() -> bool:
        return pool.redis.xlen(keys.dead) == 6 and pool.jobs() == 0

    await until_async(set_aside, "all junk is among the dead")
    async with pool.producer() as producer:
        await ask_all(producer, [[1]])
    assert worker.process.poll() is None


async def test_a_refused_row_is_an_error_and_not_a_hang(own_server: EmbeddedServer, tmp_path: Path) -> None:
    pool = Pool(own_server.url, "full", tmp_path)
    try:
        pool.start()
        async with pool.producer() as producer:
            await ask_all(producer, [[1]])
            pool.redis.config_set("maxmemory-policy", "noeviction")
            pool.redis.config_set("maxmemory", pool.redis.info("memory")["used_memory"] + 20_000)
            results = await asyncio.gather(*(producer.logprobs([2, i]) for i in range(64)), return_exceptions=True)
            assert any(isinstance(result, Exception) and "OOM" in str(result) for result in results)
            pool.redis.config_set("maxmemory", 1 << 28)
            await ask_all(producer, [[3, i] for i in range(10)])
    finally:
        pool.end()
