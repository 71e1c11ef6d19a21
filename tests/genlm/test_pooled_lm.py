"""`PooledLM` with random rows: its results, its callers, and how it is closed."""

from __future__ import annotations

import asyncio
import copy
import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import redis
import torch
from genlm.backend.llm import AsyncLM, AsyncTransformer
from genlm.backend.tokenization import decode_vocab as their_decode_vocab
from llamppl import CachedCausalLM

from lmpool.errors import (
    EmptyPrompt,
    InvalidPrompt,
    LMPoolError,
    ProducerClosed,
    SettingsError,
    UnknownAdapter,
    UnknownModel,
)
from lmpool.producer import SyncProducer
from lmpool.producer.genlm import PooledLM, load_model_by_name
from lmpool.producer.genlm.connection import Address
from tests.genlm.small import SIZE, RowsOfThePool, expected
from tests.support.pool import PATIENCE, Pool, open_sockets, until, until_async

IDS = [72, 105, 33]
PROMPTS = [[1], [1, 2], IDS, [1]]
ENDS_WITHIN_S = 120.0


def connect(pool: Pool, tokenizer: Any, **options: Any) -> PooledLM:
    return PooledLM.from_name("syn", redis=pool.url, prefix=pool.prefix, tokenizer=tokenizer, **options)


ThreadList = Callable[[], list[threading.Thread]]


@pytest.fixture
def threads_of_ours() -> ThreadList:
    """Return a function that lists the producer threads that this test has started."""

    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("lmpool-pro")]

    before = threads()
    return lambda: [thread for thread in threads() if thread not in before]


async def finished(call: Callable[[], Any]) -> Any:
    """Return the result of a call; await the result if it is a coroutine."""
    result = call()
    return await result if asyncio.iscoroutine(result) else result


# Results of every method


async def test_every_method_returns_the_row_of_the_pool(small: PooledLM) -> None:
    for row in (await small.next_token_logprobs(IDS), small.next_token_logprobs_sync(IDS)):
        assert row.dtype == torch.float32
        assert row.device == small.device
        assert torch.equal(row, expected(IDS))
    wanted = torch.stack([expected(ids) for ids in PROMPTS])
    for rows in (await small.batch_next_token_logprobs(PROMPTS), small.batch_next_token_logprobs_sync(PROMPTS)):
        assert rows.dtype == torch.float32
        assert torch.equal(rows, wanted)


async def test_no_prompts_give_no_rows(small: PooledLM) -> None:
    assert (await small.batch_next_token_logprobs([])).shape == (0, SIZE)
    assert small.batch_next_token_logprobs_sync([]).shape == (0, SIZE)


async def test_tensors_share_the_memory_of_the_rows(small: PooledLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, again = await small.next_token_logprobs(IDS), await small.next_token_logprobs(IDS)
        first_sync, again_sync = small.next_token_logprobs_sync(IDS), small.next_token_logprobs_sync(IDS)
        batch = np.zeros((1, SIZE), np.float32)

        async def batch_logprobs(*_: Any, **__: Any) -> Any:
            return batch

        monkeypatch.setattr(small._connection.producer, "batch_logprobs", batch_logprobs)
        rows = await small.batch_next_token_logprobs([IDS])
    row = await small._connection.producer.logprobs(IDS)
    assert not row.flags.writeable
    assert first.data_ptr() == again.data_ptr() == row.ctypes.data
    assert first_sync.data_ptr() == again_sync.data_ptr()
    assert rows.data_ptr() == batch.ctypes.data


async def test_a_tensor_outlives_the_cache_and_the_model(small_pool: Pool, tokenizer: Any) -> None:
    async with connect(small_pool, tokenizer, cache_bytes=0) as model:
        row = await model.next_token_logprobs(IDS)
    del model
    gc.collect()
    assert torch.equal(row, expected(IDS))


@pytest.mark.parametrize(
    "make",
    [
        tuple,
        np.array,
        torch.tensor,
        lambda ids: [np.int64(i) for i in ids],
        lambda ids: [torch.tensor(i) for i in ids],
        lambda ids: [*ids[:-1], np.array(ids[-1])],
    ],
    ids=["tuple", "numpy array", "tensor", "numpy integers", "tensors", "array of no dimension"],
)
async def test_token_ids_may_be_of_any_kind(small: PooledLM, make: Callable[[list[int]], Any]) -> None:
    assert torch.equal(await small.next_token_logprobs(make(IDS)), expected(IDS))
    assert torch.equal(small.next_token_logprobs_sync(make(IDS)), expected(IDS))
    assert torch.equal((await small.batch_next_token_logprobs([make(IDS)]))[0], expected(IDS))


def test_the_vocabulary_is_that_of_genlm_backend(small: PooledLM, tokenizer: Any) -> None:
    tokens, texts = their_decode_vocab(tokenizer)
    assert small.tokenizer is tokenizer
    assert small.byte_vocab == tokens
    assert [(type(t), t.byte_string) for t in small.byte_vocab] == [(type(t), t.byte_string) for t in tokens]
    assert small.str_vocab == texts


async def test_a_seed_draws_what_genlm_backend_draws(small: PooledLM, tokenizer: Any) -> None:
    reference = RowsOfThePool(tokenizer)
    for seed, temperature in ((1, 1.0), (2, 0.5), (3, 2.0)):
        wanted = await reference.sample(IDS, 12, [5], temperature, seed)
        assert await small.sample(IDS, 12, [5], temperature, seed) == wanted
        batch = await reference.batch_sample(PROMPTS, 5, [5], temperature=temperature, seed=seed)
        assert await small.batch_sample(PROMPTS, 5, [5], temperature=temperature, seed=seed) == batch


async def test_without_a_seed_workers_draw_and_no_row_is_cached(small: PooledLM) -> None:
    drawn = [await small.sample(torch.tensor(IDS), 6, []) for _ in range(3)]
    assert all(len(tokens) == 6 and set(tokens) <= set(range(SIZE)) for tokens in drawn)
    assert len(set(map(tuple, drawn))) > 1
    assert await small.sample(IDS, 6, range(SIZE)) == []
    assert [len(tokens) for tokens in await small.batch_sample(PROMPTS, 2, [])] == [2] * len(PROMPTS)
    most_likely = int(expected(IDS).argmax())
    assert await small.sample(IDS, 1, [], temperature=0.001) == [most_likely]


# Temperatures, statistics and caches


async def test_a_temperature_of_zero_takes_the_most_likely_tokens_with_and_without_a_seed(small: PooledLM) -> None:
    expected: list[int] = []
    for _ in range(4):
        expected.append(int((await small.next_token_logprobs([1, 2, *expected])).argmax()))
    for seed in (None, 3):
        assert await small.sample([1, 2], 4, [], temperature=0, seed=seed) == expected


async def test_it_reports_its_name_and_the_outcomes_of_its_requests(small_pool: Pool, tokenizer: Any) -> None:
    options: Any = {"redis": small_pool.url, "prefix": small_pool.prefix, "tokenizer": tokenizer}
    with PooledLM.from_name(**options) as model:
        assert repr(model) == "PooledLM('syn')"
        assert model.stats().requests == 0
        await model.batch_next_token_logprobs([[1, 7], [1, 8]])
        model.next_token_logprobs_sync([1, 7])
        model.next_token_logprobs_sync([1, 7])
        assert (model.stats().requests, model.stats().local_hits) == (4, 1)


def test_a_model_that_is_not_named_follows_the_versions_of_its_weights(pool: Pool, tokenizer: Any) -> None:
    pool.start("--vocab-size", SIZE)
    options: Any = {"redis": pool.url, "prefix": pool.prefix}
    with SyncProducer(**options) as publisher:
        publisher.publish_weights({"seed": np.array(7)})
    with PooledLM.from_name(**options, tokenizer=tokenizer) as model:
        assert (repr(model), model.info.version) == ("PooledLM('syn')", 1)
    with PooledLM.from_name("syn@1", **options, tokenizer=tokenizer) as model:
        assert repr(model) == "PooledLM('syn@1')"


async def test_cleared_rows_are_fetched_again(small: PooledLM) -> None:
    rows = await small.next_token_logprobs(IDS), small.next_token_logprobs_sync(IDS)
    small.clear_cache()
    small.clear_kv_cache()
    small.reset_async_queries()
    again = await small.next_token_logprobs(IDS), small.next_token_logprobs_sync(IDS)
    for old, new in zip(rows, again, strict=True):
        assert torch.equal(old, new)
        assert old.data_ptr() != new.data_ptr()


def test_a_warmed_prompt_is_in_the_cache(small: PooledLM, small_pool: Pool) -> None:
    before = len(small_pool.names("row:*"))
    small.cache_kv([200, 201, 202])
    assert len(small_pool.names("row:*")) == before + 1


def test_an_uncached_row_is_the_same_row(small: PooledLM) -> None:
    assert torch.equal(small.next_token_logprobs_uncached(IDS), expected(IDS))
    with pytest.raises(EmptyPrompt):
        small.next_token_logprobs_uncached([])


# Errors of PooledLM


async def test_an_unknown_adapter_is_an_error_of_both_libraries(small: PooledLM) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: small.next_token_logprobs(IDS, lora_name="gone"),
        lambda: small.batch_next_token_logprobs([IDS], lora_name="gone"),
        lambda: small.sample(IDS, 2, [], lora_name="gone"),
        lambda: small.sample(IDS, 2, [], seed=1, lora_name="gone"),
        lambda: small.next_token_logprobs_sync(IDS, lora_name="gone"),
        lambda: small.batch_next_token_logprobs_sync([IDS], lora_name="gone"),
        lambda: small.next_token_logprobs_uncached(IDS, lora_name="gone"),
        lambda: small.cache_kv(IDS, lora_name="gone"),
        lambda: small.remove_lora("gone"),
    ]
    for call in calls:
        with pytest.raises(UnknownAdapter, match="gone") as caught:
            await finished(call)
        assert isinstance(caught.value, ValueError)


async def test_an_empty_prompt_is_a_value_error(small: PooledLM) -> None:
    for kind in (ValueError, EmptyPrompt):
        with pytest.raises(kind):
            await small.next_token_logprobs([])
        with pytest.raises(kind):
            small.next_token_logprobs_sync([])
        with pytest.raises(kind):
            await small.batch_next_token_logprobs([IDS, []])


@pytest.mark.parametrize("prompt", ["a text", {"input_ids": IDS}, None, 5])
async def test_a_prompt_to_sample_from_must_be_token_ids(small: PooledLM, prompt: Any) -> None:
    for most, seed in ((0, None), (2, None), (2, 1)):
        with pytest.raises(InvalidPrompt, match="the prompt is "):
            await small.sample(prompt, most, [], seed=seed)


def test_methods_that_genlm_backend_removed_raise_here_too(small: PooledLM) -> None:
    with pytest.raises(RuntimeError, match="lora_name="):
        small.set_lora("folder", "name")
    with pytest.raises(RuntimeError, match="lora_name"):
        small.clear_lora()


def test_a_wrong_name_fails_at_once(small_pool: Pool, tokenizer: Any, threads_of_ours: ThreadList) -> None:
    with pytest.raises(UnknownModel, match="other"):
        PooledLM.from_name("other", redis=small_pool.url, prefix=small_pool.prefix, tokenizer=tokenizer)
    assert not threads_of_ours()


def test_loading_by_name_waits_for_a_worker(pool: Pool, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    options = {"redis": pool.url, "prefix": pool.prefix, "tokenizer": tokenizer}
    with pytest.raises(UnknownModel, match="is not served"):
        load_model_by_name("syn", llm_opts={**options, "when_absent": "raise"})
    with ThreadPoolExecutor(1) as other:
        loading = other.submit(load_model_by_name, "syn", llm_opts=options)
        until(lambda: "waiting for a worker to serve 'syn'" in caplog.text, "the model waits")
        pool.start("--vocab-size", SIZE)
        with loading.result(ENDS_WITHIN_S) as model:
            assert torch.equal(model.next_token_logprobs_sync(IDS), expected(IDS))
            assert pickle.loads(pickle.dumps(model))._address.when_absent == "wait"  # noqa: S301


def test_an_unpickled_model_keeps_its_priority(pool: Pool, tokenizer: Any) -> None:
    pool.start("--vocab-size", SIZE)
    where: dict[str, Any] = {"redis": pool.url, "prefix": pool.prefix, "tokenizer": tokenizer}
    with (
        PooledLM.from_name(**where, priority="bulk") as model,
        pickle.loads(pickle.dumps(model)) as other,  # noqa: S301
    ):
        for token, one in enumerate((model, other)):
            assert torch.equal(one.next_token_logprobs_sync([*IDS, token]), expected([*IDS, token]))
        until(lambda: len(pool.names("*:reply:*")) == 2, "both clients are notified through the server")
        assert all(":reply:bulk:" in name for name in pool.names("*:reply:*"))
    with pytest.raises(SettingsError, match="priority: 'high' is not one of interactive, bulk"):
        PooledLM.from_name(**where, priority="high")  # type: ignore[arg-type]


def test_a_model_without_a_tokenizer_needs_one_as_an_argument(small_pool: Pool, threads_of_ours: ThreadList) -> None:
    with pytest.raises(SettingsError, match="tokenizer: the model 'syn' has no tokenizer; pass tokenizer="):
        PooledLM.from_name(redis=small_pool.url, prefix=small_pool.prefix)
    assert not threads_of_ours()


def test_unknown_and_malformed_options_are_refused(small_pool: Pool, tokenizer: Any) -> None:
    with pytest.raises(TypeError, match="batch_size"):
        PooledLM.from_name("syn", redis=small_pool.url, batch_size=3)  # type: ignore[call-arg]
    with pytest.raises(SettingsError, match="timeout"):
        connect(small_pool, tokenizer, timeout=-1)


# Callers in several event loops, threads and processes


def test_one_model_serves_one_event_loop_after_another(small: PooledLM) -> None:
    for first in range(20):
        rows = asyncio.run(small.batch_next_token_logprobs([[first], [first, first]]))
        assert torch.equal(rows[0], expected([first]))


def test_event_loops_in_several_threads_do_not_disturb_each_other(small: PooledLM) -> None:
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    async def request_rows(thread: int) -> None:
        start.wait(ENDS_WITHIN_S)
        for token in range(60):
            ids = [thread, token]
            assert torch.equal(await small.next_token_logprobs(ids), expected(ids))
            assert torch.equal(small.next_token_logprobs_sync(ids[::-1]), expected(ids[::-1]))

    def run(thread: int) -> None:
        try:
            asyncio.run(request_rows(thread))
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ENDS_WITHIN_S)
        assert not thread.is_alive()
    assert failures == []


def test_a_copy_is_the_model_itself(small: PooledLM) -> None:
    assert copy.copy(small) is small
    assert copy.deepcopy({"model": small})["model"] is small


def test_a_pickled_model_connects_again(small: PooledLM) -> None:
    other = pickle.loads(pickle.dumps(small))  # noqa: S301
    try:
        assert other is not small
        assert other.byte_vocab == small.byte_vocab
        assert other.str_vocab == small.str_vocab
        assert torch.equal(other.next_token_logprobs_sync(IDS), expected(IDS))
        assert torch.equal(asyncio.run(other.next_token_logprobs(IDS)), expected(IDS))
    finally:
        other.close()


def test_a_redis_client_is_taken_and_cannot_be_pickled(small_pool: Pool, tokenizer: Any) -> None:
    with redis.Redis.from_url(small_pool.url, **PATIENCE) as client:
        model = PooledLM.from_name("syn", redis=client, prefix=small_pool.prefix, tokenizer=tokenizer)
        with model:
            assert torch.equal(model.next_token_logprobs_sync(IDS), expected(IDS))
            with pytest.raises(SettingsError, match="redis: .* cannot be pickled: .* URL"):
                pickle.dumps(model)


def rows_of_both_interfaces(model: PooledLM, ids: list[int]) -> tuple[int, float, float]:
    """Run in another process; return the process id, and the sums of rows from the async and the sync interface."""
    return (
        os.getpid(),
        float(asyncio.run(model.next_token_logprobs(ids)).sum()),
        float(model.next_token_logprobs_sync(ids).sum()),
    )


def send_rows(model: PooledLM, ids: list[int], answers: Any) -> None:
    answers.put(rows_of_both_interfaces(model, ids))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_connect_for_themselves(small: PooledLM, method: str) -> None:
    async def fork_inside_a_running_loop() -> tuple[int, float, float]:
        await small.next_token_logprobs([9])
        small.next_token_logprobs_sync([9])
        context: Any = multiprocessing.get_context(method)
        answers = context.Queue()
        child = context.Process(target=send_rows, args=(small, IDS, answers))
        child.start()
        answer: tuple[int, float, float] = await asyncio.to_thread(answers.get, True, ENDS_WITHIN_S)
        await asyncio.to_thread(child.join, ENDS_WITHIN_S)
        assert child.exitcode == 0
        # After the fork, the parent's connections still work.
        for token in range(20, 40):
            assert torch.equal(await small.next_token_logprobs([token]), expected([token]))
            assert torch.equal(small.next_token_logprobs_sync([token, 1]), expected([token, 1]))
        return answer

    pid, *sums = asyncio.run(fork_inside_a_running_loop())
    assert pid != os.getpid()
    assert sums == [float(expected(IDS).sum())] * 2


def test_llamppl_treats_it_as_an_async_transformer(small: PooledLM) -> None:
    assert isinstance(small, AsyncLM)
    assert isinstance(small, AsyncTransformer)
    model = CachedCausalLM(small)
    assert model.backend == "hf"
    assert model.str_vocab == small.str_vocab
    row = model.next_token_logprobs_unbatched(IDS)
    assert np.array_equal(row, expected(IDS).numpy())
    model.clear_kv_cache()
    model.reset_async_queries()


# Closing of a model


async def test_a_closed_model_raises_producer_closed(
    small_pool: Pool, tokenizer: Any, threads_of_ours: ThreadList
) -> None:
    model = connect(small_pool, tokenizer)
    await model.next_token_logprobs(IDS)
    async with model:
        pass
    model.close()
    for call in (model.next_token_logprobs_sync, model.batch_next_token_logprobs_sync):
        with pytest.raises(ProducerClosed):
            call([IDS])
    with pytest.raises(ProducerClosed):
        await model.next_token_logprobs(IDS)
    assert not threads_of_ours()


@pytest.mark.parametrize("way", ["sync", "coroutine"])
def test_closing_ends_connecting_in_other_threads(
    small_pool: Pool, tokenizer: Any, threads_of_ours: ThreadList, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """Connect as an unpickled model does with its first request, while no worker serves the model."""
    address = Address("never", small_pool.url, prefix=small_pool.prefix, when_absent="wait")
    model = PooledLM(address, tokenizer=tokenizer, connects=False)
    ended: list[BaseException] = []

    def request_rows() -> None:
        try:
            if way == "sync":
                model.next_token_logprobs_sync(IDS)
            else:
                asyncio.run(model.next_token_logprobs(IDS))
        except LMPoolError as error:
            ended.append(error)

    thread = threading.Thread(target=request_rows)
    thread.start()
    until(lambda: "waiting for a worker to serve 'never'" in caplog.text, "the thread connects")
    model.close()
    thread.join(ENDS_WITHIN_S)
    assert [type(error) for error in ended] == [ProducerClosed]
    until(lambda: not threads_of_ours(), "the thread ends")


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "dropped"])
async def test_a_model_closed_inside_an_event_loop_leaves_no_connection(
    small_pool: Pool, tokenizer: Any, is_closed: bool
) -> None:
    before = open_sockets()
    model = connect(small_pool, tokenizer)
    await model.next_token_logprobs(IDS)
    model.next_token_logprobs_sync(IDS)
    assert open_sockets() > before
    if is_closed:
        model.close()
    del model

    async def are_gone() -> bool:
        gc.collect()
        return open_sockets() <= before

    await until_async(are_gone, "the model's connections end")


def test_a_dropped_model_leaves_no_thread(small_pool: Pool, tokenizer: Any, threads_of_ours: ThreadList) -> None:
    model = connect(small_pool, tokenizer)
    model.next_token_logprobs_sync(IDS)
    assert len(threads_of_ours()) == 1
    del model
    gc.collect()
    until(lambda: not threads_of_ours(), "the thread of the dropped model ends")


ASK_AND_DROP = """
asyncio.run(llm.next_token_logprobs([1]))
llm.next_token_logprobs_sync([1])
other = connect()
other.next_token_logprobs_sync([2])
del other
"""
LEAVE_A_LOOP_AND_A_THREAD_BEHIND = """
asyncio.new_event_loop().run_until_complete(llm.next_token_logprobs([1]))
def request_rows():
    while True:
        llm.next_token_logprobs_sync([1])
threading.Thread(target=request_rows, daemon=True).start()
"""


def ended(pool: Pool, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program that has a model `llm` and does not close it; return the ended process."""
    begin = f"""
import asyncio, threading
from lmpool.producer.genlm import PooledLM
from tests.genlm.small import byte_tokenizer
def connect():
    return PooledLM.from_name("syn", redis={pool.url!r}, prefix={pool.prefix!r}, tokenizer=byte_tokenizer())
llm = connect()
"""
    command = [sys.executable, "-c", begin + program]
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * ENDS_WITHIN_S)


def test_the_interpreter_exits_quietly_without_close(small_pool: Pool) -> None:
    done = ended(small_pool, ASK_AND_DROP)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_interpreter_exits_while_requests_are_pending(small_pool: Pool) -> None:
    assert ended(small_pool, LEAVE_A_LOOP_AND_A_THREAD_BEHIND).returncode == 0


def test_without_genlm_backend_the_error_names_the_package() -> None:
    program = (
        "import sys\nsys.modules['genlm'] = None\n"
        "from lmpool.producer.genlm import TokenCharacterTrie\n"
        "assert 'torch' not in sys.modules\n"
        "from lmpool.producer.genlm import PooledLM"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=ENDS_WITHIN_S)
    assert "ImportError: PooledLM needs genlm-backend: pip install 'lmpool[genlm]'" in done.stderr.splitlines()[-1]
