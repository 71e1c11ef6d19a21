"""Positions: predictions at every position of a text, and scores of continuations."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lmpool.broker.server import Server
from lmpool.errors import (
    ModelMismatch,
    ProtocolError,
    SettingsError,
)
from lmpool.producer import Producer, SyncProducer
from lmpool.protocol import picks, query
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.picks import top
from lmpool.protocol.query import Predictions
from lmpool.protocol.row import Row, RowBlock, widen_bf16
from lmpool.synthetic import draw, fill, synthetic_row
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.worker import Worker
from tests.support.pool import DEADLINE_S, Pool, Prepared, V, until_async, until_done

PROMPT = [1, 2, 3]
ROW = synthetic_row(PROMPT, vocab_size=V)
WHOLE = [*PROMPT, *range(20, 30)]


@pytest.mark.parametrize("encoding", ["f32", "bf16"])
async def test_scores_are_the_entries_of_the_rows_of_all_prefixes(pool: Pool, encoding: str) -> None:
    pool.start("--encoding", encoding)
    async with pool.producer() as producer:
        assert producer.model.positions
        whole = [*PROMPT, *range(20, 30)]
        expected = [synthetic_row(whole[:at], vocab_size=V)[whole[at]] for at in range(3, len(whole))]
        for _ in range(2):
            scores = await producer.score(PROMPT, whole[3:])
            assert scores.dtype == np.float32
            assert np.array_equal(scores, expected)
        first, second = await producer.batch_score([PROMPT, [1]], [[4], [5, 6]])
        assert first[0] == ROW[4]
        assert np.array_equal(second, [synthetic_row([1], vocab_size=V)[5], synthetic_row([1, 5], vocab_size=V)[6]])
        # Each of the three scores took one forward pass; no row of a prefix was computed.
        assert producer.stats().computed == 3


class Unscoring(SyntheticBackend):
    """A backend without support for positions, like a simple backend of a user."""

    @property
    def info(self) -> ModelInfo:
        return replace(super().info, positions=False)


async def test_without_positions_the_client_requests_rows_of_prefixes(pool: Pool) -> None:
    backend = Unscoring(SyntheticSettings("syn", vocab_size=V))
    worker = Worker(Server(pool.url), Prepared(backend), WorkerSettings(prefix=pool.prefix))
    ready = asyncio.Event()
    running = asyncio.create_task(worker.run(lambda info: ready.set()))
    await asyncio.wait_for(ready.wait(), DEADLINE_S)
    async with pool.producer() as knowing, pool.producer() as told_otherwise:
        # Simulate a client that has found another worker of the model, which supports positions.
        session = told_otherwise._sessions.session
        assert session is not None
        session.info = replace(session.info, positions=True)
        for producer in (knowing, told_otherwise):
            whole = [*PROMPT, 20, 21, 22]
            expected = [synthetic_row(whole[:at], vocab_size=V)[whole[at]] for at in range(3, 6)]
            assert np.array_equal(await producer.score(PROMPT, whole[3:]), expected)
            await assert_positions(producer)
            for asked in (
                producer.logprobs(PROMPT, mode="logits"),
                producer.topk(PROMPT, 2, mode="logits"),
                producer.topk(PROMPT, 2, allowed=[1, 2], mode="logits"),
                producer.score(PROMPT, [1], mode="logits"),
            ):
                with pytest.raises(SettingsError, match="mode: the workers of 'syn' return log-probabilities only"):
                    await asked
            with pytest.raises(SettingsError, match="logz: the workers of 'syn'"):
                await producer.logz(PROMPT)
            rows = picks.tempered(behind(2)[:3], 0.5)
            scores = await producer.score(PROMPT, WHOLE[3:6], temperature=0.5)
            np.testing.assert_allclose(scores, rows[np.arange(3), WHOLE[3:6]], atol=1e-5)
            rare = np.sort(np.argsort(rows[0])[:3])  # The best of these is far below the best of the row.
            best = await producer.topk(PROMPT, 2, allowed=rare, temperature=0.5)
            np.testing.assert_allclose(best.values, -np.sort(-rows[0][rare])[:2], atol=1e-5)
    worker.stop()
    await asyncio.wait_for(running, DEADLINE_S)


def behind(start: int = 0) -> Row:
    """Return the rows of all positions of `WHOLE` from `start` on: (n, V)."""
    return np.stack([synthetic_row(WHOLE[: at + 1], vocab_size=V) for at in range(start, len(WHOLE))])


def of(found: Predictions) -> NDArray[np.float32]:
    """The targets or the whole rows of an answer that has one of them."""
    (values,) = (values for values in (found.targets, found.full) if values is not None)
    return values


async def assert_positions(producer: Producer) -> None:
    """Request positions in all ways, and compare them with the rows of all prefixes."""
    for start in (0, 4, len(WHOLE) - 1):
        rows = behind(start)
        best = (await producer.positions(WHOLE, start, top=7)).top
        assert best is not None
        assert best.values.dtype == np.float32
        assert best.ids.dtype == np.int64
        assert np.array_equal(best.values, np.stack([top(row, 7).values for row in rows]))
        assert np.array_equal(best.ids, np.stack([top(row, 7).ids for row in rows]))
        assert np.array_equal(of(await producer.positions(WHOLE, start, targets=[5, 0, V - 1])), rows[:, [5, 0, V - 1]])
        assert np.array_equal(of(await producer.positions(WHOLE, start, full=True)), rows)
        parts = [part async for part in producer.stream_positions(WHOLE, start, full=True)]
        assert parts[0].start == start
        for part, after in pairwise(parts):
            assert after.start == part.start + len(part)
        assert np.array_equal(of(Predictions.join(parts)), rows)


@pytest.mark.parametrize("encoding", ["f32", "bf16"])
@pytest.mark.parametrize("most", [query.MAX_ANSWER, 3 * V])
async def test_every_position_agrees_with_the_row_of_its_prefix(
    pool: Pool, encoding: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "MAX_ANSWER", most)  # A result has all positions, or three.
    pool.start("--encoding", encoding)
    async with pool.producer() as producer:
        assert producer.model.positions
        await assert_positions(producer)
        first, second = await producer.batch_positions([WHOLE, [1, 5]], 1, targets=[3])
        assert np.array_equal(of(first), behind(1)[:, [3]])
        assert np.array_equal(of(second), synthetic_row([1, 5], vocab_size=V)[None, [3]])
        assert await producer.batch_positions([], top=3) == []


async def test_one_forward_answers_all_options(pool: Pool) -> None:
    pool.start()
    rows, length = behind(2), len(WHOLE)
    lists = [[*range(at % 3)] for at in range(2, length)]  # Some positions have no targets.
    async with pool.producer(cache_bytes=0) as producer:
        for temperature in (1.0, 2.5):
            exact = rows.astype(np.float64) / temperature
            exact -= np.logaddexp.reduce(exact, axis=1)[:, None]
            options: Any = {"top": 5, "targets": lists, "temperature": temperature}
            more: Any = {"next_token": True, "logz": True, "tail": True}
            for is_full in (False, True):
                found = await producer.positions(WHOLE, 2, **options, **more, full=is_full)
                assert (found.full is not None) == is_full
                if found.full is not None:
                    np.testing.assert_allclose(found.full, exact, atol=1e-5)
                assert found.top is not None
                assert found.targets is not None
                assert found.targets.shape == (length - 2, 2)
                for at, row in enumerate(exact):
                    best = np.sort(-row)[:5]
                    np.testing.assert_allclose(found.top.values[at], -best, atol=1e-5)
                    expected = [*row[: len(lists[at])], -np.inf, -np.inf][:2]
                    np.testing.assert_allclose(found.targets[at], expected, atol=1e-5)
                    rest = np.delete(row, [*found.top.ids[at], *lists[at]])
                    np.testing.assert_allclose(np.asarray(found.tail)[at], np.logaddexp.reduce(rest), atol=1e-5)
                following = np.append(exact[np.arange(length - 3), WHOLE[3:]], np.nan)
                np.testing.assert_allclose(np.asarray(found.next_token), following, atol=1e-5)
            # Calls with fewer of the options are answered from the cached result.
            before = producer.stats().computed
            fewer = await producer.positions(WHOLE, 2, top=3, targets=np.array(_padded(lists)), temperature=temperature)
            assert producer.stats().computed == before
            assert fewer.top is not None
            assert found.top is not None
            assert np.array_equal(fewer.top.ids, found.top.ids[:, :3])
            assert fewer.tail is None
            tail = (await producer.positions(WHOLE, 2, targets=lists, top=8, tail=True, temperature=temperature)).tail
            assert producer.stats().computed == before
            assert (np.asarray(tail) < np.asarray(found.tail)).all()
            # Other calls take a temperature too.
            row = np.asarray(await producer.logprobs(WHOLE, temperature=temperature))
            np.testing.assert_allclose(row, exact[-1], atol=1e-5)
            (best,) = (await producer.batch_topk([WHOLE], 4, temperature=temperature)).values
            np.testing.assert_allclose(best, -np.sort(-exact[-1])[:4], atol=1e-5)
            scores = await producer.score(WHOLE[:4], WHOLE[4:], temperature=temperature)
            np.testing.assert_allclose(scores, following[1:-1], atol=1e-5)
            entries = await producer.batch_logprobs([WHOLE], targets=[7, 1], temperature=temperature)
            np.testing.assert_allclose(entries[0], exact[-1][[7, 1]], atol=1e-5)


@pytest.mark.parametrize("temperature", [1e-3, 1e-6])
async def test_the_probabilities_of_a_row_sum_to_1_at_a_small_temperature(pool: Pool, temperature: float) -> None:
    pool.start()
    row = behind(len(WHOLE) - 1)[0].astype(np.float64) / temperature
    exact = row - np.logaddexp.reduce(row)
    best = np.argsort(-exact)[:2]
    async with pool.producer() as producer:
        found = await producer.logprobs(WHOLE, temperature=temperature)
        rows = [found, *await producer.batch_logprobs([WHOLE], temperature=temperature)]
        for logz in (False, True):
            whole = await producer.positions(WHOLE, temperature=temperature, full=True, logz=logz)
            rows += list(np.asarray(whole.full))
        for each in rows:
            assert np.exp(each).sum() == pytest.approx(1, abs=1e-5)
        last = await producer.positions(WHOLE, len(WHOLE) - 1, temperature=temperature, targets=best, tail=True)
        values = np.append(np.asarray(last.targets)[0], np.asarray(last.tail)[0])
        assert np.exp(values).sum() == pytest.approx(1, abs=1e-5)
        assert values[0] == pytest.approx(exact[best[0]], abs=1e-5)


def _padded(lists: list[list[int]]) -> list[list[int]]:
    return [[*ids, -1, -1][:2] for ids in lists]


async def test_the_parts_of_a_text_know_the_token_that_follows(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.start()
    async with pool.producer() as producer:
        whole = await producer.positions(WHOLE, 1, targets=[3], next_token=True)
        # A part has at most two positions.
        monkeypatch.setattr(query, "MAX_ANSWER", 9)
        parts = [part async for part in producer.stream_positions(WHOLE, 1, targets=[3], next_token=True)]
        for found in (Predictions.join(parts), await producer.positions(WHOLE, 1, targets=[3], next_token=True)):
            assert len(parts) == (len(WHOLE) - 1) // 2
            np.testing.assert_array_equal(np.asarray(found.next_token), np.asarray(whole.next_token))
            np.testing.assert_array_equal(of(found), of(whole))


def logits_behind(start: int = 0) -> tuple[Row, Row]:
    """Return the logits of all positions of `WHOLE` from `start` on, (n, V), and their logZ, (n,)."""
    logits, log_z = np.empty((len(WHOLE) - start, V), np.float32), []
    for at in range(start, len(WHOLE)):
        base, shifts = draw(np.array(WHOLE[: at + 1], "<u4").tobytes(), V, 0)
        fill(bits := np.empty(V, np.uint16), base.bits, shifts)
        widen_bf16(bits, logits[at - start])
        log_z.append(base.log_z)
    return logits, np.array(log_z, np.float32)


@pytest.mark.parametrize("encoding", ["f32", "bf16"])
async def test_logits_are_returned_as_they_were_computed(pool: Pool, encoding: str) -> None:
    pool.start("--encoding", encoding)
    logits, log_z = logits_behind()
    prompts = [WHOLE[: at + 1] for at in range(len(WHOLE))]
    async with pool.producer() as producer:
        for start in (0, 5):
            assert np.array_equal(of(await producer.positions(WHOLE, start, full=True, mode="logits")), logits[start:])
            found = await producer.positions(WHOLE, start, logz=True)
            assert np.array_equal(np.asarray(found.logz), log_z[start:])
        wanted = [7, 0, V - 1]
        assert np.array_equal(of(await producer.positions(WHOLE, targets=wanted, mode="logits")), logits[:, wanted])
        best = (await producer.positions(WHOLE, top=4, mode="logits")).top
        assert best is not None
        assert np.array_equal(best.values, np.stack([top(row, 4).values for row in logits]))
        assert np.array_equal(await producer.logprobs(WHOLE, mode="logits"), logits[-1])
        assert np.array_equal(await producer.logprobs(WHOLE, mode="logits", targets=wanted), logits[-1, wanted])
        assert np.array_equal(await producer.batch_logprobs(prompts, mode="logits"), logits)
        each = np.arange(2 * len(prompts)).reshape(-1, 2)
        entries = await producer.batch_logprobs(prompts, targets=each, mode="logits")
        assert np.array_equal(entries, np.take_along_axis(logits, each, axis=1))
        assert np.array_equal((await producer.topk(WHOLE, 5, mode="logits")).values, top(logits[-1], 5).values)
        assert np.array_equal((await producer.batch_topk(prompts, 5, mode="logits")).ids[3], top(logits[3], 5).ids)
        assert await producer.logz(WHOLE) == log_z[-1]
        assert np.array_equal(await producer.batch_logz(prompts), log_z)
        assert (await producer.batch_logz([])).shape == (0,)
        following = logits[np.arange(2, len(WHOLE) - 1), WHOLE[3:]]
        assert np.array_equal(await producer.score(PROMPT, WHOLE[3:], mode="logits"), following)
        first, second = await producer.batch_score([PROMPT, WHOLE[:5]], [WHOLE[3:5], WHOLE[5:]], mode="logits")
        assert np.array_equal(first, following[:2])
        assert np.array_equal(second, following[2:])
        assert np.array_equal(await producer.logprobs(WHOLE), behind()[-1])


async def test_a_stream_ends_when_the_model_changes_between_its_parts(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "MAX_ANSWER", 3 * V)
    pool.start()
    async with pool.producer() as producer:
        parts = producer.stream_positions(WHOLE, full=True)
        assert (await anext(parts)).start == 0
        session = producer._sessions.session
        assert session is not None
        session.info = replace(session.info, revision="seed-7")  # Simulate new workers.
        with pytest.raises(ModelMismatch, match="the model or its adapter has changed before position 3: ask again"):
            await anext(parts)


async def test_parts_of_two_models_are_refused(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query, "MAX_ANSWER", 3 * V)
    pool.start()
    async with pool.producer() as producer:
        session = producer._sessions.session
        assert session is not None
        answer = session.answer

        async def answer_and_change(*given: Any, **named: Any) -> Row:
            found = await answer(*given, **named)
            session.info = replace(session.info, note="another")
            object.__setattr__(session.info, "revision", "seed-7")
            return found

        monkeypatch.setattr(session, "answer", answer_and_change)
        with pytest.raises(ModelMismatch, match="the model 'syn' has changed while parts of a result arrived"):
            await producer.positions(WHOLE, full=True)


async def test_a_job_for_too_many_positions_is_refused(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.start("--vocab-size", str(1 << 18))
    async with pool.producer() as producer:
        monkeypatch.setattr(query, "MAX_ANSWER", 1 << 30)  # Disable the client's check.
        with pytest.raises(ProtocolError, match="13 positions in one job: at most 8 for these values"):
            await producer.positions(WHOLE, full=True)
        monkeypatch.undo()
        assert of(await producer.positions(WHOLE, 5, full=True)).shape == (8, 1 << 18)


async def test_positions_take_one_job_and_store_no_rows(pool: Pool) -> None:
    pool.start()
    async with pool.producer() as producer:
        await producer.positions(WHOLE, top=3)
        await until_done(pool)
        assert len(pool.names("row:*")) == 1  # The key of the result; no row is stored.
        assert producer.stats().computed == 1


async def test_a_damaged_result_for_positions_is_requested_again(pool: Pool) -> None:
    pool.start()
    async with pool.producer() as producer:
        await producer.positions(WHOLE, top=2)
        await until_done(pool)  # A datagram can bring the result before the worker stores it.
        (key,) = pool.redis.scan_iter(match=f"{pool.prefix}:row:*")
        value = pool.redis.get(key)
        assert isinstance(value, bytes)
        pool.redis.set(key, value[:16] + b"\xff" * (len(value) - 16))
        best = (await producer.positions(WHOLE, top=2)).top
        assert best is not None
        assert np.array_equal(best.ids, np.stack([top(row, 2).ids for row in behind()]))


async def test_scores_take_one_job_and_store_no_rows(pool: Pool) -> None:
    pool.start()
    async with pool.producer() as producer:
        await producer.score(PROMPT, list(range(50)))
        await until_done(pool)
        assert len(pool.names("row:*")) == 1  # The key of the scores; no row is stored.


@pytest.mark.parametrize(("encoding", "forwards"), [("bf16", 0), ("f32", 5)])
async def test_logits_come_from_the_row_if_a_worker_has_it_in_16_bits(pool: Pool, encoding: str, forwards: int) -> None:
    size = 4096
    backend = SyntheticBackend(SyntheticSettings("syn", vocab_size=size, encoding=encoding))
    worker = Worker(Server(pool.url), Prepared(backend), WorkerSettings(prefix=pool.prefix, shm_bytes=1 << 24))
    running = asyncio.create_task(worker.run())
    await until_async(lambda: _has_segment(worker), "it has shared memory")
    base, shifts = draw(np.array(WHOLE, "<u4").tobytes(), size, 0)
    fill(bits := np.empty(size, np.uint16), base.bits, shifts)
    logits, few = widen_bf16(bits), np.array([3, 900, 2000])
    async with pool.producer(cache_bytes=0) as producer:
        await producer.logprobs(WHOLE)
        assert np.array_equal(await producer.logprobs(WHOLE, mode="logits"), logits)
        assert np.array_equal(await producer.logprobs(WHOLE, mode="logits", targets=few), logits[few])
        assert np.array_equal((await producer.topk(WHOLE, 5, mode="logits")).ids, top(logits, 5).ids)
        best = await producer.topk(WHOLE, 2, allowed=few, mode="logits")
        assert np.array_equal(best.values, top(logits, 2, few).values)
        assert await producer.logz(WHOLE) == base.log_z
        last = await producer.positions(WHOLE, len(WHOLE) - 1, full=True, mode="logits")
        assert np.array_equal(of(last)[0], logits)
        assert backend.stats().steps == 1 + forwards
        # The stored row lacks logZ of earlier positions, so the backend needs a forward pass.
        assert len(await producer.positions(WHOLE, 2, logz=True)) == len(WHOLE) - 2
        assert backend.stats().steps == 2 + forwards
        # If a query of the stored row raises, the backend computes the query, and the worker continues.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RowBlock, "logits", None)
            assert np.array_equal((await producer.topk(WHOLE, 6, mode="logits")).ids, top(logits, 6).ids)
        assert backend.stats().steps == 3 + forwards
    worker.stop()
    await asyncio.wait_for(running, DEADLINE_S)


async def _has_segment(worker: Worker) -> bool:
    return worker._serving is not None and worker._serving.segment.segment is not None


def test_without_asyncio_too(pool: Pool) -> None:
    pool.start()
    with SyncProducer(redis=pool.url, prefix=pool.prefix, cache_bytes=0) as producer:
        assert np.array_equal(of(producer.positions(WHOLE, full=True)), behind())
        assert np.array_equal(of(producer.batch_positions([WHOLE], targets=[4])[0]), behind()[:, [4]])
        (part,) = producer.stream_positions(WHOLE, 2, full=True)
        assert part.start == 2
        assert np.array_equal(of(part), behind(2))
        logits, log_z = logits_behind(2)
        assert producer.score(PROMPT, [4], mode="logits")[0] == logits[0, 4]
        assert producer.batch_score([PROMPT], [[4]], mode="logits")[0][0] == logits[0, 4]
        assert producer.logz(PROMPT) == log_z[0]
