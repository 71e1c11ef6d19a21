"""`PooledLM` waits for a row as long as a live worker may compute it, then raises an error."""

from __future__ import annotations

import asyncio
import math
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from lmpool.embedded import EmbeddedServer
from lmpool.errors import DeadlineExceeded, NoWorker, ServerError, SettingsError
from lmpool.producer.client import discovery, requests, session
from lmpool.producer.genlm import PooledLM, load_model_by_name
from tests.genlm.small import SIZE, expected
from tests.support.gate import Gate
from tests.support.pool import DEADLINE_S, Pool, SkippingLoop, run_skipping, until, until_async

IDS = [72, 105, 33]


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


def connect(pool: Pool, tokenizer: Any, **options: Any) -> PooledLM:
    return PooledLM.from_name("syn", redis=pool.url, prefix=pool.prefix, tokenizer=tokenizer, **options)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits after which a missing worker or server counts as an error."""
    monkeypatch.setattr(discovery, "_RESTART_S", 0.1)
    monkeypatch.setattr(session, "ALONE_S", 3.0)
    monkeypatch.setattr(requests, "ALONE_S", 3.0)


def test_a_request_waits_as_long_as_its_worker_lives(pool: Pool, gate: Gate, tokenizer: Any) -> None:
    pool.start("--vocab-size", SIZE, command=gate.command)

    async def send(loop: SkippingLoop) -> None:
        request = asyncio.create_task(model.next_token_logprobs(IDS))
        several = asyncio.create_task(model.batch_next_token_logprobs([[1], [2]]))
        await until_async(lambda: asyncio.to_thread(lambda: pool.held() == 3), "the worker has the prompts")
        half_an_hour = loop.create_future()
        loop.call_later(1800, half_an_hour.set_result, None)
        loop.skipped_s = 3600.0
        await half_an_hour
        assert not request.done()
        assert not several.done()
        gate.open()
        assert torch.equal(await request, expected(IDS))
        assert torch.equal(await several, torch.stack([expected([1]), expected([2])]))

    with connect(pool, tokenizer) as model:
        run_skipping(send)


@pytest.mark.usefixtures("impatient")
def test_a_request_ends_when_no_worker_has_been_alive_for_a_lease(pool: Pool, gate: Gate, tokenizer: Any) -> None:
    worker = pool.start("--vocab-size", SIZE, "--lease-s", 1, command=gate.command)
    with ThreadPoolExecutor(1) as other, connect(pool, tokenizer, when_absent="wait") as model:
        request = other.submit(model.next_token_logprobs_sync, IDS)
        until(lambda: pool.held() == 1, "the worker has the prompt")
        worker.end()
        with pytest.raises(NoWorker, match="no row could be had for .* no live worker has served 'syn'"):
            request.result(DEADLINE_S)


@pytest.mark.usefixtures("impatient")
def test_a_request_ends_when_the_server_is_unreachable_for_long(
    own_server: EmbeddedServer, gate: Gate, tmp_path: Path, tokenizer: Any
) -> None:
    pool = Pool(own_server.url, "waiting", tmp_path)
    try:
        pool.start("--vocab-size", SIZE, command=gate.command)
        with ThreadPoolExecutor(1) as other, connect(pool, tokenizer, when_absent="wait") as model:
            request = other.submit(model.next_token_logprobs_sync, IDS)
            until(lambda: pool.held() == 1, "the worker has the prompt")
            own_server.stop()
            with pytest.raises(ServerError, match="no row could be had for"):
                request.result(DEADLINE_S)
    finally:
        for worker in pool.workers:
            worker.end()


@pytest.mark.usefixtures("impatient")
def test_loading_waits_as_long_as_a_worker_loads_the_model(
    pool: Pool, tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"redis": pool.url, "prefix": pool.prefix, "tokenizer": tokenizer}
    with pytest.raises(NoWorker, match="'syn' is not served"):
        load_model_by_name("syn", llm_opts=options)
    gate = tmp_path / "loads"
    command = [sys.executable, "-m", "tests.support.gated_worker", pool.url, pool.prefix, "0", str(gate)]
    pool._launch(command, None, wait=False)
    until(lambda: pool.redis.zcard(pool.keys.model("syn").loading), "the worker loads the model")
    with ThreadPoolExecutor(1) as other:
        caplog.clear()

        def begun() -> int:
            return caplog.text.count("waiting for a worker to serve 'syn'")

        loading = other.submit(load_model_by_name, "syn", llm_opts=options)
        until(lambda: begun() > 2, "the model has started to wait again, twice")
        # Raise the limit: a worker is invisible for a moment between loading and serving.
        monkeypatch.setattr(requests, "ALONE_S", DEADLINE_S)
        before = begun()
        until(lambda: begun() > before, "the model waits longer")
        gate.touch()
        with loading.result(DEADLINE_S) as model:
            assert model.next_token_logprobs_sync(IDS).shape == (model.info.vocab_size,)


@pytest.mark.parametrize("timeout", [0.001, 0, 0.0])
def test_batch_size_and_timeout_can_be_read_and_set(small_pool: Pool, tokenizer: Any, timeout: float) -> None:
    with connect(small_pool, tokenizer) as model:
        assert (model.batch_size, model.timeout) == (20, math.inf)
        # Programs of genlm-backend set these two attributes.
        model.batch_size, model.timeout = 64, timeout
        assert torch.equal(model.next_token_logprobs_sync(IDS), expected(IDS))
        with pickle.loads(pickle.dumps(model)) as other:  # noqa: S301
            assert (other.batch_size, other.timeout) == (64, timeout)
        for wrong in (False, -1, math.nan, "5", None, True):
            with pytest.raises(SettingsError, match="timeout"):
                model.timeout = wrong  # type: ignore[assignment]
        assert model.timeout == timeout


async def connected(model: PooledLM, gate: Gate) -> None:
    """Send one request, so that the model has open connections and the cached row of prompt [1]."""
    gate.open()
    await model.next_token_logprobs([1])
    gate.shut()


async def test_a_timeout_that_is_set_is_a_deadline(pool: Pool, gate: Gate, tokenizer: Any) -> None:
    pool.start("--vocab-size", SIZE, command=gate.command)
    with connect(pool, tokenizer) as model:
        await connected(model, gate)
        model.timeout = 1.0
        with pytest.raises(DeadlineExceeded, match="no row within 1 s"):
            await model.next_token_logprobs(IDS)
        with pickle.loads(pickle.dumps(model)) as other:  # noqa: S301
            assert other.timeout == 1.0
            other.timeout = math.inf
            other.next_token_logprobs_sync([1])
            other.timeout = 1.0
            with pytest.raises(DeadlineExceeded, match="within 1 s"):
                other.batch_next_token_logprobs_sync([IDS])
