"""Clients send more requests than the pool can compute: clients take turns, and memory stays bounded."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from lmpool.embedded import EmbeddedServer
from lmpool.errors import QueueFull, SettingsError
from lmpool.producer import Producer
from lmpool.protocol.job import digest_of
from lmpool.synthetic import synthetic_row
from tests.support.gate import Gate, GatedBackend, OneByOne, gated_worker, until_full
from tests.support.pool import DEADLINE_S, Pool, V, is_held, until_async, until_done
from tests.support.servers.clocks import SetClock

BATCH = 8


def own_bytes() -> int:
    """Bytes of memory that this process uses, without segments of shared memory."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


async def checked(producer: Producer, prompt: list[int]) -> None:
    assert np.array_equal(await producer.logprobs(prompt), synthetic_row(prompt, vocab_size=V))


async def test_a_single_prompt_is_computed_within_ten_batches_next_to_a_bulk_client(pool: Pool) -> None:
    gate = OneByOne()
    backend = GatedBackend(gate, BATCH)

    async def compute_a_batch() -> None:
        await until_full(pool, BATCH)
        done = len(backend.computed)
        gate.let(1)
        await until_async(lambda: _is(len(backend.computed) > done), "a batch is computed")

    # A long lease: the worker shares this busy event loop with all requests, and must not miss its lease.
    worker = gated_worker(pool, backend, lease_s=60.0)
    async with worker, pool.producer(timeout=3000) as greedy, pool.producer(timeout=3000) as modest:
        many = [asyncio.create_task(greedy.logprobs([i % 500, i // 500])) for i in range(9000)]
        await until_async(lambda: has_queued(pool, 8192), "as many as may be are queued")
        for prompt in ([501, i] for i in range(10)):
            before = len(backend.computed)
            request = asyncio.create_task(checked(modest, prompt))
            await until_waited_for(pool, prompt)
            await until_async(lambda: is_the_way_clear(pool), "what was in its way is behind it")
            while _ids(prompt) not in backend.computed[before:]:
                await compute_a_batch()
            assert len(backend.computed) - before <= 10 * BATCH
            await request
        for task in many:
            task.cancel()
        await asyncio.gather(*many, return_exceptions=True)
        gate.open()
        await checked(greedy, [501, 0])


async def _is(condition: bool) -> bool:
    return condition


def _ids(prompt: list[int]) -> bytes:
    return np.array(prompt, "<u4").tobytes()


async def has_queued(pool: Pool, count: int) -> bool:
    return pool.jobs() >= count


async def is_the_way_clear(pool: Pool) -> bool:
    """Whether at most three batches are queued: a bulk client queues fewer prompts when it detects another client."""
    return sum(int(pool.redis.xlen(stream)) for stream in pool.streams()) - pool.held() <= 3 * BATCH


async def until_waited_for(pool: Pool, prompt: list[int]) -> None:
    """Wait until the prompt's waiting key exists, so that the prompt was submitted."""
    key = pool.keys.model("syn").waiting + digest_of(_ids(prompt))
    await until_async(lambda: _is(bool(pool.redis.exists(key))), f"{prompt} is sent")


async def test_all_prompts_of_a_client_with_many_prompts_end(pool: Pool) -> None:
    pool.start("--max-batch", 512)
    pool.start("--max-batch", 512)
    async with pool.producer() as producer:
        await asyncio.gather(*(checked(producer, [i % 500, i // 500]) for i in range(12_000)))
    await until_done(pool)
    assert not pool.names("*backlog*")
    assert not pool.names("*virtual_time*")


async def test_cancelled_prompts_leave_the_backlog(pool: Pool, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    async with gated_worker(pool, GatedBackend(gate, batch=1)), pool.producer() as producer:
        tasks = [asyncio.create_task(producer.logprobs([i])) for i in range(200)]
        await until_async(lambda: has_queued(pool, 200), "all are queued")
        for task in tasks[5:]:
            task.cancel()

        async def taken_back() -> bool:
            return pool.jobs() <= 5

        await until_async(taken_back, "the others are taken back")
        gate.open()
        await asyncio.gather(*tasks[:5])


async def test_prompts_without_a_waiting_client_are_not_computed(clocked: tuple[Pool, SetClock]) -> None:
    """A killed client leaves its prompts in the queue; workers skip them after its deadline."""
    pool, set_clock = clocked
    script = """
        import asyncio, sys
        from lmpool.producer import Producer
        async def main():
            async with Producer(redis=sys.argv[1], prefix=sys.argv[2], timeout=60) as producer:
                await asyncio.gather(*(producer.logprobs([i]) for i in range(200)))
        asyncio.run(main())
    """
    first = await asyncio.to_thread(pool.start, "--max-batch", 1, "--step-ms", 600_000, "--lease-s", 10)
    client = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script), pool.url, pool.prefix])
    try:
        await until_async(lambda: has_queued(pool, 200), "all are queued")
    finally:
        client.kill()
        client.wait()
    first.end()
    await asyncio.to_thread(set_clock, "+5m")
    assert not pool.names("*waiting*"), "nobody waits any more"
    await asyncio.to_thread(pool.start, "--max-batch", 8, "--lease-s", 1)
    async with pool.producer() as producer:
        await checked(producer, [300])

        async def empty() -> bool:
            return pool.jobs() == 0

        await until_async(empty, "the queue is empty")
    # Only prompts that the killed worker held may be computed: another worker claims them after a lease.
    assert len(pool.names("row:*")) <= 4


async def test_a_request_ends_at_once_if_the_queue_is_full_and_the_caller_chose_so(pool: Pool) -> None:
    pool.start("--step-ms", 600_000, "--max-batch", 1, "--queue-limit", 3)
    async with pool.producer() as patient, pool.producer(when_full="raise", timeout=3000) as impatient:
        asked = [asyncio.create_task(patient.logprobs([i])) for i in range(3)]
        await until_async(lambda: is_held(pool), "the worker holds a prompt")

        async def full() -> bool:
            return pool.jobs() == 3

        await until_async(full, "the queue is full")
        with pytest.raises(QueueFull, match="limit of 3 prompts.*--queue-limit"):
            await asyncio.wait_for(impatient.logprobs([9]), DEADLINE_S)
        with pytest.raises(QueueFull, match="limit of 3 prompts"):
            await asyncio.wait_for(impatient.batch_logprobs([[8], [9]]), DEADLINE_S)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


@pytest.mark.parametrize("value", ["block", None, True])
def test_when_full_accepts_two_values(value: object) -> None:
    with pytest.raises(SettingsError, match="when_full: .* is not one of wait, raise"):
        Producer(when_full=value)  # type: ignore[arg-type]


async def test_broken_connections_do_not_raise_the_number_of_queued_prompts_of_a_client(
    own_server: EmbeddedServer, tmp_path: Path
) -> None:
    pool = Pool(own_server.url, "cut", tmp_path)
    try:
        pool.start("--max-batch", 4, "--step-ms", 600_000)
        async with pool.producer(timeout=3000) as producer:
            prompts = [[i % 500, i // 500] for i in range(12_000)]
            tasks = [asyncio.create_task(producer.logprobs(prompt)) for prompt in prompts]
            await until_async(lambda: has_queued(pool, 8192), "the server has its share")
            for further in (100, 200, 300):
                pool.redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")  # type: ignore[no-untyped-call]
                # For 100 cancelled prompts the client submits 100 other prompts when it has connected again.
                for task in tasks[further : further + 100]:
                    task.cancel()
                await until_waited_for(pool, prompts[8192 + further - 1])
                assert pool.jobs() <= 8192 + further, "its share, and what it could not take back"
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        pool.end()


async def test_a_hundred_thousand_awaits_take_bounded_memory(pool: Pool) -> None:
    """Rows of 100,000 prompts would take 26 GB, so the producer must not fetch rows before tasks can take them."""
    wide = 65_536
    pool.start("--vocab-size", wide, "--max-batch", 64, "--encoding", "bf16")
    answered = 0
    async with pool.producer(cache_bytes=0, timeout=600) as producer:

        async def ask(i: int) -> None:
            nonlocal answered
            await producer.logprobs([i % 60_000, i // 60_000])
            answered += 1
            if answered % 50 == 0:
                taken.append(own_bytes())

        taken = [own_bytes()]
        tasks = [asyncio.create_task(ask(i)) for i in range(100_000)]

        async def some() -> bool:
            return answered >= 3000

        await until_async(some, "rows come")
        grown = max(taken) - taken[0]
        # 600 MiB suffice for 100,000 pending requests and for some rows in flight.
        assert grown < 600 * 2**20, f"{grown / 2**20:.0f} MB"
        print(f"peak of 100,000 awaits: {grown / 2**20:.0f} MB, the tasks included")
        assert pool.jobs() <= 8192, "the server has a part of them only"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
