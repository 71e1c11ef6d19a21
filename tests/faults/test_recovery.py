"""If workers crash, servers restart or connections break, requests still return their rows."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from lmpool.embedded import EmbeddedServer
from lmpool.errors import NoWorker, ProtocolError, WorkerError
from lmpool.producer import Producer, SyncProducer
from lmpool.producer.client import discovery, submit
from lmpool.protocol.job import WIRE_VERSION, Job, digest_of, pack_jobs
from lmpool.synthetic import synthetic_row
from tests.support.gate import Gate
from tests.support.pool import (
    DEADLINE_S,
    Pool,
    V,
    WorkerProcess,
    is_held,
    lmpool_command,
    pending,
    until,
    until_async,
    until_done,
)
from tests.support.scrape import free_port


async def ask_all(producer: Producer, prompts: list[list[int]]) -> None:
    """Request many prompts concurrently and check every value."""
    rows = await asyncio.gather(*map(producer.logprobs, prompts))
    for prompt, got in zip(prompts, rows, strict=True):
        assert np.array_equal(got, synthetic_row(prompt, vocab_size=V))


PROMPTS = [[i, j] for i in range(10) for j in range(20)]


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """A gate at which the steps of the workers wait until a test opens it."""
    return Gate(tmp_path / "gate")


async def test_a_killed_worker_loses_nothing(pool: Pool) -> None:
    victim = pool.start("--lease-s", 1, "--step-ms", 600_000)
    async with pool.producer(when_absent="wait") as producer:
        asked = asyncio.create_task(ask_all(producer, PROMPTS))
        await until_async(lambda: is_held(pool), "the worker holds prompts")
        victim.end()
        await asyncio.to_thread(pool.start, "--lease-s", 1)
        await asyncio.wait_for(asked, DEADLINE_S)
    await until_done(pool)
    assert not pool.names("*waiting*")


async def test_a_frozen_worker_that_wakes_up_late_publishes_nothing_wrong(pool: Pool, gate: Gate) -> None:
    # The lease of the claiming worker (1 s) decides when a job is claimed, not the frozen worker's lease.
    frozen = pool.start("--lease-s", 60, command=gate.command)
    async with pool.producer(when_absent="wait") as producer:
        asked = asyncio.create_task(ask_all(producer, PROMPTS))
        await until_async(lambda: is_held(pool), "the worker holds prompts")
        frozen.signal(signal.SIGSTOP)
        await asyncio.to_thread(pool.start, "--lease-s", 1)
        await asyncio.wait_for(asked, DEADLINE_S)
        gate.open()
        frozen.signal(signal.SIGCONT)
        await ask_all(producer, [[500, i] for i in range(50)])
        frozen.signal(signal.SIGTERM)
        assert await asyncio.to_thread(frozen.wait) == 0


async def test_the_jobs_of_a_slow_step_are_not_claimed(pool: Pool, gate: Gate) -> None:
    lease_s = 5
    for _ in range(2):
        pool.start("--lease-s", lease_s, "--max-batch", 4, command=gate.command)
    async with pool.producer() as producer:
        asked = asyncio.create_task(ask_all(producer, [[i] for i in range(8)]))

        async def leases_have_passed() -> bool:
            seconds, micros = pool.redis.time()
            ages = [1000 * seconds + micros // 1000 - int(job["message_id"].split(b"-")[0]) for job in pending(pool)]
            return len(ages) == 8 and min(ages) > 1500 * lease_s

        await until_async(leases_have_passed, "all are held for longer than a lease")
        assert {job["times_delivered"] for job in pending(pool)} == {1}
        gate.open()
        await asked

        async def counted() -> bool:
            return await pool.rows_computed() >= 8

        await until_async(counted, "the heartbeats count the rows")
        assert await pool.rows_computed() == 8


async def test_a_worker_that_freezes_repeatedly_does_not_count_as_crashed_by_its_prompts(
    pool: Pool, gate: Gate
) -> None:
    """A suspended laptop or a changed server clock has this effect: the worker finds its leases expired."""
    lease_s = 1
    worker = pool.start("--lease-s", lease_s, command=gate.command)
    async with pool.producer(when_absent="wait") as producer:
        asked = asyncio.create_task(ask_all(producer, [[i] for i in range(3)]))
        await until_async(lambda: _are_held(pool, 3), "the worker holds them, and has room for more")
        for _ in range(6):
            worker.signal(signal.SIGSTOP)
            await until_async(lambda: _are_silent_for(pool, lease_s), "the leases pass")
            worker.signal(signal.SIGCONT)
            await until_async(lambda: _are_renewed(pool, lease_s), "the worker renews them")
        assert {job["times_delivered"] for job in pending(pool)} == {1}
        gate.open()
        await asked
    assert not pool.redis.exists(pool.keys.model("syn").dead)


async def _are_held(pool: Pool, count: int) -> bool:
    return len(pending(pool)) == count


async def _are_silent_for(pool: Pool, seconds: float) -> bool:
    return all(job["time_since_delivered"] > 1000 * seconds for job in pending(pool))


async def _are_renewed(pool: Pool, lease_s: float) -> bool:
    return all(job["time_since_delivered"] < 1000 * lease_s for job in pending(pool))


async def test_a_prompt_that_kills_workers_is_given_up_and_the_others_are_served(pool: Pool) -> None:
    # Start all workers at once, so that the duration of one start does not matter. The lease outlasts a short pause of
    # a worker: if other workers claimed its prompts meanwhile, good prompts would use up their deliveries too.
    for _ in range(4):
        pool.start("--lease-s", 3, "--crash-token", 99, "--max-batch", 64, wait=False)
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
    await until_done(pool)


async def test_requests_wait_for_a_worker_that_is_loading(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only worker was killed; its replacement, started by a supervisor, is still loading the model."""
    monkeypatch.setattr(discovery, "_RESTART_S", 0.0)
    loads = tmp_path / "loads"

    def command() -> list[str]:
        words = (pool.url, pool.prefix, str(free_port()), str(loads), "4")
        return [sys.executable, "-m", "tests.support.gated_worker", *words]

    first = await asyncio.to_thread(pool.start, "--lease-s", 4, "--step-ms", 600_000)
    async with pool.producer() as producer:
        asked = asyncio.create_task(producer.logprobs([1]))
        await until_async(lambda: is_held(pool), "the worker holds the prompt")
        pool._launch(command(), None, wait=False)
        await asyncio.to_thread(until, lambda: pool.names("loading"), "the other is loading")
        first.end()
        with pytest.raises(NoWorker, match="no row within 8 s: a worker is loading 'syn', none serves it yet"):
            await producer.logprobs([2], timeout=8)
        assert not asked.done(), "leases have passed"
        loads.touch()
        assert np.array_equal(await asked, synthetic_row([1], vocab_size=V))


async def count_running(pool: Pool, count: int) -> bool:
    return [worker.is_running for worker in pool.workers].count(True) == count


# Send SIGHUP twice: the shell and the kernel each send a SIGHUP when a terminal closes.
@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGHUP] * 2], ids=["SIGTERM", "SIGHUP"])
async def test_a_signal_drains_and_deregisters(pool: Pool, gate: Gate, numbers: list[signal.Signals]) -> None:
    worker = pool.start("--max-batch", 8, command=gate.command)
    async with pool.producer() as producer:
        asked = asyncio.create_task(ask_all(producer, [[i] for i in range(8)]))
        await until_async(lambda: is_held(pool), "the worker holds prompts")
        for number in numbers:
            worker.signal(number)
            await asyncio.to_thread(worker.until_says, "stopping")
        gate.open()
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
    worker = pool.start("--step-ms", 600_000)
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


async def test_a_rolling_restart_fails_no_request(pool: Pool, tmp_path: Path) -> None:
    gates = [Gate(tmp_path / f"gate-{number}") for number in range(3)]
    gates[-1].open()

    def start(gate: Gate) -> WorkerProcess:
        return pool.start("--lease-s", 2, "--max-batch", 4, command=gate.command)

    leaving = start(gates[0])
    async with pool.producer() as producer:
        asked = asyncio.create_task(ask_all(producer, [[i % 500, i // 500] for i in range(2000)]))
        for gate, following in pairwise(gates):
            await until_async(lambda: is_held(pool), "the worker holds prompts")
            worker = await asyncio.to_thread(start, following)
            leaving.signal(signal.SIGTERM)
            await asyncio.to_thread(leaving.until_says, "stopping")
            gate.open()
            assert await asyncio.to_thread(leaving.wait) == 0
            leaving = worker
        await asyncio.wait_for(asked, DEADLINE_S)


@pytest.mark.parametrize("appendonly", [True, False])
async def test_requests_survive_a_restart_of_redis(
    short_dir: Path, tmp_path: Path, gate: Gate, appendonly: bool
) -> None:
    server = EmbeddedServer(memory_bytes=1 << 28, folder=short_dir / "s", appendonly=appendonly)
    server.start()
    pool = Pool(server.url, "restart", tmp_path)
    try:
        pool.start("--lease-s", 1, "--step-ms", 50, "--max-batch", 8, command=gate.command)
        async with pool.producer(when_absent="wait") as producer:
            asked = asyncio.create_task(ask_all(producer, PROMPTS))
            await until_async(lambda: is_held(pool), "the worker holds prompts")
            await asyncio.to_thread(server.stop)
            gate.open()  # The worker computes rows and cannot publish them.
            await asyncio.to_thread(server.start)
            await asyncio.wait_for(asked, DEADLINE_S)
            await ask_all(producer, [[400, i] for i in range(50)])
    finally:
        pool.end()
        server.stop()


async def test_requests_survive_flushall_and_cut_connections(
    own_server: EmbeddedServer, tmp_path: Path, gate: Gate
) -> None:
    pool = Pool(own_server.url, "cut", tmp_path)
    try:
        pool.start("--lease-s", 1, "--step-ms", 50, "--max-batch", 8, command=gate.command)
        async with pool.producer() as producer:
            for trouble in ("FLUSHALL", "CLIENT KILL TYPE normal"):
                gate.shut()
                prompts = [[len(trouble), i] for i in range(100)]
                asked = asyncio.create_task(ask_all(producer, prompts))
                await until_async(lambda: is_held(pool), "the worker holds prompts")
                pool.redis.execute_command(*trouble.split())  # type: ignore[no-untyped-call]
                gate.open()
                await asyncio.wait_for(asked, DEADLINE_S)
    finally:
        pool.end()


async def test_evicted_bookkeeping_costs_no_row(pool: Pool, gate: Gate) -> None:
    pool.start("--lease-s", 1, "--max-batch", 8, command=gate.command)
    async with pool.producer() as producer:
        asked = asyncio.create_task(ask_all(producer, PROMPTS[:64]))
        await until_async(lambda: is_held(pool), "the worker holds prompts")
        for pattern in ("*waiting*", "*reply*"):
            for key in pool.redis.scan_iter(match=f"{pool.prefix}:{pattern}", count=1000):
                pool.redis.delete(key)
        gate.open()
        await asyncio.wait_for(asked, DEADLINE_S)


@pytest.mark.parametrize("stored", ["a list", "an empty string", "no row"])
async def test_foreign_values_under_keys_of_rows_are_replaced(pool: Pool, gate: Gate, stored: str) -> None:
    pool.start("--max-batch", 8, command=gate.command)
    async with pool.producer(cache_bytes=0) as producer:
        asked = asyncio.create_task(ask_all(producer, PROMPTS[:16]))
        await until_async(lambda: is_held(pool), "the worker holds prompts")
        prefix = pool.keys.row(producer.model.fingerprint)
        for ids in PROMPTS[:16]:
            key = prefix + digest_of(np.asarray(ids, "<u4").tobytes())
            if stored == "a list":
                pool.redis.rpush(key, b"x")
            else:
                pool.redis.set(key, b"" if stored == "an empty string" else b"x" * 2064)
        gate.open()
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


async def test_jobs_of_another_wire_version_become_dead_letters_and_end_their_requests(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.start()

    def of_a_later_version(jobs: Iterable[Job]) -> list[bytes]:
        packed = map(bytearray, pack_jobs(jobs))
        return [bytes([data[0] + 1, WIRE_VERSION + 2]) + data[2:] + b"\x01" for data in packed]  # With one more field.

    monkeypatch.setattr(submit, "pack_jobs", of_a_later_version)
    async with pool.producer() as producer:
        for ask in (producer.logprobs([1, 2]), producer.topk([1, 2], 3), producer.logprobs([1, 2], targets=[3])):
            with pytest.raises(ProtocolError, match=f"a job of wire version {WIRE_VERSION + 2}, and this release"):
                await ask
    assert pool.redis.xlen(pool.keys.model("syn").dead) == 3
    assert pool.jobs() == 0


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
