"""Trie requests return correct values although trie workers crash, hang or restart, and servers lose data."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmpool.broker.registries import register
from lmpool.embedded import EmbeddedServer
from lmpool.errors import DeadlineExceeded, NoWorker, ServerUnreachable, UnknownModel
from lmpool.producer import Producer
from lmpool.producer.client import discovery
from lmpool.producer.client.requests import Deadline
from lmpool.producer.trie import PooledTrie
from lmpool.protocol.job import encode_prompt
from lmpool.protocol.query import SECRET_SIZE
from lmpool.protocol.row import VectorBlock
from lmpool.synthetic import synthetic_row
from tests.support.pool import DEADLINE_S, Pool, WorkerProcess, pending, until, until_async, until_done
from tests.support.trie_answers import answers_of, assert_right, draw_weights, leftovers, row_weights, words

V = 512
LEASE = ("--lease-s", 2)
_TRIES = 40


async def sums(trie: PooledTrie, seeds: range) -> None:
    """Request many sums of weights concurrently, and check every value."""
    told = answers_of(trie.structure)
    weights = [draw_weights(seed, trie.structure.n_tokens) for seed in seeds]
    replies = await asyncio.gather(*(trie.weight_sum(ws) for ws in weights))
    for ws, reply in zip(weights, replies, strict=True):
        assert_right(reply, told.of("sum", ws))


async def referred(trie: PooledTrie, prompts: list[list[int]]) -> None:
    """Request values of some nodes for many prompts, and check every value."""
    told = answers_of(trie.structure)
    replies = await asyncio.gather(*(trie.logsumexp(prompt=prompt, nodes=[0, 1, 2]) for prompt in prompts))
    for prompt, reply in zip(prompts, replies, strict=True):
        np.testing.assert_allclose(
            reply, told.of("logsumexp", row_weights(prompt, V, "logsumexp"))[:3], rtol=1e-6, atol=1e-6
        )


async def hold(pool: Pool, worker: WorkerProcess, ask: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
    """Freeze a trie worker while it waits for jobs, so that Redis delivers jobs to the frozen worker."""
    name = worker.text.rpartition("as worker ")[2].split()[0].encode()

    def is_held() -> bool:
        return pool.jobs("trie") > 0 and any(job["consumer"] == name for job in pending(pool, "trie"))

    async def are_reading() -> bool:
        live = sum(other.process.poll() is None for other in pool.workers)
        return len([c for c in pool.clients() if c["cmd"] == "xreadgroup" and "b" in c["flags"]]) >= live

    for _ in range(_TRIES):
        # Wait until all workers block in XREADGROUP: just after a step, a worker polls without blocking.
        await until_async(are_reading, "all workers wait for jobs")
        worker.signal(signal.SIGSTOP)
        asked = asyncio.ensure_future(ask())

        async def are_sent(asked: asyncio.Future[None] = asked) -> bool:
            return asked.done() or pool.jobs("trie") > 0

        await until_async(are_sent, "jobs are queued, or computed by others")
        # Redis delivers new jobs to a blocked read at once, so the frozen worker holds jobs now, or never will.
        if is_held():
            return asked
        worker.signal(signal.SIGCONT)
        await asked
    raise AssertionError("a frozen worker was never given jobs")


async def test_killed_frozen_and_stopped_workers_lose_no_request(pool: Pool) -> None:
    # Use a short lease, because a stopped worker may take as long as its lease to end.
    workers = [pool.start_trie_worker("--lease-s", 5, wait=False) for _ in range(3)]
    for worker in workers:
        worker.until_says("serving ")
    killed, frozen, other = workers
    producer = pool.producer()
    trie = await producer.trie(words(20, 300))
    for victim in (killed, frozen):
        asked = await hold(pool, victim, lambda: sums(trie, range(200)))
        if victim is killed:
            victim.end()
        await asyncio.wait_for(asked, DEADLINE_S)
        await until_done(pool, "trie")
    frozen.signal(signal.SIGCONT)
    other.signal(signal.SIGSTOP)
    frozen.signal(signal.SIGSTOP)
    asked = asyncio.ensure_future(sums(trie, range(400)))
    await until_async(_queued(pool, 1), "jobs are there")
    frozen.signal(signal.SIGTERM)
    for worker in (frozen, other):
        worker.signal(signal.SIGCONT)
    assert await asyncio.to_thread(frozen.wait) == 0
    await asyncio.wait_for(asked, DEADLINE_S)
    other.signal(signal.SIGTERM)
    assert await asyncio.to_thread(other.wait) == 0
    assert all("nothing was left unfinished" in worker.text for worker in (frozen, other))
    await asyncio.to_thread(until, lambda: not pool.names("weights:*"), "the client has removed the weights")
    assert not pool.redis.exists(pool.keys.models(), pool.keys.trie_models())
    await producer.close()


async def test_without_a_live_worker_a_request_ends_before_its_deadline(pool: Pool) -> None:
    producer = pool.producer()
    trie = await producer.trie(words(22, 300))
    ws = draw_weights(0, 300)
    with pytest.raises(UnknownModel, match="no trie worker serves: start one with `lmpool trie-worker`"):
        await trie.weight_sum(ws)
    worker = pool.start_trie_worker(*LEASE)
    await trie.weight_sum(ws)
    worker.end()
    with pytest.raises(NoWorker, match=r"no live worker has served 'trie' for \d+ s: .*`lmpool trie-worker`"):
        await trie.weight_sum(ws, timeout=3600)

    async def gone() -> bool:
        return not leftovers(pool)

    await until_async(gone, "the request is taken back")
    await producer.close()


@pytest.fixture
def private(own_server: EmbeddedServer, tmp_path: Path) -> Iterator[Pool]:
    """A model worker and a trie worker on their own server, which a test may stop."""
    pool = Pool(own_server.url, "own", tmp_path)
    try:
        started = [pool.start(*LEASE, "--vocab-size", V, wait=False), pool.start_trie_worker(*LEASE, wait=False)]
        for worker in started:
            worker.until_says("serving ")
        yield pool
    finally:
        pool.end()


async def test_inputs_that_the_server_lost_are_sent_again(private: Pool, own_server: EmbeddedServer) -> None:
    async with private.producer() as producer:
        model_trie, other_trie = await producer.trie(), await producer.trie(words(23, 300))
        await sums(other_trie, range(3))
        troubles: list[Callable[[], Any]] = [
            private.redis.flushall,
            lambda: private.redis.execute_command("CLIENT", "KILL", "TYPE", "normal"),  # type: ignore[no-untyped-call]
            own_server.stop,
        ]
        for number, trouble in enumerate(troubles):
            for worker in private.workers:
                worker.signal(signal.SIGSTOP)
            asked = [
                asyncio.ensure_future(referred(model_trie, [[number, i] for i in range(100)])),
                *(asyncio.ensure_future(sums(trie, range(100))) for trie in (model_trie, other_trie)),
            ]
            await until_async(_queued(private, 1), "jobs are queued")
            for worker in private.workers:
                worker.signal(signal.SIGCONT)
            await asyncio.to_thread(trouble)
            if trouble == own_server.stop:
                await asyncio.to_thread(own_server.start)
            await asyncio.wait_for(asyncio.gather(*asked), DEADLINE_S)


async def test_a_model_s_workers_keep_its_vocabulary_in_the_pool(private: Pool) -> None:
    async with private.producer() as producer:
        digest = producer.model.vocabulary
        key = private.keys.vocabulary(digest)
        private.redis.delete(key)
        await until_async(_exists(private, key), "the vocabulary is there again")
        assert (await producer.trie()).structure.digest == digest


def _exists(pool: Pool, key: bytes) -> Callable[[], Awaitable[bool]]:
    async def exists() -> bool:
        return bool(pool.redis.exists(key))

    return exists


async def test_weights_and_vocabularies_and_rows_that_were_evicted_are_sent_again(private: Pool) -> None:
    worker = private.workers[1]
    fresh = count()
    async with private.producer() as producer:
        trie = await producer.trie(words(24, V))
        await sums(trie, range(1))  # Send the vocabulary now: a client that sends it again sends weights too.

        async def ask() -> None:
            turn = next(fresh)
            prompts = [[turn, i] for i in range(3)]
            await producer.batch_logprobs(prompts)
            await asyncio.gather(sums(trie, range(40)), referred(trie, prompts))

        for pattern in ("weights:*", "trie:*", "row:*"):
            asked = await hold(private, worker, ask)
            await until_async(_queued(private, 43), "all are queued")
            for name in private.redis.scan_iter(match=f"{private.prefix}:{pattern}", count=1000):
                private.redis.delete(name)
            worker.signal(signal.SIGCONT)
            await asyncio.wait_for(asked, DEADLINE_S)


async def test_weights_that_another_client_has_overwritten_are_never_used(private: Pool) -> None:
    worker = private.workers[1]
    block = VectorBlock([b""], [np.ones(V, np.float32)])
    forged = b"".join(*block.encoded())
    async with private.producer() as producer:
        trie = await producer.trie(words(24, V))
        await sums(trie, range(1))
        for other in (forged, bytes(SECRET_SIZE) + forged, b"LMPR"):
            asked = await hold(private, worker, lambda: sums(trie, range(40)))
            await until_async(_queued(private, 40), "all are queued")
            names = [*private.redis.scan_iter(match=f"{private.prefix}:weights:*", count=1000)]
            assert len(names) == 40
            for name in names:
                private.redis.set(name, other, px=60_000)
            worker.signal(signal.SIGCONT)
            await asyncio.wait_for(asked, DEADLINE_S)


def _queued(pool: Pool, count: int) -> Callable[[], Awaitable[bool]]:
    async def queued() -> bool:
        return pool.jobs("trie") >= count

    return queued


async def test_vocabularies_over_the_limit_of_a_worker_are_served_one_at_a_time(pool: Pool) -> None:
    pool.start_trie_worker(*LEASE, "--trie-mb", 1, "--trie-values-mb", 0)
    producer = pool.producer()
    tries = [await producer.trie(words(25 + number, 8000)) for number in range(3)]
    assert all(trie.structure.vocabulary.nbytes * 26 > 2**20 for trie in tries)
    for _ in range(2):
        await asyncio.gather(*(sums(trie, range(4)) for trie in tries))
    for trie in tries:
        await sums(trie, range(2))
    await producer.close()


async def test_a_model_with_other_weights_serves_their_rows(pool: Pool) -> None:
    # Use long leases, so that the model's info does not expire while its next worker starts.
    lease = ("--lease-s", 20)
    old = pool.start(*lease, "--vocab-size", V, wait=False)
    pool.start_trie_worker(*lease)
    old.until_says("serving ")
    async with pool.producer() as producer:
        trie = await producer.trie()
        await referred(trie, [[1]])
        before = producer.model.fingerprint
        old.signal(signal.SIGTERM)
        await asyncio.to_thread(old.wait)
        asked = asyncio.ensure_future(trie.weight_sum(prompt=[2, 3]))
        await until_async(_queued_row(pool), "its row is asked for")
        await asyncio.to_thread(pool.start, *lease, "--vocab-size", V, "--seed", 5)
        row = np.exp(synthetic_row([2, 3], vocab_size=V, seed=5))
        assert_right(await asyncio.wait_for(asked, DEADLINE_S), answers_of(trie.structure).of("sum", row))
        assert producer.model.fingerprint != before


def _queued_row(pool: Pool) -> Callable[[], Awaitable[bool]]:
    async def queued() -> bool:
        return pool.jobs() > 0

    return queued


async def test_damaged_rows_are_replaced(private: Pool) -> None:
    async with private.producer(cache_bytes=0) as producer:
        trie = await producer.trie()
        prompt = encode_prompt([4, 5], vocab_size=V, max_tokens=10)
        key = private.keys.row(producer.model.fingerprint) + prompt.digest
        for damage in (b"", b"LMPR", b"x" * 1000):
            private.redis.set(key, damage, px=60_000)
            await ask_some(trie, [4, 5], [len(damage) % 7])
        assert np.array_equal(await producer.logprobs([4, 5]), synthetic_row([4, 5], vocab_size=V))


async def test_damaged_rows_do_not_stop_a_model_worker_with_tries(pool: Pool) -> None:
    pool.start(*LEASE, "--vocab-size", V, "--with-trie")
    async with pool.producer() as producer:
        trie = await producer.trie()
        prompt = encode_prompt([4, 5], vocab_size=V, max_tokens=10)
        for damage in (b"", b"LMPR", b"x" * 1000, b"x" * 100_000):
            pool.redis.set(pool.keys.row(producer.model.fingerprint) + prompt.digest, damage, px=60_000)
            await ask_some(trie, [4, 5], [len(damage) % 7])
            await ask_some(trie, [4, len(damage) % V], [1])


async def ask_some(trie: PooledTrie, prompt: list[int], nodes: list[int]) -> None:
    """Request values of some nodes for one prompt, and check the values."""
    exact = answers_of(trie.structure).of("sum", row_weights(prompt, V, "sum"))[nodes]
    assert_right(await trie.weight_sum(prompt=prompt, nodes=nodes), exact)


# Timers of deadlines (`DeadlineTimers`)


async def never(*_: Any, **__: Any) -> None:
    """Wait for ever, like a call of a server that does not reply."""
    await asyncio.Event().wait()


async def test_no_step_of_a_request_outlives_its_deadline(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    started = [pool.start(*LEASE, "--vocab-size", V, wait=False), pool.start_trie_worker(*LEASE, wait=False)]
    for worker in started:
        worker.until_says("serving ")
    monkeypatch.setattr(discovery, "register", never)
    monkeypatch.setattr(discovery, "look_up", never)
    async with pool.producer() as producer:
        monkeypatch.setattr(producer, "_timeout", 3.0)
        with pytest.raises(DeadlineExceeded, match="no answer within 3 s"):
            await producer.trie()
        trie = await producer.trie(words(26, 300))
        asked = [trie.weight_sum(draw_weights(seed, 300), timeout=0.5) for seed in range(3)]
        for error in await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), DEADLINE_S):
            assert isinstance(error, (ServerUnreachable, DeadlineExceeded))
            assert "within 0.5 s" in str(error)


async def test_a_vocabulary_that_many_miss_at_once_travels_once(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = 0

    async def counted(*args: Any, **options: Any) -> None:
        nonlocal sent
        sent += 1
        await register(*args, **options)

    monkeypatch.setattr(discovery, "register", counted)
    pool.start_trie_worker(*LEASE)
    producer = pool.producer()
    trie = await producer.trie(words(27, 300))
    tries = (await producer._trie_sessions.open(Deadline(10))).vocabularies
    await asyncio.gather(*(tries.register(trie.structure.vocabulary, Deadline(10)) for _ in range(20)))
    assert sent == 1
    pool.redis.set(pool.keys.vocabulary(trie.structure.digest), bytes(trie.structure.vocabulary.nbytes))
    await sums(trie, range(3))
    assert sent == 2
    await producer.close()


async def test_callers_that_share_a_connection_keep_their_own_deadlines() -> None:
    accepted = asyncio.Semaphore(0)
    held: list[Any] = []

    def accept(*streams: Any) -> None:
        held.extend(streams)
        accepted.release()

    silent = await asyncio.start_server(accept, "127.0.0.1", 0)
    producer = Producer(redis=f"redis://127.0.0.1:{silent.sockets[0].getsockname()[1]}?socket_connect_timeout=60")
    patient = asyncio.ensure_future(producer.logprobs([1], timeout=60))
    await accepted.acquire()
    with pytest.raises(ServerUnreachable, match=r"no answer within 0\.2 s"):
        await asyncio.wait_for(producer.logprobs([1], timeout=0.2), DEADLINE_S)
    assert not patient.done()
    assert accepted.locked(), "both wait for one connection"
    patient.cancel()
    await asyncio.gather(patient, return_exceptions=True)
    await asyncio.wait_for(held[0].read(), DEADLINE_S)  # The read returns when the connection is closed.
    again = asyncio.ensure_future(producer.logprobs([1], timeout=60))
    await asyncio.wait_for(accepted.acquire(), DEADLINE_S)
    again.cancel()
    await asyncio.gather(again, return_exceptions=True)
    silent.close()
    for stream in held[1::2]:
        stream.close()


async def test_a_passed_deadline_is_reported_before_anything_is_tried() -> None:
    deadline = Deadline(0.0)
    with pytest.raises(DeadlineExceeded, match=r"no answer within 0 s: allow more time \(timeout=\)"):
        async with deadline.limit():
            raise AssertionError("nothing is tried")
