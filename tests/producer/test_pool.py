"""Tests of the main path, on a pool of real processes: programs send prompts and get rows."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from redis.asyncio import Redis, RedisCluster

from lmpool.errors import LMPoolError, ModelMismatch
from lmpool.producer import Producer, SyncProducer
from lmpool.synthetic import synthetic_row
from tests.support.pool import DEADLINE_S, Pool, V, is_held, until, until_async, until_done


def row(prompt: list[int], vocab_size: int = V) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return synthetic_row(prompt, vocab_size=vocab_size)


async def test_a_row_arrives_bit_for_bit(pool: Pool) -> None:
    pool.start()
    async with pool.producer() as producer:
        got = await producer.logprobs([1, 2, 3])
        assert got.dtype == np.float32
        assert got.shape == (V,)
        assert np.array_equal(got, row([1, 2, 3]))
        assert producer.model.name == "syn"
        assert producer.model.vocab_size == V


@pytest.mark.parametrize("encoding", ["f32", "bf16"])
@pytest.mark.parametrize("vocab_size", [1, 64, 49_152])
async def test_every_size_and_encoding_gives_the_same_rows(pool: Pool, encoding: str, vocab_size: int) -> None:
    pool.start("--vocab-size", vocab_size, "--encoding", encoding)
    prompts = [[i % vocab_size, (7 * i) % vocab_size, 0] for i in range(50)]
    async with pool.producer(cache_bytes=0) as producer:
        for _ in range(2):  # First computed, then read from the cache in Redis.
            got = await asyncio.gather(*map(producer.logprobs, prompts))
            for prompt, got_row in zip(prompts, got, strict=True):
                assert np.array_equal(got_row, row(prompt, vocab_size))


async def test_small_rows_and_results_are_carried_by_notifications(pool: Pool) -> None:
    pool.start("--vocab-size", 64, "--max-batch", 8)
    async with pool.producer(cache_bytes=0) as producer:
        prompts = [[token, 1] for token in range(64)]
        for got, prompt in zip(await asyncio.gather(*map(producer.logprobs, prompts)), prompts, strict=True):
            assert np.array_equal(got, row(prompt, 64))
            with pytest.raises(ValueError, match="read-only"):
                got[0] = 0
        assert producer.stats().computed == len(prompts)
        # Send requests one by one: if the client did not trim its reply stream, it would have 128 entries.
        for token in range(64):
            assert np.array_equal(await producer.logprobs([token, 2]), row([token, 2], 64))
            scores = await producer.score([token], list(range(1 + token % 3)))
            assert scores.shape == (1 + token % 3,)
        (reply,) = pool.redis.scan_iter(match=pool.keys.model("syn").reply("*").decode())

        async def is_short() -> bool:
            return int(pool.redis.xlen(reply)) < 64

        await until_async(is_short, "what has been read is removed")
        # The rows are still in the cache.
        before = producer.stats().cache_hits
        assert np.array_equal(await producer.logprobs([5, 2]), row([5, 2], 64))
        assert producer.stats().cache_hits == before + 1


async def test_all_kinds_of_integer_sequences_are_the_same_prompt(pool: Pool) -> None:
    pool.start()
    async with pool.producer() as producer:
        kinds = [[5, 6], (5, 6), np.array([5, 6]), np.array([5, 6], np.uint8), torch.tensor([5, 6])]
        for ids in kinds:
            assert np.array_equal(await producer.logprobs(ids), row([5, 6]))
        assert producer.stats().computed == 1


async def test_returned_rows_are_read_only(pool: Pool) -> None:
    pool.start()
    async with pool.producer() as producer:
        got = await producer.logprobs([1])
        assert not got.flags.writeable
        with pytest.raises(ValueError, match="cannot set WRITEABLE"):
            got.flags.writeable = True
        batch = await producer.batch_logprobs([[1], [2]])
        batch[:] = 0  # The caller owns the array of a batch.
        assert np.array_equal(await producer.logprobs([1]), row([1]))


async def test_a_batch_is_one_array_in_the_order_of_its_prompts(pool: Pool) -> None:
    pool.start()
    async with pool.producer() as producer:
        prompts = [[3], [1, 2], [3], [9] * 40]
        got = await producer.batch_logprobs(prompts)
        assert got.shape == (4, V)
        assert got.dtype == np.float32
        for got_row, prompt in zip(got, prompts, strict=True):
            assert np.array_equal(got_row, row(prompt))
        assert (await producer.batch_logprobs([])).shape == (0, V)
        assert np.array_equal(await producer.batch_logprobs(np.array([[3], [4]])), np.stack([row([3]), row([4])]))
        assert producer.stats().computed == 4


async def test_stats_count_the_origin_of_each_row(pool: Pool) -> None:
    pool.start()
    async with pool.producer() as first, pool.producer() as second:
        await asyncio.gather(first.logprobs([1]), first.logprobs([1]), first.logprobs([2]))
        await first.logprobs([1])
        await second.logprobs([1])
        stats = first.stats()
        assert (stats.requests, stats.computed, stats.joined, stats.local_hits, stats.cache_hits) == (4, 2, 1, 1, 0)
        assert (second.stats().requests, second.stats().cache_hits, second.stats().computed) == (1, 1, 0)


async def test_ten_thousand_awaits_at_once_in_one_loop(pool: Pool) -> None:
    pool.start("--vocab-size", 64)
    prompts = [[i % 64, i // 64 % 64, i // 4096] for i in range(10_000)]
    async with pool.producer() as producer:
        rows = await asyncio.gather(*map(producer.logprobs, prompts))
        for prompt, got in zip(prompts, rows, strict=True):
            assert np.array_equal(got, row(prompt, 64))
        assert producer.stats().computed == len(prompts)
    await until_done(pool)  # Datagrams can bring the last rows before their jobs end.


CLIENT = """
    import asyncio, json, sys
    import numpy as np
    from lmpool.producer import Producer
    from lmpool.synthetic import synthetic_row

    async def main(url, prefix, V):
        prompts = [[i, j] for i in range(20) for j in range(20)]
        async with Producer(redis=url, prefix=prefix) as producer:
            print("ready", flush=True)
            sys.stdin.readline()
            rows = await asyncio.gather(*map(producer.logprobs, prompts))
            wrong = sum(not np.array_equal(r, synthetic_row(p, vocab_size=V)) for p, r in zip(prompts, rows))
            stats = producer.stats()
            print(json.dumps([wrong, stats.requests, stats.computed]))

    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


async def test_three_clients_and_two_workers_compute_each_prompt_once(pool: Pool) -> None:
    for _ in range(2):
        pool.start("--step-ms", 5, "--lease-s", 10)
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(CLIENT), pool.url, pool.prefix, str(V)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    for client in clients:
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"
    for client in clients:
        assert client.stdin is not None
        client.stdin.write("go\n")
        client.stdin.flush()
    results = [json.loads(client.communicate(timeout=DEADLINE_S)[0]) for client in clients]
    assert [result[0] for result in results] == [0, 0, 0]
    assert sum(result[1] for result in results) == 1200
    assert sum(result[2] for result in results) == 400

    # Compute 64 more rows: when heartbeats count these rows, they also count all earlier rows.
    async with pool.producer() as producer:
        await producer.batch_logprobs([[100 + i] for i in range(64)])

    async def counted() -> bool:
        return await pool.rows_computed() >= 464

    await until_async(counted, "the workers' heartbeats count the rows")
    assert await pool.rows_computed() == 464


async def test_a_cancelled_await_leaves_no_keys(pool: Pool) -> None:
    frozen = pool.start("--max-batch", 1, "--lease-s", 60)
    async with pool.producer() as producer:
        frozen.signal(signal.SIGSTOP)
        tasks = [asyncio.create_task(producer.logprobs([i])) for i in range(20)]

        async def queued() -> bool:
            return len(pool.names("*waiting*")) == 20

        await until_async(queued, "all prompts are queued")
        for task in tasks[5:]:
            task.cancel()

        async def are_taken_back() -> bool:
            return pool.jobs() == 5

        await until_async(are_taken_back, "what was cancelled is not queued any more")
        frozen.signal(signal.SIGCONT)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results[5:])
        for index, got in enumerate(results[:5]):
            assert isinstance(got, np.ndarray)
            assert np.array_equal(got, row([index]))

        async def empty() -> bool:
            return pool.jobs() == 0 and not pool.names("*waiting*")

        await until_async(empty, "queue and waiting keys are empty")
        assert producer.stats().failed == 15
        assert np.array_equal(await producer.logprobs([19]), row([19]))
    assert frozen.process.poll() is None
    assert not pool.names("*reply*")


async def test_closing_a_producer_leaves_no_key_of_its_own(pool: Pool) -> None:
    pool.start("--step-ms", 600_000, "--max-batch", 1)
    producer = pool.producer()
    await producer.open()
    tasks = [asyncio.create_task(producer.logprobs([i])) for i in range(10)]

    async def queued() -> bool:
        return len(pool.names("*waiting*")) == 10

    await until_async(queued, "all prompts are queued")
    await producer.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert any(isinstance(result, LMPoolError) and "closed" in str(result) for result in results)
    until(lambda: pool.jobs() == 0 and not pool.names("*waiting*"), "nothing is queued any more")
    until(lambda: not pool.names("*reply*"), "the reply stream is deleted")


def test_one_producer_survives_several_event_loops(pool: Pool) -> None:
    pool.start()
    producer = pool.producer()
    for token in range(3):
        got = asyncio.run(producer.logprobs([token]))
        assert np.array_equal(got, row([token]))

    async def as_context() -> None:
        async with producer:
            assert np.array_equal(await producer.logprobs([7]), row([7]))

    asyncio.run(as_context())
    asyncio.run(as_context())
    assert np.array_equal(asyncio.run(producer.logprobs([8])), row([8]))
    assert not pool.names("*reply*")


CLOSED_LOOPS = """
    import asyncio, sys
    import numpy as np
    from lmpool.producer import Producer
    from lmpool.synthetic import synthetic_row

    producer = Producer(redis=sys.argv[1], prefix=sys.argv[2])
    for token in range(3):
        loop = asyncio.new_event_loop()
        row = loop.run_until_complete(producer.logprobs([token]))
        assert np.array_equal(row, synthetic_row([token], vocab_size=int(sys.argv[3])))
        loop.close()
    print("fine")
"""


def test_a_loop_closed_without_cancelling_its_tasks_is_harmless(pool: Pool) -> None:
    pool.start()
    # Use another process, whose output shows whether asyncio logs tasks that were never cancelled.
    script = [sys.executable, "-c", textwrap.dedent(CLOSED_LOOPS), pool.url, pool.prefix, str(V)]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.stdout == "fine\n", ended.stderr
    assert ended.returncode == 0


def test_the_sync_producer_needs_no_event_loop(pool: Pool) -> None:
    pool.start()
    with SyncProducer(redis=pool.url, prefix=pool.prefix) as producer:
        assert np.array_equal(producer.logprobs([1, 2]), row([1, 2]))
        assert producer.batch_logprobs([[1, 2], [3]]).shape == (2, V)
        assert producer.model.vocab_size == V
        assert producer.stats().computed == 2
    producer.close()
    with pytest.raises(LMPoolError, match="closed"):
        producer.logprobs([1])


async def test_the_sync_producer_works_inside_a_running_event_loop(pool: Pool) -> None:
    pool.start()
    with SyncProducer(redis=pool.url, prefix=pool.prefix) as producer:
        assert np.array_equal(producer.logprobs([4]), row([4]))


async def test_a_redis_client_can_be_passed_instead_of_a_url(pool: Pool) -> None:
    pool.start()
    kind = RedisCluster if "+cluster" in pool.url else Redis
    client = kind.from_url(pool.url.replace("+cluster", ""), decode_responses=True)
    async with Producer(redis=client, prefix=pool.prefix) as producer:
        assert np.array_equal(await producer.logprobs([4]), row([4]))
    assert await client.ping()
    await client.aclose()
    async with Producer(redis=pool.redis, prefix=pool.prefix) as producer:
        assert np.array_equal(await producer.logprobs([4]), row([4]))


async def test_two_models_are_served_side_by_side(pool: Pool) -> None:
    pool.start("--seed", 1, model="one")
    pool.start("--seed", 2, "--vocab-size", 99, model="two")
    async with pool.producer("one") as first, pool.producer("two") as second:
        assert np.array_equal(await first.logprobs([1]), synthetic_row([1], vocab_size=V, seed=1))
        assert np.array_equal(await second.logprobs([1]), synthetic_row([1], vocab_size=99, seed=2))


async def test_the_producers_own_cache_is_bounded_by_bytes(pool: Pool) -> None:
    pool.start()
    async with pool.producer(cache_bytes=4 * V * 10) as producer:
        for token in range(30):
            await producer.logprobs([token])
        await producer.logprobs([29])
        await producer.logprobs([0])
        stats = producer.stats()
        assert (stats.computed, stats.local_hits, stats.cache_hits) == (30, 1, 1)


async def test_a_damaged_row_in_the_cache_is_recomputed(pool: Pool) -> None:
    pool.start()
    async with pool.producer(cache_bytes=0) as producer:
        await producer.logprobs([1])
        (key,) = pool.redis.scan_iter(match=f"{pool.prefix}:row:*")
        for damage in (b"short", b"X" * 2064, pool.redis.get(key)[:-4]):  # type: ignore[index]
            pool.redis.set(key, damage)
            assert np.array_equal(await producer.logprobs([1]), row([1]))


async def test_an_evicted_row_is_computed_again(pool: Pool) -> None:
    pool.start()
    async with pool.producer(cache_bytes=0) as producer:
        await producer.logprobs([1])
        for key in pool.redis.scan_iter(match=f"{pool.prefix}:row:*"):
            pool.redis.delete(key)
        assert np.array_equal(await producer.logprobs([1]), row([1]))
        assert producer.stats().computed == 2


async def test_every_row_has_a_lifetime(pool: Pool) -> None:
    pool.start("--row-ttl-s", 100)
    async with pool.producer() as producer:
        await producer.logprobs([1])
        (key,) = pool.redis.scan_iter(match=f"{pool.prefix}:row:*")
        assert 0 < pool.redis.pttl(key) <= 100_000


async def test_requests_wait_at_the_queue_limit(pool: Pool) -> None:
    pool.start("--queue-limit", 4, "--max-batch", 2, "--step-ms", 5)
    async with pool.producer() as producer:
        got = await producer.batch_logprobs([[i] for i in range(60)])
        for index, got_row in enumerate(got):
            assert np.array_equal(got_row, row([index]))


async def test_a_prompt_requested_again_right_after_its_cancellation_is_computed(pool: Pool) -> None:
    # A long lease, because clients submit a lost prompt again after a lease.
    pool.start("--lease-s", 600)
    async with pool.producer() as producer:
        for token in range(30):
            first = asyncio.create_task(producer.logprobs([token]))
            for _ in range(token % 5):
                await asyncio.sleep(0)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            assert np.array_equal(await producer.logprobs([token]), row([token]))


async def test_closing_while_requests_are_being_sent_leaves_no_job(pool: Pool) -> None:
    blocker = pool.start("--step-ms", 500, "--max-batch", 1)
    for ticks in range(8):
        producer = pool.producer()
        await producer.open()
        asked = asyncio.create_task(producer.logprobs([ticks]))
        for _ in range(ticks):
            await asyncio.sleep(0)
        await producer.close()
        await asyncio.gather(asked, return_exceptions=True)
    until(lambda: pool.jobs() == 0 and not pool.names("*waiting*"), "nothing is queued any more")
    assert blocker.process.poll() is None


def test_rows_of_other_weights_do_not_outlive_an_event_loop(pool: Pool) -> None:
    first = pool.start("--seed", 1, "--lease-s", 1)
    producer = pool.producer()
    assert np.array_equal(asyncio.run(producer.logprobs([1])), synthetic_row([1], vocab_size=V, seed=1))
    first.end()
    until(lambda: not pool.names("worker:*"), "the killed worker's heartbeat expires")
    pool.start("--seed", 2)
    assert np.array_equal(asyncio.run(producer.logprobs([1])), synthetic_row([1], vocab_size=V, seed=2))


async def test_a_batch_across_a_change_of_the_vocabulary_size_fails_alone(pool: Pool) -> None:
    first = pool.start("--step-ms", 600_000, "--lease-s", 2)
    async with pool.producer(when_absent="wait") as producer:
        asked = asyncio.create_task(producer.batch_logprobs([[1], [2]]))
        await until_async(lambda: is_held(pool), "the worker holds prompts")
        first.end()
        await asyncio.to_thread(until, lambda: not pool.names("worker:*"), "the heartbeat expires")
        await asyncio.to_thread(pool.start, "--lease-s", 2, "--vocab-size", V // 2)
        with pytest.raises(ModelMismatch, match=f"V was {V} and is {V // 2} now"):
            await asked
        assert np.array_equal(await producer.logprobs([3]), row([3], V // 2))
