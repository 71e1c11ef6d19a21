"""Bad input and failures raise the right exception, with the value and the limit in its text."""

from __future__ import annotations

import asyncio
import re
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import torch

from lmpool import errors
from lmpool.embedded import EmbeddedServer
from lmpool.producer import Producer, SyncProducer
from lmpool.producer.client.submit import Submitter
from lmpool.synthetic import synthetic_row
from tests.support.pool import DEADLINE_S, PATIENCE, Pool, V, WorkerProcess, is_held, lmpool_command, until, until_async

BAD_PROMPTS: list[tuple[Any, type[errors.LMPoolError], str]] = [
    ([], errors.EmptyPrompt, "at least 1 token"),
    (np.array([], np.int64), errors.EmptyPrompt, "at least 1 token"),
    ([1, -2], errors.TokenOutOfRange, f"-2 .* from 0 to {V - 1}"),
    ([1, V], errors.TokenOutOfRange, f"{V} .* from 0 to {V - 1}"),
    ([2**70], errors.TokenOutOfRange, "1180591620717411303424"),
    (np.array([V]), errors.TokenOutOfRange, str(V)),
    ([1] * 21, errors.PromptTooLong, "21 tokens.* at most 20"),
    (np.ones(21, np.int32), errors.PromptTooLong, "21 tokens.* at most 20"),
    ([1.0], errors.NotTokenIds, "1.0"),
    (np.array([1.5]), errors.NotTokenIds, "float64"),
    (torch.tensor([1.5]), errors.NotTokenIds, "float32"),
    ([True], errors.NotTokenIds, "True"),
    (np.array([True]), errors.NotTokenIds, "bool"),
    ("hello", errors.NotTokenIds, "tokenizer"),
    (["a"], errors.NotTokenIds, "'a'"),
    ([[1, 2], [3, 4]], errors.NotTokenIds, r"\[1, 2\]"),
    (np.ones((2, 2), int), errors.NotTokenIds, r"\(2, 2\)"),
    (None, errors.NotTokenIds, "None"),
    (7, errors.NotTokenIds, "7"),
    ({1: 2}, errors.NotTokenIds, "1: 2"),
]


@pytest.mark.parametrize(("prompt", "kind", "message"), BAD_PROMPTS)
async def test_a_bad_prompt_is_refused_before_it_is_sent(
    shared_producer: Producer, prompt: Any, kind: type[errors.LMPoolError], message: str
) -> None:
    before = shared_producer.stats()
    with pytest.raises(kind, match=message) as caught:
        await shared_producer.logprobs(prompt)
    assert isinstance(caught.value, errors.InvalidPrompt)
    with pytest.raises(kind, match=message):
        await shared_producer.batch_logprobs([[1], prompt])
    assert shared_producer.stats() == before


@pytest.fixture
async def shared_producer(pool: Pool) -> Any:
    pool.start("--max-prompt-tokens", 20)
    async with pool.producer() as producer:
        yield producer


async def test_bad_arguments_name_the_field(shared_producer: Producer) -> None:
    for timeout in (0, -1, True, "5", float("nan"), float("inf")):
        with pytest.raises(errors.SettingsError, match=f"timeout: {timeout!r}"):
            await shared_producer.logprobs([1], timeout=timeout)  # type: ignore[arg-type]
    for prompts in ("text", 5, None):
        with pytest.raises(errors.SettingsError, match="prompts: "):
            await shared_producer.batch_logprobs(prompts)  # type: ignore[arg-type]
    with pytest.raises(errors.SettingsError, match=r'dict is not a sequence of prompts; pass its \["input_ids"\]'):
        await shared_producer.batch_logprobs({"input_ids": [[1], [2, 3]], "attention_mask": [[1], [1, 1]]})


async def test_the_error_for_an_unknown_model_names_the_served_ones(pool: Pool) -> None:
    with pytest.raises(errors.UnknownModel, match=f"no model is served: .*, or correct prefix='{pool.prefix}'"):
        await pool.producer().open()
    pool.start(model="one")
    with pytest.raises(errors.UnknownModel, match="'gpt5' is not served; served are: one") as caught:
        await pool.producer("gpt5").logprobs([1])
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("UnknownModel: the model 'gpt5' is not served") == 1, "the error is not its own cause"
    with pytest.raises(errors.UnknownModel, match=r"'Onne' is not served; did you mean 'one'\? served are: one"):
        await pool.producer("Onne").open()
    pool.start(model="two")
    with pytest.raises(errors.AmbiguousModel, match="name one of them: one, two"):
        await pool.producer().logprobs([1])


async def test_without_a_live_worker_a_request_ends_at_its_deadline(pool: Pool) -> None:
    worker = pool.start("--lease-s", 1)
    async with pool.producer() as producer:
        await producer.logprobs([1])
        worker.end()
        started = time.monotonic()
        with pytest.raises(errors.NoWorker, match="no live worker has served 'syn' for"):
            await asyncio.wait_for(producer.logprobs([2], timeout=3600), DEADLINE_S)
        assert time.monotonic() - started > 5, "one that is started again has time to say so"
        with pytest.raises(errors.NoWorker, match=r"no row within 0.3 s: no live worker serves 'syn'"):
            await producer.logprobs([2], timeout=0.3)
        assert np.array_equal(await producer.logprobs([1]), synthetic_row([1], vocab_size=V))
    until(lambda: not pool.names("*waiting*"), "the failed request is taken back")


async def test_the_error_at_a_deadline_has_the_number_of_workers(pool: Pool) -> None:
    pool.start("--step-ms", 600_000, "--max-batch", 1)
    async with pool.producer() as producer:
        with pytest.raises(errors.DeadlineExceeded, match=r"no row within 0.3 s: 1 live worker") as caught:
            await producer.logprobs([1], timeout=0.3)
        assert isinstance(caught.value, TimeoutError)
        with pytest.raises(errors.DeadlineExceeded, match=r"within 0.2 s"):
            await producer.batch_logprobs([[2], [3]], timeout=0.2)


async def test_a_full_queue_is_named_at_the_deadline(pool: Pool) -> None:
    pool.start("--step-ms", 600_000, "--max-batch", 1, "--queue-limit", 3)
    async with pool.producer() as producer:
        waiting = [asyncio.create_task(producer.logprobs([i])) for i in range(3)]

        async def is_full() -> bool:
            return pool.jobs() == 3

        await until_async(is_full, "the queue is full")
        with pytest.raises(errors.QueueFull, match="limit of 3 prompts.*--queue-limit"):
            await producer.logprobs([100], timeout=6)
        for task in waiting:
            task.cancel()


async def test_a_full_queue_is_named_while_the_prompt_is_sent_again(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = 0
    call_script = Submitter._call_script

    async def once(submitter: Submitter, *args: Any) -> bytes:
        nonlocal answers
        if answers:
            await asyncio.Event().wait()
        answers += 1
        return await call_script(submitter, *args)

    pool.start("--step-ms", 600_000, "--max-batch", 1, "--queue-limit", 1)
    async with pool.producer() as producer:
        waiting = asyncio.create_task(producer.logprobs([1]))

        async def is_full() -> bool:
            return pool.jobs() == 1

        await until_async(is_full, "the queue is full")
        monkeypatch.setattr(Submitter, "_call_script", once)
        asked = [asyncio.create_task(producer.logprobs([100], timeout=6))]
        session = producer._sessions.session
        assert session is not None
        submitter = session._submitter

        async def is_refused() -> bool:
            return submitter.is_full

        await until_async(is_refused, "the first prompt is refused")
        # Request a second prompt, about which the server sends no reply.
        asked.append(asyncio.create_task(producer.logprobs([101], timeout=1)))
        for task in asked:
            with pytest.raises(errors.QueueFull, match="limit of 1 prompts.*--queue-limit"):
                await task
        waiting.cancel()
    assert answers == 1


async def test_a_wrong_url_fails_at_once(short_dir: Path) -> None:
    cases = [
        (f"unix://{short_dir}/none.sock", errors.ServerUnreachable, "none.sock"),
        ("redis://127.0.0.1:1", errors.ServerUnreachable, "redis://127.0.0.1:1"),
        ("http://127.0.0.1", errors.SettingsError, "redis: 'http://127.0.0.1'.*redis://"),
        ("127.0.0.1:6379", errors.SettingsError, "must begin with"),
        ("redis://127.0.0.1:1?colour=red", errors.SettingsError, "colour"),
    ]
    for url, kind, message in cases:
        with pytest.raises(kind, match=message):
            await asyncio.wait_for(Producer(redis=url, timeout=3600).logprobs([1]), DEADLINE_S)
        with pytest.raises(kind, match=message):
            SyncProducer(redis=url, timeout=3600)


async def test_without_a_server_the_error_names_the_command_that_starts_one(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMPOOL_RUNTIME_DIR", str(short_dir / "empty"))
    with pytest.raises(errors.ServerUnreachable, match="lmpool up MODEL.*LMPOOL_REDIS_URL"):
        await Producer().logprobs([1])


async def test_the_environment_names_the_server(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.start()
    monkeypatch.setenv("LMPOOL_REDIS_URL", pool.url)
    async with Producer(prefix=pool.prefix) as producer:
        assert np.array_equal(await producer.logprobs([1]), synthetic_row([1], vocab_size=V))


async def test_a_wrong_password_is_reported_but_not_shown(own_server: EmbeddedServer) -> None:
    with redis.Redis.from_url(own_server.url, **PATIENCE) as client:
        client.config_set("requirepass", "right")
    for url in (own_server.url, own_server.url.replace("unix://", "unix://:wrongsecret@")):
        with pytest.raises(errors.AuthenticationFailed) as caught:
            await Producer(redis=url).logprobs([1])
        assert "wrongsecret" not in str(caught.value) + repr(caught.value)
        assert "redis.sock" in str(caught.value)


async def test_a_password_that_is_right_works(own_server: EmbeddedServer, tmp_path: Path) -> None:
    with redis.Redis.from_url(own_server.url, **PATIENCE) as client:
        client.config_set("requirepass", "s3cret@/ &?")
    url = own_server.url.replace("unix://", "unix://:s3cret%40%2F%20%26%3F@")
    options = ["worker", "syn", "--backend", "synthetic", "--vocab-size", "9", "--redis", url]
    worker = WorkerProcess([*lmpool_command(), *options], tmp_path / "w")
    try:
        worker.until_says("serving ")
        async with Producer(redis=url) as producer:
            assert (await producer.logprobs([1])).shape == (9,)
            assert "s3cret" not in repr(producer) + worker.text
    finally:
        worker.end()


async def test_redis_gone_mid_request_is_named_at_the_deadline(own_server: EmbeddedServer, tmp_path: Path) -> None:
    pool = Pool(own_server.url, "gone", tmp_path)
    pool.start("--step-ms", 600_000)
    try:
        async with pool.producer(timeout=8) as producer:
            request = asyncio.create_task(producer.logprobs([1]))
            await until_async(lambda: is_held(pool), "the worker holds the prompt")
            await asyncio.to_thread(own_server.stop)
            with pytest.raises(errors.ServerUnreachable, match=r"no row within 8 s: no Redis server answers at unix"):
                await asyncio.wait_for(request, DEADLINE_S)
            with pytest.raises(errors.ServerUnreachable):
                await producer.logprobs([2], timeout=0.5)
    finally:
        pool.end()


async def test_a_failing_prompt_fails_alone(pool: Pool) -> None:
    pool.start("--fail-token", 13)
    async with pool.producer() as producer:
        results = await asyncio.gather(*(producer.logprobs([i]) for i in range(20)), return_exceptions=True)
        for token, result in enumerate(results):
            if token == 13:
                assert isinstance(result, errors.WorkerError)
                assert re.search(r"token 13.*\(worker ", str(result))
            else:
                assert isinstance(result, np.ndarray)
                assert np.array_equal(result, synthetic_row([token], vocab_size=V))
        with pytest.raises(errors.WorkerError):
            await producer.batch_logprobs([[1], [13]])
        assert producer.stats().failed == 2
    assert pool.jobs() == 0


def test_a_worker_with_other_weights_may_not_join(pool: Pool) -> None:
    pool.start("--seed", 1)
    other = pool.start("--seed", 2, "--vocab-size", 77, wait=False)
    assert other.wait() == 2
    (line,) = [line for line in other.text.splitlines() if line.startswith("lmpool: ")]
    differences = "vocab_size is 512 there and 77 here; revision is 'seed-1' there and 'seed-2' here"
    assert re.search(rf"'syn' is served by .*{differences}.*--name", line)
    assert "Traceback" not in other.text


async def test_other_weights_may_join_when_no_worker_serves_the_model(pool: Pool) -> None:
    first = pool.start("--seed", 1, "--lease-s", 1)
    async with pool.producer(when_absent="wait") as producer:
        assert np.array_equal(await producer.logprobs([1]), synthetic_row([1], vocab_size=V, seed=1))
        first.end()
        await asyncio.to_thread(until, lambda: not pool.names("worker:*"), "the heartbeat expires")
        await asyncio.to_thread(pool.start, "--seed", 2)

        async def follows() -> bool:
            return np.array_equal(await producer.logprobs([1]), synthetic_row([1], vocab_size=V, seed=2))

        await until_async(follows, "rows of the new weights are served")
        # A prompt that is requested for the first time must get a row of the new weights.
        assert np.array_equal(await producer.logprobs([2]), synthetic_row([2], vocab_size=V, seed=2))


async def test_a_pending_request_follows_the_model_to_new_weights(pool: Pool) -> None:
    first = pool.start("--seed", 1, "--step-ms", 600_000, "--lease-s", 2)
    async with pool.producer(when_absent="wait") as producer:
        request = asyncio.create_task(producer.logprobs([1]))
        await until_async(lambda: is_held(pool), "the worker holds the prompt")
        first.end()
        await asyncio.to_thread(until, lambda: not pool.names("worker:*"), "the heartbeat expires")
        await asyncio.to_thread(pool.start, "--seed", 2, "--lease-s", 2)
        assert np.array_equal(await request, synthetic_row([1], vocab_size=V, seed=2))


SETTINGS = [
    (["--vocab-size", "0"], "--vocab-size: 0 "),
    (["--max-batch", "-1"], "--max-batch: -1 "),
    (["--step-ms", "-1"], "--step-ms: -1.0 "),
    (["--lease-s", "0"], "--lease-s: 0.0 "),
    (["--encoding", "f64"], "encoding: 'f64' is not one of f32, bf16"),
    (["--name", "{x}"], "name: '{x}'"),
    (["--vocab-size", "many"], "--vocab-size"),
    (["--colour", "red"], "--colour"),
    (["--gguf-file", "x"], "--gguf-file: not a setting of the synthetic backend"),
    (["--backend", "magic"], "backend: 'magic' is not one of hf, vllm, sglang, synthetic"),
]


@pytest.mark.parametrize(("options", "message"), SETTINGS)
def test_a_wrong_setting_is_refused_at_the_start_with_its_name(pool: Pool, options: list[str], message: str) -> None:
    if "--backend" not in options:
        options = ["--backend", "synthetic", *options]
    worker = pool.start(*options, wait=False)
    assert worker.wait() == 2
    assert worker.text.startswith("lmpool: ")
    assert message in worker.text
    assert len(worker.text.splitlines()) == 1
