"""A worker that receives arbitrary jobs still serves all other clients, and leaves no keys."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmpool.producer import SyncProducer
from lmpool.protocol.job import Job, digest_of
from lmpool.protocol.keys import GROUP, WAKE_FIELD
from lmpool.synthetic import synthetic_row
from tests.faults.hostile import strategies as hostile
from tests.faults.hostile.cases import cases
from tests.faults.hostile.commands import execute
from tests.support.gate import Gate
from tests.support.pool import DEADLINE_S, Pool, V, WorkerProcess, is_held, until, until_async

A_BATCH = 25
LEASE_S = 1.0

entries = st.shared(st.just(hostile.INFO.fingerprint)).flatmap(hostile.job_entries)


def row(*ids: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return synthetic_row(ids, vocab_size=V)


@pytest.fixture
def worker(pool: Pool) -> WorkerProcess:
    return pool.start("--lease-s", LEASE_S, "--max-batch", 16, "--max-prompt-tokens", hostile.INFO.max_prompt_tokens)


@pytest.fixture
def producer(pool: Pool, worker: WorkerProcess) -> Iterator[SyncProducer]:
    with SyncProducer("syn", redis=pool.url, prefix=pool.prefix, timeout=DEADLINE_S, cache_bytes=0) as producer:
        yield producer


def streams_of(pool: Pool) -> list[bytes]:
    """The two streams that the only worker reads: the shared stream, and its lane (own stream)."""
    shared, lane = pool.streams()
    return [shared, lane]


def assert_serves(pool: Pool, worker: WorkerProcess) -> None:
    """Assert that the worker process has ended all arbitrary jobs, and still serves a valid job."""
    until(lambda: pool.jobs() == 0 and pool.held() == 0, "all that was sent is ended")
    assert worker.is_running, worker.text
    assert "Traceback" not in worker.text
    assert pool.redis.xlen(pool.keys.model("syn").dead) <= 11_000
    with SyncProducer("syn", redis=pool.url, prefix=pool.prefix, timeout=DEADLINE_S) as producer:
        assert np.array_equal(producer.logprobs([5, 6]), row(5, 6))


def test_arbitrary_jobs_disturb_no_client(pool: Pool, worker: WorkerProcess, producer: SyncProducer) -> None:
    streams = cycle(streams_of(pool))
    assert hostile.INFO.fingerprint == producer.model.fingerprint
    asked = iter(range(10**9))

    @cases(400, a_batch=A_BATCH)
    @given(st.lists(entries, min_size=A_BATCH, max_size=A_BATCH))
    def send(batch: list[list[tuple[bytes, bytes]]]) -> None:
        for fields in batch:
            execute(pool.redis, "XADD", next(streams), "*", *(part for pair in fields for part in pair))
        # Valid prompts, which no arbitrary job has, get their rows in time.
        prompts = [[next(asked) % V, 1, 2], [next(asked) % V, 3]]
        for prompt, reply in zip(prompts, producer.batch_logprobs(prompts), strict=True):
            assert np.array_equal(reply, row(*prompt))

    send()
    assert_serves(pool, worker)


HUGE = Job(bytes(4 * 200_000), "", hostile.INFO.fingerprint).pack()
ODD_ENTRIES = {
    "a prompt of a million tokens": [b"m", Job(bytes(4_000_000), "", hostile.INFO.fingerprint).pack()],
    "more than a job may have": [b"m", bytes(17 * 2**20)],
    "twelve thousand fields": [b"x", b"y"] * 6000 + [b"m", b"no job"],
    "a job behind other fields": [b"x", b"y", b"m", HUGE],
    "two jobs": [b"m", b"no job", b"m", HUGE],
    "no job": [b"x", b""],
    "a field without a name": [b"", b""],
    "a deep nest": [b"m", b"\x91" * 1_000_000],
    "a bomb": [b"m", b"\x98" + b"\xdd\x00\x20\x00\x00" + b"\xa0" * 2**21],
    "an adapter of a megabyte": [b"m", Job(b"\0\0\0\0", "a" * 2**20, hostile.INFO.fingerprint).pack()],
    "a fingerprint of a megabyte": [b"m", Job(b"\0\0\0\0", "", "f" * 2**20).pack()],
}


@pytest.mark.parametrize("place", ["shared stream", "lane"])
def test_odd_entries_end_however_they_were_queued(
    pool: Pool, worker: WorkerProcess, producer: SyncProducer, place: str
) -> None:
    """A worker reads odd entries as new jobs; then another worker claims odd entries of a silent worker by a script."""
    jobs, dead = streams_of(pool)[place == "lane"], pool.keys.model("syn").dead
    silent = [execute(pool.redis, "XADD", jobs, "*", *fields) for fields in ODD_ENTRIES.values()]
    assert_serves(pool, worker)
    worker.end()
    until(lambda: not pool.names("worker:*"), "the heartbeat expires")
    for fields in ODD_ENTRIES.values():
        execute(pool.redis, "XADD", jobs, "*", *fields)
    # The silent worker reads half of its lane (own stream): a script must also take over the unread half.
    held = len(ODD_ENTRIES) // 2 if place == "lane" else len(ODD_ENTRIES)
    execute(pool.redis, "XREADGROUP", "GROUP", GROUP, "silent", "COUNT", held, "STREAMS", jobs, ">")
    assert pool.held() == held <= len(silent)
    after = pool.start("--lease-s", LEASE_S, "--max-prompt-tokens", hostile.INFO.max_prompt_tokens)
    assert_serves(pool, after)
    dead_letters: Any = pool.redis.xrange(dead)
    assert len(dead_letters) >= len(ODD_ENTRIES)
    for _, fields in dead_letters:
        assert sum(map(len, fields.values())) < 2**20 + 10_000, "what is too large is not kept"


def test_arbitrary_values_of_a_waiting_key_cannot_stop_a_worker(
    pool: Pool, worker: WorkerProcess, producer: SyncProducer
) -> None:
    """The waiting key of a job may have another type, name no client, or name streams that cannot be written."""
    model = pool.keys.model("syn")
    worker.end()
    prompts = [[10 + number] for number in range(6)]
    for prompt in prompts:
        ids = np.array(prompt, "<u4").tobytes()
        pool.redis.xadd(model.jobs, {"m": Job(ids, "", hostile.INFO.fingerprint).pack()})
    waiting = [model.waiting + digest_of(np.array(prompt, "<u4").tobytes()) for prompt in prompts]
    exhausted, other = model.reply("exhausted"), model.reply("other")
    execute(pool.redis, "XADD", exhausted, f"{2**64 - 1}-{2**64 - 1}", "d", "x")
    pool.redis.set(other, "no stream")
    pool.redis.set(waiting[0], "no hash")
    pool.redis.rpush(waiting[1], "no hash")
    pool.redis.hset(waiting[2], mapping={model.jobs: "", pool.keys.models(): "", "job": "junk", "lmpool": ""})
    pool.redis.hset(waiting[3], mapping={exhausted: "", other: ""})
    pool.redis.hset(waiting[4], mapping={f"{pool.prefix}:{{syn}}:reply:{number}": "" for number in range(20_000)})
    execute(pool.redis, "XADD", model.dead, f"{2**64 - 1}-{2**64 - 1}", "e", "x")
    pool.redis.xadd(model.jobs, {"m": "junk"})
    before = set(pool.names("*"))
    after = pool.start("--lease-s", LEASE_S)
    until(lambda: pool.jobs() == 0 and pool.held() == 0, "all that was sent is ended")
    # Compare now: the worker may notify the client of `assert_serves` after that client has removed its stream.
    created = set(pool.names("*")) - before
    assert_serves(pool, after)
    assert pool.redis.ttl(model.jobs) == -1, "a queue is no reply stream"
    assert pool.redis.hget(pool.keys.models(), "syn") is not None
    assert not [name for name in created if ":reply:" in name]
    # The worker replaces a damaged reply stream, so the clients are notified.
    for key in (exhausted, other):
        told: Any = pool.redis.xrange(key)
        ((_, fields),) = told
        assert fields[b"d"] == digest_of(np.array(prompts[3], "<u4").tobytes())


@pytest.mark.parametrize(
    ("entry", "is_deleted"),
    [(f"{2**64 - 1}-{2**64 - 1}", False), (f"{2**64 - 1}-{2**64 - 1}", True), ("253402300799000-0", False)],
)
async def test_a_queue_whose_ids_are_ahead_of_the_clock_is_replaced(
    pool: Pool, tmp_path: Path, entry: str, is_deleted: bool
) -> None:
    """Redis adds no entry after the largest id, and entries after an id far in the future never seem old."""
    jobs = pool.keys.model("syn").jobs
    gate = Gate(tmp_path / "gate")
    worker = await asyncio.to_thread(lambda: pool.start("--lease-s", LEASE_S, "--max-batch", 1, command=gate.command))
    async with pool.producer(cache_bytes=0) as producer:
        held = asyncio.create_task(producer.logprobs([1]))
        await until_async(lambda: is_held(pool), "the worker holds the prompt")
        behind = asyncio.create_task(producer.logprobs([2]))
        execute(pool.redis, "XADD", jobs, entry, "m", "x")
        if is_deleted:

            async def is_read() -> bool:
                (group,) = pool.redis.xinfo_groups(jobs)
                return bool(group["last-delivered-id"] == entry.encode())

            await until_async(is_read, "the worker has read what is behind the prompt that it holds")
            pool.redis.xdel(jobs, entry)
        await asyncio.to_thread(worker.until_says, "the job stream of 'syn' was replaced")
        gate.open()
        for number, asked in ((1, held), (2, behind), (3, producer.logprobs([3]))):
            assert np.array_equal(await asked, row(number))
    assert worker.text.count("the job stream of 'syn' was replaced") == 1
    last: Any = pool.redis.xinfo_stream(jobs)["last-generated-id"]
    assert int(last.split(b"-")[0]) < (time.time() + 3600) * 1000
    assert_serves(pool, worker)


def test_keys_of_another_type_end_no_worker(pool: Pool, worker: WorkerProcess, producer: SyncProducer) -> None:
    model, keys = pool.keys.model("syn"), pool.keys
    pool.redis.set(keys.worker("not-a-hash"), "junk")
    pool.redis.hset(keys.worker("junk"), mapping={b"\xff": b"\xfe", "state": b"\xff", "adapters": "[" * 9999})
    pool.redis.hset(keys.worker("large"), mapping={"model": "syn", "fingerprint": bytes(20 * 2**20)})
    for name in (b"not-a-hash", b"junk", b"large", b"\xff\xfe", b"gone"):
        execute(pool.redis, "XGROUP", "CREATECONSUMER", model.jobs, GROUP, name)
    pool.redis.hset(keys.loading(), mapping={b"\xff": "x", "not-a-hash": "y"})
    pool.redis.hset(keys.models(), mapping={b"\xff": b"\xff", "large": bytes(2**20), "other": hostile.INFO.pack()})
    pool.redis.hset(model.adapters, "junk", b"\xc1")
    # Wait until the worker has sent a heartbeat and swept, so that it has read all junk keys.
    until(lambda: not pool.redis.hexists(keys.models(), b"\xff"), "infos of nobody are swept")
    # Junk in the list of adapters affects only requests that name the adapter, so a new worker can join.
    other = pool.start("--lease-s", LEASE_S)
    assert_serves(pool, worker)
    assert "Traceback" not in other.text
    pool.redis.delete(model.adapters, keys.models())
    assert_serves(pool, pool.start("--lease-s", LEASE_S))
    assert worker.is_running


def test_an_info_without_a_live_worker_is_replaced(pool: Pool, worker: WorkerProcess, producer: SyncProducer) -> None:
    models = pool.keys.models()
    info = pool.redis.hget(models, "syn")
    assert info is not None
    for junk in (b"junk", bytes(2**20), hostile.INFO.pack().replace(b"seed-0", b"seed-9")):
        pool.redis.hset(models, "syn", junk)
        until(lambda: pool.redis.hget(models, "syn") == info, "the worker puts its info right")
    assert_serves(pool, worker)


async def test_adapters_that_cannot_be_read_do_not_fill_a_worker_with_jobs(pool: Pool, worker: WorkerProcess) -> None:
    model = pool.keys.model("syn")
    pool.redis.hset(model.adapters, "junk", b"\xc1")
    ids = np.array([1], "<u4").tobytes()
    for number in range(200):
        pool.redis.xadd(model.jobs, {"m": Job(ids, f"poet@{number}", hostile.INFO.fingerprint).pack()})
    async with pool.producer("syn") as producer:
        replies = await asyncio.gather(*(producer.logprobs([number]) for number in range(20)))
    assert all(np.array_equal(reply, row(number)) for number, reply in enumerate(replies))
    await asyncio.to_thread(assert_serves, pool, worker)


def test_a_lane_whose_ids_are_ahead_of_the_clock_is_replaced(
    pool: Pool, worker: WorkerProcess, producer: SyncProducer
) -> None:
    _, lane = streams_of(pool)
    execute(pool.redis, "XADD", lane, f"{2**64 - 1}-{2**64 - 1}", "m", "x")
    until(lambda: "the job stream of 'syn' was replaced" in worker.text, "the worker replaces it")
    pool.redis.xadd(lane, {"m": "junk"})
    assert_serves(pool, worker)


@pytest.mark.parametrize("delay", ["1" * 400, "1" * 5000, "-1", "no number"], ids=["400", "5000", "negative", "text"])
def test_wake_ups_with_invalid_delays_end_no_worker(
    pool: Pool, worker: WorkerProcess, producer: SyncProducer, delay: str
) -> None:
    _, lane = streams_of(pool)
    pool.redis.xadd(lane, {WAKE_FIELD: delay})
    until(lambda: pool.redis.xlen(lane) == 0 or not worker.is_running, "the worker removes the wake-up")
    assert np.array_equal(producer.logprobs([5]), row(5)), "the worker still runs"
    assert_serves(pool, worker)


@pytest.mark.parametrize("length", [1e6, -1e6, 0.5, float("inf")])
def test_invented_lengths_of_lanes_block_no_client(pool: Pool, worker: WorkerProcess, length: float) -> None:
    """Clients write the lengths of lanes (workers' own streams) in Redis themselves, so lengths may be wrong."""
    lanes = pool.keys.model("syn").lanes
    pool.start("--lease-s", LEASE_S, "--max-prompt-tokens", hostile.INFO.max_prompt_tokens)
    pool.redis.zadd(lanes, {**{f"nobody-{number}": length for number in range(20)}, "": length, b"\xff": length})
    with SyncProducer("syn", redis=pool.url, prefix=pool.prefix, timeout=DEADLINE_S) as producer:
        rows = producer.batch_logprobs([[number] for number in range(100)])
        assert all(np.array_equal(got, row(number)) for number, got in enumerate(rows))
    until(lambda: pool.redis.zcard(lanes) == 3, "lanes of nobody are forgotten")
    until(lambda: pool.redis.zscore(lanes, "") == 0, "the sum is right again")


def test_keys_of_lanes_of_another_type_end_no_worker(pool: Pool, worker: WorkerProcess, producer: SyncProducer) -> None:
    lanes, (_, lane) = pool.keys.model("syn").lanes, streams_of(pool)
    other = pool.start("--lease-s", LEASE_S, "--max-prompt-tokens", hostile.INFO.max_prompt_tokens)
    for key in (lanes, lane):
        pool.redis.delete(key)
        pool.redis.set(key, "junk")
        rows = producer.batch_logprobs([[len(key), number] for number in range(40)])
        assert all(np.array_equal(got, row(len(key), number)) for number, got in enumerate(rows))
        until(lambda: pool.redis.type(lanes) == b"zset" and pool.redis.type(lane) == b"stream", "both are put right")
    assert_serves(pool, worker)
    assert_serves(pool, other)
