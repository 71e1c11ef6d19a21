"""A producer that reads values of foreign programs returns the right row, or raises an lmpool error in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmpool.errors import DeadlineExceeded, LMPoolError, ProtocolError
from lmpool.producer import Producer
from lmpool.producer.client.session import Session
from lmpool.protocol.job import digest_of
from lmpool.protocol.keys import GROUP
from lmpool.protocol.picks import Sampling, sample, top
from lmpool.protocol.row import Row
from lmpool.synthetic import synthetic_row
from tests.faults.hostile import strategies as hostile
from tests.faults.hostile.cases import cases
from tests.faults.hostile.commands import execute
from tests.support.gate import Gate, GatedBackend, gated_worker
from tests.support.pool import DEADLINE_S, Pool, V, WorkerProcess, is_held, until, until_async

LEASE_S = 1.0
TIMEOUT_S = 15.0
A_BATCH = 40


def row(prompt: list[int]) -> Row:
    return synthetic_row(prompt, vocab_size=V)


def name(prompt: list[int]) -> bytes:
    return digest_of(np.array(prompt, "<u4").tobytes())


@pytest.fixture
def worker(pool: Pool) -> WorkerProcess:
    return pool.start("--lease-s", LEASE_S)


@pytest.fixture
async def producer(pool: Pool, worker: WorkerProcess) -> AsyncIterator[Producer]:
    # Without a cache of its own, the producer reads each row from the server.
    async with pool.producer("syn", timeout=TIMEOUT_S, cache_bytes=0) as producer:
        yield producer


ROW = hostile.encoded_row([1, 2], V)
SPOILT = {
    "a text": b"junk",
    "an empty string": b"",
    "a row that is too short": ROW[:-4],
    "a row that is too long": ROW + bytes(4),
    "a row of three megabytes": ROW + bytes(3 * 2**20),
    "a row with NaN": ROW[:-4] + np.array([np.nan], "<f4").tobytes(),
    "a row of -inf": ROW[:16] + np.full(V, -np.inf, "<f4").tobytes(),
    "a row of low numbers": ROW[:16] + np.full(V, -50, "<f4").tobytes(),
    "logits": ROW[:16] + np.linspace(-5, 5, V, dtype="<f4").tobytes(),
    "another version": hostile.with_header(ROW, version=2),
    "another V": hostile.encoded_row([1, 2], V - 1),
    "another encoding": hostile.with_header(ROW, encoding=2),
    "no magic": hostile.with_header(ROW, magic=b"LMPX"),
}


async def test_a_foreign_value_under_the_key_of_a_row_is_computed_again(pool: Pool, producer: Producer) -> None:
    """Damaged rows in Redis are replaced, also when one call requests them together with valid rows."""
    prompts = [[1, 2, at] for at in range(len(SPOILT) + 2)]
    prefix = pool.keys.row(producer.model.fingerprint)
    keys = [prefix + name(prompt) for prompt in prompts]
    for key, spoilt in zip(keys, SPOILT.values(), strict=False):
        pool.redis.set(key, spoilt)
    pool.redis.rpush(keys[-2], "a list")
    pool.redis.hset(keys[-1], "a", "hash")
    others = [[7, at] for at in range(20)]
    await producer.batch_logprobs(others)
    for ask in (prompts + others, prompts):
        replies = await producer.batch_logprobs(ask)
        assert all(np.array_equal(reply, row(prompt)) for reply, prompt in zip(replies, ask, strict=True))
    assert all(pool.redis.strlen(key) == len(ROW) for key in keys), "what is stored has been put right"


@pytest.mark.parametrize("carried", [b"junk", b"", ROW[:-4], hostile.encoded_row([9], V - 1), bytes(16)])
async def test_a_notification_without_a_row_ends_no_request(pool: Pool, tmp_path: Path, carried: bytes) -> None:
    gate = Gate(tmp_path / "gate")
    async with (
        gated_worker(pool, GatedBackend(gate)),
        pool.producer("syn", timeout=TIMEOUT_S, cache_bytes=0) as producer,
    ):
        asked = [asyncio.create_task(producer.logprobs([1, at])) for at in range(2)]
        await until_async(lambda: is_held(pool), "the worker holds the prompts")
        waiting = pool.keys.model("syn").waiting + name([1, 0])
        value: Any = pool.redis.get(waiting)
        reply, _ = value.split(b"\n")
        digests, fingerprint = name([1, 0]) + name([1, 1]), producer.model.fingerprint
        pool.redis.xadd(reply, {"d": digests, "f": fingerprint, "v": carried})
        # Now the worker computes the rows and sends its own, valid notification.
        gate.open()
        for at, answer in enumerate(await asyncio.gather(*asked)):
            assert np.array_equal(answer, row([1, at]))


async def test_a_query_about_a_damaged_row_is_answered_from_a_new_row(pool: Pool, producer: Producer) -> None:
    prefix = pool.keys.row(producer.model.fingerprint)
    asks: list[Callable[[list[int]], Awaitable[object]]] = [
        lambda prompt: producer.topk(prompt, 3),
        lambda prompt: producer.sample(prompt, seed=3),
        lambda prompt: producer.logprobs(prompt, targets=[0, 5, V - 1]),
        lambda prompt: producer.logprobs(prompt, fresh=True),
    ]
    values: list[Callable[[Row], object]] = [
        lambda vector: top(vector, 3),
        lambda vector: sample(vector, Sampling(1.0, 1.0, 3)),
        lambda vector: vector[[0, 5, V - 1]],
        lambda vector: vector,
    ]
    for kind, (label, spoilt) in enumerate(SPOILT.items()):
        prompts = [[kind, at] for at in range(len(asks))]
        for prompt in prompts:
            pool.redis.set(prefix + name(prompt), spoilt)
        replies = await asyncio.gather(*(ask(prompt) for ask, prompt in zip(asks, prompts, strict=True)))
        for reply, prompt, value in zip(replies, prompts, values, strict=True):
            wanted: Any = value(row(prompt))
            # A client that reads three entries of a row cannot detect that all entries of the row are too low.
            if value is not values[2] or label not in ("a row of -inf", "a row of low numbers"):
                assert np.array_equal(np.array(reply), np.array(wanted)), label


async def hears(producer: Producer, number: int, asked: Iterator[int]) -> bool:
    """Whether a row arrives within two seconds, before the producer polls for it."""
    try:
        await producer.logprobs([3, number, next(asked)], timeout=2)
    except DeadlineExceeded:
        return False
    return True


async def test_a_damaged_reply_stream_is_dropped_and_read_again(
    pool: Pool, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await producer.logprobs([1])
    (reply,) = pool.redis.scan_iter(match=f"{pool.prefix}:*reply*")
    recheck, may_look = Session._recheck, True

    async def look(session: Session) -> None:
        if may_look:
            await recheck(session)

    monkeypatch.setattr(Session, "_recheck", look)
    last = f"{2**64 - 1}-{2**64 - 1}"
    spoil: list[Callable[[], object]] = [
        lambda: pool.redis.set(reply, "no stream"),
        lambda: execute(pool.redis, "XADD", reply, last, "d", b"x" * 16, "f", producer.model.fingerprint),
        lambda: execute(pool.redis, "XADD", reply, "*", *["x", bytes(2**20)] * 300),
        lambda: execute(pool.redis, "XADD", reply, "*", "d", bytes(2**20), "e", bytes(2**20)),
    ]

    async def is_dropped() -> bool:
        return not pool.redis.exists(reply)

    for number, act in enumerate(spoil):
        pool.redis.delete(reply)
        act()
        if number < 3:
            await until_async(is_dropped, "the stream is dropped")
        may_look = True
        assert np.array_equal(await producer.logprobs([2, number]), row([2, number]))
        may_look = False
        asked = iter(range(1000))

        await until_async(partial(hears, producer, number, asked), "notifications are heard again")


# Random values


def replace(redis: Any, key: bytes, command: str, *values: str | bytes) -> None:
    """Delete a key and write it in one transaction: otherwise the pool may write the key between the two commands."""
    pipeline = redis.pipeline()
    pipeline.delete(key)
    pipeline.execute_command(command, key, *values)
    pipeline.execute()


def write(pool: Pool, producer: Producer, prompts: list[list[int]], draw: Callable[[Any], Any]) -> None:
    """Write a random foreign value under one of the keys that producers or workers read."""
    redis, keys, model = pool.redis, pool.keys, pool.keys.model("syn")
    prompt = draw(st.sampled_from(prompts))
    digest = name(prompt)
    match draw(st.integers(0, 10)):
        case 0 | 1 | 2:
            redis.set(keys.row(producer.model.fingerprint) + digest, draw(hostile.spoilt_rows(ROW)))
        case 3:
            key = draw(st.sampled_from([keys.row(producer.model.fingerprint) + digest, model.waiting + digest]))
            replace(redis, key, draw(st.sampled_from(["RPUSH", "SADD", "SET"])), draw(hostile.noise))
        case 4 | 5:
            contents = st.sampled_from([digest, digest[:9], digest * 3, producer.model.fingerprint.encode()])
            values = contents | hostile.failures | hostile.odd_bytes
            names = st.sampled_from([b"d", b"e", b"f", b"w", b""]) | hostile.noise
            # Draw the fields before listing the streams: an example must be the same when it runs again.
            fields = draw(st.lists(st.tuples(names, values), min_size=1, max_size=4))
            for reply in redis.scan_iter(match=f"{pool.prefix}:*reply*"):
                execute(redis, "XADD", reply, "*", *(part for pair in fields for part in pair))
        case 6:
            field = draw(st.sampled_from([b"other", b"more"]) | hostile.noise)
            if field != b"syn":
                redis.hset(keys.models(), field, draw(hostile.infos))
        case 7:
            worker = keys.worker(draw(st.sampled_from(["a", "b", "c"])))
            redis.hset(worker, mapping={draw(hostile.noise): draw(hostile.heartbeats), "state": draw(hostile.noise)})
            execute(redis, "XGROUP", "CREATECONSUMER", model.jobs, GROUP, draw(st.sampled_from([b"a", b"\xff"])))
        case 8:
            job = draw(st.sampled_from([b"1-1"]) | hostile.noise)
            replace(redis, model.waiting + digest, "HSET", "job", job, draw(hostile.noise), "")
        case 9:
            lengths = st.floats(allow_nan=False) | st.integers(-100, 100)
            redis.zadd(model.lanes, {draw(hostile.noise | st.just(b"")): draw(lengths)})
        case _:
            redis.hset(draw(st.just(model.adapters)), draw(hostile.noise), draw(hostile.odd_bytes))


def test_a_foreign_waiting_key_replaces_a_string_of_the_pool(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = pool.keys.model("syn").waiting + name([1, 2])
    redis: Any = pool.redis
    run = redis.execute_command

    def race(*arguments: Any, **options: Any) -> Any:
        result = run(*arguments, **options)
        run("SET", waiting, "a client and an entry")  # A client of the pool submits the prompt after every command.
        return result

    monkeypatch.setattr(redis, "execute_command", race)
    drawn = iter([[1, 2], 8, b"1-1", b"a client"])
    write(pool, pool.producer("syn"), [[1, 2]], lambda _: next(drawn))
    assert run("HGET", waiting, "job") == b"1-1"


def test_a_producer_returns_the_row_or_an_lmpool_error_in_time(pool: Pool, worker: WorkerProcess) -> None:
    pool.start("--lease-s", LEASE_S)  # A single worker has no lane (its own job stream), so start two.
    asked = iter(range(10**9))
    ended = {"rows": 0, "errors": 0}

    async def ask(prompts: list[list[int]], spoil: Callable[[Producer], None]) -> None:
        async with pool.producer("syn", timeout=TIMEOUT_S, cache_bytes=0) as producer:
            await producer.logprobs([1])  # This creates the client's reply stream.
            for _ in range(A_BATCH // 2):
                spoil(producer)
            requests = [asyncio.ensure_future(producer.logprobs(prompt)) for prompt in prompts]
            for _ in range(A_BATCH // 2):  # Write foreign values while requests are in flight.
                await asyncio.sleep(0)
                spoil(producer)
            outcomes = await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), DEADLINE_S)
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                assert isinstance(outcome, LMPoolError), outcome
                ended["errors"] += 1
            else:
                assert np.array_equal(outcome, row(prompt))
                ended["rows"] += 1

    @cases(240, a_batch=A_BATCH, most=6000)
    @given(st.data())
    def attack(data: st.DataObject) -> None:
        prompts = [[next(asked) % V, next(asked) % V] for _ in range(20)]

        asyncio.run(ask(prompts, lambda producer: write(pool, producer, prompts, data.draw)))

    attack()
    assert ended["rows"] > 9 * ended["errors"], "what is announced as failed by somebody else fails, and little more"
    model = pool.keys.model("syn")
    pool.redis.delete(model.adapters)
    until(lambda: pool.jobs() == 0, "all that was asked is ended")
    assert worker.is_running, worker.text
    assert "Traceback" not in worker.text


async def test_an_info_under_another_name_is_refused(pool: Pool, producer: Producer) -> None:
    pool.redis.hset(pool.keys.models(), "twin", hostile.INFO.pack())
    with pytest.raises(ProtocolError, match="'twin' cannot be read: it is the info of 'syn'"):
        await pool.producer("twin").open()
