"""Requests for less than a row: Redis gets the answer and no row, and the worker answers the next request without a step."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmpool.producer import Producer
from lmpool.protocol.job import encode_prompt
from lmpool.protocol.keys import Keys
from lmpool.protocol.picks import Sampling, mass_of, sample, tempered, top
from lmpool.protocol.row import Row
from lmpool.rows.shared_memory import FOLDER_VARIABLE, is_reference
from lmpool.synthetic import synthetic_row
from tests.support.pool import Pool, WorkerProcess, until_async

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
    """Start a worker, and wait for its shared memory."""
    worker = pool.start("--vocab-size", V, "--encoding", "bf16", *options, environment={FOLDER_VARIABLE: str(folder)})
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


async def computes(pool: Pool, count: int) -> None:
    async def is_counted() -> bool:
        return await pool.rows_computed() >= count

    await until_async(is_counted, f"{count} rows are computed")
    assert await pool.rows_computed() == count


@pytest.mark.parametrize("ask", [*OF_A_ROW, score])
async def test_a_request_from_another_host_sends_the_server_no_row(
    pool: Pool, folders: tuple[Path, Path], ask: Ask
) -> None:
    start(pool, folders[0])
    async with pool.producer(cache_bytes=0) as producer:
        await ask(producer, [1])
        for _ in range(2):
            before = received(pool)
            for prompt in PROMPTS:
                await ask(producer, prompt)
            print(ask.__name__, (received(pool) - before) / len(PROMPTS))
            assert received(pool) - before < MAX_INPUT_BYTES * len(PROMPTS)
        before = received(pool)
        await asyncio.gather(*(ask(producer, [*prompt, 1]) for prompt in PROMPTS))
        print(ask.__name__, "at once", (received(pool) - before) / len(PROMPTS))
        assert received(pool) - before < MAX_INPUT_BYTES * len(PROMPTS)
        assert all(stored(pool, producer, prompt) != "row" for prompt in PROMPTS)
