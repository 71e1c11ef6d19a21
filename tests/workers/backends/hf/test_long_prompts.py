"""Long prompts on the hf backend: they are computed in chunks, and short prompts run between the chunks."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from lmpool.broker.server import Server
from lmpool.protocol.query import PositionsQuery
from lmpool.workers.backends.hf.backend import HfBackend
from lmpool.workers.backends.hf.forward import KVPool
from lmpool.workers.backends.settings import HfSettings
from lmpool.workers.execution.contract import Finished
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.worker import Worker
from tests.support.models.tiny_models import CONFIGS
from tests.support.pool import DEADLINE_S, Pool, Prepared, until_async
from tests.workers.backends.hf.hf_tiny import Tiny, decode, drain, job, random_prompts, serve

EVERY_KIND = pytest.mark.parametrize("kind", list(CONFIGS))
# Kinds of models that compute a prompt as a whole: their state is recurrent, or embeddings depend on the length.
WHOLE = ("mamba", "rwkv", "longrope")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


def answered(backend: HfBackend, *, steps: int = 1) -> list[bytes]:
    """Run a number of steps; returns the digests of the prompts that get results."""
    finished = [backend.step() for _ in range(steps)]
    return [digest for step in finished for digest in step.digests]


@EVERY_KIND
def test_a_long_prompt_computed_in_chunks_has_the_row_of_transformers(tiny: Tiny, kind: str) -> None:
    backend = tiny.backend(kind, chunked_prefill_size=8)
    prompts = random_prompts(3, (40, 60), seed=5)
    backend.submit([job(prompt) for prompt in prompts])
    finished = drain(backend)
    assert (len(finished) > sum(len(prompt) // 8 for prompt in prompts)) == (kind not in WHOLE)
    rows = decode(block for step in finished for block in step.blocks)
    tiny.reference(kind).check({prompt: rows[job(prompt).digest] for prompt in prompts})


def test_chunks_keep_to_the_tokens_of_a_forward(tiny: Tiny) -> None:
    assert tiny.backend(max_batch_tokens=16)._rules.chunk == 16


@pytest.mark.parametrize(("bytes_", "says"), [(1 << 14, True), (1 << 24, False)])
def test_a_log_line_states_the_longest_prompt_that_is_computed_in_chunks(
    tiny: Tiny, caplog: pytest.LogCaptureFixture, bytes_: int, says: bool
) -> None:
    caplog.set_level(logging.INFO)
    backend = tiny.backend(kv_cache_bytes=bytes_)
    assert backend._pool is not None
    told = f"in chunks up to {backend._pool.capacity} tokens: --kv-cache-bytes has no capacity for more"
    assert (told in caplog.text) == says


@EVERY_KIND
def test_a_short_prompt_is_answered_before_a_long_one_that_came_first(tiny: Tiny, kind: str) -> None:
    backend = tiny.backend(kind, chunked_prefill_size=8)
    long, short, late = *random_prompts(1, (60, 60)), (1, 2, 3), (4, 5, 6)
    backend.submit([job(long), job(short)])
    assert answered(backend) == [job(short).digest]
    if kind not in WHOLE:
        assert answered(backend) == []
    backend.submit([job(late)])
    order = [digest for finished in drain(backend) for digest in finished.digests]
    # A long prompt that is computed as a whole runs after one step of shorter prompts, so before the prompt `late`.
    assert order == [job(ids).digest for ids in ((long, late) if kind in WHOLE else (late, long))]


@pytest.mark.parametrize(("length", "score_from"), [(60, 0), (64, 0), (61, 1), (65, 1)])
def test_a_short_prompt_waits_for_one_chunk_also_for_the_last(tiny: Tiny, length: int, score_from: int) -> None:
    backend = tiny.backend("llama", chunked_prefill_size=8, max_batch=1)
    (long,) = random_prompts(1, (length, length))
    short = iter(random_prompts(20, (1, 1), seed=3))
    backend.submit([job(long)._replace(positions=PositionsQuery.scores_from(score_from) if score_from else None)])
    waits = 0
    while not answered(backend):
        waits += 1
        backend.submit([asked := job(next(short))])
        assert answered(backend) == [asked.digest]
    assert waits == (length - 1 - score_from) // 8  # Tokens after the last scored position are not computed.


@pytest.mark.parametrize("wanted", ["row", "scores"])
def test_an_interactive_prompt_waits_for_one_short_step_of_bulk_prompts(tiny: Tiny, wanted: str) -> None:
    backend = tiny.backend("llama", max_batch=4)
    prompts = random_prompts(4, (60, 60))
    scores = PositionsQuery.scores_from(1) if wanted == "scores" else None
    bulk = [job(prompt)._replace(bulk=True, positions=scores) for prompt in prompts]
    # Let a bulk step compute at most 8 tokens, instead of a number that depends on this machine's speed.
    backend._bulk_limit = SimpleNamespace(  # type: ignore[assignment]
        tokens=8,
        is_turn=lambda others_wait: not others_wait,
        bulk_step=lambda *_: None,
        interactive_step=lambda _: None,
    )
    backend.submit(bulk)
    short = iter(random_prompts(200, (1, 3), seed=3))
    vectors: dict[bytes, Any] = {}
    rows: dict[bytes, Any] = {}
    most = 0
    while len(vectors) + len(rows) < len(bulk):
        computed = backend.stats().steps
        finished = backend.step()
        assert backend.stats().steps == computed + 1
        rows |= decode(finished.blocks)
        if finished.answers is not None:
            vectors |= dict(zip(finished.answers.digests, finished.answers.vectors, strict=True))
        most += 1
        backend.submit([asked := job(next(short))])
        assert answered(backend) == [asked.digest]
    assert most >= 4 * 60 // 8, "no step computes more than 8 tokens of bulk prompts"
    if wanted == "row":
        tiny.reference("llama").check({prompt: rows[job(prompt).digest] for prompt in prompts})


@pytest.mark.parametrize("kind", ["llama", "rwkv"])
def test_the_limit_of_bulk_steps_is_measured_by_the_tokens_that_a_step_computes(
    tiny: Tiny, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = tiny.backend(kind, max_batch=1)
    computed: list[int] = []
    monkeypatch.setattr(backend._bulk_limit, "bulk_step", lambda tokens, _: computed.append(tokens))
    for prompt in random_prompts(2, (60, 60)):
        backend.submit([job(prompt)._replace(bulk=True)])
        drain(backend)
    assert computed == [60, 60]


def test_a_bulk_prompt_that_another_client_joins_runs_first(tiny: Tiny) -> None:
    backend = tiny.backend("llama", max_batch=1)
    bulk = [job(prompt)._replace(bulk=True) for prompt in random_prompts(3, (3, 3))]
    backend.submit(bulk)
    backend.submit([bulk[2]._replace(bulk=False)])
    assert answered(backend, steps=3) == [bulk[2].digest, bulk[0].digest, bulk[1].digest]


@pytest.mark.parametrize("kind", ["llama", "rwkv"])
@pytest.mark.parametrize("chunk", [4, 8])
def test_a_long_prompt_is_answered_among_any_number_of_short_ones(tiny: Tiny, kind: str, chunk: int) -> None:
    backend = tiny.backend(kind, chunked_prefill_size=chunk, max_batch=4)
    (long,) = random_prompts(1, (60, 60))
    short = iter(random_prompts(400, (2, 3), seed=3))
    backend.submit([job(long)])
    rows: dict[bytes, Any] = {}
    for _ in range(2 * (60 // chunk + 1)):
        backend.submit([job(next(short)) for _ in range(backend.capacity())])
        rows |= decode(backend.step().blocks)
    tiny.reference(kind).check({long: rows[job(long).digest]})


@pytest.mark.parametrize("slots", [9, 50, 70, 200])
def test_a_long_prompt_progresses_in_a_pool_that_others_fill(tiny: Tiny, slots: int) -> None:
    backend = tiny.backend(chunked_prefill_size=8, max_batch=4, max_batch_tokens=32)
    assert backend._pool is not None
    backend._pool = KVPool(backend._pool.layout, slots)
    longs = random_prompts(3, (60, 60), seed=1)
    others = iter(random_prompts(400, (2, 12), seed=2))
    backend.submit([job(long) for long in longs])
    rows: dict[bytes, Any] = {}
    # Run 2 * 3 * 8 steps: each of the 3 long prompts has 8 chunks, and every second step computes a chunk.
    for _ in range(2 * 3 * 8):
        backend.submit([job(next(others)) for _ in range(backend.capacity())])
        rows |= decode(backend.step().blocks)
    tiny.reference("llama").check({long: rows[job(long).digest] for long in longs})


def test_computed_chunks_stay_in_a_pool_that_others_need(tiny: Tiny) -> None:
    backend = tiny.backend(chunked_prefill_size=8, max_batch=8)
    assert backend._pool is not None
    pool = backend._pool = KVPool(backend._pool.layout, 51)
    (long,) = random_prompts(1, (60, 60))
    others = iter(random_prompts(400, (2, 3), seed=2))
    backend.submit([job(long)])
    held: list[int] = []
    while not held or (held[-1] < 51 and len(held) < 30):
        backend.submit([job(next(others)) for _ in range(backend.capacity())])
        assert job(long).digest not in backend.step().digests
        held.append(len(pool.slots.match(long)))
    assert held == sorted(held)
    assert held[-1] == 51


def test_a_chunk_takes_a_step_of_no_more_tokens_than_it_has(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    forward = LlamaForCausalLM.forward

    @functools.wraps(forward)
    def noted(self: LlamaForCausalLM, *arguments: Any, **named: Any) -> Any:
        sizes.append(named["input_ids"].numel())
        return forward(self, *arguments, **named)

    backend = tiny.backend(chunked_prefill_size=8)
    monkeypatch.setattr(LlamaForCausalLM, "forward", noted)
    serve(backend, random_prompts(4, (60, 60)))
    assert max(sizes) <= 8 * 4  # The last chunks of the 4 prompts, which have equal lengths, may run together.
    assert sizes.count(8) >= 4 * 6


def test_an_aborted_long_prompt_ends_between_chunks(tiny: Tiny) -> None:
    backend = tiny.backend(chunked_prefill_size=8)
    long, other = random_prompts(2, (60, 60))
    backend.submit([job(long), job(other)])
    assert answered(backend, steps=3) == []
    steps = backend.stats().steps
    backend.abort([job(long).digest])
    drain(backend)
    assert backend.stats().steps - steps <= 60 // 8 + 1
    assert backend.capacity() == 2 * backend.batch
    # Other prompts reuse the computed chunks of the aborted prompt.
    reused = backend.stats().reused
    serve(backend, [long[:24]])
    assert backend.stats().reused - reused == 23


def test_chunks_of_one_prompt_are_not_counted_as_reused(tiny: Tiny) -> None:
    backend = tiny.backend(chunked_prefill_size=8)
    serve(backend, random_prompts(2, (60, 60)))
    stats = backend.stats()
    assert (stats.rows, stats.tokens, stats.reused) == (2, 120, 0)


def test_a_long_fresh_prompt_neither_uses_nor_stores_keys_and_values(tiny: Tiny) -> None:
    backend = tiny.backend(chunked_prefill_size=8)
    (long,) = random_prompts(1, (60, 60))
    serve(backend, [long])
    assert backend._pool is not None
    with torch.inference_mode():
        # Spoil all cached keys and values: results that use them would be wrong.
        backend._pool._storages[0][1:].fill_(7.0)
    fresh = job(long)._replace(digest=b"f" * 16, fresh=True)
    backend.submit([fresh, job((1, 2, 3))])
    assert answered(backend, steps=2) == [job((1, 2, 3)).digest]
    rows = decode(block for finished in drain(backend) for block in finished.blocks)
    tiny.reference("llama").check({long: rows[fresh.digest]})
    assert len(backend._pool.slots.match(long)) == 60


def test_short_prompts_go_before_a_long_text_that_is_scored(tiny: Tiny) -> None:
    backend = tiny.backend(chunked_prefill_size=8)
    text, far = random_prompts(2, (60, 60), seed=7)
    jobs = [
        job(text)._replace(positions=PositionsQuery.scores_from(1)),
        job(far)._replace(positions=PositionsQuery.scores_from(50)),
    ]
    backend.submit(jobs)
    order: list[bytes] = []
    scores: dict[bytes, Any] = {}
    for step in range(40):
        if step == 5:
            backend.submit([job((1, 2, 3))])
        finished = backend.step()
        order += finished.digests
        if finished.answers is not None:
            scores.update(zip(finished.answers.digests, finished.answers.vectors, strict=True))
        if len(order) == 3:
            break
    assert order[0] == job((1, 2, 3)).digest
    row = tiny.reference("llama").row
    for scored, ids in zip(jobs, (text, far), strict=True):
        expected = [row(ids[:at])[ids[at]] for at in range(scored.span.start + 1, 60)]
        np.testing.assert_allclose(scores[scored.digest], expected, atol=1e-4, rtol=0)


# In a worker


class SteppedBackend(HfBackend):
    """An hf backend that runs a step only when the test allows a step.

    Attributes:
        answered: digests in the order in which they were answered.
    """

    def __init__(self, settings: HfSettings) -> None:
        self.answered: list[bytes] = []
        self._steps = threading.Semaphore(1000)  # Enough for the checks at the start.
        super().__init__(settings)
        self.answered, self._steps = [], threading.Semaphore(0)

    def let(self, steps: int) -> None:
        """Allow the backend to run this many more steps."""
        self._steps.release(steps)

    def step(self) -> Finished:
        """See `Backend.step`."""
        self._steps.acquire()
        finished = super().step()
        self.answered += finished.digests
        return finished


@asynccontextmanager
async def serving(pool: Pool, backend: SteppedBackend) -> AsyncIterator[Worker]:
    """A worker in this process. At the end of the test, its backend may run any number of steps."""
    worker = Worker(Server(pool.url), Prepared(backend), WorkerSettings(pool.prefix, lease_s=2.0))
    ready = asyncio.Event()
    running = asyncio.create_task(worker.run(lambda _: ready.set()))
    try:
        await asyncio.wait_for(ready.wait(), DEADLINE_S)
        yield worker
    finally:
        backend.let(10_000)
        worker.stop()
        await asyncio.wait_for(running, DEADLINE_S)


async def until_true(holds: Callable[[], bool], expected: str) -> None:
    """Wait for a condition that another thread of the worker fulfils."""

    async def look() -> bool:
        return holds()

    await until_async(look, expected)


@pytest.fixture
def backend(tiny: Tiny) -> SteppedBackend:
    return SteppedBackend(HfSettings(str(tiny.folder("llama")), "tiny", device="cpu", chunked_prefill_size=8))


def owed_by(worker: Worker) -> int:
    """The number of prompts that the worker's backend has not answered."""
    assert worker._serving is not None
    return worker._serving.engine_thread.owed


async def test_a_clients_short_prompt_is_answered_while_another_clients_long_one_is_computed(
    pool: Pool, tiny: Tiny, backend: SteppedBackend
) -> None:
    (long,), short = random_prompts(1, (60, 60)), (1, 2, 3)
    async with (
        serving(pool, backend) as worker,
        pool.producer("tiny") as early,
        pool.producer("tiny") as late,
    ):
        first = asyncio.create_task(early.logprobs(long))
        backend.let(3)
        await until_true(lambda: backend.stats().steps == 3, "three chunks are computed")
        second = asyncio.create_task(late.logprobs(short))
        await until_true(lambda: owed_by(worker) == 2, "the backend gets the short prompt")
        # Allow two steps: one may have begun before the short prompt arrived, and the next computes the short prompt.
        backend.let(2)
        rows: dict[tuple[int, ...], Any] = {short: await second}
        assert backend.answered == [job(short).digest]
        assert not first.done()
        backend.let(100)
        rows[long] = await first
    tiny.reference("llama").check(rows)


async def test_the_long_prompt_of_a_closed_client_ends_between_chunks(
    pool: Pool, tiny: Tiny, backend: SteppedBackend
) -> None:
    (long,) = random_prompts(1, (60, 60))
    async with (
        serving(pool, backend) as worker,
        pool.producer("tiny") as early,
        pool.producer("tiny") as late,
    ):
        first = asyncio.create_task(early.logprobs(long))
        backend.let(3)
        await until_true(lambda: backend.stats().steps == 3, "three chunks are computed")
        first.cancel()
        await until_true(lambda: not owed_by(worker), "the worker drops the prompt")
        second = asyncio.create_task(late.logprobs((1, 2, 3)))
        await until_true(lambda: owed_by(worker) == 1, "the backend gets another prompt")
        backend.let(100)
        tiny.reference("llama").check({(1, 2, 3): await second})
        assert backend.answered == [job((1, 2, 3)).digest]
        # Count three chunks, at most one chunk that was running at the cancellation, and the step of the second prompt.
        assert backend.stats().steps <= 5
