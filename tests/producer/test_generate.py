"""`generate` returns a continuation in one request: the tokens that repeated sampling would draw."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmpool.errors import (
    LMPoolError,
    NotTokenIds,
    PromptTooLong,
    SettingsError,
    TokenOutOfRange,
    UnknownAdapter,
    WorkerError,
)
from lmpool.producer import Continuation, Producer, SyncProducer
from lmpool.protocol.query import MAX_SEED
from lmpool.synthetic import synthetic_row
from tests.support.pool import DEADLINE_S, Pool, V, is_held, until, until_async, until_done

PROMPT = [1, 2, 3]
MANY = 1_000_000


async def sampled(producer: Producer, prompt: list[int], count: int, seed: int, **options: Any) -> Continuation:
    """Sample a continuation token by token, with one request for each token."""
    ids: list[int] = []
    for place in range(count):
        ids.append(await producer.sample(prompt + ids, seed=(seed + place) & MAX_SEED, **options))
    rows = [await producer.logprobs(prompt + ids[:place], adapter=options.get("adapter", "")) for place in range(count)]
    return Continuation(np.array(ids), np.array([row[token] for row, token in zip(rows, ids, strict=True)]))


def assert_same(made: Continuation, expected: Continuation) -> None:
    assert made.ids.dtype == np.int64
    assert made.logprobs.dtype == np.float32
    assert np.array_equal(made.ids, expected.ids)
    assert np.array_equal(made.logprobs, expected.logprobs)


@pytest.mark.parametrize("encoding", ["f32", "bf16"])
async def test_generate_with_a_seed_equals_repeated_sampling(pool: Pool, encoding: str) -> None:
    pool.start("--encoding", encoding)
    async with pool.producer() as producer:
        options: Any
        for options in ({}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0}):
            made = await producer.generate(PROMPT, 9, seed=40, n=3, **options)
            for at, continuation in enumerate(made):
                assert_same(continuation, await sampled(producer, PROMPT, 9, 40 + (at << 32), **options))
        last = MAX_SEED - 2
        assert_same((await producer.generate(PROMPT, 5, seed=last))[0], await sampled(producer, PROMPT, 5, last))
        first, second = await producer.batch_generate([PROMPT, [7]], 4, seed=3)
        assert_same(first, await sampled(producer, PROMPT, 4, 3))
        assert_same(second, await sampled(producer, [7], 4, 3 + (1 << 32)))
        assert await producer.batch_generate([], 4) == []


async def test_a_continuation_is_one_job_and_no_row_of_it_is_stored(pool: Pool) -> None:
    pool.start()
    async with pool.producer() as producer:
        for _ in range(2):
            await producer.generate(PROMPT, 50, seed=1)
            await until_done(pool)
        assert (producer.stats().computed, producer.stats().cache_hits) == (1, 1)
        assert len(pool.names("row:*")) == 1
        different = await producer.generate(PROMPT, 6, n=20)
        assert len({tuple(made.ids) for made in different}) == 20
        # Continuations without a seed are removed, because no other client can request them.
        await until_async(lambda: _count(pool, 1), "just the answer for the seed is left")


async def _count(pool: Pool, count: int) -> bool:
    return len(pool.names("row:*")) == count


async def test_a_continuation_ends_with_a_stop_token_or_sequence(pool: Pool) -> None:
    pool.start()
    async with pool.producer() as producer:
        (whole,) = await producer.generate(PROMPT, 12, seed=9)
        ids = whole.ids.tolist()
        assert len(set(ids)) == len(ids), "a seed that draws no token twice"
        stop: Any
        for stop, length in (
            ([ids[4]], 5),
            ([ids[7], ids[4]], 5),
            ([ids[3:6]], 6),
            ([[ids[2], ids[4]], ids[8:9], np.array(ids[5:8])], 8),
            ([[*PROMPT[1:], ids[0]]], 12),  # A stop sequence that begins in the prompt does not match.
            ([[5], *([token] for token in range(V) if token not in ids)], 12),
        ):
            (made,) = await producer.generate(PROMPT, 12, seed=9, stop=stop)
            assert_same(made, Continuation(whole.ids[:length], whole.logprobs[:length]))


async def test_other_clients_get_rows_from_the_same_steps(pool: Pool) -> None:
    pool.start("--step-ms", 5)
    async with pool.producer() as producer:
        asked = asyncio.create_task(producer.batch_generate([PROMPT, [4], [5, 6]], 40, seed=1))
        prompts = [[at, at + 1] for at in range(60)]
        for prompt, row in zip(prompts, await producer.batch_logprobs(prompts), strict=True):
            assert np.array_equal(row, synthetic_row(prompt, vocab_size=V))
        assert len(await producer.positions(PROMPT, top=2)) == len(PROMPT)
        made = await asked
        for at, prompt in enumerate(([1, 2, 3], [4], [5, 6])):
            assert_same(made[at], await sampled(producer, prompt, 40, 1 + (at << 32)))


async def test_another_worker_takes_over_the_continuation_of_a_killed_one(pool: Pool) -> None:
    first = pool.start("--step-ms", 600_000, "--lease-s", 1)
    async with pool.producer() as producer:
        asked = asyncio.create_task(producer.generate(PROMPT, 6, seed=2))
        await until_async(lambda: is_held(pool), "the worker holds it")
        await asyncio.to_thread(pool.start, "--lease-s", 1)
        first.signal(signal.SIGKILL)
        (made,) = await asyncio.wait_for(asked, DEADLINE_S)
        assert_same(made, await sampled(producer, PROMPT, 6, 2))


async def test_a_continuation_without_waiters_is_stopped(pool: Pool) -> None:
    worker = pool.start("--step-ms", 5, "--max-prompt-tokens", MANY)
    async with pool.producer() as producer:
        asked = asyncio.create_task(producer.generate(PROMPT, MANY // 2))
        await until_async(lambda: is_held(pool), "the worker holds it")
        asked.cancel()
        await until_done(pool)
        # If the worker had not stopped the continuation, it would not end for an hour.
        worker.signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.wait) == 0


async def test_a_continuation_is_sampled_from_the_rows_of_its_adapter(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("some")
    pool.start("--adapters", f"one={tmp_path / 'weights'}")
    async with pool.producer() as producer:
        (made,) = await producer.generate(PROMPT, 7, seed=4, adapter="one")
        assert_same(made, await sampled(producer, PROMPT, 7, 4, adapter="one"))
        assert not np.array_equal(made.ids, (await producer.generate(PROMPT, 7, seed=4))[0].ids)
        with pytest.raises(UnknownAdapter):
            await producer.generate(PROMPT, 7, adapter="two")


async def test_a_failing_prefix_fails_only_its_continuation(pool: Pool) -> None:
    pool.start()
    async with pool.producer() as producer:
        (whole,) = await producer.generate(PROMPT, 6, seed=6)
    until(lambda: not pool.jobs(), "nothing is queued")
    failing = pool.start("--fail-token", int(whole.ids[3]), "--name", "failing")
    async with pool.producer("failing") as producer:
        bad, good = producer.generate(PROMPT, 5, seed=6), producer.generate(PROMPT, 4, seed=6)
        with pytest.raises(WorkerError, match=f"the token {whole.ids[3]}"):
            await bad
        assert_same((await good)[0], Continuation(whole.ids[:4], whole.logprobs[:4]))
    assert failing.process.poll() is None


TWOS = bytes(20) + b"\x00\x00\x00\x40" * 5
"""Five tokens whose log-probabilities are 2, which none can be."""


async def cached(pool: Pool, producer: Producer) -> tuple[Continuation, Callable[[bytes], object]]:
    """A continuation of five tokens in the cache, and a function that replaces its numbers there."""
    (whole,) = await producer.generate(PROMPT, 5, seed=6)
    await until_done(pool)
    (key,) = pool.redis.scan_iter(match=f"{pool.prefix}:row:*")
    value = pool.redis.get(key)
    assert isinstance(value, bytes)
    assert len(value) == 16 + len(TWOS)
    return whole, lambda numbers: pool.redis.set(key, value[:16] + numbers, px=60_000)


async def test_a_damaged_continuation_is_computed_again(pool: Pool) -> None:
    pool.start()
    async with pool.producer(cache_bytes=0) as producer:
        whole, damage = await cached(pool, producer)
        for numbers in (b"\xff" * 40, TWOS, b"\x01\x01\x01\x00" * 10):
            damage(numbers)
            assert_same((await producer.generate(PROMPT, 5, seed=6))[0], whole)
            # The result can arrive before its job has ended: until then, a request for the same result joins this job.
            await until_done(pool)


async def test_a_damaged_continuation_is_removed_before_a_worker_computes_it(pool: Pool) -> None:
    worker = pool.start()
    async with pool.producer(cache_bytes=0) as producer:
        whole, damage = await cached(pool, producer)
        damage(TWOS)
        worker.signal(signal.SIGSTOP)
        asked = asyncio.create_task(producer.generate(PROMPT, 5, seed=6))
        # A client whose notification is late reads the cache again, and would take the damaged value for the new one.
        await until_async(lambda: _count(pool, 0), "the damaged value is removed")
        worker.signal(signal.SIGCONT)
        assert_same((await asked)[0], whole)


async def test_a_damaged_continuation_that_is_read_twice_is_computed_again(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.start()
    async with pool.producer(cache_bytes=0) as producer:
        whole, _ = await cached(pool, producer)
        session: Any = producer._sessions.session
        answer, damaged = session.answer, [np.frombuffer(TWOS, np.float32)] * 2

        async def answer_late(*arguments: Any, **options: Any) -> Any:
            # A read of the cache that began before the damaged value was removed may end after it.
            return damaged.pop() if damaged else await answer(*arguments, **options)

        monkeypatch.setattr(session, "answer", answer_late)
        assert_same((await producer.generate(PROMPT, 5, seed=6))[0], whole)


def test_without_asyncio_too(pool: Pool) -> None:
    pool.start()
    with SyncProducer("syn", redis=pool.url, prefix=pool.prefix) as producer:
        (made,) = producer.generate(PROMPT, 5, seed=1)
        assert producer.batch_generate([PROMPT], 5, seed=1)[0].ids.tolist() == made.ids.tolist()


BAD: list[tuple[dict[str, Any], type[LMPoolError], str]] = [
    ({"max_tokens": 0}, SettingsError, "max_tokens: 0 must be a whole number of at least 1"),
    ({"max_tokens": True}, SettingsError, "max_tokens: True"),
    ({"max_tokens": 99}, PromptTooLong, "max_tokens: 99 after a prompt of 3 tokens: this model has room for 98"),
    ({"n": 0}, SettingsError, "n: 0 must be a whole number of at least 1"),
    ({"n": "2"}, SettingsError, "n: '2'"),
    ({"seed": -1}, SettingsError, "seed: -1"),
    ({"top_p": 0}, SettingsError, "top_p: 0"),
    ({"temperature": "hot"}, SettingsError, "temperature: 'hot'"),
    ({"colour": 1}, SettingsError, "colour: not an option; there are temperature, top_p, seed, adapter, timeout, stop"),
    ({"stop": "\n"}, NotTokenIds, r"stop: '\\n' must be a list of token ids"),
    ({"stop": 5}, NotTokenIds, "stop: 5 must be a list of token ids"),
    ({"stop": [[]]}, NotTokenIds, r"stop: \[\] must be a list of at least 1 token id"),
    ({"stop": ["the end"]}, NotTokenIds, "stop: "),
    ({"stop": [V]}, TokenOutOfRange, f"token id {V} is out of range"),
    ({"stop": [[1]] * 70_000}, SettingsError, "stop: 70000 sequences with 70000 tokens are too many"),
]


async def test_bad_arguments_are_refused_by_name(pool: Pool) -> None:
    pool.start("--max-prompt-tokens", 100)
    async with pool.producer() as producer:
        for options, kind, message in BAD:
            with pytest.raises(kind, match=message):
                await producer.generate(PROMPT, **{"max_tokens": 2, **options})
        (made,) = await producer.generate(PROMPT, 98, seed=1)
        assert len(made.ids) == 98
        assert producer.stats().computed == 1
