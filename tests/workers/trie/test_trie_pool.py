"""Trie workers in a pool: every value is correct, and no byte is sent or stored without need."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmpool.broker.connection import RawCommandConnection
from lmpool.broker.server import Server
from lmpool.errors import DeadlineExceeded, ProducerClosed, SettingsError
from lmpool.producer import Producer
from lmpool.producer import trie as trie_module
from lmpool.producer.genlm.numbering import Token
from lmpool.producer.trie import PooledTrie
from lmpool.protocol.query import OPS, Op
from lmpool.rows.connection import RawRowReceiver
from lmpool.synthetic import synthetic_row
from lmpool.trie.kernels import Kernels, open_kernels
from lmpool.trie.trie import Trie
from lmpool.workers import dispatch as dispatch_module
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.trie import TrieSettings
from lmpool.workers.worker import Worker
from tests.shared.broker.adapters.test_adapters import adapted, expected, serving, write_adapters
from tests.support.pool import DEADLINE_S, Pool, until_async, until_done
from tests.support.trie_answers import (
    answers_of,
    assert_right,
    draw_weights,
    leftovers,
    row_weights,
    words,
)
from tests.workers.trie.asking import LEASE, V, ask, ask_batch, current, fused_fixture, keep, selections  # noqa: F401


@pytest.fixture(scope="module")
def shared(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """One model worker and one trie worker, which the tests of this file share."""
    pool = Pool(server_url, "tries", tmp_path_factory.mktemp("tries"))
    started = [
        pool.start(*LEASE, "--vocab-size", V, wait=False),
        pool.start_trie_worker(*LEASE, wait=False, installed=True),
    ]
    for worker in started:
        worker.until_says("serving ")
    yield pool
    pool.end()


# Values


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("op", OPS)
async def test_every_form_of_a_call_matches_the_definition(shared: Pool, op: Op, local: bool) -> None:
    async with shared.producer() as producer:
        for trie in (await producer.trie(), await producer.trie(words(1, V))):
            told = answers_of(trie.structure)
            for options, nodes in selections(trie):
                options["local"] = local
                ws = np.stack([draw_weights(seed, V, op) for seed in range(3)])
                exact = np.stack([told.of(op, row) for row in ws])[:, nodes]
                assert_right(await ask(trie, op, ws[0], **options), exact[0])
                assert_right(await ask_batch(trie, op, ws, **options), exact)
                prompts = [[OPS.index(op), 7], [8], [9, 9, 9]]
                exact = np.stack([told.of(op, row_weights(prompt, V, op)) for prompt in prompts])[:, nodes]
                assert_right(await ask(trie, op, prompt=prompts[0], **options), exact[0])
                assert_right(await ask_batch(trie, op, prompts=prompts, **options), exact)


async def test_a_token_of_genlm_is_a_prefix_by_its_bytes(shared: Pool) -> None:
    """The hash of a `Token` is its id, and two tokens of one id are equal."""
    async with shared.producer() as producer:
        trie, weights = await producer.trie(words(1, V)), draw_weights(1, V)
        for node in trie.structure.children(0)[:2]:
            prefix = trie.structure.prefix(node)
            values = await trie.weight_sum(weights, under=Token(7, prefix), local=True)
            assert np.array_equal(values, await trie.weight_sum(weights, under=prefix, local=True))


@pytest.mark.parametrize("op", OPS)
async def test_a_batch_of_none_is_an_empty_array(shared: Pool, op: Op) -> None:
    async with shared.producer() as producer:
        trie = await producer.trie()
        for local in (False, True):
            for options, size in ({}, trie.structure.n_nodes), ({"nodes": [1, 2]}, 2):
                wanted: dict[str, Any] = {**options, "local": local}
                assert (await ask_batch(trie, op, np.empty((0, V), np.float32), **wanted)).shape == (0, size)
                assert (await ask_batch(trie, op, prompts=[], **wanted)).shape == (0, size)


async def test_infinities_and_zeros_are_weights_like_others(shared: Pool) -> None:
    async with shared.producer() as producer:
        trie = await producer.trie(words(2, 300))
        told = answers_of(trie.structure)
        zeros, nothing = np.zeros(300, np.float32), np.full(300, -np.inf, np.float32)
        assert_right(await trie.weight_sum(zeros), told.of("sum", zeros))
        assert_right(await trie.weight_max(nothing), told.of("max", nothing))
        assert_right(await trie.logsumexp(nothing), np.full(trie.structure.n_nodes, -np.inf))
        assert_right(await trie.weight_sum(np.full(300, np.inf, np.float32)), np.full(trie.structure.n_nodes, np.inf))


async def test_vocabularies_of_one_token_are_served(shared: Pool) -> None:
    async with shared.producer() as producer:
        for token in (b"", b"long", b"\x00"):
            trie = await producer.trie([token])
            assert_right(await trie.weight_sum(np.array([0.5], np.float32)), np.full(len(token) + 1, 0.5))


async def test_concurrent_clients_get_the_right_values_from_shared_steps(shared: Pool) -> None:
    vocabularies = [words(seed, size) for seed, size in ((3, 600), (4, 900), (5, 600))]
    producers = [shared.producer() for _ in range(3)]
    # Requests that are sent while workers are frozen must end before the leases expire.
    for producer in producers:
        for trie in [await producer.trie(), *[await producer.trie(vocabulary) for vocabulary in vocabularies]]:
            await trie.weight_sum(np.zeros(trie.structure.n_tokens, np.float32))
    before = await current(shared, "trie")

    async def ask_and_check(producer: Producer, seed: int) -> None:
        op = OPS[seed % 3]
        if seed % 4 == 0:
            trie = await producer.trie()
            prompt = [seed % 24]
            weights = row_weights(prompt, V, op)
            given: dict[str, Any] = {"prompt": prompt}
        else:
            trie = await producer.trie(vocabularies[seed % len(vocabularies)])
            weights = draw_weights(seed, trie.structure.n_tokens, op)
            given = {"ws": weights}
        told = answers_of(trie.structure)
        options, nodes = selections(trie)[seed % 5 * (seed % 2)]
        assert_right(await ask(trie, op, **options, **given), told.of(op, weights)[nodes])

    try:
        with frozen(shared):
            asked = asyncio.gather(*(ask_and_check(producer, seed) for producer in producers for seed in range(96)))
            await until_async(_has_jobs(shared, 64), "many jobs are queued")
        await asked
    finally:
        await asyncio.gather(*(producer.close() for producer in producers))
    after = await current(shared, "trie")
    steps, rows = after["steps"] - before["steps"], after["rows"] - before["rows"]
    assert after["failures"] - before["failures"] <= 24 * 12 + 3 * 72
    assert steps < rows - 32, f"{steps} steps for {rows} jobs, of which 64 were there at once"


async def test_a_result_has_the_same_bits_alone_and_in_company(shared: Pool) -> None:
    async with shared.producer() as producer:
        trie = await producer.trie()
        for op in OPS:
            ws = np.stack([draw_weights(seed, V, op) for seed in range(40)])
            alone = [await ask(trie, op, row) for row in ws[:5]]
            together = await ask_batch(trie, op, ws)
            assert np.array_equal(np.stack(alone), together[:5])
            assert np.array_equal(await ask(trie, op, ws[0], local=True), alone[0])


@contextmanager
def frozen(pool: Pool) -> Iterator[None]:
    """Freeze the shared trie worker in this context. Redis may still deliver jobs to the worker's blocked read."""
    worker = pool.workers[1]
    worker.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        worker.signal(signal.SIGCONT)


async def test_jobs_of_two_clients_are_answered_in_one_step(shared: Pool) -> None:
    first, second = shared.producer(), shared.producer()
    try:
        tries = [await producer.trie(words(6, 200)) for producer in (first, second)]
        for trie in tries:
            await trie.weight_sum(draw_weights(0, 200))
        before = await current(shared, "trie")
        with frozen(shared):
            weights = [draw_weights(seed, 200) for seed in range(8)]
            asked = [asyncio.create_task(trie.weight_sum(ws)) for trie in tries for ws in weights]
            await until_async(_has_jobs(shared, 16), "all jobs are queued")
        await asyncio.gather(*asked)
        after = await current(shared, "trie")
        assert after["rows"] == before["rows"] + 16
        assert after["steps"] - before["steps"] <= 2, "the read that was under way may have brought one client's"
    finally:
        await asyncio.gather(first.close(), second.close())


def _has_jobs(pool: Pool, count: int) -> Any:
    async def has() -> bool:
        return pool.jobs("trie") >= count

    return has


async def test_the_row_of_an_adapter_is_its_own(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_module, "_MAX_BLOCK_MS", 20)
    async with serving(pool, adapted(write_adapters(tmp_path))), trie_worker(pool), pool.producer("syn") as producer:
        trie = await producer.trie()
        told = answers_of(trie.structure)
        for _ in range(2):
            for adapter in ("", "one", "other"):
                exact = told.of("sum", np.exp(await expected(producer, [1, 2], adapter)))
                assert_right(await trie.weight_sum(prompt=[1, 2], adapter=adapter), exact)
                assert_right(await trie.weight_sum(prompt=[1, 2], adapter=adapter, local=True), exact)
                (got,) = await trie.batch_weight_sum(prompts=[[1, 2]], adapter=adapter, nodes=[3])
                assert_right(got, exact[[3]])


@asynccontextmanager
async def trie_worker(pool: Pool) -> AsyncIterator[None]:
    """A trie worker in this process."""
    worker = Worker(Server(pool.url), TrieSettings(), WorkerSettings(pool.prefix))
    ready = asyncio.Event()
    running = asyncio.create_task(worker.run(lambda _: ready.set()))
    await asyncio.wait_for(ready.wait(), DEADLINE_S)
    yield
    worker.stop()
    await asyncio.wait_for(running, DEADLINE_S)


# Bytes on the wire


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counters of the bytes that this process receives and sends on the connections for rows and scripts."""
    counted: list[int] = []
    got, answered = RawRowReceiver.buffer_updated, RawCommandConnection.data_received

    def count_row(self: RawRowReceiver, nbytes: int) -> None:
        counted.append(nbytes)
        got(self, nbytes)

    def count_reply(self: RawCommandConnection, data: bytes) -> None:
        counted.append(len(data))
        answered(self, data)

    monkeypatch.setattr(RawRowReceiver, "buffer_updated", count_row)
    monkeypatch.setattr(RawCommandConnection, "data_received", count_reply)
    return counted


@pytest.mark.parametrize("kind", ["shared", "fused"])
async def test_by_reference_the_row_stays_where_it_is(
    kind: str, request: pytest.FixtureRequest, received: list[int]
) -> None:
    pool = request.getfixturevalue(kind)
    prompts = [[1000, i] for i in range(40)]
    async with pool.producer(cache_bytes=0) as producer:
        trie = await producer.trie()
        told = answers_of(trie.structure)
        await trie.weight_sum(prompt=[1001], nodes=[0])
        received.clear()
        values = await trie.batch_weight_sum(prompts=prompts, nodes=[0, 3])
    assert sum(received) < len(prompts) * 4 * V / 8, "an eighth of the rows"
    for prompt, got in zip(prompts, values, strict=True):
        assert_right(got, told.of("sum", row_weights(prompt, V, "sum"))[[0, 3]])
    assert not pool.names("weights:*")
    async with pool.producer() as other:
        rows = await other.batch_logprobs(prompts)
        assert other.stats().cache_hits == len(prompts)
        assert other.stats().computed == 0
    assert np.array_equal(rows, [synthetic_row(prompt, vocab_size=V) for prompt in prompts])


async def test_a_row_that_is_in_the_cache_is_not_computed_again(shared: Pool) -> None:
    async with shared.producer() as producer:
        await producer.logprobs([1002])
        before = await current(shared, "syn")
        trie = await producer.trie()
        for _ in range(2):
            assert_right(
                await trie.weight_max(prompt=[1002]),
                answers_of(trie.structure).of("max", row_weights([1002], V, "max")),
            )
        assert (await current(shared, "syn"))["rows"] == before["rows"]


@pytest.mark.parametrize("known", [True, False])
async def test_weights_and_their_results_are_removed_after_the_calls(shared: Pool, known: bool) -> None:
    before = leftovers(shared)
    async with shared.producer() as producer:
        trie = await producer.trie(words(7 + known, 400))
        if known:
            await trie.weight_sum(draw_weights(0, 400))
        await trie.batch_weight_sum(np.stack([draw_weights(seed, 400) for seed in range(50)]))
        await asyncio.gather(*(trie.weight_max(draw_weights(seed, 400), under=b"") for seed in range(50)))
        await until_async(_as_before(shared, before), "nothing is left of the requests")


def _as_before(pool: Pool, before: list[str]) -> Any:
    async def is_so() -> bool:
        return not set(leftovers(pool)) - set(before)

    return is_so


async def test_a_much_used_trie_leaves_only_rows_and_results_of_rows(shared: Pool) -> None:
    def count() -> int:
        # Ignore rows, and the keys of heartbeats and claims, which workers write at intervals.
        passing = ("row:", "worker:", "claim_cursor")
        return sum(not any(part in name for part in passing) for name in shared.names("*"))

    before = count()
    async with shared.producer() as producer:
        trie = await producer.trie()
        ws = draw_weights(0, V)
        prompts = [[1004, i] for i in range(30)]
        await asyncio.gather(
            *(trie.weight_sum(ws, nodes=[i]) for i in range(100)), trie.batch_weight_sum(prompts=prompts, under=b"")
        )
    await until_async(_counts(count, before), "the keys are as many as before")
    assert all(shared.redis.pttl(key) > 0 for key in shared.redis.scan_iter(match="tries:row:*", count=1000))
    await until_done(shared, "trie")
    await until_done(shared)


def _counts(count: Any, expected: int) -> Any:
    async def is_so() -> bool:
        return bool(count() <= expected)

    return is_so


# Requests that end early


async def test_cancelled_requests_leave_no_weights(shared: Pool) -> None:
    before = leftovers(shared)
    async with shared.producer() as producer:
        trie = await producer.trie(words(9, 5000))
        await trie.weight_sum(draw_weights(0, 5000))
        for ticks in range(12):
            tasks = [asyncio.create_task(trie.weight_sum(draw_weights(seed, 5000))) for seed in range(8)]
            for _ in range(ticks):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert_right(await trie.weight_sum(draw_weights(1, 5000), nodes=[0]), [1.0])

        async def gone() -> bool:
            return not shared.names("weights:*") and not shared.jobs("trie")

        await until_async(gone, "the weights are gone")
        # The only new keys allowed are results published after their client had left; these expire soon.
        for name in set(leftovers(shared)) - set(before):
            assert name.startswith("tries:row:")


async def test_requests_that_time_out_leave_no_weights(shared: Pool) -> None:
    async with shared.producer() as producer:
        trie = await producer.trie(words(10, 400))
        await trie.weight_sum(draw_weights(0, 400))
        with frozen(shared):
            late = asyncio.ensure_future(trie.weight_sum(draw_weights(1, 400), timeout=6))
            await until_async(
                lambda: _persist(shared, "weights:*"), "weights are stored"
            )  # `_persist` removes the expiry, so that the weights do not expire during the test.
            with pytest.raises(DeadlineExceeded, match=r"within 6 s: .* 'trie'"):
                await late
            await until_async(_none_of(shared, "weights:*"), "the weights are gone")
        assert_right(await trie.weight_sum(draw_weights(1, 400), nodes=[0]), [1.0])


async def _persist(pool: Pool, pattern: str) -> bool:
    return any(pool.redis.persist(key) for key in pool.redis.scan_iter(f"{pool.prefix}:{pattern}", 1000))


def _none_of(pool: Pool, pattern: str) -> Any:
    async def none() -> bool:
        return not pool.names(pattern)

    return none


async def test_closing_ends_requests_and_removes_their_weights(shared: Pool) -> None:
    producer = shared.producer()
    trie = await producer.trie(words(11, 400))
    await trie.weight_sum(draw_weights(0, 400))
    with frozen(shared):
        asked = [asyncio.create_task(trie.weight_sum(draw_weights(seed, 400))) for seed in range(4)]
        await until_async(_has_jobs(shared, 4), "the jobs are queued")
        await producer.close()
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {ProducerClosed}
        assert not shared.names("weights:*")
    assert_right(await trie.weight_sum(draw_weights(1, 400), nodes=[0]), [1.0])
    await producer.close()


def test_ctrl_c_ends_requests_and_removes_their_weights(shared: Pool) -> None:
    producer = shared.producer()

    async def interrupted() -> None:
        trie = await producer.trie(words(12, 400))
        await trie.weight_sum(draw_weights(0, 400))
        with frozen(shared):
            asked = [asyncio.create_task(trie.weight_sum(draw_weights(seed, 400))) for seed in range(4)]
            await until_async(_has_jobs(shared, 4), "the jobs are queued")
            signal.raise_signal(signal.SIGINT)
            await asyncio.gather(*asked)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(interrupted())
    assert not shared.names("weights:*")

    async def again() -> None:
        trie = await producer.trie(words(12, 400))
        assert_right(await trie.weight_sum(draw_weights(1, 400), nodes=[0]), [1.0])
        await producer.close()

    asyncio.run(again())


def test_a_producer_and_its_trie_serve_several_event_loops_in_a_row(shared: Pool) -> None:
    producer = shared.producer()

    async def first() -> PooledTrie:
        return await producer.trie()

    async def use(trie: PooledTrie, seed: int) -> None:
        told = answers_of(trie.structure)
        ws = draw_weights(seed, V)
        assert_right(await trie.weight_sum(ws), told.of("sum", ws))
        assert_right(await trie.weight_sum(prompt=[seed]), told.of("sum", row_weights([seed], V, "sum")))
        assert_right(await trie.weight_sum(ws, local=True), told.of("sum", ws))

    trie = asyncio.run(first())
    for seed in range(3):
        asyncio.run(use(trie, seed))
    asyncio.run(producer.close())


async def test_without_a_server_a_local_trie_works(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = Producer(redis="redis://localhost:1")
    trie = await producer.trie(words(13, 100), local=True)
    ws = draw_weights(1, 100)
    assert_right(await trie.weight_sum(ws), answers_of(trie.structure).of("sum", ws))
    await producer.close()


async def test_a_local_trie_takes_rows_that_the_producer_has(shared: Pool) -> None:
    async with shared.producer() as producer:
        trie = await producer.trie(local=True)
        await keep(producer, [1040])
        exact = answers_of(trie.structure).of("sum", row_weights([1040], V, "sum"))
        before = producer.stats()
        assert_right(await trie.weight_sum(prompt=[1040]), exact)
        stats = producer.stats()
        assert (stats.requests, stats.local_hits) == (before.requests + 1, before.local_hits + 1)


async def test_concurrent_first_calls_make_the_kernels_once_and_a_failure_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Trie] = []

    def make(structure: Trie) -> Kernels:
        made.append(structure)
        if len(made) == 1:
            raise SettingsError("not this time")
        return open_kernels(structure)

    monkeypatch.setattr(trie_module, "open_kernels", make)
    trie = await Producer(redis="redis://localhost:1").trie(words(14, 100), local=True)
    ws = draw_weights(1, 100)
    for failures in (1, 0, 0):
        outcomes = await asyncio.gather(*(trie.weight_sum(ws) for _ in range(10)), return_exceptions=True)
        kinds = [type(outcome) for outcome in outcomes]
        assert (kinds.count(SettingsError), kinds.count(np.ndarray)) == (failures, 10 - failures)
        assert len(made) == 2, "one attempt fails, the next one is for all"
