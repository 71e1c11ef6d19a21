"""A full server evicts rows right after workers store them: other rows are served, and no request is delayed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from pathlib import Path

import numpy as np
import pytest

from lmpool.broker.scripts import Call
from lmpool.broker.server import Server
from lmpool.embedded import EmbeddedServer
from lmpool.errors import LMPoolError, ServerError
from lmpool.producer import Producer
from lmpool.protocol.job import encode_prompt
from lmpool.protocol.row import Block, VectorBlock
from lmpool.rows.cache import RowCache, Then
from lmpool.rows.shared_memory import NOT_SHARED, Shared
from lmpool.synthetic import synthetic_row
from lmpool.workers.backends.synthetic import SyntheticSettings
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.worker import Worker
from tests.support.pool import DEADLINE_S, Pool, V, count_waiting, until_async


class Evicting:
    """Removes chosen rows right after workers store them, like a full server.

    Attributes:
        is_gone: function of a block and a digest in the block that returns whether to remove this row.
        stored: digest -> number of times that a worker has stored its row.
        before: function that is awaited before rows are removed, or None.
    """

    def __init__(self) -> None:
        self.is_gone: Callable[[Block, bytes], bool] = lambda *_: False
        self.stored: Counter[bytes] = Counter()
        self.before: Callable[[], Awaitable[None]] | None = None

    async def put(
        self,
        rows: RowCache,
        block: Block,
        overwrite: Collection[bytes] = (),
        then: Then | None = None,
        shared: Shared = NOT_SHARED,
    ) -> dict[bytes, str]:
        """Replacement of `RowCache.put` that removes rows after it has stored them."""
        self.stored.update(block.digests)
        gone = [digest for digest in block.digests if self.is_gone(block, digest)]
        if gone and self.before is not None:
            await self.before()

        async def evict(call: Call, refused: Collection[bytes]) -> None:
            if gone:
                await call(b"DEL", *(rows._prefix + digest for digest in gone))
            assert then is not None
            await then(call, refused)

        return await _put(rows, block, overwrite, evict, shared)


_put = RowCache.put


@pytest.fixture
def evicting(monkeypatch: pytest.MonkeyPatch) -> Evicting:
    """Simulated evictions by the server, in place of `RowCache.put`."""
    evicting = Evicting()
    monkeypatch.setattr(RowCache, "put", lambda rows, *args, **settings: evicting.put(rows, *args, **settings))
    return evicting


@pytest.fixture
async def worker(own_pool: Pool) -> AsyncIterator[Worker]:
    """A worker in this process that computes up to 8 prompts per step."""
    backend = SyntheticSettings("syn", vocab_size=V, max_batch=8, step_ms=20)
    worker = Worker(Server(own_pool.url), backend, WorkerSettings(own_pool.prefix))
    ready = asyncio.Event()
    running = asyncio.create_task(worker.run(lambda _: ready.set()))
    await asyncio.wait_for(ready.wait(), DEADLINE_S)
    yield worker
    worker.stop()
    await asyncio.wait_for(running, DEADLINE_S)


@pytest.fixture
def own_pool(own_server: EmbeddedServer, tmp_path: Path) -> Pool:
    """A pool on a single server, not a cluster, because a worker sees there whether its rows are stored."""
    return Pool(own_server.url, "evicting", tmp_path)


def digest_of(*prompt: int) -> bytes:
    return encode_prompt(list(prompt), vocab_size=V, max_tokens=10).digest


async def ask(producer: Producer, *tokens: int) -> None:
    """Request one row per token and check the rows."""
    for token, row in zip(tokens, await asyncio.gather(*(producer.logprobs([token]) for token in tokens)), strict=True):
        assert np.array_equal(row, synthetic_row([token], vocab_size=V))


async def is_done(pool: Pool) -> bool:
    """Whether the queue has no jobs, neither waiting nor held."""
    return pool.jobs() == 0 and pool.held() == 0


@pytest.mark.usefixtures("worker")
async def test_only_rows_that_are_missing_are_stored_again(own_pool: Pool, evicting: Evicting) -> None:
    unlucky = {digest_of(2), digest_of(5)}
    evicting.is_gone = lambda _, digest: digest in unlucky and evicting.stored[digest] <= 2
    async with own_pool.producer() as producer:
        await ask(producer, *range(8))
    assert evicting.stored == {digest_of(token): 3 if digest_of(token) in unlucky else 1 for token in range(8)}


def is_the_row_of_3(block: Block, digest: bytes) -> bool:
    return digest == digest_of(3)


def is_an_answer(block: Block, digest: bytes) -> bool:
    return isinstance(block, VectorBlock)


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(("is_gone", "kind"), [(is_the_row_of_3, "logprobs"), (is_an_answer, "topk")])
async def test_a_row_that_is_always_evicted_fails_with_advice(
    own_pool: Pool, evicting: Evicting, is_gone: Callable[[Block, bytes], bool], kind: str
) -> None:
    evicting.is_gone = is_gone
    async with own_pool.producer() as producer:
        # Request the top 300, because a smaller result would be sent within the notification and not be stored.
        unlucky = producer.logprobs([3]) if kind == "logprobs" else producer.topk([3], 300)
        failing = asyncio.ensure_future(unlucky)
        await ask(producer, 0, 1, 2, 4)
        with pytest.raises(ServerError, match=r"evicted .* at least .* MB more \(maxmemory\), or .* --max-batch"):
            await failing
        await until_async(lambda: is_done(own_pool), "nothing is queued or held")
        evicting.is_gone = lambda *_: False
        await ask(producer, 3)


@pytest.mark.usefixtures("worker")
async def test_rows_without_a_waiting_client_are_not_stored_again(own_pool: Pool, evicting: Evicting) -> None:
    evicting.is_gone = is_the_row_of_3
    waiting = own_pool.keys.model("syn").waiting + digest_of(3)
    async with own_pool.producer() as producer:
        asked = asyncio.ensure_future(producer.logprobs([3]))

        async def leave() -> None:
            asked.cancel()

            async def has_left() -> bool:
                return bool(own_pool.redis.exists(waiting)) and not count_waiting(own_pool.redis, waiting)

            await until_async(has_left, "the client has left its prompt")

        evicting.before = leave
        await until_async(lambda: _is_stored(evicting, digest_of(3)), "the row is stored")
        await until_async(lambda: is_done(own_pool), "nothing is queued or held")
        assert evicting.stored[digest_of(3)] == 1
        assert not own_pool.names("*waiting*")


async def _is_stored(evicting: Evicting, digest: bytes) -> bool:
    return evicting.stored[digest] > 0


async def test_a_batch_larger_than_the_server_s_memory_delays_no_other_request(short_dir: Path, tmp_path: Path) -> None:
    size, batch = 1 << 18, 16
    with EmbeddedServer(memory_bytes=12 << 20, folder=short_dir / "s") as server:
        pool = Pool(server.url, "small", tmp_path)
        try:
            await asyncio.to_thread(pool.start, "--vocab-size", size, "--max-batch", batch, "--lease-s", 1)
            async with pool.producer(cache_bytes=0) as producer:
                asked = [producer.logprobs([2, token], timeout=2) for token in range(4 * batch)]
                outcomes = await asyncio.gather(*asked, return_exceptions=True)
                assert all(isinstance(outcome, (np.ndarray, LMPoolError)) for outcome in outcomes)
                row = await producer.logprobs([3])
                assert np.array_equal(row, synthetic_row([3], vocab_size=size))
                await until_async(lambda: is_done(pool), "nothing is queued or held")
        finally:
            pool.end()
