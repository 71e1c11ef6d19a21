"""Queries for a part of a row: entries, top-k tokens, samples."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmpool.errors import (
    EmptyPrompt,
    LMPoolError,
    NotTokenIds,
    NoWorker,
    PromptTooLong,
    SettingsError,
    TokenOutOfRange,
    UnknownAdapter,
    WorkerError,
)
from lmpool.producer import Producer, SyncProducer
from lmpool.protocol.job import digest_of, encode_prompt
from lmpool.protocol.keys import Keys
from lmpool.protocol.picks import Sampling, sample, top
from lmpool.synthetic import synthetic_row
from tests.support.gate import Gate, GatedBackend, gated_worker
from tests.support.pool import DEADLINE_S, Pool, V, until_async

PROMPT = [1, 2, 3]
ROW = synthetic_row(PROMPT, vocab_size=V)
OTHERS = [[4, 5], [6], [7, 8, 9, 10]]


def rows(prompts: list[list[int]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.stack([synthetic_row(prompt, vocab_size=V) for prompt in prompts])


def row_key(producer: Producer, prompt: list[int]) -> bytes:
    encoded = encode_prompt(prompt, vocab_size=V, max_tokens=100)
    return Keys(producer._options["prefix"]).row(producer.model.fingerprint) + encoded.digest


@pytest.mark.parametrize("encoding", ["f32", "bf16"])
@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
async def test_entries_equal_those_of_the_row_in_memory_and_on_the_server(
    pool: Pool, encoding: str, cache_bytes: int
) -> None:
    pool.start("--encoding", encoding)
    targets = [0, V - 1, 7, 7]
    async with pool.producer(cache_bytes=cache_bytes) as producer:
        # The first query computes the row; later queries find it in Redis or in the producer's own cache.
        for _ in range(2):
            entries = await producer.logprobs(PROMPT, targets=targets)
            assert entries.dtype == np.float32
            assert entries.flags.writeable
            assert np.array_equal(entries, ROW[targets])
        await producer.logprobs(PROMPT)
        assert np.array_equal(await producer.logprobs(PROMPT, targets=np.array(targets, np.uint16)), ROW[targets])
        many = list(range(V))
        assert np.array_equal(await producer.logprobs(OTHERS[0], targets=many), rows(OTHERS)[0])


async def test_a_temperature_may_be_a_number_of_numpy(pool: Pool) -> None:
    pool.start()
    async with pool.producer(cache_bytes=0) as producer:
        halves: tuple[Any, ...] = (np.float32(0.5), np.float64(0.5))
        for temperature in halves:
            entries = await producer.logprobs(PROMPT, targets=[1, 2], temperature=temperature)
            assert np.array_equal(entries, await producer.logprobs(PROMPT, targets=[1, 2], temperature=0.5))


async def test_only_the_entries_of_a_kept_row_are_sent(pool: Pool) -> None:
    pool.start("--vocab-size", 49_152)
    async with pool.producer() as first, pool.producer(cache_bytes=0) as second:
        row = synthetic_row(PROMPT, vocab_size=49_152)
        await first.logprobs(PROMPT, targets=[5], keep_row=True)
        assert first.stats().computed == 1
        sent = int(pool.redis.info("stats")["total_net_output_bytes"])
        for _ in range(100):
            assert (await second.logprobs(PROMPT, targets=[9, 11]))[1] == row[11]
        sent = int(pool.redis.info("stats")["total_net_output_bytes"]) - sent
        assert sent < 100 * 1000
        assert np.array_equal(await second.logprobs(PROMPT), row)
        stats = second.stats()
        assert (stats.requests, stats.cache_hits, stats.computed) == (101, 101, 0)


async def test_a_batch_of_entries_has_common_or_separate_targets(pool: Pool) -> None:
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


async def test_a_thousand_concurrent_requests_get_their_own_entries(pool: Pool) -> None:
    pool.start("--vocab-size", 64)
    prompts = [[i % 64, i // 64] for i in range(1500)]
    expected = [synthetic_row(prompt, vocab_size=64) for prompt in prompts]
    async with pool.producer(cache_bytes=0) as producer:
        for _ in range(2):
            asked = (producer.logprobs(prompt, targets=[at % 64]) for at, prompt in enumerate(prompts))
            for at, entries in enumerate(await asyncio.gather(*asked)):
                assert entries[0] == expected[at][at % 64]
            # A worker answers queries while it stores the rows: a query of a missing row would compute the row again.
            await until_async(lambda: _count(pool, "row:*", 2 * len(prompts)), "all rows and all entries are stored")
        batch = await producer.batch_logprobs(prompts, targets=[1, 2])
        assert np.array_equal(batch, np.stack(expected)[:, [1, 2]])
        assert producer.stats().computed == 1500


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
async def test_top_k_equals_the_largest_entries_of_the_row(pool: Pool, cache_bytes: int) -> None:
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
async def test_a_seed_samples_the_same_token_from_worker_cache_and_memory(pool: Pool, cache_bytes: int) -> None:
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


async def test_requests_are_counted_as_computed_rather_than_their_rows(pool: Pool) -> None:
    pool.start()
    async with pool.producer(cache_bytes=0) as producer:
        await asyncio.gather(producer.topk(PROMPT, 3), producer.mass(PROMPT, [1, 2]))
        assert producer.stats().computed == 2

        async def is_counted() -> bool:
            return await pool.rows_computed() > 0

        await until_async(is_counted, "the worker tells of its rows")
        assert await pool.rows_computed() == 1


async def test_a_private_result_is_removed_after_its_last_waiter(pool: Pool, tmp_path: Path) -> None:
    backend = GatedBackend(Gate(tmp_path / "gate"))
    async with gated_worker(pool, backend), pool.producer(keep_answers=False) as producer:
        first, second = (asyncio.create_task(producer.topk(PROMPT, 3)) for _ in range(2))
        assert await asyncio.to_thread(backend.is_stepping.wait, DEADLINE_S)
        first.cancel()
        await asyncio.wait([first])
        backend.gate.open()
        assert np.array_equal((await second).ids, top(ROW, 3).ids)
        await until_async(lambda: _count(pool, "row:*", 1), "just the row is left")
        assert producer.stats().computed == 1


async def test_without_a_seed_every_sample_is_new_and_no_key_is_left(pool: Pool) -> None:
    pool.start()
    async with pool.producer(cache_bytes=0) as producer:
        drawn = await producer.batch_sample([PROMPT] * 200)
        assert len(set(drawn.tolist())) > 20
        assert drawn.dtype == np.int64
        # The row stays for all clients; samples without a seed are removed.
        await until_async(lambda: _count(pool, "row:*", 1), "just the row is left")


async def _count(pool: Pool, pattern: str, count: int) -> bool:
    return len(pool.names(pattern)) == count


async def test_a_fresh_row_is_computed_and_not_cached(pool: Pool) -> None:
    pool.start()
    async with pool.producer() as producer:
        await producer.logprobs(PROMPT)
        for computed in (2, 3):
            assert np.array_equal(await producer.logprobs(PROMPT, fresh=True), ROW)
            assert producer.stats().computed == computed
        assert np.array_equal(await producer.logprobs(PROMPT, fresh=True, targets=[4, 2]), ROW[[4, 2]])
        await until_async(lambda: _count(pool, "row:*", 1), "just the row is left")


async def test_warming_computes_a_row_and_transfers_none(pool: Pool) -> None:
    pool.start()
    async with pool.producer() as first, pool.producer() as second:
        await first.warm(PROMPT)
        await first.warm(PROMPT)
        assert pool.redis.exists(row_key(first, PROMPT))
        assert np.array_equal(await second.logprobs(PROMPT), ROW)
        assert (second.stats().cache_hits, second.stats().computed) == (1, 0)


async def test_a_cleared_producer_requests_rows_again(pool: Pool) -> None:
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


@pytest.mark.parametrize("ask", ["row", "targets", "topk", "warm"])
async def test_foreign_content_under_a_rows_key_is_overwritten(pool: Pool, ask: str) -> None:
    pool.start()
    async with pool.producer(cache_bytes=0) as producer:
        await producer.warm(PROMPT)
        await producer.warm(OTHERS[0])
        pool.redis.delete(row_key(producer, PROMPT))
        pool.redis.rpush(row_key(producer, PROMPT), "a list")
        # Request another prompt in the same read, which must succeed.
        other = producer.logprobs(OTHERS[0], targets=[1])
        if ask == "row":
            answer, wrong = await asyncio.gather(other, producer.logprobs(PROMPT))
            assert np.array_equal(wrong, ROW)
        elif ask == "targets":
            answer, wrong = await asyncio.gather(other, producer.logprobs(PROMPT, targets=[1]))
            assert wrong[0] == ROW[1]
        elif ask == "warm":
            answer, _ = await asyncio.gather(other, producer.warm(PROMPT))
            assert pool.redis.strlen(row_key(producer, PROMPT)) == pool.redis.strlen(row_key(producer, OTHERS[0]))
        else:
            answer, other_answer = await asyncio.gather(other, producer.topk(PROMPT, 2))
            assert np.array_equal(other_answer.ids, top(ROW, 2).ids)
        assert answer[0] == rows(OTHERS)[0][1]


async def test_a_damaged_result_is_overwritten(pool: Pool) -> None:
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
async def test_entries_belong_to_the_current_model(pool: Pool, first: str) -> None:
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


async def test_concurrent_rows_and_queries_of_one_prompt_are_computed_once(pool: Pool) -> None:
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


async def test_every_call_takes_an_adapter_and_uses_its_current_weights(pool: Pool, tmp_path: Path) -> None:
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
    ("sample", {"seed": -1}, SettingsError, "seed: -1 must be a whole number from 0 to"),
    ("sample", {"seed": 1.5}, SettingsError, "seed: 1.5 must be a whole number"),
    ("sample", {"top_k": 5}, SettingsError, "top_k: not an option; there are"),
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
        "k: not an option; there are mode, temperature, adapter, timeout, top, targets, next_token, logz, tail, full",
    ),
    ("positions", {}, SettingsError, "give at least one of"),
    ("positions", {"logz": True, "tail": True}, SettingsError, "tail: True, of the tokens that are not in"),
    ("positions", {"targets": [[1], [2]]}, SettingsError, "targets: 2 lists for 3 positions"),
    ("positions", {"targets": [[1], [V], [2]]}, TokenOutOfRange, f"token id {V} is out of range"),
    ("positions", {"targets": [[1], [-2], [2]]}, TokenOutOfRange, "token id -2 is out of range"),
    ("positions", {"targets": [[1], "a", [2]]}, NotTokenIds, "targets: "),
    ("positions", {"targets": [[], [], []]}, NotTokenIds, "targets: "),
    ("positions", {"targets": [[1, [2, 3]], [1], [1]]}, NotTokenIds, "targets: "),
    ("positions", {"targets": [[1], 2, [1]]}, NotTokenIds, "targets: "),
    ("positions", {"top": 1, "temperature": 0}, SettingsError, "temperature: 0 must be"),
    (
        "positions",
        {"top": 1, "temperature": 2, "mode": "logits"},
        SettingsError,
        "temperature: of log-probabilities only",
    ),
    ("positions", {"top": 1, "mode": "raw"}, SettingsError, "mode: 'raw' is not one of logprobs, logits"),
    ("score", {"continuation": [1], "mode": "raw"}, SettingsError, "mode: 'raw' is not one of logprobs, logits"),
    ("score", {"continuation": []}, EmptyPrompt, "at least 1 token id"),
    ("score", {"continuation": "text"}, NotTokenIds, "continuation: it is text, 'text'"),
    ("score", {"continuation": [V]}, TokenOutOfRange, f"continuation: token id {V} is out of range"),
    ("score", {"continuation": [1] * 8}, PromptTooLong, "the prompt and its continuation have 11 tokens: .* 10"),
]


async def test_bad_input_is_refused_before_anything_is_sent(pool: Pool) -> None:
    pool.start("--max-prompt-tokens", 10)
    async with pool.producer() as producer:
        for method, arguments, error, message in BAD:
            with pytest.raises(error, match=message):
                await getattr(producer, method)(PROMPT, **arguments)
            if method in ("topk", "sample", "positions"):
                # In a batch of positions, a nested value has the targets of each text.
                given = (
                    {"targets": [arguments["targets"]]} if method == "positions" and arguments.get("targets") else {}
                )
                with pytest.raises(error, match=message):
                    await getattr(producer, f"batch_{method}")([PROMPT], **{**arguments, **given})
            if method == "positions":
                with pytest.raises(error, match=message):
                    await anext(producer.stream_positions(PROMPT, **arguments))
        with pytest.raises(SettingsError, match="targets: 1 lists for 2 prompts"):
            await producer.batch_logprobs([PROMPT, PROMPT], targets=[[1]])
        with pytest.raises(SettingsError, match="continuations: 1 for 2 prompts"):
            await producer.batch_score([PROMPT, PROMPT], [[1]])
        assert producer.stats().requests == 0
        assert pool.names("row:*") == []


async def test_an_error_of_a_batch_names_the_prompt_by_its_index(pool: Pool) -> None:
    pool.start("--fail-token", 13)
    async with pool.producer() as producer:
        asks: tuple[tuple[str, Callable[..., Any]], ...] = (
            ("prompts", producer.batch_logprobs),
            ("prompts", partial(producer.batch_logprobs, targets=[1])),
            ("prompts", partial(producer.batch_topk, k=2)),
            ("prompts", producer.batch_sample),
            ("prompts", partial(producer.batch_mass, allowed=[1, 2])),
            ("prompts", producer.batch_logz),
            ("prompts", partial(producer.batch_generate, max_tokens=2)),
            ("prompts", partial(producer.batch_score, continuations=[[1]] * 3)),
            ("continuations", partial(producer.batch_score, [[1], [2], [3]])),
            ("texts", partial(producer.batch_positions, top=2)),
        )
        for name, ask in asks:
            with pytest.raises(TokenOutOfRange, match=rf"^{name}\[1\]: token id {V}"):
                await ask([[1], [1, V], [2]])
            # A worker computes a prompt and its continuation together, so the error names the prompt.
            with pytest.raises(WorkerError, match=rf"^{name.replace('continuations', 'prompts')}\[1\]: .* token 13"):
                await ask([[1], [13, 1], [2]])
        for ask_one in (producer.batch_topk([[13]], 2), producer.generate([13], 2, n=3)):
            with pytest.raises(WorkerError, match=r"^(?!prompts\[)"):
                await ask_one


async def test_an_error_names_the_prompt_whose_length_or_options_do_not_fit(pool: Pool) -> None:
    pool.start("--fail-token", 13, "--max-prompt-tokens", 5)
    same = [1, 2]
    failing: tuple[tuple[str, str, tuple[Any, ...], dict[str, Any]], ...] = (
        (r"prompts\[1\]: max_tokens: 5 after a prompt of 2", "batch_generate", ([[1], same], 5), {}),
        (r"prompts\[1\]: the prompt and its continuation", "batch_score", ([same] * 2, [[1], [1] * 4]), {}),
        (r"prompts\[1\]: .* token 13", "batch_score", ([same] * 2, [[1], [13]]), {}),
        (r"texts\[1\]: start: 2 must be", "batch_positions", ([[1, 2, 3], same], 2), {"top": 2}),
        (r"texts\[1\]: targets: 1 lists for 2", "batch_positions", ([same] * 2,), {"targets": [[1], [[1]]]}),
        (r"texts\[1\]: targets: token id", "batch_positions", ([same] * 2,), {"targets": [[1], [V]]}),
        # These errors do not depend on one of several prompts.
        (r"top: 0 must be", "batch_positions", ([same] * 2,), {"top": 0}),
        (r"max_tokens: 0 must be", "batch_generate", ([same, [1]], 0), {}),
        (r"max_tokens: 5 after a prompt of 2", "generate", (same, 5), {"n": 2}),
    )
    async with pool.producer() as producer:
        for message, method, arguments, options in failing:
            with pytest.raises((PromptTooLong, SettingsError, TokenOutOfRange, WorkerError), match=f"^{message}"):
                await getattr(producer, method)(*arguments, **options)


async def test_queries_fail_and_time_out_like_rows(pool: Pool) -> None:
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


async def test_cancelled_requests_are_withdrawn(pool: Pool) -> None:
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
        await until_async(
            lambda: _are_held(pool),
            "only the prompts that a worker holds are left",
        )
        assert pool.jobs() <= 4  # The worker takes four batches of one prompt in advance.


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
        producer.warm(OTHERS[0])
        producer.clear_cache()


def test_the_digest_of_a_query_differs_from_that_of_the_row() -> None:
    prompt = encode_prompt(PROMPT, vocab_size=V, max_tokens=10)
    assert prompt.digest == digest_of(prompt.ids)
    assert prompt.with_query(b"a", 1).digest not in (prompt.digest, prompt.with_query(b"b", 1).digest)
