"""Asking for less than a row, or for those of every position: entries, the likeliest tokens, draws, scores."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmpool.broker.server import Server
from lmpool.errors import (
    EmptyPrompt,
    LMPoolError,
    ModelMismatch,
    NotTokenIds,
    NoWorker,
    PromptTooLong,
    ProtocolError,
    SettingsError,
    TokenOutOfRange,
    UnknownAdapter,
    WorkerError,
)
from lmpool.producer import Producer, SyncProducer
from lmpool.protocol import query
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.prompt import digest_of, encode_prompt
from lmpool.protocol.query import Sampling, TopK, sample, top
from lmpool.protocol.row import Row, widen_bf16
from lmpool.synthetic import draw, fill, synthetic_row
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.worker import Worker
from tests.support.pool import DEADLINE_S, Pool, Prepared, V, until_async

PROMPT = [1, 2, 3]
ROW = synthetic_row(PROMPT, vocab_size=V)
OTHERS = [[4, 5], [6], [7, 8, 9, 10]]


def rows(prompts: list[list[int]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.stack([synthetic_row(prompt, vocab_size=V) for prompt in prompts])


def row_key(producer: Producer, prompt: list[int]) -> bytes:
    encoded = encode_prompt(prompt, vocab_size=V, max_tokens=100)
    return Keys(producer._keys.prefix).row(producer.model.fingerprint) + encoded.digest


@pytest.mark.parametrize("encoding", ["f32", "bf16"])
@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
async def test_entries_are_those_of_the_row_wherever_it_is(pool: Pool, encoding: str, cache_bytes: int) -> None:
    pool.start("--encoding", encoding)
    targets = [0, V - 1, 7, 7]
    async with pool.producer(cache_bytes=cache_bytes) as producer:
        # Computed; from the cache in Redis; and from this process's memory, if it has some.
        for _ in range(2):
            entries = await producer.logprobs(PROMPT, targets=targets)
            assert entries.dtype == np.float32
            assert entries.flags.writeable
            assert np.array_equal(entries, ROW[targets])
        await producer.logprobs(PROMPT)
        assert np.array_equal(await producer.logprobs(PROMPT, targets=np.array(targets, np.uint16)), ROW[targets])
        many = list(range(V))
        assert np.array_equal(await producer.logprobs(OTHERS[0], targets=many), rows(OTHERS)[0])


async def test_only_the_entries_travel_and_the_row_is_there_for_everyone(pool: Pool) -> None:
    pool.start("--vocab-size", 49_152)
    async with pool.producer() as first, pool.producer(cache_bytes=0) as second:
        row = synthetic_row(PROMPT, vocab_size=49_152)
        await first.logprobs(PROMPT, targets=[5])
        assert first.stats().computed == 1
        sent = int(pool.redis.info("stats")["total_net_output_bytes"])
        for _ in range(100):
            assert (await second.logprobs(PROMPT, targets=[9, 11]))[1] == row[11]
        sent = int(pool.redis.info("stats")["total_net_output_bytes"]) - sent
        assert sent < 100 * 1000
        assert np.array_equal(await second.logprobs(PROMPT), row)
        stats = second.stats()
        assert (stats.requests, stats.cache_hits, stats.computed) == (101, 101, 0)


async def test_a_batch_of_entries_has_the_same_targets_for_all_or_each_its_own(pool: Pool) -> None:
    pool.start()
    prompts = [PROMPT, *OTHERS, PROMPT]
    async with pool.producer(cache_bytes=0) as producer:
        await producer.warm(OTHERS[1])
        expected = rows(prompts)
        assert np.array_equal(await producer.batch_logprobs(prompts, targets=[3, 1]), expected[:, [3, 1]])
        each = np.arange(10).reshape(5, 2)
        assert np.array_equal(
            await producer.batch_logprobs(prompts, targets=each), np.take_along_axis(expected, each, axis=1)
        )
        assert (await producer.batch_logprobs([], targets=[3, 1])).shape == (0, 2)
        many = np.tile(np.arange(V), (5, 1))
        assert np.array_equal(await producer.batch_logprobs(prompts, targets=many), expected)


async def test_a_thousand_requests_at_once_are_each_answered_with_their_own(pool: Pool) -> None:
    pool.start("--vocab-size", 64)
    prompts = [[i % 64, i // 64] for i in range(1500)]
    expected = [synthetic_row(prompt, vocab_size=64) for prompt in prompts]
    async with pool.producer(cache_bytes=0) as producer:
        for _ in range(2):
            asked = (producer.logprobs(prompt, targets=[at % 64]) for at, prompt in enumerate(prompts))
            for at, entries in enumerate(await asyncio.gather(*asked)):
                assert entries[0] == expected[at][at % 64]
        batch = await producer.batch_logprobs(prompts, targets=[1, 2])
        assert np.array_equal(batch, np.stack(expected)[:, [1, 2]])
        assert producer.stats().computed == 1500


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
async def test_the_likeliest_tokens_are_those_of_the_row(pool: Pool, cache_bytes: int) -> None:
    pool.start()
    async with pool.producer(cache_bytes=cache_bytes) as producer:
        for k in (1, 5, V):
            best, expected = await producer.topk(PROMPT, k), top(ROW, k)
            assert np.array_equal(best.values, expected.values)
            assert np.array_equal(best.ids, expected.ids)
        await producer.logprobs(PROMPT)
        assert np.array_equal((await producer.topk(PROMPT, 3)).ids, top(ROW, 3).ids)
        values, ids = await producer.batch_topk([PROMPT, *OTHERS], 4)
        assert values.shape == ids.shape == (4, 4)
        assert np.array_equal(values, np.take_along_axis(rows([PROMPT, *OTHERS]), ids, axis=1))
        assert np.array_equal(values[:, 0], rows([PROMPT, *OTHERS]).max(axis=1))
        assert producer.stats().computed >= 4


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
async def test_a_seed_draws_the_same_token_from_worker_cache_and_memory(pool: Pool, cache_bytes: int) -> None:
    pool.start()
    async with pool.producer(cache_bytes=cache_bytes) as producer:
        expected = [sample(ROW, Sampling(0.8, 0.95, seed)) for seed in range(20)]
        options: Any = {"temperature": 0.8, "top_p": 0.95}
        drawn = [await producer.sample(PROMPT, seed=seed, **options) for seed in range(20)]
        assert drawn == expected
        await producer.logprobs(PROMPT)
        assert [await producer.sample(PROMPT, seed=seed, **options) for seed in range(20)] == expected
        assert (await producer.batch_sample([PROMPT] * 20, seed=0, **options)).tolist() == expected
        assert await producer.sample(PROMPT, temperature=0) == int(ROW.argmax())


async def test_without_a_seed_every_draw_is_anew_and_leaves_nothing(pool: Pool) -> None:
    pool.start()
    async with pool.producer(cache_bytes=0) as producer:
        drawn = await producer.batch_sample([PROMPT] * 200)
        assert len(set(drawn.tolist())) > 20
        assert drawn.dtype == np.int64
        # The row stays for everyone; the draws are of no use to anybody else.
        await until_async(lambda: _count(pool, "row:*", 1), "just the row is left")


async def _count(pool: Pool, pattern: str, count: int) -> bool:
    return len(pool.names(pattern)) == count


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
        # One forward each, and no rows of prefixes.
        assert producer.stats().computed == 3


class Unscoring(SyntheticBackend):
    """Says nothing of scores and positions, as a backend of one's own."""

    @property
    def info(self) -> ModelInfo:
        return replace(super().info, positions=False)


async def test_workers_that_do_not_score_are_asked_for_rows_of_prefixes(pool: Pool) -> None:
    backend = Unscoring(SyntheticSettings("syn", vocab_size=V))
    worker = Worker(Server(pool.url), Prepared(backend), WorkerSettings(prefix=pool.prefix))
    ready = asyncio.Event()
    running = asyncio.create_task(worker.run(lambda info: ready.set()))
    await asyncio.wait_for(ready.wait(), DEADLINE_S)
    async with pool.producer() as knowing, pool.producer() as told_otherwise:
        # As after another worker of the model, which does, has joined.
        session = told_otherwise._sessions.session
        assert session is not None
        session._renew(replace(session.info, positions=True))
        for producer in (knowing, told_otherwise):
            whole = [*PROMPT, 20, 21, 22]
            expected = [synthetic_row(whole[:at], vocab_size=V)[whole[at]] for at in range(3, 6)]
            assert np.array_equal(await producer.score(PROMPT, whole[3:]), expected)
            await assert_positions(producer)
            for asked in (producer.logprobs(PROMPT, mode="logits"), producer.topk(PROMPT, 2, mode="logits")):
                with pytest.raises(SettingsError, match="mode: the workers of 'syn' tell log-probabilities only"):
                    await asked
            with pytest.raises(SettingsError, match="logz: the workers of 'syn'"):
                await producer.logz(PROMPT)
    worker.stop()
    await asyncio.wait_for(running, DEADLINE_S)


WHOLE = [*PROMPT, *range(20, 30)]


def behind(start: int = 0) -> Row:
    """The rows of all positions of `WHOLE` from one on, (n, V)."""
    return np.stack([synthetic_row(WHOLE[: at + 1], vocab_size=V) for at in range(start, len(WHOLE))])


async def assert_positions(producer: Producer) -> None:
    """Ask for every position in all ways, and compare with the rows of all prefixes."""
    for start in (0, 4, len(WHOLE) - 1):
        rows = behind(start)
        best = await producer.positions(WHOLE, start, top=7)
        assert isinstance(best, TopK)
        assert best.values.dtype == np.float32
        assert best.ids.dtype == np.int64
        assert np.array_equal(best.values, np.stack([top(row, 7).values for row in rows]))
        assert np.array_equal(best.ids, np.stack([top(row, 7).ids for row in rows]))
        assert np.array_equal(await producer.positions(WHOLE, start, targets=[5, 0, V - 1]), rows[:, [5, 0, V - 1]])
        assert np.array_equal(await producer.positions(WHOLE, start, full=True), rows)
        parts = [part async for part in producer.stream_positions(WHOLE, start, full=True)]
        assert parts[0].start == start
        for part, after in pairwise(parts):
            assert after.start == part.start + len(part.values)
        assert np.array_equal(np.concatenate([np.asarray(part.values) for part in parts]), rows)


@pytest.mark.parametrize("encoding", ["f32", "bf16"])
@pytest.mark.parametrize("most", [query.MOST_ANSWER, 3 * V])
async def test_every_position_expects_what_the_row_of_its_prefix_says(
    pool: Pool, encoding: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "MOST_ANSWER", most)  # Of all positions at once, or of three.
    pool.start("--encoding", encoding)
    async with pool.producer() as producer:
        assert producer.model.positions
        await assert_positions(producer)
        first, second = await producer.batch_positions([WHOLE, [1, 5]], 1, targets=[3])
        assert np.array_equal(first, behind(1)[:, [3]])
        assert np.array_equal(second, synthetic_row([1, 5], vocab_size=V)[None, [3]])
        assert await producer.batch_positions([], top=3) == []


def logits_behind(start: int = 0) -> tuple[Row, Row]:
    """The logits of all positions of `WHOLE` from one on, (n, V), and their logZ, (n,)."""
    logits, log_z = np.empty((len(WHOLE) - start, V), np.float32), []
    for at in range(start, len(WHOLE)):
        base, shifts = draw(np.array(WHOLE[: at + 1], "<u4").tobytes(), V, 0)
        fill(bits := np.empty(V, np.uint16), base.bits, shifts)
        widen_bf16(bits, logits[at - start])
        log_z.append(base.log_z)
    return logits, np.array(log_z, np.float32)


@pytest.mark.parametrize("encoding", ["f32", "bf16"])
async def test_logits_are_told_as_they_were_computed(pool: Pool, encoding: str) -> None:
    pool.start("--encoding", encoding)
    logits, log_z = logits_behind()
    prompts = [WHOLE[: at + 1] for at in range(len(WHOLE))]
    async with pool.producer() as producer:
        for start in (0, 5):
            assert np.array_equal(await producer.positions(WHOLE, start, full=True, mode="logits"), logits[start:])
            assert np.array_equal(await producer.positions(WHOLE, start, logz=True), log_z[start:])
        wanted = [7, 0, V - 1]
        assert np.array_equal(await producer.positions(WHOLE, targets=wanted, mode="logits"), logits[:, wanted])
        best = await producer.positions(WHOLE, top=4, mode="logits")
        assert np.array_equal(best[0], np.stack([top(row, 4).values for row in logits]))
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
        assert np.array_equal(await producer.logprobs(WHOLE), behind()[-1])


async def test_a_stream_ends_when_the_model_changes_between_its_parts(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "MOST_ANSWER", 3 * V)
    pool.start()
    async with pool.producer() as producer:
        parts = producer.stream_positions(WHOLE, full=True)
        assert (await anext(parts)).start == 0
        session = producer._sessions.session
        assert session is not None
        session._renew(replace(session.info, revision="seed-7"))  # As after all workers were replaced.
        with pytest.raises(ModelMismatch, match="the model or its adapter has changed before position 3: ask again"):
            await anext(parts)


async def test_parts_of_two_models_make_no_answer(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query, "MOST_ANSWER", 3 * V)
    pool.start()
    async with pool.producer() as producer:
        session = producer._sessions.session
        assert session is not None
        answer = session.answer

        async def answer_and_change(*given: Any, **named: Any) -> Row:
            found = await answer(*given, **named)
            session._renew(replace(session.info, note="another"))
            object.__setattr__(session.info, "revision", "seed-7")
            return found

        monkeypatch.setattr(session, "answer", answer_and_change)
        with pytest.raises(ModelMismatch, match="the model 'syn' has changed while parts of an answer came"):
            await producer.positions(WHOLE, full=True)


async def test_a_job_for_more_positions_than_an_answer_may_have_is_refused(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.start("--vocab-size", str(1 << 18))
    async with pool.producer() as producer:
        monkeypatch.setattr(query, "MOST_ANSWER", 1 << 30)  # As a client that does not care.
        with pytest.raises(ProtocolError, match="13 positions in one job: at most 8 of what is wanted of them"):
            await producer.positions(WHOLE, full=True)
        monkeypatch.undo()
        assert np.shape(await producer.positions(WHOLE, 5, full=True)) == (8, 1 << 18)


async def test_every_position_costs_one_job_and_no_rows(pool: Pool) -> None:
    pool.start()
    async with pool.producer() as producer:
        await producer.positions(WHOLE, top=3)
        assert len(pool.names("row:*")) == 1  # the answer
        assert producer.stats().computed == 1


async def test_a_damaged_answer_for_every_position_is_asked_for_again(pool: Pool) -> None:
    pool.start()
    async with pool.producer() as producer:
        await producer.positions(WHOLE, top=2)
        (key,) = pool.redis.scan_iter(match=f"{pool.prefix}:row:*")
        value = pool.redis.get(key)
        assert isinstance(value, bytes)
        pool.redis.set(key, value[:16] + b"\xff" * (len(value) - 16))
        best = await producer.positions(WHOLE, top=2)
        assert isinstance(best, TopK)
        assert np.array_equal(best.ids, np.stack([top(row, 2).ids for row in behind()]))


async def test_scoring_costs_one_job_and_no_rows(pool: Pool) -> None:
    pool.start()
    async with pool.producer() as producer:
        await producer.score(PROMPT, list(range(50)))
        assert len(pool.names("row:*")) == 1  # the scores


async def test_a_fresh_row_is_computed_whatever_is_cached_and_is_not_kept(pool: Pool) -> None:
    pool.start()
    async with pool.producer() as producer:
        await producer.logprobs(PROMPT)
        for computed in (2, 3):
            assert np.array_equal(await producer.logprobs(PROMPT, fresh=True), ROW)
            assert producer.stats().computed == computed
        assert np.array_equal(await producer.logprobs(PROMPT, fresh=True, targets=[4, 2]), ROW[[4, 2]])
        await until_async(lambda: _count(pool, "row:*", 1), "just the row is left")


async def test_warming_computes_a_row_and_sends_nothing(pool: Pool) -> None:
    pool.start()
    async with pool.producer() as first, pool.producer() as second:
        await first.warm(PROMPT)
        await first.warm(PROMPT)
        assert pool.redis.exists(row_key(first, PROMPT))
        assert np.array_equal(await second.logprobs(PROMPT), ROW)
        assert (second.stats().cache_hits, second.stats().computed) == (1, 0)


async def test_a_cleared_producer_asks_the_pool_again(pool: Pool) -> None:
    pool.start()
    async with pool.producer() as producer:
        await producer.logprobs(PROMPT)
        producer.clear_cache()
        await producer.logprobs(PROMPT)
        assert (producer.stats().cache_hits, producer.stats().local_hits) == (1, 0)


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"short",
        b"X" * (16 + 4 * V),
        b"LMPR\x01\x01\0\0" + (V + 1).to_bytes(4, "little") + bytes(4) + bytes(4 * V),
        b"LMPR\x01\x01\0\0" + V.to_bytes(4, "little") + bytes(4),
        b"LMPR\x01\x01\0\0" + V.to_bytes(4, "little") + bytes(4) + b"\xff" * 4 * V,
        b"LMPR\x01\x09\0\0" + V.to_bytes(4, "little") + bytes(4) + bytes(4 * V),
    ],
    ids=["empty", "short", "noise", "other V", "cut", "NaN", "encoding"],
)
async def test_nothing_is_read_from_a_damaged_row(pool: Pool, damage: bytes) -> None:
    pool.start()
    async with pool.producer(cache_bytes=0) as producer:
        await producer.warm(PROMPT)
        for ask in ("targets", "topk", "sample"):
            pool.redis.set(row_key(producer, PROMPT), damage, px=60_000)
            if ask == "targets":
                assert np.array_equal(await producer.logprobs(PROMPT, targets=[3, 5]), ROW[[3, 5]])
                pool.redis.set(row_key(producer, PROMPT), damage, px=60_000)
                assert np.array_equal(await producer.batch_logprobs([PROMPT], targets=[3, 5]), ROW[None, [3, 5]])
            elif ask == "topk":
                assert np.array_equal((await producer.topk(PROMPT, 5)).ids, top(ROW, 5).ids)
            else:
                assert await producer.sample(PROMPT, seed=3) == sample(ROW, Sampling(1.0, 1.0, 3))
        assert np.array_equal(await producer.logprobs(PROMPT), ROW)


@pytest.mark.parametrize("ask", ["row", "targets", "topk"])
async def test_something_else_under_a_rows_key_is_put_right(pool: Pool, ask: str) -> None:
    pool.start()
    async with pool.producer(cache_bytes=0) as producer:
        await producer.warm(PROMPT)
        await producer.warm(OTHERS[0])
        pool.redis.delete(row_key(producer, PROMPT))
        pool.redis.rpush(row_key(producer, PROMPT), "a list")
        # The other prompts of the same read are not harmed.
        other = producer.logprobs(OTHERS[0], targets=[1])
        if ask == "row":
            answer, wrong = await asyncio.gather(other, producer.logprobs(PROMPT))
            assert np.array_equal(wrong, ROW)
        elif ask == "targets":
            answer, wrong = await asyncio.gather(other, producer.logprobs(PROMPT, targets=[1]))
            assert wrong[0] == ROW[1]
        else:
            answer, other_answer = await asyncio.gather(other, producer.topk(PROMPT, 2))
            assert np.array_equal(other_answer.ids, top(ROW, 2).ids)
        assert answer[0] == rows(OTHERS)[0][1]


async def test_a_damaged_answer_is_replaced(pool: Pool) -> None:
    pool.start()
    damage = b"LMPR\x01\x01\0\0" + (2).to_bytes(4, "little") + bytes(4) + b"\xff" * 8
    async with pool.producer(cache_bytes=0) as producer:
        for _ in range(2):
            assert np.array_equal((await producer.topk(PROMPT, 1)).ids, top(ROW, 1).ids)
            assert np.array_equal(await producer.score(PROMPT, [4, 5]), [ROW[4], rows([[*PROMPT, 4]])[0][5]])
            for key in pool.redis.scan_iter(match=f"{pool.prefix}:row:*"):
                if key != row_key(producer, PROMPT):
                    pool.redis.set(key, damage, px=60_000)


@pytest.mark.parametrize("first", ["f32", "bf16"])
async def test_entries_are_those_of_the_model_that_answers(pool: Pool, first: str) -> None:
    worker = pool.start("--encoding", first)
    async with pool.producer(when_absent="wait") as producer:
        await producer.warm(PROMPT)
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        asked = asyncio.create_task(producer.logprobs([1, 2], targets=[1, V - 1]))
        await asyncio.sleep(0)
        pool.start("--encoding", "bf16" if first == "f32" else "f32", "--seed", 5)
        row = synthetic_row([1, 2], vocab_size=V, seed=5)
        assert np.array_equal(await asked, row[[1, V - 1]])


async def test_rows_and_picks_of_one_prompt_at_once_are_computed_once(pool: Pool) -> None:
    worker = pool.start("--step-ms", 100)
    async with pool.producer(cache_bytes=0) as producer:
        answers = await asyncio.gather(
            producer.topk(PROMPT, 3),
            producer.logprobs(PROMPT),
            producer.sample(PROMPT, seed=5),
            producer.logprobs(PROMPT, targets=[9]),
            producer.topk(PROMPT, 4),
            producer.warm(PROMPT),
        )
        assert np.array_equal(answers[0].ids, top(ROW, 3).ids)
        assert np.array_equal(answers[1], ROW)
        assert answers[2] == sample(ROW, Sampling(1.0, 1.0, 5))
        assert np.array_equal(answers[3], ROW[[9]])
        assert np.array_equal(answers[4].ids, top(ROW, 4).ids)
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        assert pool.jobs() == 0


async def test_everything_is_asked_of_an_adapter_too_and_of_the_weights_that_it_has_now(
    pool: Pool, tmp_path: Path
) -> None:
    pool.start()
    (tmp_path / "weights").write_text("first")
    options: Any = {"adapter": "poet"}
    async with pool.producer() as producer:
        for content in ("first", "second"):
            (tmp_path / "weights").write_text(content)
            revision = await producer.add_adapter("poet", tmp_path)
            row = synthetic_row(PROMPT, vocab_size=V, adapter_revision=revision)
            for _ in range(2):
                assert np.array_equal(await producer.logprobs(PROMPT, targets=[3, 4], **options), row[[3, 4]])
                assert np.array_equal((await producer.topk(PROMPT, 3, **options)).ids, top(row, 3).ids)
                assert await producer.sample(PROMPT, seed=2, **options) == sample(row, Sampling(1.0, 1.0, 2))
                assert (await producer.score(PROMPT, [7], **options))[0] == row[7]
                assert np.array_equal(await producer.logprobs(PROMPT, fresh=True, **options), row)
            await producer.warm(PROMPT, **options)
            assert np.array_equal(await producer.batch_logprobs(iter([PROMPT]), targets=[1], **options), row[None, [1]])
        with pytest.raises(UnknownAdapter, match="no adapter 'judge'; it has: poet"):
            await producer.topk(PROMPT, 3, adapter="judge")
        assert np.array_equal(await producer.logprobs(PROMPT), ROW)


BAD: list[tuple[str, dict[str, Any], type[LMPoolError], str]] = [
    ("logprobs", {"targets": []}, NotTokenIds, "targets: .* at least 1 token id"),
    ("logprobs", {"targets": [1.5]}, NotTokenIds, "targets"),
    ("logprobs", {"targets": [True]}, NotTokenIds, "targets"),
    ("logprobs", {"targets": "the"}, NotTokenIds, "targets: 'the'"),
    ("logprobs", {"targets": [[1], [2, 3]]}, NotTokenIds, "targets"),
    ("logprobs", {"targets": [[1]]}, NotTokenIds, "targets"),
    ("logprobs", {"targets": [V]}, TokenOutOfRange, f"token id {V} is out of range: .* 0 to {V - 1}"),
    ("logprobs", {"targets": [3, -1]}, TokenOutOfRange, "token id -1"),
    ("topk", {"k": 0}, SettingsError, f"k: 0 must be a whole number from 1 to {V}"),
    ("topk", {"k": V + 1}, SettingsError, f"k: {V + 1}"),
    ("topk", {"k": 1.0}, SettingsError, "k: 1.0"),
    ("topk", {"k": True}, SettingsError, "k: True"),
    ("topk", {"k": 1, "mode": 3}, SettingsError, "mode: 3 is not one of"),
    ("logprobs", {"mode": "logit"}, SettingsError, "mode: 'logit' is not one of logprobs, logits"),
    ("logprobs", {"mode": "logits", "fresh": True}, SettingsError, "fresh: True, of rows only"),
    ("sample", {"temperature": -1}, SettingsError, "temperature: -1 must be a number from 0"),
    ("sample", {"temperature": float("nan")}, SettingsError, "temperature: nan"),
    ("sample", {"temperature": "hot"}, SettingsError, "temperature: 'hot'"),
    ("sample", {"top_p": 0}, SettingsError, "top_p: 0 must be a number above 0 and at most 1"),
    ("sample", {"top_p": 1.01}, SettingsError, "top_p: 1.01"),
    ("sample", {"seed": -1}, SettingsError, "seed: -1 must be from 0 to"),
    ("sample", {"seed": 1.5}, SettingsError, "seed: 1.5 must be a whole number"),
    ("sample", {"top_k": 5}, SettingsError, "top_k: not an option; there are"),
    ("positions", {}, SettingsError, r"give just one of top=k, targets=\[ids\], full=True and logz=True"),
    ("positions", {"top": 1, "full": True}, SettingsError, "give just one of"),
    ("positions", {"top": 0}, SettingsError, f"top: 0 must be a whole number from 1 to {V}"),
    ("positions", {"top": V + 1}, SettingsError, f"top: {V + 1} must be"),
    ("positions", {"full": 1}, SettingsError, "full: 1 must be True or False"),
    ("positions", {"targets": []}, NotTokenIds, "targets: .* at least 1 token id"),
    ("positions", {"targets": [V]}, TokenOutOfRange, f"token id {V} is out of range"),
    ("positions", {"top": 1, "start": 3}, SettingsError, "start: 3 must be a whole number from 0 to 2, the last"),
    ("positions", {"top": 1, "start": -1}, SettingsError, "start: -1 must be"),
    ("positions", {"top": 1, "start": 1.0}, SettingsError, "start: 1.0 must be"),
    (
        "positions",
        {"k": 5},
        SettingsError,
        "k: not an option; there are top, targets, full, logz, mode",
    ),
    ("positions", {"logz": True, "full": True}, SettingsError, "give just one of"),
    ("positions", {"top": 1, "mode": "raw"}, SettingsError, "mode: 'raw' is not one of logprobs, logits"),
    ("score", {"continuation": []}, EmptyPrompt, "at least 1 token id"),
    ("score", {"continuation": "text"}, NotTokenIds, "text"),
    ("score", {"continuation": [V]}, TokenOutOfRange, "out of range"),
    ("score", {"continuation": [1] * 8}, PromptTooLong, "the prompt and its continuation have 11 tokens: .* 10"),
]


async def test_bad_input_is_refused_before_anything_is_sent(pool: Pool) -> None:
    pool.start("--max-prompt-tokens", 10)
    async with pool.producer() as producer:
        for method, arguments, error, message in BAD:
            with pytest.raises(error, match=message):
                await getattr(producer, method)(PROMPT, **arguments)
            if method in ("topk", "sample", "positions"):
                with pytest.raises(error, match=message):
                    await getattr(producer, f"batch_{method}")([PROMPT], **arguments)
            if method == "positions":
                with pytest.raises(error, match=message):
                    await anext(producer.stream_positions(PROMPT, **arguments))
        with pytest.raises(SettingsError, match="targets: 1 lists for 2 prompts"):
            await producer.batch_logprobs([PROMPT, PROMPT], targets=[[1]])
        with pytest.raises(SettingsError, match="continuations: 1 for 2 prompts"):
            await producer.batch_score([PROMPT, PROMPT], [[1]])
        assert producer.stats().requests == 0
        assert pool.names("row:*") == []


async def test_failures_and_deadlines_are_those_of_rows(pool: Pool) -> None:
    worker = pool.start("--fail-token", 13, "--lease-s", 1)
    async with pool.producer() as producer:
        for ask in (
            producer.logprobs([13], targets=[1]),
            producer.topk([13], 2),
            producer.sample([13]),
            producer.score([1], [13, 1]),
            producer.positions([1, 13], top=2),
            producer.warm([13]),
            producer.logprobs([13], fresh=True),
        ):
            with pytest.raises(WorkerError, match="the token 13"):
                await ask
        worker.end()
        for ask in (
            producer.logprobs([1], targets=[1]),
            producer.topk([1], 2),
            producer.score([1], [2]),
            producer.positions([1, 2], full=True),
        ):
            with pytest.raises(NoWorker):
                await ask


async def test_cancelled_requests_are_taken_back(pool: Pool) -> None:
    pool.start("--step-ms", 600_000, "--max-batch", 1)
    async with pool.producer() as producer:
        tasks = [
            asyncio.create_task(work)
            for at in range(5)
            for work in (
                producer.logprobs([at], targets=[1]),
                producer.topk([at, 1], 2),
                producer.sample([at, 2]),
                producer.score([at, 3], [1]),
            )
        ]
        await until_async(lambda: _has_jobs(pool, 20), "all are queued")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until_async(lambda: _are_held(pool), "what nobody waits for is taken back, but for what a worker holds")
        assert pool.jobs() <= 4  # batches of one that a worker takes ahead


async def _has_jobs(pool: Pool, count: int) -> bool:
    return pool.jobs() == count


async def _are_held(pool: Pool) -> bool:
    return pool.jobs() == pool.held()


def test_without_asyncio_too(pool: Pool) -> None:
    pool.start()
    with SyncProducer(redis=pool.url, prefix=pool.prefix, cache_bytes=0) as producer:
        assert np.array_equal(producer.logprobs(PROMPT, targets=[4]), ROW[[4]])
        assert np.array_equal(producer.batch_logprobs([PROMPT], targets=[4]), ROW[None, [4]])
        assert np.array_equal(producer.logprobs(PROMPT, fresh=True), ROW)
        assert np.array_equal(producer.topk(PROMPT, 3).ids, top(ROW, 3).ids)
        assert producer.batch_topk([PROMPT], 3).ids.shape == (1, 3)
        assert producer.sample(PROMPT, seed=1) == sample(ROW, Sampling(1.0, 1.0, 1))
        assert producer.batch_sample([PROMPT], seed=1).tolist() == [sample(ROW, Sampling(1.0, 1.0, 1))]
        assert producer.score(PROMPT, [4])[0] == ROW[4]
        assert producer.batch_score([PROMPT], [[4]])[0][0] == ROW[4]
        assert np.array_equal(producer.positions(WHOLE, full=True), behind())
        assert np.array_equal(producer.batch_positions([WHOLE], targets=[4])[0], behind()[:, [4]])
        (part,) = producer.stream_positions(WHOLE, 2, full=True)
        assert part.start == 2
        assert np.array_equal(np.asarray(part.values), behind(2))
        producer.warm(OTHERS[0])
        producer.clear_cache()


def test_the_digest_of_a_pick_is_not_that_of_the_row() -> None:
    prompt = encode_prompt(PROMPT, vocab_size=V, max_tokens=10)
    assert prompt.digest == digest_of(prompt.ids)
    assert prompt.with_query(b"a", 1).digest not in (prompt.digest, prompt.with_query(b"b", 1).digest)
