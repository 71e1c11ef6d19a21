"""Requests for less than a row: Redis gets no row, and the worker answers later requests from shared memory."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmpool.errors import SettingsError, TokenOutOfRange
from lmpool.producer import Producer
from lmpool.protocol.job import encode_prompt
from lmpool.protocol.keys import Keys
from lmpool.protocol.picks import Sampling, mass_of, sample, tempered, top
from lmpool.protocol.row import Row
from lmpool.rows.shared_memory import FOLDER_VARIABLE, is_reference
from lmpool.synthetic import synthetic_row
from tests.support.pool import Pool, WorkerProcess, until

V = 128_256
PROMPTS = [[i, i + 1, 7] for i in range(40)]
TOKENS = [5, V - 1, 77, 5]
MAX_INPUT_BYTES = 2_000
"""Max bytes that the server receives for one request, from all clients and workers together."""


def row_of(prompt: list[int]) -> Row:
    return synthetic_row(prompt, vocab_size=V)


async def topk(producer: Producer, prompt: list[int], **options: Any) -> None:
    found, expected = await producer.topk(prompt, 32, **options), top(row_of(prompt), 32)
    assert np.array_equal(found.ids, expected.ids)
    assert np.array_equal(found.values, expected.values)


async def targets(producer: Producer, prompt: list[int], **options: Any) -> None:
    assert np.array_equal(await producer.logprobs(prompt, targets=TOKENS, **options), row_of(prompt)[TOKENS])


async def tempered_targets(producer: Producer, prompt: list[int], **options: Any) -> None:
    found = await producer.logprobs(prompt, targets=TOKENS, temperature=2, **options)
    assert np.array_equal(found, tempered(row_of(prompt)[None], 2)[0, TOKENS])


async def mass(producer: Producer, prompt: list[int], **options: Any) -> None:
    assert await producer.mass(prompt, TOKENS, **options) == mass_of(row_of(prompt), np.unique(TOKENS))


async def seeded(producer: Producer, prompt: list[int], **options: Any) -> None:
    assert await producer.sample(prompt, seed=3, **options) == sample(row_of(prompt), Sampling(1.0, 1.0, 3))


async def unseeded(producer: Producer, prompt: list[int], **options: Any) -> None:
    assert 0 <= await producer.sample(prompt, **options) < V


async def whole(producer: Producer, prompt: list[int]) -> None:
    assert np.array_equal(await producer.logprobs(prompt), row_of(prompt))


async def score(producer: Producer, prompt: list[int]) -> None:
    assert (await producer.score(prompt, [9]))[0] == row_of(prompt)[9]


Ask = Callable[..., Awaitable[None]]
OF_A_ROW: list[Ask] = [topk, targets, tempered_targets, mass, seeded, unseeded]


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """The folders of shared memory of two hosts; producers are on the second host."""
    with tempfile.TemporaryDirectory(dir=os.environ[FOLDER_VARIABLE]) as folder:
        here, there = Path(folder, "worker"), Path(folder, "client")
        here.mkdir()
        there.mkdir()
        monkeypatch.setenv(FOLDER_VARIABLE, str(there))
        yield here, there


def start(pool: Pool, folder: Path, *options: str | int) -> WorkerProcess:
    """Start a worker whose rows go through Redis to other hosts, and wait for its shared memory."""
    more = ("--encoding", "bf16", "--lease-s", 2, "--no-direct", *options)
    worker = pool.start("--vocab-size", V, *more, environment={FOLDER_VARIABLE: str(folder)})
    if "--shm-bytes" not in options:
        worker.until_says("for clients on this machine")
    return worker


def row_key(producer: Producer, prompt: list[int]) -> bytes:
    encoded = encode_prompt(prompt, vocab_size=V, max_tokens=100)
    return Keys(producer._options["prefix"]).row(producer.model.fingerprint) + encoded.digest


def stored(pool: Pool, producer: Producer, prompt: list[int]) -> str:
    """What Redis holds under the key of a prompt's row: "row", "reference" or "nothing"."""
    value = pool.redis.get(row_key(producer, prompt))
    return "nothing" if value is None else "reference" if is_reference(value) else "row"


def received(pool: Pool) -> int:
    return int(pool.redis.info("stats")["total_net_input_bytes"])


async def computed(pool: Pool) -> int:
    """Return how many rows the workers have computed, from heartbeats that they send from now on."""
    keys = list(pool.redis.scan_iter(match=f"{pool.prefix}:worker:*"))
    for key in keys:
        pool.redis.delete(key)
    await asyncio.to_thread(until, lambda: all(map(pool.redis.exists, keys)), "each worker sends a heartbeat")
    return await pool.rows_computed()


@pytest.mark.parametrize("options", [(), ("--shm-bytes", 0)], ids=["shared memory", "none"])
async def test_requests_from_another_host_send_the_server_no_row(
    pool: Pool, folders: tuple[Path, Path], options: tuple[str | int, ...]
) -> None:
    start(pool, folders[0], *options)
    async with pool.producer(cache_bytes=0) as producer:
        await topk(producer, [1])  # The first calls send the scripts.
        await targets(producer, [2])
        for number, ask in enumerate([*OF_A_ROW, score]):
            prompts = [[*prompt, number] for prompt in PROMPTS]
            before = received(pool)
            await asyncio.gather(*(ask(producer, prompt) for prompt in prompts))
            assert received(pool) - before < MAX_INPUT_BYTES * len(PROMPTS), ask.__name__
            assert {stored(pool, producer, prompt) for prompt in prompts} <= {"reference", "nothing"}
        assert producer.stats().computed == 2 + len(PROMPTS) * (len(OF_A_ROW) + 1)


async def test_a_kept_row_is_stored_for_all_hosts(pool: Pool, folders: tuple[Path, Path]) -> None:
    start(pool, folders[0])
    async with pool.producer(cache_bytes=0) as producer, pool.producer(cache_bytes=0) as other:
        for number, ask in enumerate(OF_A_ROW):
            await ask(producer, [number, 2])
            for prompt in ([number, 2], [number, 4]):
                await ask(producer, prompt, keep_row=True)
                assert stored(pool, producer, prompt) == "row"
                await whole(other, prompt)
        assert (other.stats().cache_hits, other.stats().computed) == (2 * len(OF_A_ROW), 0)
    assert await computed(pool) == 2 * len(OF_A_ROW)


async def test_a_worker_answers_later_requests_from_shared_memory(pool: Pool, folders: tuple[Path, Path]) -> None:
    start(pool, folders[0])
    async with pool.producer(cache_bytes=0) as producer:
        await unseeded(producer, [1, 2])
        # Without the reference in Redis, the worker finds the row in its own memory only.
        pool.redis.delete(row_key(producer, [1, 2]))
        for ask in OF_A_ROW:
            await ask(producer, [1, 2])
        await asyncio.gather(*(ask(producer, [1, 2]) for ask in OF_A_ROW))
        assert stored(pool, producer, [1, 2]) == "nothing"
        # The row is stored when a client on another host requests the row itself.
        await whole(producer, [1, 2])
        assert stored(pool, producer, [1, 2]) == "row"
    assert await computed(pool) == 1


async def test_a_client_on_the_workers_host_finds_the_row_of_an_earlier_query(
    pool: Pool, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(pool, folders[0])
    async with pool.producer(cache_bytes=0) as elsewhere:
        await asyncio.gather(*(topk(elsewhere, prompt) for prompt in PROMPTS))
        monkeypatch.setenv(FOLDER_VARIABLE, str(folders[0]))
        async with pool.producer(cache_bytes=0) as here:
            await asyncio.gather(*(targets(here, prompt) for prompt in PROMPTS))
            await asyncio.gather(*(whole(here, prompt) for prompt in PROMPTS))
            assert (here.stats().cache_hits, here.stats().computed) == (2 * len(PROMPTS), 0)
            assert {stored(pool, here, prompt) for prompt in PROMPTS} == {"reference"}


async def test_without_shared_memory_no_row_is_stored(pool: Pool, folders: tuple[Path, Path]) -> None:
    start(pool, folders[0], "--shm-bytes", 0)
    async with pool.producer(cache_bytes=0) as producer:
        # Rows that are requested, and rows of queries, are computed in the same steps.
        rows, queried = PROMPTS[:20], PROMPTS[20:]
        pairs = zip(rows, queried, strict=True)
        await asyncio.gather(*(work for pair in pairs for work in (whole(producer, pair[0]), topk(producer, pair[1]))))
        assert {stored(pool, producer, prompt) for prompt in rows} == {"row"}
        assert {stored(pool, producer, prompt) for prompt in queried} == {"nothing"}
        # Queries use rows that Redis stores.
        await asyncio.gather(*(mass(producer, prompt) for prompt in rows))
        assert await computed(pool) == len(PROMPTS)
        await mass(producer, queried[0])
        assert await computed(pool) == len(PROMPTS) + 1


@pytest.mark.parametrize("options", [(), ("--shm-bytes", 0)])
async def test_a_damaged_row_does_not_stay_where_a_query_found_it(
    pool: Pool, folders: tuple[Path, Path], options: tuple[str | int, ...]
) -> None:
    start(pool, folders[0], *options)
    async with pool.producer(cache_bytes=0) as producer:
        for ask in OF_A_ROW:
            prompt = [OF_A_ROW.index(ask)]
            pool.redis.set(row_key(producer, prompt), b"noise", px=60_000)
            await ask(producer, prompt)
            assert stored(pool, producer, prompt) == ("nothing" if options else "reference")


async def test_a_row_and_queries_of_one_prompt_are_computed_once(pool: Pool, folders: tuple[Path, Path]) -> None:
    start(pool, folders[0], "--step-ms", 100)
    async with pool.producer(cache_bytes=0) as first, pool.producer(cache_bytes=0) as second:
        await asyncio.gather(whole(second, [1, 2]), *(ask(first, [1, 2]) for ask in OF_A_ROW))
        assert stored(pool, first, [1, 2]) == "row"
    assert await computed(pool) == 1
    assert pool.jobs() == 0


async def test_queries_of_one_prompt_are_not_computed_by_several_workers(
    pool: Pool, folders: tuple[Path, Path]
) -> None:
    for _ in range(2):
        start(pool, folders[0])
    async with pool.producer(cache_bytes=0) as producer:
        await asyncio.gather(*(ask(producer, prompt) for prompt in PROMPTS for ask in OF_A_ROW))
        # Each worker would compute most prompts if the first queries about a prompt were sent at once.
        assert await computed(pool) < 1.5 * len(PROMPTS)


async def test_each_adapter_has_its_own_row(pool: Pool, folders: tuple[Path, Path], tmp_path: Path) -> None:
    start(pool, folders[0])
    (tmp_path / "weights").write_text("poet")
    async with pool.producer(cache_bytes=0) as producer:
        revision = await producer.add_adapter("poet", tmp_path)
        row = synthetic_row([1, 2], vocab_size=V, adapter_revision=revision)
        for _ in range(2):
            await targets(producer, [1, 2])
            assert np.array_equal(await producer.logprobs([1, 2], targets=TOKENS, adapter="poet"), row[TOKENS])
            assert np.array_equal((await producer.topk([1, 2], 5, adapter="poet")).ids, top(row, 5).ids)


async def test_a_row_is_not_kept_and_fresh_at_once(pool: Pool) -> None:
    pool.start()
    async with pool.producer() as producer:
        with pytest.raises(SettingsError, match="keep_row"):
            await producer.logprobs([1], targets=[1], fresh=True, keep_row=True)
        with pytest.raises(SettingsError, match="keep_row: 1 must be True or False"):
            await producer.topk([1], 1, keep_row=1)  # type: ignore[arg-type]


async def test_targets_beyond_the_vocabulary_of_a_changed_model_are_refused(pool: Pool) -> None:
    worker = pool.start("--vocab-size", 512)
    async with pool.producer(when_absent="wait") as producer:
        await producer.warm([1])
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        asked = asyncio.create_task(producer.logprobs([1, 2], targets=[1, 500]))
        await asyncio.sleep(0)
        pool.start("--vocab-size", 64)
        with pytest.raises(TokenOutOfRange, match="token id 500 is out of range: this model's V is 64"):
            await asked
