"""`lmpool.testing.pool` behaves like a pool of processes, and leaves no threads, files or sockets behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from lmpool.errors import (
    AmbiguousModel,
    DeadlineExceeded,
    LMPoolError,
    ModelMismatch,
    NoWorker,
    QueueFull,
    SettingsError,
    UnknownModel,
    WorkerError,
)
from lmpool.producer import Producer, SyncProducer
from lmpool.protocol.keys import Keys
from lmpool.testing import MemoryPool, SyntheticModel, pool
from lmpool.vocabulary import Vocabulary, decode_vocab
from tests.support.models.real_tokenizers import gpt2
from tests.support.pool import DEADLINE_S, count_waiting, deadline_ms, until, until_async
from tests.support.trie_answers import answers_of, draw_weights, words

SHORT = 0.5
TINY = SyntheticModel(vocab_size=64)


@pytest.fixture
def memory() -> Iterator[MemoryPool]:
    with pool(TINY) as opened:
        yield opened


def jobs(memory: MemoryPool, model: str = "synthetic") -> int:
    return int(memory.redis.xlen(Keys().model(model).jobs))


def held(memory: MemoryPool, model: str = "synthetic") -> int:
    groups: Any = memory.redis.xinfo_groups(Keys().model(model).jobs)
    return int(groups[0]["pending"])


# Rows


@pytest.mark.parametrize("encoding", ["f32", "bf16"])
@pytest.mark.parametrize("vocab_size", [1, 3, 512, 49_152])
async def test_every_row_is_the_row_of_the_model(vocab_size: int, encoding: str) -> None:
    model = SyntheticModel("m", vocab_size=vocab_size, seed=7, encoding=encoding)
    prompts = [[i % vocab_size, (i * i) % vocab_size, 0][: 1 + i % 3] for i in range(40)]
    async with pool(model) as memory, Producer(redis=memory.url) as producer:
        assert producer.model.vocab_size == vocab_size
        rows = await producer.batch_logprobs(prompts)
        assert all((row == model.row(prompt)).all() for row, prompt in zip(rows, prompts, strict=True))
        assert ((await producer.logprobs([0])) == model.row([0])).all()


async def test_rows_can_be_read_from_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Path(os.environ.get("LMPOOL_SHM_DIR", "/dev/shm"), tmp_path.name)
    place.mkdir()
    monkeypatch.setenv("LMPOOL_SHM_DIR", str(place))
    model = SyntheticModel(vocab_size=2048)
    try:
        with pool(model) as memory:
            async with Producer(redis=memory.url, cache_bytes=0) as producer:
                number = 0

                async def is_shared() -> bool:
                    nonlocal number
                    number += 1
                    assert (await producer.logprobs([number]) == model.row([number])).all()
                    return producer._counters.shared.rows > 0

                await until_async(is_shared, "rows come through shared memory once it is made")
                before = producer._counters.shared.rows
                assert (await producer.logprobs([number]) == model.row([number])).all()
                assert producer._counters.shared.rows == before + 1
        assert list(place.glob("*/*")) == []
    finally:
        shutil.rmtree(place)


def test_a_synchronous_producer_can_use_a_pool(memory: MemoryPool) -> None:
    with SyncProducer(redis=memory.redis) as producer:
        np.testing.assert_array_equal(producer.logprobs([1, 2]), TINY.row([1, 2]))


def test_two_pools_do_not_see_each_other() -> None:
    model, other = SyntheticModel(vocab_size=8, seed=1), SyntheticModel(vocab_size=8, seed=2)
    with pool(model) as first, pool(other) as second:
        for memory in (first, second):
            with SyncProducer(redis=memory.url) as producer:
                np.testing.assert_array_equal(producer.logprobs([3]), memory.model.row([3]))
        assert first.url != second.url


def test_a_pool_can_have_another_prefix() -> None:
    with pool(TINY, prefix="mine") as memory, SyncProducer(redis=memory.url, prefix="mine") as producer:
        np.testing.assert_array_equal(producer.logprobs([1]), TINY.row([1]))
        assert {bytes(key)[:5] for key in memory.redis.scan_iter()} == {b"mine:"}


def test_a_pool_works_with_a_long_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pool(TINY) as memory:
        use(memory)


def test_other_processes_can_connect(memory: MemoryPool) -> None:
    code = "from lmpool.producer import SyncProducer\nwith SyncProducer() as p: print(p.logprobs([5]).tobytes().hex())"
    environment = {**os.environ, "LMPOOL_REDIS_URL": memory.url}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert bytes.fromhex(done.stdout) == TINY.row([5]).tobytes()


async def test_a_prompt_of_several_clients_is_computed_once(memory: MemoryPool) -> None:
    memory.worker.stall()
    producers = [Producer(redis=memory.url) for _ in range(5)]
    requested = [asyncio.ensure_future(producer.logprobs([1, 2, 3])) for producer in producers]
    waiting = Keys().model("synthetic").waiting + b"*"

    async def all_wait() -> bool:
        return [count_waiting(memory.redis, key) for key in memory.redis.scan_iter(waiting)] == [len(producers)]

    await until_async(all_wait, "all clients wait for the same prompt")
    assert jobs(memory) == 1
    memory.worker.resume()
    for row in await asyncio.gather(*requested):
        np.testing.assert_array_equal(row, TINY.row([1, 2, 3]))
    for producer in producers:
        await producer.close()


# Several models and their names


async def test_several_models_are_served_by_name() -> None:
    models = [SyntheticModel("a", vocab_size=8), SyntheticModel("b", vocab_size=9, seed=1)]
    async with pool(*models) as memory:
        for model in models:
            async with Producer(model.name, redis=memory.url) as producer:
                np.testing.assert_array_equal(await producer.logprobs([7]), model.row([7]))
        with pytest.raises(AmbiguousModel, match=r"a.*b"):
            await Producer(redis=memory.url).open()
        with pytest.raises(UnknownModel, match="'c'"):
            await Producer("c", redis=memory.url).open()


def test_another_model_of_the_same_name_is_refused(memory: MemoryPool) -> None:
    with pytest.raises(ModelMismatch, match="vocab_size"):
        memory.serve(SyntheticModel(vocab_size=65))
    with SyncProducer(redis=memory.url) as producer:
        np.testing.assert_array_equal(producer.logprobs([1]), TINY.row([1]))


def test_errors_name_malformed_settings() -> None:
    for settings, name in (
        ({"vocab_size": -1}, "vocab_size"),
        ({"lease_s": 0}, "lease_s"),
        ({"queue_limit": 0}, "queue_limit"),
        ({"name": "trie"}, "name"),
        ({"name": ""}, "name"),
        ({"vocabulary": [b"a"], "vocab_size": 2}, "vocab_size"),
    ):
        with pytest.raises(SettingsError, match=name):
            SyntheticModel(**settings)
    with pytest.raises(SettingsError, match="'a', 'a'"):
        pool(SyntheticModel("a"), SyntheticModel("a", seed=1))
    with pytest.raises(TypeError, match="crash"):
        SyntheticModel(crash_token=3)  # type: ignore[call-arg]


# Vocabularies and tries


async def test_a_pool_serves_the_vocabulary_of_the_users_tokenizer() -> None:
    tokens = decode_vocab(gpt2()).tokens
    model = SyntheticModel(vocabulary=tokens)
    assert model.vocab_size == len(tokens) > 50_000
    async with pool(model) as memory, Producer(redis=memory.url) as producer:
        assert producer.model.vocab_size == len(tokens)
        assert producer.model.vocabulary == Vocabulary(tokens).digest
        trie = await producer.trie()
        assert trie.structure.prefix(trie.structure.leaf[300]) == tokens[300]
        row = await producer.logprobs([300])
        np.testing.assert_array_equal(row, model.row([300]))


async def test_trie_calls_are_answered() -> None:
    model = SyntheticModel(vocabulary=words(3, 50), with_trie=True)
    prompts = [[i, 1] for i in range(20)]
    async with pool(model) as memory, Producer(redis=memory.url) as producer:
        trie = await producer.trie()
        truth = answers_of(trie.structure)
        for prompt in prompts:  # Pass the prompt, not weights: the model's worker computes the sums.
            expected = truth.of("sum", np.exp(model.row(prompt)))
            np.testing.assert_allclose(await trie.weight_sum(prompt=prompt), expected, rtol=1e-6)
        memory.serve_tries()
        other = await producer.trie(words(4, 30))
        weights = draw_weights(1, 30)
        maxima = await other.weight_max(weights)
        np.testing.assert_allclose(maxima, answers_of(other.structure).of("max", weights), rtol=1e-6)


# Failures


def test_a_worker_serves_published_weights(memory: MemoryPool) -> None:
    with SyncProducer(redis=memory.url) as producer:
        for version in (1, 2):
            assert producer.publish_weights({"seed": np.array(version)}, timeout=DEADLINE_S) == version
            other = SyntheticModel(vocab_size=64, seed=version)
            assert np.array_equal(producer.logprobs([1, 2]), other.row([1, 2]))
            assert (memory.worker.is_running, memory.worker.info.version) == (True, version)


async def test_a_failing_prompt_does_not_affect_other_prompts() -> None:
    model = SyntheticModel(vocab_size=20, fail_token=13)
    async with pool(model) as memory, Producer(redis=memory.url) as producer:
        other = asyncio.create_task(producer.logprobs([1]))
        with pytest.raises(WorkerError, match="13"):
            await producer.logprobs([1, 13])
        np.testing.assert_array_equal(await other, model.row([1]))


async def test_a_stalled_worker_returns_rows_after_resume(memory: MemoryPool) -> None:
    async with Producer(redis=memory.url) as producer:
        memory.worker.stall()
        with pytest.raises(DeadlineExceeded):
            await producer.logprobs([1], timeout=SHORT)
        requested = asyncio.ensure_future(producer.logprobs([2]))
        memory.worker.resume()
        np.testing.assert_array_equal(await requested, TINY.row([2]))


async def test_a_step_takes_step_ms() -> None:
    async with pool(SyntheticModel(vocab_size=8, step_ms=200)) as memory, Producer(redis=memory.url) as producer:
        began = time.monotonic()
        await producer.logprobs([1])
        assert time.monotonic() - began >= 0.2


async def test_a_full_queue_refuses() -> None:
    model = SyntheticModel(vocab_size=8, queue_limit=2, max_batch=1)
    async with pool(model) as memory, Producer(redis=memory.url, when_full="raise") as producer:
        memory.worker.stall()
        requested = [asyncio.ensure_future(producer.logprobs([i])) for i in range(2)]
        await until_async(lambda: _holds(jobs(memory) == 2), "the queue is full")
        with pytest.raises(QueueFull):
            await producer.logprobs([2])
        memory.worker.resume()
        await asyncio.gather(*requested)


async def test_a_cancelled_request_is_removed_from_the_queue(memory: MemoryPool) -> None:
    memory.worker.kill()
    async with Producer(redis=memory.url) as producer:
        requested = asyncio.ensure_future(producer.logprobs([1]))
        await until_async(lambda: _holds(jobs(memory) == 1), "the prompt is queued")
        requested.cancel()
        await until_async(lambda: _holds(jobs(memory) == 0), "the prompt is removed")


async def test_a_request_without_a_live_worker_raises_no_worker() -> None:
    async with pool(SyntheticModel(vocab_size=8, lease_s=SHORT)) as memory, Producer(redis=memory.url) as producer:
        memory.worker.kill()
        assert not memory.worker.is_running
        with pytest.raises(NoWorker):
            await producer.logprobs([1])


async def test_another_worker_takes_over_the_jobs_of_a_killed_worker() -> None:
    model = SyntheticModel(vocab_size=16, lease_s=SHORT)
    async with pool(model) as memory, Producer(redis=memory.url) as producer:
        memory.worker.stall()
        requested = asyncio.ensure_future(producer.batch_logprobs([[i] for i in range(16)]))
        await until_async(lambda: _holds(held(memory) == 16), "the worker holds all prompts")
        memory.worker.kill()
        memory.serve(model)
        for i, row in enumerate(await requested):
            np.testing.assert_array_equal(row, model.row([i]))
        await until_async(lambda: _holds(jobs(memory) == 0), "the queue is empty")


async def test_a_stopped_worker_finishes_its_prompts() -> None:
    model = SyntheticModel(vocab_size=16, max_batch=4)
    async with pool(model) as memory, Producer(redis=memory.url) as producer:
        memory.worker.stall()
        requested = asyncio.ensure_future(producer.batch_logprobs([[i] for i in range(8)]))
        await until_async(lambda: _holds(held(memory) == 8), "the worker holds all prompts")
        await asyncio.to_thread(memory.worker.stop)
        assert held(memory) == jobs(memory) == 0
        np.testing.assert_array_equal((await requested)[5], model.row([5]))
        with pytest.raises(UnknownModel):
            await Producer("synthetic", redis=memory.url).open()


async def test_requests_survive_flushall(memory: MemoryPool) -> None:
    async with Producer(redis=memory.url) as producer:
        await producer.logprobs([1])
        memory.redis.flushall()
        np.testing.assert_array_equal(await producer.logprobs([2]), TINY.row([2]))


# Closing a pool


def traces() -> tuple[set[str], set[str], set[Path]]:
    """List the threads, sockets and temporary folders of this process."""
    threads = {thread.name for thread in threading.enumerate()}
    files = {str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    sockets = {name for name in files if name.startswith(("socket:", "anon_inode:"))}
    return threads, sockets, set(Path(tempfile.gettempdir()).glob("lmp*"))


def use(memory: MemoryPool) -> None:
    with SyncProducer(redis=memory.url) as producer:
        producer.logprobs([1])


def stall(memory: MemoryPool) -> None:
    memory.worker.stall()
    with SyncProducer(redis=memory.url) as producer, pytest.raises(DeadlineExceeded):
        producer.logprobs([1], timeout=1)


def leave_a_client_waiting(memory: MemoryPool) -> None:
    def wait() -> None:
        with pytest.raises(redis.ConnectionError):
            redis.Redis.from_url(memory.url, retry=None).xread({"never": "0"}, block=0)

    before = len(memory.redis.client_list())
    waiting = threading.Thread(target=wait, name="waiting")
    waiting.start()
    until(lambda: len(memory.redis.client_list()) > before, "it is connected")


@pytest.mark.parametrize(
    "body", [lambda memory: None, use, stall, leave_a_client_waiting], ids=["open", "use", "stall", "clients"]
)
def test_a_closed_pool_leaves_no_threads_files_or_sockets(
    body: Callable[[MemoryPool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        before = traces()
        with pool(SyntheticModel(vocab_size=8)) as memory:
            body(memory)
        until(lambda: traces()[0] <= before[0], "its threads have ended")
        assert traces()[1:] == before[1:]
        assert list(Path(folder).iterdir()) == []


def test_a_pool_closes_during_a_step_of_minutes() -> None:
    began, before = time.monotonic(), traces()[0]
    with pool(SyntheticModel(vocab_size=8, step_ms=600_000)) as memory:
        with SyncProducer(redis=memory.url) as producer, pytest.raises(DeadlineExceeded):
            producer.logprobs([1], timeout=1)
        memory.serve(SyntheticModel("other"))
    until(lambda: traces()[0] <= before, "its threads have ended")
    assert time.monotonic() - began < DEADLINE_S


def test_an_error_in_the_body_closes_the_pool() -> None:
    with pytest.raises(ZeroDivisionError), pool() as memory:
        _ = 1 / 0
    with pytest.raises(LMPoolError, match="not open"):
        _ = memory.url


def test_a_pool_can_be_opened_repeatedly() -> None:
    memory = pool(TINY)
    for _ in range(3):
        with memory:
            use(memory)
            with pytest.raises(LMPoolError, match="open already"):
                memory.__enter__()


def test_the_error_of_a_failed_worker_is_raised_at_the_end() -> None:
    def spoil(memory: MemoryPool) -> None:
        name = memory.model.name
        memory.redis.hset(Keys().worker("other"), mapping={"model": name, "fingerprint": "another"})
        memory.redis.zadd(Keys().model(name).workers, {"other": deadline_ms()})
        memory.redis.hset(Keys().models(), name, b"not a info")
        until(lambda: not memory.worker.is_running, "the worker finds that others serve another model")

    with pytest.raises(ModelMismatch), pool(SyntheticModel(vocab_size=8, lease_s=SHORT)) as memory:
        spoil(memory)


def test_a_program_ends_without_a_warning() -> None:
    code = (
        "from lmpool.testing import pool\nfrom lmpool.producer import SyncProducer\n"
        "with pool() as memory, SyncProducer(redis=memory.url) as producer: producer.logprobs([1])\n"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("missing", ["fakeredis", "lupa"])
def test_the_error_names_the_missing_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lmpool.testing.front", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SettingsError, match=r"lmpool\[testing\]"), pool():
        pass


async def _holds(condition: bool) -> bool:
    return condition
